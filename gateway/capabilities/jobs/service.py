"""The component that the routes, the acceptance and the runner of jobs share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from weakref import WeakValueDictionary

from gateway.access.auth import authorize_all_models
from gateway.callers import CallerKind, Right
from gateway.capabilities.jobs.callback_urls import CallbackUrls
from gateway.capabilities.jobs.errors import (
    JobFileLost,
    JobsFull,
    JobsUnavailable,
    SubjectRequired,
    TooManyWaiters,
)
from gateway.capabilities.jobs.job import Job, find_job_id
from gateway.capabilities.jobs.settings import JobSettings
from gateway.capabilities.jobs.store import JobFiles, JobStore
from gateway.capabilities.jobs.trust import open_job_trust
from gateway.errors import Forbidden
from gateway.tasks import ChangeSignal, TaskSet
from gateway.telemetry.request_info import RequestInfo, RequestScope

# Changes by other processes are seen after this time.
POLL_S = 0.5
LEFT_OVER_BATCH = 500  # files
# Bodies and results are read from the store in pieces of this size.
READ_BYTES = 1 << 20
MAX_WAITERS_PER_CALLER = 100  # in one process


class Jobs:
    """The jobs of this gateway, or of all that share the store."""

    def __init__(self, store: JobStore, settings: JobSettings, max_body_bytes: int) -> None:
        self.store = store
        self.settings = settings
        self.max_body_bytes = max_body_bytes
        self.callback_urls = CallbackUrls(settings.callback_urls)
        # What the store has, as other processes knew it a few seconds ago; and bodies that have no job yet.
        self.stored_bytes = 0
        self.incoming_bytes = 0
        # Notified when this process accepts a job, or has a place for another one.
        self.changes = ChangeSignal()
        # Of each job for which somebody waits here, by its ID.
        self._job_changes: WeakValueDictionary[str, ChangeSignal] = WeakValueDictionary()
        self._waiters: Counter[str] = Counter()  # by owner
        self.trust = open_job_trust(settings)
        self.tasks = TaskSet()

    async def replace(self, job: Job, seen_token: int) -> bool:
        """Replace a job in the store, as `JobStore.replace`, and delete the body of one that has ended."""
        is_replaced = await self.store.replace(job, seen_token)
        if is_replaced and job.has_ended:
            self.notify(job)
            with suppress(JobsFull, JobsUnavailable):
                await self.store.files.delete(job.body_file)
        return is_replaced

    def notify(self, job: Job) -> None:
        """Wake those who wait for this job, after a change of it."""
        if (change := self._job_changes.get(job.id)) is not None:
            change.notify()

    def watch(self, job: Job) -> ChangeSignal:
        """Return the signal of a job's changes by this process, which lasts as long as it is referenced."""
        return self._job_changes.setdefault(job.id, ChangeSignal())

    @contextmanager
    def wait_as(self, owner: str) -> Iterator[None]:
        """Count a request that waits for a job, or streams its rows. Raises `TooManyWaiters`."""
        if self._waiters[owner] >= MAX_WAITERS_PER_CALLER:
            raise TooManyWaiters(MAX_WAITERS_PER_CALLER)
        self._waiters[owner] += 1
        try:
            yield
        finally:
            self._waiters[owner] -= 1
            if not self._waiters[owner]:
                del self._waiters[owner]

    async def delete(self, job: Job) -> None:
        """Forget a job and its files."""
        # The files first: their room may be what the store needs, and none is left behind.
        await self.store.files.delete(*job.files)
        await self.store.delete(job)

    async def delete_left_over(self) -> None:
        """Delete old files without a job: of processes that were killed."""
        files = self.store.files
        names = await files.list_old()
        for start in range(0, len(names), LEFT_OVER_BATCH):
            batch = names[start : start + LEFT_OVER_BATCH]
            unknown = await self.store.find_unknown(list(map(find_job_id, batch)))
            await files.delete(*(name for name in batch if find_job_id(name) in unknown))

    async def wait_until_ended(self, job: Job, timeout_s: float) -> Job | None:
        """Return the job when it has ended, or after the time; None if it was deleted."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        current: Job | None = job
        change = self.watch(job)
        seen = change.count
        while current is not None and not current.has_ended and loop.time() < deadline:
            remaining_s = deadline - loop.time()
            seen = await change.wait(seen, min(remaining_s, POLL_S))
            current = await self.store.find(job.id)
        return current


async def read_piece(files: JobFiles, file: str, start: int, size_bytes: int) -> bytes:
    """Return the next piece of a file. Raises `JobFileLost` if it ends before its size."""
    length = min(size_bytes - start, READ_BYTES)
    piece = await files.read(file, start, length) if length else b""
    if len(piece) < length:
        raise JobFileLost
    return piece


async def read_pieces(files: JobFiles, file: str, size_bytes: int) -> AsyncIterator[bytes]:
    """Yield the pieces of a file; of one that is empty, an empty one. Raises `JobFileLost`."""
    for position in range(0, size_bytes or 1, READ_BYTES):
        yield await read_piece(files, file, position, size_bytes)


def decode_headers(pairs: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in pairs)


def find_owner(info: RequestInfo) -> str:
    """Return whose a job is: a key, whom a token or certificate names, or without keys the network.

    Raises `SubjectRequired` for a token that names nobody.
    """
    if info.caller.kind is CallerKind.anonymous:
        return f"network:{info.caller_name}"
    if info.caller.kind is CallerKind.key:
        return f"key:{info.caller.id}"
    if not info.subject_id:
        raise SubjectRequired
    return f"subject:{info.subject_id}"


def find_listed_owner(scope: RequestScope) -> str | None:
    """Return whose jobs the caller may list; None for those of all callers."""
    return None if may_use_all(scope) else find_owner(scope["request_info"])


def may_use(scope: RequestScope, job: Job) -> bool:
    """Return whether the caller may read and cancel a job whose ID it knows."""
    info = scope["request_info"]
    if info.caller.kind is CallerKind.anonymous:
        return not job.caller_id
    return job.owner == find_owner(info) or may_use_all(scope)


def may_use_all(scope: RequestScope) -> bool:
    """Return whether the caller may use the jobs of others. A change by it becomes an event."""
    try:
        authorize_all_models(scope, Right.manage)
    except Forbidden:
        return False
    return True
