"""Log lines: readable for people, or one JSON object each; always one line, always with the request id."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from typing import Any, Final

import orjson

from gateway import audit
from gateway.linewriter import LineWriter, format_dropped_notice
from gateway.messages import escape_unprintable, escape_unprintable_json
from gateway.request_info import current_request_info
from gateway.settings import LogFormat, Settings

STDERR: Final = 2
LOG_FLUSH_TIMEOUT_S: Final = 1.0

STANDARD_RECORD_FIELDS = set(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "request_id",
    "color_message",
}


class RequestIdFilter(logging.Filter):
    """Adds the request's id to a record, and those of its trace where there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        notes = current_request_info.get()
        if not getattr(record, "request_id", ""):
            record.request_id = notes.request_id if notes is not None else ""
        if notes is not None and notes.trace is not None:
            record.trace_id, record.span_id = notes.trace.trace_id, notes.trace.span_id
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
        told = " ".join(
            f"{key}={escape_unprintable(str(value))}" for key, value in pairs.items() if value != ""
        )
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        message = escape_unprintable(record.getMessage())
        line = f"{time} {record.levelname.lower():7} {message} {told}".rstrip()
        return f"{line}\n{self.format_traceback(record)}" if record.exc_info else line

    def format_traceback(self, record: logging.LogRecord) -> str:
        """Each line of it escaped and moved in: what an exception says could pass for a line of the log."""
        lines = self.formatException(record.exc_info or (None, None, None)).split("\n")
        return "\n".join(f"  {escape_unprintable(line)}" for line in lines)


class QueuedLogHandler(logging.Handler):
    """Hands the formatted lines to a thread that writes them: the event loop waits for nobody who reads."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.writer = LineWriter(descriptor, format_notice=self._format_notice)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.enqueue(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - as every handler of logging: what is said must not fail who says it
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
    """Set up the log; what else goes to standard error has its turn in the same queue."""
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
    """Those of this process's log: one, or none where nobody has set it up."""
    return [
        handler for handler in logging.getLogger().handlers if isinstance(handler, QueuedLogHandler)
    ]


def flush() -> None:
    """Have written what was said until now, but wait for nobody for long."""
    for queue in find_log_handlers():
        queue.flush()


def count_dropped_lines() -> int:
    """How many lines of this process's log nobody read in time."""
    return sum(queue.writer.dropped_count for queue in find_log_handlers())
