"""Claims jobs and runs them, and deletes those that are outdated."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar

from gateway.capabilities.jobs.batches import BatchRun
from gateway.capabilities.jobs.errors import JobFileLost, JobNotTrusted, JobsFull, JobsUnavailable
from gateway.capabilities.jobs.job import MAX_ERROR_CHARS, Job, JobKind, JobState
from gateway.capabilities.jobs.replay import (
    BUSY_STATUSES,
    NO_ROOM_PAUSE_S,
    BodyReader,
    RequestReplay,
    find_delay_s,
)
from gateway.capabilities.jobs.service import Jobs, decode_headers
from gateway.capabilities.jobs.store import JobCounts
from gateway.errors import GatewayError, InternalError
from gateway.process_exit import Drain
from gateway.services import Services
from gateway.tasks import TaskSet, cancel_tasks, repeat

log = logging.getLogger(__name__)

T = TypeVar("T")

# Jobs that this process accepts are claimed at once, those of others at each period.
CLAIM_PERIOD_S: Final = 1.0
MAX_HEARTBEAT_S: Final = 2.0  # cancelled jobs are noticed with a heartbeat
CLEANING_PERIOD_S: Final = 5.0
CLEANING_COUNT: Final = 200  # jobs of one kind in one period
LEFT_OVER_PERIOD_S: Final = 3600.0
STORE_RETRY_S: Final = 1.0
# When the process ends, it stores the outcomes of jobs that have just ended.
ENDING_TIMEOUT_S: Final = 2.0


@dataclass
class RunningJob:
    job: Job
    task: asyncio.Task[None]
    is_lost: bool = False
    is_ending: bool = False  # its outcome is being stored


class JobRunner:
    """Claims jobs and runs them. As a context manager it works in the background."""

    def __init__(self, jobs: Jobs, services: Services) -> None:
        self._jobs = jobs
        self._store = jobs.store
        self._replay = RequestReplay(services, jobs.settings.job_max_run_s)
        self._drain = services.get(Drain)
        # The keys are IDs and tokens: a job that was taken over can come back to this process.
        self._running: dict[tuple[str, int], RunningJob] = {}
        self._loops = TaskSet()
        self._claims = TaskSet()
        self._next_left_over_search_at = 0.0
        self._oldest_queued_at: float | None = None
        create = services.metrics.create
        self._job_gauge = create.worst("gateway_jobs", "Jobs that are kept, by state.", ("state",))
        self._age_gauge = create.worst(
            "gateway_job_queue_age_seconds", "Age of the oldest job that is queued."
        )
        self._bytes_gauge = create.worst(
            "gateway_jobs_bytes", "Size of the bodies and results of jobs."
        )
        self._refused = create.counter(
            "gateway_jobs_refused_total",
            "Reads of stored jobs that no gateway can have written (unreadable), and jobs that ended because "
            "the secret, the body or the caller is another one (not_trusted).",
            ("reason",),
        )
        self._reported_unreadable = 0

    async def __aenter__(self) -> JobRunner:
        for name, step in (
            ("jobs", self._claim_jobs),
            ("job_leases", self._renew_leases),
            ("job_cleaning", self._clean),
        ):
            self._loops.start(repeat(name, step))
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks(self._loops)
        await self._wait_for(self._claims)
        # Every task begins: one that is cancelled before cannot queue its job again.
        await asyncio.sleep(0)
        await self._wait_for([each.task for each in self._running.values() if each.is_ending])
        await cancel_tasks([running.task for running in self._running.values()])

    @staticmethod
    async def _wait_for(tasks: Collection[asyncio.Task[None]]) -> None:
        if tasks:
            await asyncio.wait(tasks, timeout=ENDING_TIMEOUT_S)

    async def _claim_jobs(self) -> None:
        seen = self._jobs.changes.count
        free = self._jobs.settings.max_running_jobs - len(self._running)
        if free > 0 and not self._drain.is_draining:
            await asyncio.shield(self._claims.start(self._start_jobs(free)))
        await self._jobs.changes.wait(seen, CLAIM_PERIOD_S)

    async def _start_jobs(self, count: int) -> None:
        with suppress(JobsUnavailable, JobsFull):
            running = [each.job for each in self._running.values()]
            async for job in self._store.claim(count, time.time(), running):
                if (job.id, job.token) in self._running:
                    continue  # a Redis that lost its last second has forgotten that it runs
                task = asyncio.create_task(self._run(job))
                self._running[job.id, job.token] = RunningJob(job, task)
                task.add_done_callback(partial(self._forget, job))

    def _forget(self, job: Job, _: asyncio.Task[None]) -> None:
        del self._running[job.id, job.token]
        self._jobs.changes.notify()

    async def _renew_leases(self) -> None:
        await asyncio.sleep(min(self._jobs.settings.job_lease_s / 3, MAX_HEARTBEAT_S))
        if not self._running:
            return
        with suppress(JobsUnavailable, JobsFull):
            for lost in await self._store.renew([each.job for each in self._running.values()]):
                self.cancel(lost)

    def cancel(self, job: Job) -> None:
        """Stop a job that this process may run, and that it has lost: it was cancelled, or taken over."""
        if (running := self._running.get((job.id, job.token))) is not None:
            running.is_lost = True
            running.task.cancel()

    async def _run(self, job: Job) -> None:
        """Run a job and store what became of it. At the end of the process it is queued again."""
        has_result = False
        try:
            ended = await self._handle(job)
            has_result = ended.result_file == job.own_result_file
            self._running[job.id, job.token].is_ending = True
            replace_job = partial(self._jobs.replace, ended, job.token)
            is_stored = await repeat_until_available(replace_job, JobsUnavailable, JobsFull)
            has_result = is_stored and has_result
        except asyncio.CancelledError:
            running = self._running[job.id, job.token]
            if not running.is_lost:
                with suppress(JobsUnavailable, JobsFull):
                    await self._store.replace(running.job.postpone(time.time()), job.token)
            raise
        finally:
            if not has_result:
                with suppress(JobsUnavailable, JobsFull):
                    await self._delete_unused_result(job)

    async def _delete_unused_result(self, job: Job) -> None:
        """Delete the result that this process has written, unless another one continues a batch with it."""
        kept = await self._store.find(job.id)
        if kept is None or kept.result_file != job.own_result_file:
            await self._store.files.delete(job.own_result_file)

    async def _handle(self, job: Job) -> Job:
        """Run a job; return it as it ended or was postponed."""
        running = self._running[job.id, job.token]
        try:
            self._jobs.trust.check(job)
            if job.kind is JobKind.request:
                return await self._run_request(job)
            return await BatchRun(self._jobs, self._replay, job, self._report_progress).run()
        except JobFileLost as exc:
            return running.job.lose_run(time.time(), self._jobs.settings.job_lease_s, exc)
        except JobNotTrusted as exc:
            self._refused.labels("not_trusted").inc()
            log.warning("job %s did not run: %s", job.id, exc.detail)
            return running.job.fail(time.time(), exc)
        except GatewayError as exc:
            return running.job.fail(time.time(), exc)
        except Exception:
            log.exception("job %s failed", job.id, extra={"request_id": job.request_id})
            return running.job.fail(time.time(), InternalError())

    async def _report_progress(self, job: Job) -> None:
        """Store how far a batch is. Cancels it if this process has lost it."""
        if await self._store.replace(job, job.token):
            self._running[job.id, job.token].job = job
            self._jobs.notify(job)
        else:
            self.cancel(job)
            await asyncio.sleep(0)  # raises the `CancelledError`

    async def _run_request(self, job: Job) -> Job:
        body = BodyReader(self._store.files, job)
        capture, info = await self._replay.call(job, body.read)
        now = time.time()
        if isinstance(body.failure, JobsUnavailable):
            return job.postpone(now + NO_ROOM_PAUSE_S)
        if body.failure is not None:
            raise body.failure
        if capture.status in BUSY_STATUSES:
            return job.postpone(now + find_delay_s(capture, job.starts))
        write = partial(self._store.files.write, job.own_result_file, capture.body)
        try:
            await repeat_until_available(write, JobsUnavailable)
        except JobsFull:
            return job.postpone(now + NO_ROOM_PAUSE_S)
        headers = decode_headers(capture.headers)
        ended = job.finish(now, capture.status, headers, len(capture.body))
        reason = info.error_reason[:MAX_ERROR_CHARS]
        return replace(ended, error=reason, error_code=info.error_code)

    async def _clean(self) -> None:
        now = time.time()
        with suppress(JobsUnavailable, JobsFull):
            before = now - self._jobs.settings.job_retention_s
            for job in await self._store.find_outdated(before, CLEANING_COUNT):
                if job.has_ended:
                    await self._jobs.delete(job)
                else:
                    await self._jobs.replace(job.expire(now), job.token)
            self._report_counts(await self._store.count_jobs())
            self._report_unreadable()
            if time.monotonic() >= self._next_left_over_search_at:
                self._next_left_over_search_at = time.monotonic() + LEFT_OVER_PERIOD_S
                await self._jobs.delete_left_over()
        # The oldest job grows older also while the store cannot be reached.
        oldest_at = self._oldest_queued_at or now
        self._age_gauge.set(max(now - oldest_at, 0.0))
        await asyncio.sleep(CLEANING_PERIOD_S)

    def _report_unreadable(self) -> None:
        unreadable = self._store.reader.unreadable
        if unreadable > self._reported_unreadable:
            self._refused.labels("unreadable").inc(unreadable - self._reported_unreadable)
            self._reported_unreadable = unreadable
            log.warning("%d reads of stored jobs found something else than a job", unreadable)

    def _report_counts(self, counts: JobCounts) -> None:
        self._jobs.stored_bytes = counts.size_bytes
        self._oldest_queued_at = counts.oldest_queued_at
        for state in JobState:
            self._job_gauge.labels(state.value).set(counts.by_state.get(state, 0))
        self._bytes_gauge.set(counts.size_bytes)


async def repeat_until_available(
    call: Callable[[], Awaitable[T]], *failures: type[GatewayError]
) -> T:
    """Return the result of a call to the store, which is repeated after these failures."""
    while True:
        try:
            return await call()
        except failures:
            await asyncio.sleep(STORE_RETRY_S)
