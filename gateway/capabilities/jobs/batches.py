"""Batches: their rows, which are written to the body while they arrive, and run as requests.

Many rows run at the same time; their results have the order of the rows.
"""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import orjson

from gateway.capabilities.jobs.errors import JobFileLost, JobsFull, JobsUnavailable
from gateway.capabilities.jobs.job import MIN_ERROR_STATUS, Job
from gateway.capabilities.jobs.replay import (
    BUSY_STATUSES,
    NO_ROOM_PAUSE_S,
    BodyReader,
    RequestReplay,
    ResponseCapture,
    find_delay_s,
    find_retry_after_s,
)
from gateway.capabilities.jobs.service import Jobs, read_piece, read_pieces
from gateway.capabilities.jobs.store import JobFiles
from gateway.errors import MalformedRequest, TooLarge
from gateway.headers import decode_header_text, parse_content_type, parse_header_parameters
from gateway.media_types import (
    JSON,
    MULTIPART,
    NDJSON,
    OCTET_STREAM,
    TEXT,
    TYPES_BY_SUFFIX,
    escape_line_separators,
)
from gateway.memory import MemoryCharge
from gateway.tasks import cancel_tasks
from gateway.telemetry.request_info import RequestInfo
from gateway.tensors.multipart import PartReader

# A line is parsed on the event loop.
MAX_LINE_BYTES: Final = 1 << 20
MAX_FILE_BYTES: Final = 16 << 20
# Lines, of which some are empty, for each row that a batch may have.
MAX_LINES_PER_ROW: Final = 2
LINE_FEED: Final = b"\n"
CUSTOM_ID: Final = "custom_id"
Append = Callable[[bytes], Awaitable[None]]  # to the body of a job
# Rows that have begun, of which the first one that runs holds back the others, for each that may run.
MAX_LEAD: Final = 4
# The bodies and results of rows in memory.
MAX_HELD_BYTES: Final = 16 << 20
REPORT_PERIOD_S: Final = 1.0
MAX_UNREPORTED_BYTES: Final = 1 << 20
# The end of a line in a JSON document is space between its tokens.
LINE_END_TO_SPACE: Final = bytes.maketrans(b"\r\n", b"  ")


class Row(NamedTuple):
    number: int  # the first row has 1
    custom_id: str | None
    content_type: str
    body: bytes


class RowWriter:
    """Writes the lines of an NDJSON body to a file, without the empty ones.

    What it holds of the body, because its end has not arrived, is charged to the memory budget.
    """

    def __init__(self, append: Append, max_rows: int, charge: MemoryCharge) -> None:
        self._append = append
        self._max_rows = max_rows
        self._charge = charge
        self._lines = 0
        self._rest = bytearray()
        self.rows = 0

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
            await self._append(data)


class FormWriter(RowWriter):
    """Writes the files of a form, each after a line that describes it."""

    def __init__(
        self, append: Append, max_rows: int, charge: MemoryCharge, content_type: str
    ) -> None:
        super().__init__(append, max_rows, charge)
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
        self._position = 0
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
            if self._position == self._job.body_bytes:
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
        job = self._job
        piece = await read_piece(self._files, job.body_file, self._position, job.body_bytes)
        if not piece:
            raise JobFileLost
        self._position += len(piece)
        self._buffer += piece


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


class RowResult(NamedTuple):
    """A line of the result."""

    line: bytes
    is_failed: bool


@dataclass(frozen=True)
class RowTask:
    row: Row
    task: asyncio.Task[RowResult]

    @property
    def held_bytes(self) -> int:
        is_done = self.task.done() and self.task.exception() is None
        return len(self.task.result().line if is_done else self.row.body)


