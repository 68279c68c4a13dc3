"""Files of samples: their names, the lock of their folder, their events, and the events of one caller."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import orjson

from gateway.commands.errors import ClientError

HOUR_S: Final = 3600.0
HOUR_FORMAT: Final = "%Y-%m-%dT%H"
FILE_NAME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d\.jsonl")
LOCK_NAME: Final = ".lock"
COPY_NAME: Final = ".copy"
CALLER_ATTRIBUTES: Final = ("caller", "callersubject")
Document = dict[str, Any]


def format_file_name(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, timezone.utc).strftime(HOUR_FORMAT)}.jsonl"


def find_end_time(path: Path) -> float:
    start = datetime.strptime(path.stem, HOUR_FORMAT).replace(tzinfo=timezone.utc)
    return start.timestamp() + HOUR_S


def list_sample_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if FILE_NAME.fullmatch(path.name))


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from changing the files. Raises `OSError`."""
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def parse_event(line: bytes) -> Document | None:
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) and "specversion" in document else None


def erase_caller(folder: Path, caller: str) -> int:
    """Remove the events of a caller from all files; return their number. Raises `ClientError`.

    Lines that are no events are removed as well, because they could be anybody's.
    """
    try:
        count = 0
        for path in list_sample_files(folder):
            with lock_folder(folder):
                count += erase_from_file(path, caller)
    except OSError as exc:
        raise ClientError(f"the samples in {folder} cannot be erased: {exc.strerror}") from None
    return count


def erase_from_file(path: Path, caller: str) -> int:
    copy = path.with_name(COPY_NAME)
    count = 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with path.open("rb") as lines, os.fdopen(os.open(copy, flags, 0o600), "wb") as kept:
            for line in lines:
                event = parse_event(line)
                if event is None or caller in map(event.get, CALLER_ATTRIBUTES):
                    count += 1
                else:
                    kept.write(line)
            kept.flush()
            os.fsync(kept.fileno())
        if count:
            copy.replace(path)
    except FileNotFoundError:
        return 0  # it became too old
    finally:
        copy.unlink(missing_ok=True)
    return count
