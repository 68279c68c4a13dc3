"""Runs a batch: each row as a request, many at the same time, with the results in the order of the rows."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import orjson

from gateway.capabilities.jobs.batches.rows import CUSTOM_ID, Row, RowReader
from gateway.capabilities.jobs.errors import JobsFull, JobsUnavailable
from gateway.capabilities.jobs.job import MIN_ERROR_STATUS, Job
from gateway.capabilities.jobs.replay import (
    BUSY_STATUSES,
    NO_ROOM_PAUSE_S,
    BodyCheck,
    RequestReplay,
    ResponseCapture,
    build_receive,
    find_delay_s,
    find_retry_after_s,
    read_all_pieces,
)
from gateway.capabilities.jobs.service import Jobs
from gateway.fleet.inference import InferenceService
from gateway.fleet.signatures import SignatureCache
from gateway.media_types import JSON, NDJSON, escape_line_separators
from gateway.services import Services
from gateway.tasks import cancel_tasks
from gateway.telemetry.request_info import RequestInfo
from gateway.tensors.outputs import InferResult
from gateway.tensors.signature import Signature
from gateway.triton.inference import InferRequest

# Rows that have begun, of which the first one that runs holds back the others, for each that may run.
MAX_LEAD: Final = 4
# The bodies and results of rows in memory.
MAX_HELD_BYTES: Final = 16 << 20
REPORT_PERIOD_S: Final = 1.0
MAX_UNREPORTED_BYTES: Final = 1 << 20
# In Triton: one that is computed, and one that waits, so that there is always a next one.
BATCHES_PER_INSTANCE: Final = 2
# The end of a line in a JSON document is space between its tokens.
LINE_END_TO_SPACE: Final = bytes.maketrans(b"\r\n", b"  ")


class RowResult(NamedTuple):
    """A line of the result."""

    line: bytes
    is_failed: bool


class RowTask(NamedTuple):
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
        inference = RowInference(replay.services, job.model)
        self._services = replace(replay.services, inference=inference)
        # Its progress is what the store has: rows that are not reported yet do not count.
        self._job = job
        self._first_row = job.done_rows + job.failed_rows
        self._started_at = time.monotonic()
        self._pending: deque[RowTask] = deque()
        self._unreported: list[RowResult] = []
        self._running = 0
        self._change = asyncio.Event()  # a row has ended, or it is time to report

    async def run(self) -> Job:
        try:
            await self._check_body()
            await self._take_over_result()
            await self._run_rows()
        except (JobsFull, JobsUnavailable):
            return self._job.postpone(time.time() + NO_ROOM_PAUSE_S)
        finally:
            await cancel_tasks([each.task for each in self._pending])
        return self._job.finish_batch(time.time())

    async def _check_body(self) -> None:
        """Read the whole body before its first row runs. Raises `JobNotTrusted`."""
        check = BodyCheck(self._job)
        async for piece in read_all_pieces(self._files, self._job.body_file, self._job.body_bytes):
            check.add(piece)

    async def _take_over_result(self) -> None:
        """Copy the result of the run before, which may still write to its file."""
        before = self._job
        own = before.own_result_file
        await self._files.write(own, b"")
        async for piece in read_all_pieces(self._files, before.result_file, before.result_bytes):
            await self._files.append(own, piece)
        headers = (("content-type", NDJSON),)
        await self._files.flush(own)
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
                self._start_row(row)
                row = await reader.read()
                await asyncio.sleep(0)  # rows that fail at once leave time for others
            self._take_results()
            unreported_bytes = sum(len(each.line) for each in self._unreported)
            if time.monotonic() >= report_at or unreported_bytes > MAX_UNREPORTED_BYTES:
                await self._report()
                report_at = time.monotonic() + REPORT_PERIOD_S
            await self._wait_for_change(report_at)
        self._take_results()
        await self._report()

    def _has_room(self, row: Row) -> bool:
        admission = self._services.admission
        slots = admission.max_running_per_model
        if admission.is_in_foreground_use(self._job.model):
            slots = max(slots - 1, 1)  # the next request of a user need not wait for one
        limit = min(slots, self._max_running)
        if self._running >= limit or len(self._pending) >= MAX_LEAD * limit:
            return False
        held_bytes = sum(each.held_bytes for each in self._pending)
        return not self._pending or held_bytes + len(row.body) <= MAX_HELD_BYTES

    def _start_row(self, row: Row) -> None:
        task = asyncio.create_task(self._run_row(row))
        task.add_done_callback(self._end_row)
        self._pending.append(RowTask(row, task))
        self._running += 1

    def _end_row(self, _: asyncio.Task[RowResult]) -> None:
        self._running -= 1
        self._change.set()

    async def _wait_for_change(self, report_at: float) -> None:
        if not self._pending or self._pending[0].task.done():
            return
        timer = asyncio.get_running_loop().call_later(
            max(report_at - time.monotonic(), 0), self._change.set
        )
        await self._change.wait()
        self._change.clear()
        timer.cancel()

    def _take_results(self) -> None:
        """Take the lines of the first rows that have ended. Raises what one of them raised."""
        while self._pending and self._pending[0].task.done():
            self._unreported.append(self._pending.popleft().task.result())

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
            receive = build_receive(read, len(row.body))
            capture, info = await self._replay.call(request, receive, self._services)
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
        job = self._job
        if results:
            data = b"".join(each.line for each in results)
            await self._files.append(job.result_file, data)
            await self._files.flush(job.result_file)
            failed = sum(each.is_failed for each in results)
            done_rows = job.done_rows + len(results) - failed
            failed_rows = job.failed_rows + failed
            elapsed_s = time.monotonic() - self._started_at
            self._job = replace(
                job,
                done_rows=done_rows,
                failed_rows=failed_rows,
                result_bytes=job.result_bytes + len(data),
                rows_per_second=(done_rows + failed_rows - self._first_row) / elapsed_s,
            )
            await self._report_progress(self._job)


class RowInference(InferenceService):
    """The inferences of one batch: no more at the same time than `choose_row_limit` says.

    More would wait in Triton, where no other request could overtake them.
    """

    def __init__(self, services: Services, model: str) -> None:
        cancellable = services.settings.cancellable_models
        super().__init__(services.dispatcher, services.signatures, cancellable)
        self._services = services
        self._model = model
        self._running = 0
        self._ends = asyncio.Condition()

    async def infer(self, request: InferRequest) -> InferResult:
        async with self._ends:
            await self._ends.wait_for(self._has_place)
            self._running += 1
        try:
            return await super().infer(request)
        finally:
            self._running -= 1
            async with self._ends:
                self._ends.notify_all()

    def _has_place(self) -> bool:
        services = self._services
        pool = services.pool
        stages = find_stages(services.signatures, self._model)
        replicas = max(sum(map(pool.accepts_requests, pool.replicas.values())), 1)
        has_users = services.admission.is_in_foreground_use(self._model)
        return self._running < choose_row_limit(stages, replicas, has_users=has_users)


def find_stages(signatures: SignatureCache, model: str) -> Sequence[Signature]:
    """Return the signatures of the models in whose queues rows wait: the steps of an ensemble, or itself.

    There are none, and no limit, until the configs were read, which this starts.
    """
    signature = signatures.find_or_start_reading(model)
    names = (signature.steps or {model}) if signature is not None else ()
    stages = [signatures.find_or_start_reading(name) for name in names]
    found = [stage for stage in stages if stage is not None]
    return found if len(found) == len(stages) else []


def choose_row_limit(stages: Collection[Signature], replicas: int, *, has_users: bool) -> int:
    """Return how many rows keep the model busy. Beside users they leave one of several instances free."""
    limits = []
    shared_limits = []
    for stage in stages:
        batch_size = max(stage.max_batch_size, 1) if stage.has_dynamic_batching else 1
        instances = stage.instances * replicas
        limits.append(BATCHES_PER_INSTANCE * batch_size * instances)
        if has_users and instances > 1:
            shared_limits.append(batch_size * (instances - 1))
    return min((max(limits, default=sys.maxsize), *shared_limits))


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
