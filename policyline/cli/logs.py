"""Logs go to stderr: text for people, or one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from policyline.cli.output import visible

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class LogFormat(StrEnum):
    """How logs are written."""

    TEXT = "text"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """One object a line; the record's `extra` fields become keys."""

    def format(self, record: logging.LogRecord) -> str:
        """Serialise a record."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **{k: v for k, v in record.__dict__.items() if k not in _PLAIN},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """One line a record, then its traceback; nothing in either steers a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """As logging's."""
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """As logging's."""
        return "\n".join(map(visible, super().formatException(ei).split("\n")))


def set_up_logs(verbose: int, log_format: LogFormat) -> None:
    """Send policyline's logs to stderr; other libraries only from WARNING up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    level = logging.DEBUG if verbose else logging.INFO
    logging.getLogger("policyline").setLevel(level)
    if verbose > 1:
        logging.getLogger().setLevel(logging.INFO)
