"""Log formatters (console and JSON, one line per record, with the request id) and the queued log handler."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from functools import lru_cache
from time import time
from typing import Any, Final

import orjson

from gateway.messages import escape_unprintable, escape_unprintable_json
from gateway.settings import Settings
from gateway.settings.observability import LogFormat, LogLevel
from gateway.telemetry import audit
from gateway.telemetry.linewriter import LineWriter, format_dropped_notice
from gateway.telemetry.request_info import current_request_info

STDERR: Final = 2
LOG_FLUSH_TIMEOUT_S: Final = 1.0
ACCESS_LOGGER: Final = "gateway.access"
READING_METHODS: Final = ("GET", "HEAD", "OPTIONS")
LogFields = Mapping[str, Any]

OWN_RECORD_FIELDS = {"message", "asctime", "request_id", "color_message"}
STANDARD_RECORD_FIELDS = vars(logging.makeLogRecord({})).keys() | OWN_RECORD_FIELDS


def add_request_id(record: logging.LogRecord) -> bool:
    """Add the request id to a record, and the trace and span ids if the request is traced."""
    info = current_request_info.get()
    if not getattr(record, "request_id", ""):
        record.request_id = info.request_id if info is not None else ""
    if info is not None and info.trace is not None:
        record.trace_id, record.span_id = info.trace.trace_id, info.trace.span_id
    return True  # log it


class LineFormatter(logging.Formatter):
    """A formatter whose lines can also be written without a record."""

    def format_line(self, time_s: float, level: str, message: str, fields: LogFields) -> str:
        raise NotImplementedError

    def format_record(self, record: logging.LogRecord, **fields: Any) -> str:
        fields = {"request_id": getattr(record, "request_id", ""), **fields}
        fields |= {
            key: value for key, value in vars(record).items() if key not in STANDARD_RECORD_FIELDS
        }
        return self.format_line(
            record.created, record.levelname.lower(), record.getMessage(), fields
        )


class JsonFormatter(LineFormatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"logger": record.name}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return self.format_record(record, **fields)

    def format_line(self, time_s: float, level: str, message: str, fields: LogFields) -> str:
        time = f"{format_utc_second(int(time_s))}.{int(time_s % 1 * 1000):03d}+00:00"
        line = {"time": time, "level": level, "message": message, **fields}
        return escape_unprintable_json(orjson.dumps(line, default=str).decode())


class ConsoleFormatter(LineFormatter):
    def format(self, record: logging.LogRecord) -> str:
        line = self.format_record(record)
        return f"{line}\n{self.format_traceback(record)}" if record.exc_info else line

    def format_line(self, time_s: float, level: str, message: str, fields: LogFields) -> str:
        pairs = [
            f"{key}={escape_unprintable(str(value))}"
            for key, value in fields.items()
            if value != "" and key != "logger"
        ]
        time = format_local_second(int(time_s))
        return f"{time} {level:7} {escape_unprintable(message)} {' '.join(pairs)}".rstrip()

    def format_traceback(self, record: logging.LogRecord) -> str:
        # Every line is escaped and indented, because an exception's message could look like a log line.
        lines = self.formatException(record.exc_info or (None, None, None)).split("\n")
        return "\n".join(f"  {escape_unprintable(line)}" for line in lines)


class TerminalFormatter(ConsoleFormatter):
    """Short lines for requests: `POST ensemble 200 12 ms`.

    Successful reads of information are omitted, so that the page, which refreshes itself, writes nothing.
    """

    def format_line(self, time_s: float, level: str, message: str, fields: LogFields) -> str:
        is_detailed = logging.getLogger().isEnabledFor(logging.DEBUG)
        if is_detailed or fields.get("logger") != ACCESS_LOGGER:
            return super().format_line(time_s, level, message, fields)
        method, _, target = message.partition(" ")
        path, _, status = target.rpartition(" ")
        is_success = status < "400"
        if is_success and method in READING_METHODS:
            return ""
        name = escape_unprintable(fields["model"] or path)
        suffix = "" if is_success else f" request_id={escape_unprintable(fields['request_id'])}"
        time = format_local_second(int(time_s))
        return f"{time} {method} {name} {status} {fields['duration_ms']:.0f} ms{suffix}"


@lru_cache(4)
def format_utc_second(second: int) -> str:
    return datetime.fromtimestamp(second, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


@lru_cache(4)
def format_local_second(second: int) -> str:
    return datetime.fromtimestamp(second).astimezone().strftime("%H:%M:%S")


class QueuedLogHandler(logging.Handler):
    """Hands the formatted lines to a thread that writes them, so that the event loop never blocks."""

    def __init__(self, descriptor: int, formatter: LineFormatter) -> None:
        super().__init__()
        self.addFilter(add_request_id)
        self.setFormatter(formatter)
        self.line_formatter = formatter
        self.writer = LineWriter(descriptor, format_notice=self._format_notice)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.enqueue(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - like every logging handler: logging must not raise
            self.handleError(record)

    def write_line(self, message: str, fields: LogFields) -> None:
        """Write a line of level INFO."""
        if line := self.line_formatter.format_line(time(), "info", message, fields):
            self.writer.enqueue(f"{line}\n")

    def flush(self) -> None:
        self.writer.flush(LOG_FLUSH_TIMEOUT_S)

    def _format_notice(self, dropped: int) -> str:
        message = format_dropped_notice(dropped)
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None)
        return self.format(record)


def configure(settings: Settings) -> LineWriter:
    """Configure logging; return the writer of standard error, for other lines in the same order."""
    handler = QueuedLogHandler(STDERR, choose_formatter(settings))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    set_level(settings.log_level)
    audit.log.setLevel(audit.AUDIT_LEVEL)
    return handler.writer


def get_level() -> LogLevel:
    return LogLevel(logging.getLevelName(logging.getLogger().level).lower())


def set_level(level: LogLevel) -> None:
    root = logging.getLogger()
    root.setLevel(level.value.upper())
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))


def choose_formatter(settings: Settings) -> LineFormatter:
    if settings.log_format is LogFormat.json:
        return JsonFormatter()
    return TerminalFormatter() if os.isatty(STDERR) else ConsoleFormatter()


def log_fields(logger: logging.Logger, message: str, request_id: str, fields: LogFields) -> None:
    """Log a message of level INFO with these fields, as `logger.info` does with `extra`.

    If this module's handler is the only one, it writes the line without a record: a record with so many
    fields costs about as much as the rest of a request.
    """
    handlers = logging.getLogger().handlers
    if len(handlers) == 1 and isinstance(handlers[0], QueuedLogHandler) and not logger.handlers:
        line = {"request_id": request_id, "logger": logger.name, **fields}
        handlers[0].write_line(message, line)
    else:
        logger.info("%s", message, extra=fields)


def find_log_handlers() -> list[QueuedLogHandler]:
    handlers = logging.getLogger().handlers
    return [handler for handler in handlers if isinstance(handler, QueuedLogHandler)]


def flush() -> None:
    """Wait until the queued lines are written, up to `LOG_FLUSH_TIMEOUT_S`."""
    for queue in find_log_handlers():
        queue.flush()


def count_dropped_lines() -> int:
    return sum(queue.writer.dropped_count for queue in find_log_handlers())
