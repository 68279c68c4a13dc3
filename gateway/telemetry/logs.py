"""Log formatters (console and JSON, one line per record, with the request id), and the handler of both logs.

A line is formatted where it is logged, and written by a thread. The audit log is a logger, whose lines go to
the log, or with `GATEWAY_AUDIT_LOG` to a place of their own.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from functools import lru_cache, partial
from logging.handlers import QueueHandler, QueueListener, WatchedFileHandler
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import orjson

from gateway.config.settings import LogFormat, LogLevel, Settings
from gateway.messages import (
    CommandError,
    escape_unprintable,
    escape_unprintable_json,
    print_message,
)
from gateway.telemetry import audit
from gateway.telemetry.request_info import current_request_info

STDOUT: Final = 1
STDERR: Final = 2
LOG_FLUSH_TIMEOUT_S: Final = 1.0
TO_STDOUT: Final = "stdout"  # the value of `GATEWAY_AUDIT_LOG`
log = logging.getLogger(__name__)
ACCESS_LOGGER: Final = "gateway.access"
READING_METHODS: Final = ("GET", "HEAD", "OPTIONS")
LogFields = Mapping[str, Any]
OWN_RECORD_FIELDS = {"message", "asctime", "request_id", "color_message"}
STANDARD_RECORD_FIELDS = vars(logging.makeLogRecord({})).keys() | OWN_RECORD_FIELDS

MAX_QUEUED_CHARS: Final = 4 << 20  # limit of the lines that wait to be written
MAX_BATCH_LINES: Final = 256
BATCH_DELAY_S: Final = 0.005


class LineWriter(QueueListener):
    """A bounded queue of lines, and the thread that writes them.

    A full queue drops and counts new lines, and their number is written as soon as there is room. All methods
    but `handle` and `dequeue` may be called from any thread and from signal handlers.
    """

    def __init__(
        self,
        write: Callable[[str], object],
        format_notice: Callable[[int], str],
        max_chars: int = MAX_QUEUED_CHARS,
    ) -> None:
        self._items: SimpleQueue[str | threading.Event] = SimpleQueue()
        super().__init__(self._items)
        self.dropped_count = 0
        self._write = write
        self._format_notice = format_notice
        self._max_chars = max_chars
        self._waiting_chars = 0
        self._unreported_count = 0  # lines dropped since the last notice
        self._batch: list[str] = []
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt its holder
        self.start()

    def put(self, text: str) -> None:
        # `text` is one or more lines with their line ends; all of them are written, or none.
        with self._lock:
            if self._waiting_chars and self._waiting_chars + len(text) > self._max_chars:
                self.dropped_count += 1
                self._unreported_count += 1
                return
            self._waiting_chars += len(text)
        self._items.put(text)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are written; return False after the timeout."""
        flushed = threading.Event()
        self._items.put(flushed)
        return flushed.wait(timeout_s)

    # In the thread.

    def dequeue(self, block: bool) -> Any:
        with suppress(Empty):
            return self._items.get_nowait()
        item = self._items.get(block)
        # Lines that follow within this time are written together, because waking the thread for each line
        # would cost more than the line itself.
        time.sleep(BATCH_DELAY_S)
        return item

    def handle(self, item: Any) -> None:
        if isinstance(item, str):
            self._batch.append(item)
            if len(self._batch) < MAX_BATCH_LINES and not self._items.empty():
                return
        if self._batch:
            self._write_batch()
        if isinstance(item, threading.Event):
            item.set()

    def _write_batch(self) -> None:
        count = len(self._batch)
        text = "".join(self._batch)
        self._batch.clear()
        try:
            self._write(text)
            with self._lock:
                unreported, self._unreported_count = self._unreported_count, 0
            if unreported:
                self._write(f"{self._format_notice(unreported)}\n")
        except Exception:  # noqa: BLE001 - a full disk, MemoryError; later lines must be written
            with self._lock:
                self.dropped_count += count
        with self._lock:
            self._waiting_chars -= len(text)


