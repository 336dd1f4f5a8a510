"""The log of the HTTP server: aiohttp's own, without what a client sent.

aiohttp logs a request that is no HTTP with a traceback and the header that is wrong, which may be
the one with the key.
"""

from __future__ import annotations

import logging
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError

_LEVEL: Final = logging.INFO


def server_logger() -> logging.Logger:
    """The logger that aiohttp's server is given."""
    logger = logging.getLogger(__name__)
    logger.addFilter(_without_headers)  # adding it again changes nothing
    return logger


def _without_headers(record: logging.LogRecord) -> bool:
    """Whether the record is logged; one of malformed HTTP is reduced to the kind of its error."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    record.msg = f"{record.msg}: malformed HTTP (%s)"
    record.args = (*(record.args if isinstance(record.args, tuple) else ()), type(error).__name__)
    record.exc_info = record.exc_text = None
    record.levelno, record.levelname = _LEVEL, logging.getLevelName(_LEVEL)
    return logging.getLogger(record.name).isEnabledFor(_LEVEL)