class BatchRun:
    """One run of a batch. It continues with the rows after those that the job has as its progress.

    What it has written and not reported is not part of the result: the next run writes it again.
    """

    def __init__(
        self,
        jobs: Jobs,
        replay: RequestReplay,
        job: Job,
        report_progress: Callable[[Job], Awaitable[None]],
    ) -> None:
        self._replay = replay
        self._report_progress = report_progress
        self._files = jobs.store.files
        self._max_row_s = jobs.settings.job_max_run_s
        self._max_running = jobs.settings.max_running_jobs
        # Its progress is what the store has: rows that are not reported yet do not count.
        self._job = job
        self._first_row = job.done_rows + job.failed_rows
        self._started_at = time.monotonic()
        self._pending: deque[RowTask] = deque()
        self._unreported: list[RowResult] = []

    async def run(self) -> Job:
        try:
            await BodyReader(self._files, self._job).check()
            await self._take_over_result()
            await self._run_rows()
        except (JobsFull, JobsUnavailable):
            return self._job.postpone(time.time() + NO_ROOM_PAUSE_S)
        finally:
            await cancel_tasks([each.task for each in self._pending])
        return self._job.finish_batch(time.time())

    async def _take_over_result(self) -> None:
        """Copy the result of the run before, which may still write to its file."""
        before = self._job
        own = before.own_result_file
        await self._files.write(own, b"")
        async for piece in read_pieces(self._files, before.result_file, before.result_bytes):
            await self._files.append(own, piece)
        await self._files.flush(own)
        headers = (("content-type", NDJSON),)
        self._job = replace(before, result_token=before.token, response_headers=headers)
        await self._report_progress(self._job)
        if before.result_file:
            await self._files.delete(before.result_file)

    async def _run_rows(self) -> None:
        caller = self._replay.find_caller(self._job)
        if caller.limits is not None:
            self._max_running = min(self._max_running, caller.limits.max_inflight or sys.maxsize)
        reader = RowReader(self._files, self._job)
        await reader.skip(self._first_row)
        row = await reader.read()
        report_at = time.monotonic() + REPORT_PERIOD_S
        while row is not None or self._pending:
            while row is not None and self._has_room(row):
                self._pending.append(RowTask(row, asyncio.create_task(self._run_row(row))))
                row = await reader.read()
                await asyncio.sleep(0)  # rows that fail at once leave time for others
            if running := [each.task for each in self._pending if not each.task.done()]:
                wait_s = max(report_at - time.monotonic(), 0)
                first = asyncio.FIRST_COMPLETED
                await asyncio.wait(running, timeout=wait_s, return_when=first)
            while self._pending and self._pending[0].task.done():
                self._unreported.append(self._pending.popleft().task.result())
            unreported_bytes = sum(len(each.line) for each in self._unreported)
            if time.monotonic() >= report_at or unreported_bytes > MAX_UNREPORTED_BYTES:
                await self._report()
                report_at = time.monotonic() + REPORT_PERIOD_S
        await self._report()

    def _has_room(self, row: Row) -> bool:
        admission = self._replay.services.admission
        limit = min(admission.max_running_per_model, self._max_running)
        if admission.is_in_foreground_use(self._job.model):
            limit = 1  # nothing overtakes the rows that Triton has
        running = sum(not each.task.done() for each in self._pending)
        if running >= limit or len(self._pending) >= MAX_LEAD * limit:
            return False
        held_bytes = sum(each.held_bytes for each in self._pending)
        return not self._pending or held_bytes + len(row.body) <= MAX_HELD_BYTES

    async def _run_row(self, row: Row) -> RowResult:
        """Return the result of a row, which waits while the fleet is busy."""
        headers = [pair for pair in self._job.headers if pair[0] != "content-type"]
        headers.append(("content-type", row.content_type))
        request = replace(self._job, headers=tuple(headers), body_bytes=len(row.body))

        async def read(_: int) -> bytes:
            return row.body

        give_up_at = time.monotonic() + self._max_row_s
        starts = 0
        while True:
            starts += 1
            capture, info = await self._replay.call(request, read)
            delay_s = find_delay_s(capture, starts)
            # A quota can begin again long after the row gives up: it would hold back the jobs of others.
            wait_s = max(delay_s, find_retry_after_s(capture))
            is_late = time.monotonic() + wait_s > give_up_at
            if capture.status not in BUSY_STATUSES or is_late:
                break
            await asyncio.sleep(delay_s)
        return RowResult(build_line(row, capture, info), capture.status >= MIN_ERROR_STATUS)

    async def _report(self) -> None:
        """Make the new lines durable, and then part of the result."""
        results, self._unreported = self._unreported, []
        if not results:
            return
        job = self._job
        data = b"".join(each.line for each in results)
        await self._files.append(job.result_file, data)
        await self._files.flush(job.result_file)
        failed = sum(each.is_failed for each in results)
        rows = job.done_rows + job.failed_rows + len(results) - self._first_row
        self._job = replace(
            job,
            done_rows=job.done_rows + len(results) - failed,
            failed_rows=job.failed_rows + failed,
            result_bytes=job.result_bytes + len(data),
            rows_per_second=rows / (time.monotonic() - self._started_at),
        )
        await self._report_progress(self._job)


def build_line(row: Row, capture: ResponseCapture, info: RequestInfo) -> bytes:
    document: dict[str, Any] = {"row": row.number}
    if row.custom_id is not None:
        document[CUSTOM_ID] = row.custom_id
    document["status"] = capture.status
    content_type = dict(capture.headers).get(b"content-type", b"").decode("latin-1")
    if capture.status >= MIN_ERROR_STATUS:
        document["error"] = {"code": info.error_code, "message": info.error_reason}
    elif content_type == JSON:
        document["response"] = orjson.Fragment(capture.body.translate(LINE_END_TO_SPACE))
    else:
        document["content_type"] = content_type
        document["base64"] = base64.b64encode(capture.body).decode()
    return escape_line_separators(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