def write_fully(descriptor: int, text: str) -> None:
    """Write all text, waiting even if another program made the descriptor non-blocking. Raises `OSError`."""
    view = memoryview(text.encode("utf-8", "backslashreplace"))
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


class AuditFile(WatchedFileHandler):
    """The file of the audit log, which only its owner may read. One that was moved is created again."""

    terminator = ""

    def __init__(self, path: Path) -> None:
        super().__init__(path, errors="backslashreplace")

    def _open(self) -> Any:
        # Lines of a batch are written at once: workers append to the same file.
        return open(
            self.baseFilename, self.mode, MAX_QUEUED_CHARS, errors=self.errors, opener=open_private
        )

    def write(self, text: str) -> None:
        try:
            self.emit(logging.makeLogRecord({"msg": text}))
        except OSError as exc:
            log.error("the audit log cannot be written (%s) and may lack %s", exc.strerror, text)
            raise

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name in `logging`
        raise  # noqa: PLE0704 - the error of `emit`, which calls this


def open_private(path: str, flags: int) -> int:
    # A pipe without a reader would block without O_NONBLOCK.
    return os.open(path, flags | os.O_NONBLOCK, 0o600)


def add_request_id(record: logging.LogRecord) -> bool:
    info = current_request_info.get()
    if not getattr(record, "request_id", ""):
        record.request_id = info.request_id if info is not None else ""
    if info is not None and info.trace is not None:
        record.trace_id = info.trace.trace_id
        record.span_id = info.trace.span_id
    return True  # log it


class LineFormatter(logging.Formatter):
    """A formatter whose lines can also be written without a record."""

    def format_line(self, time_s: float, level: str, message: str, fields: LogFields) -> str:
        raise NotImplementedError

    def format_message(self, level: str, message: str, **fields: str) -> str:
        """Return a line for whoever started the process; on the console, the message is all of it."""
        return escape_unprintable(message)

    def format_record(self, record: logging.LogRecord, **fields: Any) -> str:
        fields = {"request_id": getattr(record, "request_id", ""), **fields}
        fields |= {
            key: value for key, value in vars(record).items() if key not in STANDARD_RECORD_FIELDS
        }
        return self.format_line(
            record.created, record.levelname.lower(), record.getMessage(), fields
        )


class JsonFormatter(LineFormatter):
    def format_message(self, level: str, message: str, **fields: str) -> str:
        return self.format_line(time.time(), level, message, {"logger": __name__, **fields})

    def format(self, record: logging.LogRecord) -> str:
        fields = {"logger": record.name}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return self.format_record(record, **fields)

    def format_line(self, time_s: float, level: str, message: str, fields: LogFields) -> str:
        time = f"{format_utc_second(int(time_s))}.{int(time_s % 1 * 1000):03d}Z"
        line = {"time": time, "level": level, "message": message, **fields}
        try:
            text = orjson.dumps(line, default=str).decode()
        except TypeError:  # such as a path that is not valid UTF-8
            text = json.dumps(line, default=str)
        return escape_unprintable_json(text)


