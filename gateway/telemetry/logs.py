"""Log formatters (console and JSON, one line per record, with the request id) and the queued log handler."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import select
import signal
import stat
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, Final

import orjson

from gateway.config.settings import LogFormat, LogLevel, Settings
from gateway.errors import AuditLogUnavailable
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
# For the lines of the changes that are in progress when the disk becomes full.
RESERVE_BYTES: Final = 256 << 10
AUDIT_TIMEOUT_S: Final = 5.0
AUDIT_CHECK_INTERVAL_S: Final = 1.0
MAX_WAITING_AUDIT_LINES: Final = 1000
TOO_MANY_LINES: Final = "too many lines wait"
log = logging.getLogger(__name__)
ACCESS_LOGGER: Final = "gateway.access"
READING_METHODS: Final = ("GET", "HEAD", "OPTIONS")
LogFields = Mapping[str, Any]
OWN_RECORD_FIELDS = {"message", "asctime", "request_id", "color_message"}
STANDARD_RECORD_FIELDS = vars(logging.makeLogRecord({})).keys() | OWN_RECORD_FIELDS

MAX_QUEUED_BYTES: Final = 4 << 20  # limit of the lines that wait to be written
WRITE_BATCH_BYTES: Final = 64 << 10
# Lines that follow the first one within this time are written together, because waking the thread for each
# line would cost more than the line itself.
BATCH_DELAY_S: Final = 0.005
FLUSH_POLL_S: Final = 0.005


def format_dropped_notice(count: int) -> str:
    return f"{count} log lines were dropped here because standard error was not read in time"


class LineWriter:
    """A bounded queue of lines, and the thread that writes them.

    A full queue drops and counts new lines, and writes a notice with their number when it has room again. All
    methods may be called from any thread and from signal handlers.
    """

    def __init__(
        self,
        descriptor: int,
        max_bytes: int = MAX_QUEUED_BYTES,
        format_notice: Callable[[int], str] = format_dropped_notice,
    ) -> None:
        self.descriptor = descriptor
        self.max_bytes = max_bytes
        self.format_notice = format_notice
        self.dropped_count = 0
        self._unreported_count = 0  # lines dropped since the last notice
        self._lines: deque[str] = deque()
        self._queued_size = 0
        self._is_idle = True
        self._wakeup: SimpleQueue[None] = SimpleQueue()
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt its holder
        threading.Thread(target=self._run, name="log-writer", daemon=True).start()

    def enqueue(self, text: str) -> None:
        # `text` is one or more lines with their line ends; all of them are written, or none.
        with self._lock:
            if self._queued_size and self._queued_size + len(text) > self.max_bytes:
                self.dropped_count += 1
                self._unreported_count += 1
                return
            if self._unreported_count:
                self._append_notice()
            self._append(text)
            was_idle = self._is_idle
            self._is_idle = False
        if was_idle:
            self._wakeup.put(None)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all lines are written; return False after the timeout."""
        deadline = time.monotonic() + timeout_s
        while not self._is_idle:
            if time.monotonic() > deadline:
                return False
            time.sleep(FLUSH_POLL_S)
        return True

    def _append_notice(self) -> None:
        self._append(f"{self.format_notice(self._unreported_count)}\n")
        self._unreported_count = 0

    def _append(self, text: str) -> None:
        self._lines.append(text)
        self._queued_size += len(text)

    def _run(self) -> None:
        while True:
            self._wakeup.get()
            time.sleep(BATCH_DELAY_S)
            is_idle = False
            while not is_idle:
                try:
                    is_idle = self._write_batch()
                except Exception:  # noqa: BLE001 - such as MemoryError; later lines must be written
                    with self._lock:
                        self.dropped_count += 1
                    time.sleep(BATCH_DELAY_S)

    def _write_batch(self) -> bool:
        """Write the next lines; return whether there are none."""
        lines = self._take_batch()
        if lines:
            data = "".join(lines).encode("utf-8", "backslashreplace")
            try:
                write_fully(self.descriptor, data)
            except OSError:  # the reader closed the pipe, or the disk is full
                with self._lock:
                    self.dropped_count += len(lines)
        return not lines

    def _take_batch(self) -> list[str]:
        """Return the next lines to write; an empty list marks the thread as idle."""
        pieces: list[str] = []
        with self._lock:
            if not self._lines and self._unreported_count:
                self._append_notice()
            size = 0
            while self._lines and size < WRITE_BATCH_BYTES:
                pieces.append(self._lines.popleft())
                size += len(pieces[-1])
            self._queued_size -= size
            self._is_idle = not pieces
        return pieces


