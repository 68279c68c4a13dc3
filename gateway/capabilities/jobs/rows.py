"""The rows of a batch: how they are written to its body while they arrive, and read while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final, NamedTuple

import orjson

from gateway.capabilities.jobs.errors import JobFileLost
from gateway.capabilities.jobs.job import Job
from gateway.capabilities.jobs.service import ArrivingBody
from gateway.capabilities.jobs.store import JobFiles
from gateway.errors import MalformedRequest, TooLarge
from gateway.headers import decode_header_text, parse_content_type, parse_header_parameters
from gateway.media_types import JSON, MULTIPART, OCTET_STREAM, TEXT, TYPES_BY_SUFFIX
from gateway.memory import MemoryCharge
from gateway.tensors.multipart import PartReader

BUFFER_BYTES: Final = 256 << 10
# A line is parsed on the event loop.
MAX_LINE_BYTES: Final = 1 << 20
MAX_FILE_BYTES: Final = 16 << 20
# Lines, of which some are empty, for each row that a batch may have.
MAX_LINES_PER_ROW: Final = 2
LINE_FEED: Final = b"\n"
CUSTOM_ID: Final = "custom_id"


class Row(NamedTuple):
    number: int  # the first row has 1
    custom_id: str | None
    content_type: str
    body: bytes


class RowWriter:
    """Writes the lines of an NDJSON body to a file, without the empty ones.

    What it holds of the body, because its end has not arrived, is charged to the memory budget.
    """

    def __init__(self, file: ArrivingBody, max_rows: int, charge: MemoryCharge) -> None:
        self._file = file
        self._max_rows = max_rows
        self._charge = charge
        self._lines = 0
        self._rest = bytearray()
        self.rows = 0
        self.size_bytes = 0

    async def feed(self, data: bytes) -> None:
        """Write the complete rows. Raises `MalformedRequest`, `TooLarge` or `MemoryBudgetExceeded`."""
        self._lines += data.count(LINE_FEED)
        max_lines = MAX_LINES_PER_ROW * self._max_rows
        if self._lines > max_lines:
            raise TooLarge(
                f"the batch has more than {max_lines} lines, of which {self._max_rows} may be rows"
            )
        self._rest += data
        lines: list[bytearray] = []
        if LINE_FEED in data:  # otherwise many small pieces of a long line would each copy it
            *lines, self._rest = self._rest.split(LINE_FEED)
        if max(map(len, (*lines, self._rest))) > MAX_LINE_BYTES:
            raise TooLarge(
                f"row {self.rows + 1} or one of the next exceeds {MAX_LINE_BYTES} bytes; "
                "send large rows as requests of their own, with Prefer: respond-async"
            )
        self._charge.resize(len(self._rest))
        rows = [line for line in lines if line.strip()]
        await self._write(len(rows), rows)

    async def finish(self) -> None:
        if self._rest.strip():
            await self._write(1, [self._rest])

    async def _write(self, rows: int, lines: Sequence[bytes | bytearray]) -> None:
        self.rows += rows
        if self.rows > self._max_rows:
            raise TooLarge(f"the batch has more than {self._max_rows} rows")
        if lines:
            data = LINE_FEED.join([*lines, b""])
            self.size_bytes += len(data)
            await self._file.append(data)


class FormWriter(RowWriter):
    """Writes the files of a form, each after a line that describes it."""

    def __init__(
        self, file: ArrivingBody, max_rows: int, charge: MemoryCharge, content_type: str
    ) -> None:
        super().__init__(file, max_rows, charge)
        self._parser = PartReader(content_type, max_rows)
        self._part_content = bytearray()

    async def feed(self, data: bytes) -> None:
        for part in self._parser.feed(data):
            self._extend(part.content)
            content, self._part_content = self._part_content, bytearray()
            await self._write(1, [describe_file(part.headers, len(content)), content])
        if self._parser.part_headers is not None:
            self._extend(self._parser.take_partial_content())
        self._charge.resize(len(self._part_content))

    async def finish(self) -> None:
        self._parser.finish()

    def _extend(self, content: bytes) -> None:
        self._part_content += content
        if len(self._part_content) > MAX_FILE_BYTES:
            raise TooLarge(f"file {self.rows + 1} of the batch exceeds {MAX_FILE_BYTES} bytes")


def describe_file(headers: Mapping[str, str], size_bytes: int) -> bytes:
    """Return the line of a part of a form. Raises `MalformedRequest`."""
    disposition, options = parse_header_parameters(headers.get("content-disposition", ""))
    if disposition != "form-data":
        raise MalformedRequest("a part of the multipart body has no name")
    name = decode_header_text(options.get("filename") or options.get("name", ""))
    content_type = headers.get("content-type", OCTET_STREAM if "filename" in options else TEXT)
    if content_type == OCTET_STREAM:
        content_type = TYPES_BY_SUFFIX.get(PurePath(name).suffix.lower(), OCTET_STREAM)
    return orjson.dumps([name, content_type, size_bytes])


class RowReader:
    """Reads the rows of a batch one after the other."""

    def __init__(self, files: JobFiles, job: Job) -> None:
        self._files = files
        self._job = job
        self._file_position = 0
        self._buffer = bytearray()
        self._number = 0
        content_type = next(value for name, value in job.headers if name == "content-type")
        self._has_files = parse_content_type(content_type)[0] == MULTIPART

    async def skip(self, count: int) -> None:
        for _ in range(count):
            if await self.read() is None:
                return

    async def read(self) -> Row | None:
        line = await self._read_line()
        if not line:
            return None
        self._number += 1
        if self._has_files:
            name, content_type, length = orjson.loads(line)
            content = await self._read_bytes(length + len(LINE_FEED))
            return Row(self._number, name, content_type, content[:length])
        custom_id, body = split_line(line)
        return Row(self._number, custom_id, JSON, body)

    async def _read_line(self) -> bytes:
        searched = 0
        while (end := self._buffer.find(LINE_FEED, searched)) < 0:
            searched = len(self._buffer)
            if self._file_position == self._job.body_bytes:
                return b""
            await self._fill_buffer()
        return (await self._read_bytes(end + 1))[:end]

    async def _read_bytes(self, count: int) -> bytes:
        while len(self._buffer) < count:
            await self._fill_buffer()
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    async def _fill_buffer(self) -> None:
        length = min(self._job.body_bytes - self._file_position, BUFFER_BYTES)
        data = await self._files.read(self._job.body_file, self._file_position, length)
        if not data or len(data) < length:
            raise JobFileLost
        self._file_position += length
        self._buffer += data


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
    try:
        return custom_id, orjson.dumps(document)
    except orjson.JSONEncodeError:
        return custom_id, line  # it is nested too deeply for a request as well
