"""Log lines: readable for people, or one JSON object each; always one line, always with the request id."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from typing import Any, Final

import orjson

from gateway import audit
from gateway.context import current
from gateway.linewriter import LineWriter, missing
from gateway.settings import LogFormat, Settings
from gateway.words import printable, printable_json

STDERR: Final = 2
FLUSH_S: Final = 1.0

PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "color_message"}


class WithRequestId(logging.Filter):
    """Adds the request's id to a record, and those of its trace where there is one."""

    def filter(self, record: logging.LogRecord) -> bool:
        notes = current.get()
        if not getattr(record, "request_id", ""):
            record.request_id = notes.request_id if notes is not None else ""
        if notes is not None and notes.trace is not None:
            record.trace_id, record.span_id = notes.trace.trace_id, notes.trace.span_id
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
        return printable_json(orjson.dumps(line, default=str).decode())


class Console(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        pairs = {"request_id": getattr(record, "request_id", ""), **extras(record)}
        told = " ".join(
            f"{key}={printable(str(value))}" for key, value in pairs.items() if value != ""
        )
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        message = printable(record.getMessage())
        line = f"{time} {record.levelname.lower():7} {message} {told}".rstrip()
        return f"{line}\n{self.traceback(record)}" if record.exc_info else line

    def traceback(self, record: logging.LogRecord) -> str:
        """Each line of it escaped and moved in: what an exception says could pass for a line of the log."""
        lines = self.formatException(record.exc_info or (None, None, None)).split("\n")
        return "\n".join(f"  {printable(line)}" for line in lines)


class LogQueue(logging.Handler):
    """Hands the formatted lines to a thread that writes them: the event loop waits for nobody who reads."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.writer = LineWriter(descriptor, notice=self._notice)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.writer.put(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - as every handler of logging: what is said must not fail who says it
            self.handleError(record)

    def flush(self) -> None:
        self.writer.flush(FLUSH_S)

    def _notice(self, dropped: int) -> str:
        arguments = ("gateway.logs", logging.WARNING, __file__, 0, missing(dropped), None, None)
        return self.format(logging.LogRecord(*arguments))


def configure(settings: Settings) -> LineWriter:
    """Set up the log; what else goes to standard error has its turn in the same queue."""
    handler = LogQueue(STDERR)
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
    audit.log.setLevel(audit.LEVEL)
    return handler.writer


def queues() -> list[LogQueue]:
    """Those of this process's log: one, or none where nobody has set it up."""
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, LogQueue)]


def flush() -> None:
    """Have written what was said until now, but wait for nobody for long."""
    for queue in queues():
        queue.flush()


def dropped_lines() -> int:
    """How many lines of this process's log nobody read in time."""
    return sum(queue.writer.dropped for queue in queues())