def write_fully(descriptor: int, data: bytes) -> None:
    """Write all data, waiting even if another program made the descriptor non-blocking. Raises `OSError`."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            wait_until_writable(descriptor)


def wait_until_writable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll()


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

    def write_message(self, message: str, **fields: str) -> None:
        self.writer.enqueue(f"{self.line_formatter.format_message('info', message, **fields)}\n")

    def write_line(self, message: str, fields: LogFields) -> None:
        if line := self.line_formatter.format_line(time.time(), "info", message, fields):
            self.writer.enqueue(f"{line}\n")

    def flush(self) -> None:
        self.writer.flush(LOG_FLUSH_TIMEOUT_S)

    def _format_notice(self, dropped: int) -> str:
        message = format_dropped_notice(dropped)
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None)
        return self.format(record)


class AuditLogHandler(logging.Handler):
    """Writes lines in order, in a thread, because a disk may be slow.

    A file that was moved is created again. Some room on its disk stays reserved, so that a disk that becomes
    full first refuses changes, and has room for the lines of those in progress.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file, or standard output. Raises `OSError`."""
        super().__init__()
        self.addFilter(add_request_id)
        self.setFormatter(JsonFormatter())
        self.problem = ""  # why the last line was not written, or the next one may not be
        self._path = path
        self._descriptor = STDOUT if path is None else open_audit_file(path)
        self._reserve: IO[Any] | None = None
        self._is_last_line_cut = False
        self._queue: SimpleQueue[bytes | Future[None]] = SimpleQueue()
        self._reserve_room()
        threading.Thread(target=self._run, name="audit-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._queue.qsize() < MAX_WAITING_AUDIT_LINES:
            self._queue.put(f"{self.format(record)}\n".encode("utf-8", "backslashreplace"))
        else:
            self._record_problem(TOO_MANY_LINES)

    def find_problem(self) -> str:
        """Return why the next change may not be recorded; empty if nothing is known.

        Half of the lines that may wait are those of changes in progress.
        """
        if self._queue.qsize() > MAX_WAITING_AUDIT_LINES // 2:
            return TOO_MANY_LINES
        return self.problem

    async def flush_lines(self) -> None:
        """Wait until the lines are written, or `problem` says why not."""
        written = asyncio.wrap_future(self._request_flush())
        await asyncio.wait((written,), timeout=AUDIT_TIMEOUT_S)
        if not written.done():
            self._record_problem("it takes too long")

    def flush(self) -> None:
        with suppress(FutureTimeout):
            self._request_flush().result(LOG_FLUSH_TIMEOUT_S)

    def _request_flush(self) -> Future[None]:
        written: Future[None] = Future()
        self._queue.put(written)
        return written

    # In the thread.

    def _run(self) -> None:
        while True:
            item: bytes | Future[None] = b""
            with suppress(Empty):
                item = self._queue.get(timeout=AUDIT_CHECK_INTERVAL_S)
            if isinstance(item, bytes):
                self._write(item)
            elif item.set_running_or_notify_cancel():
                item.set_result(None)

    def _write(self, line: bytes) -> None:
        """Write a line. An empty one only finds out whether the next line could be written.

        It can begin a problem, which only a line that was written ends.
        """
        try:
            self._open_if_moved()
            if line:
                self._append(line)
            self._reserve_room()
        except Exception as exc:  # noqa: BLE001 - such as MemoryError; later lines must be written
            reason = exc.strerror if isinstance(exc, OSError) else None
            self._record_problem((reason or type(exc).__name__).lower())
            if line:  # its change may have been made
                log.error("the audit log may not have this line: %s", line.decode())
        else:
            if line and self.problem:
                log.warning("the audit log is written again")
                self.problem = ""

    def _append(self, line: bytes) -> None:
        # Otherwise this line would continue the one that a full disk has cut.
        rest = memoryview(b"\n" + line if self._is_last_line_cut else line)
        length = len(rest)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                wait_until_writable(self._descriptor)
            except OSError:
                if self._reserve is None:
                    self._is_last_line_cut |= len(rest) < length
                    raise
                self._reserve.close()
                self._reserve = None
        self._is_last_line_cut = False
        if self._path is not None:
            os.fsync(self._descriptor)

    def _open_if_moved(self) -> None:
        if self._path is None:
            return
        try:
            is_moved = not os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            is_moved = True
        if is_moved:
            descriptor = open_audit_file(self._path)
            os.close(self._descriptor)
            self._descriptor = descriptor
            self._is_last_line_cut = False

    def _reserve_room(self) -> None:
        if self._reserve is None and self._path is not None:
            # It has no name, and so ends with this process.
            reserve = tempfile.TemporaryFile(dir=self._path.parent)  # noqa: SIM115 - kept open
            try:
                os.posix_fallocate(reserve.fileno(), 0, RESERVE_BYTES)
            except OSError:
                reserve.close()
                raise
            self._reserve = reserve

    def _record_problem(self, problem: str) -> None:
        if problem != self.problem:
            log.error("the audit log cannot be written, and changes are refused: %s", problem)
        self.problem = problem


def open_audit_file(path: Path) -> int:
    # A pipe without a reader would block without O_NONBLOCK.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def open_audit_log(target: str) -> None:
    """Write audit lines to `stdout` or a file instead of the log. Raises `CommandError`."""
    path = None if target == TO_STDOUT else Path(target).absolute()
    try:
        handler = AuditLogHandler(path)
    except OSError as exc:
        raise CommandError(f"GATEWAY_AUDIT_LOG: {path} cannot be written: {exc.strerror}") from None
    audit.log.handlers[:] = [handler]
    audit.log.propagate = False
    if path is not None and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        # Tools that rotate logs send it. A moved file is noticed without it.
        signal.signal(signal.SIGHUP, lambda *_: None)


def find_audit_log() -> AuditLogHandler | None:
    handlers = (each for each in audit.log.handlers if isinstance(each, AuditLogHandler))
    return next(handlers, None)


def check_audit_log() -> None:
    """Check that the next change can be recorded. Raises `AuditLogUnavailable`."""
    handler = find_audit_log()
    if handler is not None and (problem := handler.find_problem()):
        raise AuditLogUnavailable(problem)


def configure(settings: Settings) -> QueuedLogHandler:
    """Configure logging; return the handler, which writes messages in the same order."""
    handler = QueuedLogHandler(STDERR, choose_formatter(settings))
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


def find_log_handlers() -> list[QueuedLogHandler]:
    handlers = logging.getLogger().handlers
    return [handler for handler in handlers if isinstance(handler, QueuedLogHandler)]


def flush() -> None:
    """Wait until the queued lines are written, up to `LOG_FLUSH_TIMEOUT_S`."""
    for handler in (*find_log_handlers(), *audit.log.handlers):
        handler.flush()


def count_dropped_lines() -> int:
    return sum(queue.writer.dropped_count for queue in find_log_handlers())
