"""Log lines: readable for people, or one JSON object each; always one line, always with the request id."""

from __future__ import annotations

import logging
import sys
from datetime import datetime, timezone
from typing import Any

import orjson

from gateway.context import current
from gateway.settings import LogFormat, Settings

PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "color_message"}


class WithRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if not getattr(record, "request_id", ""):
            notes = current.get()
            record.request_id = notes.request_id if notes is not None else ""
        return True


def extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in PLAIN}


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", ""),
            "logger": record.name,
            **extras(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


class Console(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        pairs = {"request_id": getattr(record, "request_id", ""), **extras(record)}
        told = " ".join(f"{key}={escaped(value)}" for key, value in pairs.items() if value != "")
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        line = f"{time} {record.levelname.lower():7} {escaped(record.getMessage())} {told}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def escaped(value: object) -> str:
    """Nothing in a line can end it, or speak to a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def configure(settings: Settings) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(WithRequestId())
    handler.setFormatter(JsonLines() if settings.log_format is LogFormat.json else Console())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.value.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))
