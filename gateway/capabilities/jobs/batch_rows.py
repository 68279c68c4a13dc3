"""The rows of a batch: how they are written to its body while they arrive, and read while it runs."""

from __future__ import annotations

from typing import Final, NamedTuple

import orjson

from gateway.capabilities.jobs.errors import JobsUnavailable
from gateway.capabilities.jobs.job import Job
from gateway.capabilities.jobs.store import JobStore
from gateway.errors import TooLarge
from gateway.media_types import JSON

READ_BYTES: Final = 256 << 10
# A line is parsed on the event loop.
MAX_LINE_BYTES: Final = 1 << 20
LINE_FEED: Final = b"\n"
CUSTOM_ID: Final = "custom_id"


class Row(NamedTuple):
    number: int  # from 1
    custom_id: str | None
    content_type: str
    body: bytes


class RowWriter:
    """Writes the lines of an NDJSON body to a file, without the empty ones."""

    def __init__(self, store: JobStore, file: str, max_rows: int) -> None:
        self._store = store
        self._file = file
        self._max_rows = max_rows
        self._rest = b""
        self.rows = 0
        self.size_bytes = 0

    async def feed(self, data: bytes) -> None:
        """Raises `TooLarge`."""
        *lines, self._rest = (self._rest + data).split(LINE_FEED)
        if max(map(len, (*lines, self._rest))) > MAX_LINE_BYTES:
            raise TooLarge(
                f"row {self.rows + 1} or one of the next exceeds {MAX_LINE_BYTES} bytes; "
                "send large rows as requests of their own, with Prefer: respond-async"
            )
        await self._write([line for line in lines if line.strip()])

    async def finish(self) -> None:
        if self._rest.strip():
            await self._write([self._rest])

    async def _write(self, lines: list[bytes]) -> None:
        self.rows += len(lines)
        if self.rows > self._max_rows:
            raise TooLarge(
                f"the batch has more than {self._max_rows} rows (GATEWAY_MAX_BATCH_ROWS)"
            )
        if lines:
            data = LINE_FEED.join([*lines, b""])
            self.size_bytes += len(data)
            await self._store.append(self._file, data)


class RowReader:
    """Reads the rows of a batch one after the other."""

    def __init__(self, store: JobStore, job: Job) -> None:
        self._store = store
        self._job = job
        self._position = 0  # in the file
        self._buffer = bytearray()
        self._number = 0

    async def skip(self, count: int) -> None:
        for _ in range(count):
            await self._read_line()
        self._number = count

    async def read(self) -> Row | None:
        """Return the next row, or None after the last one."""
        line = await self._read_line()
        if not line:
            return None
        self._number += 1
        custom_id, body = split_line(line)
        return Row(self._number, custom_id, JSON, body)

    async def _read_line(self) -> bytes:
        """Return the next line, or nothing at the end."""
        searched = 0
        while (end := self._buffer.find(LINE_FEED, searched)) < 0:
            searched = len(self._buffer)
            length = min(self._job.body_bytes - self._position, READ_BYTES)
            if not length:
                return b""
            data = await self._store.read(self._job.body_file, self._position, length)
            if len(data) < length:
                raise JobsUnavailable("the body of the job is incomplete")
            self._position += length
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


def split_line(line: bytes) -> tuple[str | None, bytes]:
    """Return the `custom_id` of a line, and the rest as the body of its request."""
    if CUSTOM_ID.encode() not in line:
        return None, line
    try:
        document = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None, line
    if not isinstance(document, dict) or not isinstance(document.get(CUSTOM_ID), str):
        return None, line
    custom_id = document.pop(CUSTOM_ID)
    return custom_id, orjson.dumps(document)
