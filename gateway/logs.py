"""Log formatters (console and JSON, one line per record, with the request id) and the queued log handler."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from typing import Any, Final

import orjson

from gateway import audit
from gateway.linewriter import LineWriter, format_dropped_notice
from gateway.messages import escape_unprintable, escape_unprintable_json
from gateway.request_info import current_request_info
from gateway.settings import Settings
from gateway.settings.observability import LogFormat

STDERR: Final = 2
LOG_FLUSH_TIMEOUT_S: Final = 1.0

STANDARD_RECORD_FIELDS = set(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "request_id",
    "color_message",
}


class RequestIdFilter(logging.Filter):
    """Adds the request id to a record, and the trace and span ids if the request is traced."""

    def filter(self, record: logging.LogRecord) -> bool:
        info = current_request_info.get()
        if not getattr(record, "request_id", ""):
            record.request_id = info.request_id if info is not None else ""
        if info is not None and info.trace is not None:
            record.trace_id, record.span_id = info.trace.trace_id, info.trace.span_id
        return True


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in STANDARD_RECORD_FIELDS}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(
                timespec="milliseconds"
            ),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", ""),
            "logger": record.name,
            **extra_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return escape_unprintable_json(orjson.dumps(line, default=str).decode())


class ConsoleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        pairs = {"request_id": getattr(record, "request_id", ""), **extra_fields(record)}
        fields = " ".join(
            f"{key}={escape_unprintable(str(value))}" for key, value in pairs.items() if value != ""
        )
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        message = escape_unprintable(record.getMessage())
        line = f"{time} {record.levelname.lower():7} {message} {fields}".rstrip()
        return f"{line}\n{self.format_traceback(record)}" if record.exc_info else line

    def format_traceback(self, record: logging.LogRecord) -> str:
        # Every line is escaped and indented, because an exception's message could look like a log line.
        lines = self.formatException(record.exc_info or (None, None, None)).split("\n")
        return "\n".join(f"  {escape_unprintable(line)}" for line in lines)


class QueuedLogHandler(logging.Handler):
    """Hands the formatted lines to a thread that writes them, so that the event loop never blocks."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.writer = LineWriter(descriptor, format_notice=self._format_notice)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.enqueue(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - like every logging handler: logging must not raise
            self.handleError(record)

    def flush(self) -> None:
        self.writer.flush(LOG_FLUSH_TIMEOUT_S)

    def _format_notice(self, dropped: int) -> str:
        arguments = (
            "gateway.logs",
            logging.WARNING,
            __file__,
            0,
            format_dropped_notice(dropped),
            None,
            None,
        )
        return self.format(logging.LogRecord(*arguments))


def configure(settings: Settings) -> LineWriter:
    """Configure logging; return the writer of standard error, for other lines in the same order."""
    handler = QueuedLogHandler(STDERR)
    handler.addFilter(RequestIdFilter())
    handler.setFormatter(
        JsonFormatter() if settings.log_format is LogFormat.json else ConsoleFormatter()
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.value.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))
    audit.log.setLevel(audit.AUDIT_LEVEL)
    return handler.writer


def find_log_handlers() -> list[QueuedLogHandler]:
    return [
        handler for handler in logging.getLogger().handlers if isinstance(handler, QueuedLogHandler)
    ]


def flush() -> None:
    """Wait until the queued lines are written, up to `LOG_FLUSH_TIMEOUT_S`."""
    for queue in find_log_handlers():
        queue.flush()


def count_dropped_lines() -> int:
    return sum(queue.writer.dropped_count for queue in find_log_handlers())
