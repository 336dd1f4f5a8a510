"""The log of the HTTP server: aiohttp's, without the headers of malformed requests.

aiohttp logs malformed HTTP with a traceback and the malformed header, which may be the one with
the API key.
"""

from __future__ import annotations

import logging
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError

_LEVEL: Final = logging.INFO


def server_logger() -> logging.Logger:
    """The logger for aiohttp's server."""
    logger = logging.getLogger(__name__)
    logger.addFilter(_without_headers)  # adding it again changes nothing
    return logger


def _without_headers(record: logging.LogRecord) -> bool:
    """Reduce a record of malformed HTTP to the class of its error; whether to log the record."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    record.msg = f"{record.msg}: malformed HTTP (%s)"
    record.args = (*(record.args if isinstance(record.args, tuple) else ()), type(error).__name__)
    record.exc_info = record.exc_text = None
    record.levelno, record.levelname = _LEVEL, logging.getLevelName(_LEVEL)
    return logging.getLogger(record.name).isEnabledFor(_LEVEL)