class ConsoleFormatter(LineFormatter):
    def format(self, record: logging.LogRecord) -> str:
        line = self.format_record(record)
        return f"{line}\n{self.format_traceback(record)}" if record.exc_info else line

    def format_line(self, time_s: float, level: str, message: str, fields: LogFields) -> str:
        pairs = [
            f"{key}={format_console_value(value)}"
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
        name = format_console_value(fields["model"] or path)
        suffix = "" if is_success else f" request_id={format_console_value(fields['request_id'])}"
        time = format_local_second(int(time_s))
        duration = f"{fields['duration_ms']:.0f} ms"
        return f"{time} {escape_unprintable(method)} {name} {status} {duration}{suffix}"


def format_console_value(value: Any) -> str:
    """Return a value in one word, or in quotes: a client's must not look like further fields."""
    text = str(value)
    return repr(text) if " " in text or text[:1] in ("'", '"') else escape_unprintable(text)


@lru_cache(4)
def format_utc_second(second: int) -> str:
    return datetime.fromtimestamp(second, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")


@lru_cache(4)
def format_local_second(second: int) -> str:
    return datetime.fromtimestamp(second).astimezone().strftime("%H:%M:%S")


class QueuedLogHandler(QueueHandler):
    """Hands the formatted lines to a thread that writes them, so that the event loop never blocks."""

    def __init__(self, write: Callable[[str], object], formatter: LineFormatter) -> None:
        self.writer = LineWriter(write, self._format_notice)
        super().__init__(self.writer.queue)
        self.addFilter(add_request_id)
        self.setFormatter(formatter)
        self.line_formatter = formatter

    def prepare(self, record: logging.LogRecord) -> str:
        return f"{self.format(record)}\n"

    def enqueue(self, record: Any) -> None:
        self.writer.put(record)

    def write_message(self, message: str, **fields: str) -> None:
        self.writer.put(f"{self.line_formatter.format_message('info', message, **fields)}\n")

    def write_line(self, message: str, fields: LogFields) -> None:
        if line := self.line_formatter.format_line(time.time(), "info", message, fields):
            self.writer.put(f"{line}\n")

    def flush(self) -> None:
        self.writer.flush(LOG_FLUSH_TIMEOUT_S)

    def _format_notice(self, dropped: int) -> str:
        message = f"{dropped} log lines were dropped because they were not read in time"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None)
        return self.format(record)


def open_audit_log(target: str) -> None:
    """Write audit lines to `stdout` or a file instead of the log. Raises `CommandError`."""
    write: Callable[[str], object] = partial(write_fully, STDOUT)
    if target != TO_STDOUT:
        try:
            write = AuditFile(Path(target)).write
        except OSError as exc:
            raise CommandError(
                f"GATEWAY_AUDIT_LOG: {target} cannot be written: {exc.strerror}"
            ) from None
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            # Tools that rotate logs send it. A moved file is noticed without it.
            signal.signal(signal.SIGHUP, lambda *_: None)
    audit.log.handlers[:] = [QueuedLogHandler(write, JsonFormatter())]
    audit.log.propagate = False


def configure(settings: Settings) -> QueuedLogHandler:
    """Configure logging; return the handler, which writes messages in the same order."""
    handler = QueuedLogHandler(partial(write_fully, STDERR), choose_formatter(settings))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    set_level(settings.log_level)
    audit.log.setLevel(audit.AUDIT_LEVEL)
    if settings.audit_log:
        open_audit_log(settings.audit_log)
    return handler


def print_failure(exc: CommandError) -> None:
    """Print why a server ends, in the format of its log, which may not be configured yet."""
    is_json = os.environ.get("GATEWAY_LOG_FORMAT") == LogFormat.json.value
    formatter = JsonFormatter() if is_json else ConsoleFormatter()
    print_message(formatter.format_message("error", f"triton-gateway: {exc}"))


def get_level() -> LogLevel:
    return LogLevel(logging.getLevelName(logging.getLogger().level).lower())


def set_level(level: LogLevel) -> None:
    root = logging.getLogger()
    root.setLevel(level.value.upper())
    # What httpx logs of each request has its URL, which can contain a secret.
    for name in ("uvicorn.error", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


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


def find_queued_handlers() -> list[QueuedLogHandler]:
    handlers = (*logging.getLogger().handlers, *audit.log.handlers)
    return [handler for handler in handlers if isinstance(handler, QueuedLogHandler)]


def flush() -> None:
    """Wait until the queued lines are written, up to `LOG_FLUSH_TIMEOUT_S` for each log."""
    for handler in find_queued_handlers():
        handler.flush()


def count_dropped_lines() -> int:
    return sum(handler.writer.dropped_count for handler in find_queued_handlers())
