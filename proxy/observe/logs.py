"""Log records: one line each on stderr, as text or JSON. Prompts, outputs and credentials are never given to it."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from proxy.config import LogFormat, LogLevel

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


def _one_line(text: str) -> str:
    """A text without line ends, so that a value from outside cannot forge a record."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO fleetgate.gate gate closed by /pause key=value``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback behind it on the same line."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = f"{when} {record.levelname} {record.name} {record.getMessage()}"
        for key, value in _extras(record).items():
            text += f" {key}={value}"
        if record.exc_info:
            text += " | " + self.formatException(record.exc_info)
        return _one_line(text)


class JsonFormatter(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message, then the extra fields."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        data: dict[str, Any] = {
            "time": when,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            data["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(data, default=str).decode("utf-8")


def configure(log_format: LogFormat, level: LogLevel) -> None:
    """Send the records of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("fleetgate").setLevel(level.upper())
