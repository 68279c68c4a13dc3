"""The store of jobs: what is kept of them, and how they are claimed.

`JobStore` is the same for all places. A `JobTable` is one of them (`sqlite.py`, `redis.py`): it keeps
documents with tokens, and lists of their IDs with scores, and knows nothing of their meaning. Everything in
it can have been written by others: a job counts in a list only if its document says so as well.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf
from typing import Final, Protocol

from gateway.capabilities.jobs.errors import JobsFull, JobsUnavailable, TooManyJobs
from gateway.capabilities.jobs.job import Job, JobReader, JobState, StoredJob, encode_job
from gateway.messages import CommandError

# Of the places of a process, no caller gets more.
MAX_SHARE_OF_PLACES: Final = 2 / 3
LEASES_PERIOD_S: Final = 0.5  # leases that are over are noticed with a claim after this time
PAGE: Final = 200  # documents that are read at a time
# After a first page with jobs that were not wanted. A database counts the IDs before each page again.
ID_PAGE: Final = 10_000
# Results of `JobTable.change` in place of an ID.
REFUSED: Final = ""
TOO_MANY: Final = "TOO_MANY"
ANY_TOKEN: Final = -1
# The lists, or the beginnings of their names. Their scores are times, that of the creation if nothing else is
# said.
ALL: Final = "all"
OWNER: Final = "owner:"  # all jobs of a caller
UNFINISHED: Final = "unfinished:"  # those of a caller
QUEUE: Final = "queue:"  # queued jobs of a caller, by the time from which they may start
STATE: Final = "state:"  # those in a state; that have ended, by their end
CALLBACKS: Final = "callbacks:"  # those with a callback to a host that is to come, by its time
LEASES: Final = "leases"  # running jobs, by the end of their lease on the clock of the table
TURNS: Final = (
    "turns"  # callers with queued jobs, by when they joined, or a job of theirs was started
)
MAX_TURNS: Final = 10_000


@dataclass(frozen=True)
class JobQuery:
    """A page of a list of jobs, the newest first."""

    owner: str | None  # None: of all callers
    state: JobState | None = None
    model: str = ""
    limit: int = 100
    after: str = ""  # the last ID of the page before

    def matches(self, job: Job) -> bool:
        is_in_state = self.state in (None, job.state) and self.model in ("", job.model)
        return is_in_state and self.owner in (None, job.owner)


@dataclass(frozen=True)
class JobCounts:
    """Facts about all jobs, for the metrics."""

    by_state: Mapping[JobState, int]
    oldest_queued_at: float | None
    size_bytes: int


@dataclass(frozen=True)
class Change:
    """A change of one job: a new one, another document, or none."""

    id: str
    owner: str
    document: bytes  # empty: the job is deleted
    token: int
    seen_token: int | None  # None for a new job
    size_bytes: int
    scores: Mapping[str, float | None]  # by list; None takes the job out of it
    queue: str  # the list that decides whether the owner has a turn
    limited: str  # the list that has unfinished jobs of the owner
    max_length: int = 0  # of it, for a new job
    name: str = ""  # no other job has it
    lost_id: str = ""  # a job that had the name, and cannot be read
    lease_s: float = 0.0  # how long a running job belongs to its process
    is_start: bool = False


class JobFiles(Protocol):
    """The bodies of jobs, which are written before their job is added, and results, written while it runs.

    Methods raise `JobsUnavailable` if the files cannot be used, and those that write `JobsFull`.
    """

    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def append(self, file: str, data: bytes) -> None: ...
    async def write(
        self, file: str, data: bytes
    ) -> None: ...  # a whole file, which is durable then
    async def flush(self, file: str) -> None: ...  # makes it durable
    # Returns less if the file ends, and nothing if there is none.
    async def read(self, file: str, start: int, length: int) -> bytes: ...
    async def delete(self, *files: str) -> None: ...
    async def list_old(
        self,
    ) -> Sequence[str]: ...  # those left over by killed processes, or of jobs


class JobTable(Protocol):
    """A place of jobs, whose methods are atomic, and raise `JobsUnavailable` if it cannot be used."""

    renewal_s: float  # after an outage, the processes renew their leases within this time

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def change(self, change: Change) -> str:
        """Change a job whose token still is the one that was seen, and return its ID when that is durable.

        Returns `REFUSED` for another token, the ID of the job that has the name, or `TOO_MANY`.
        Raises `JobsFull`.
        """

    async def renew(self, tokens: Mapping[str, int], lease_s: float) -> Set[str]:
        """Renew the leases of jobs; return those whose token is another one."""

    async def read(self, *job_ids: str) -> Sequence[StoredJob]: ...

    async def list_ids(
        self, name: str, first: int, count: int, until: float | None, *, is_reverse: bool
    ) -> Sequence[str]:
        """Return a page of a list up to a score, or up to the clock of the table."""

    # The number of jobs in a list before this one; None if it is not in the list.
    async def find_rank(self, name: str, job_id: str) -> int | None: ...
    async def count(self, *names: str) -> Sequence[int]: ...  # the length of each list
    async def measure(self) -> int: ...  # the bytes of all jobs

    async def keep_name(self, name: str, value: str) -> str:
        """Let a name stand for a value, unless it has one or the value is empty; return its value."""


class JobStore:
    """The jobs of all gateways that share a table.

    It knows no rules of jobs: what follows from what is in `job.py`, and `replace` makes sure that no change
    is lost. Jobs that cannot be read are skipped, and no page is shorter for them.
    """

    def __init__(self, table: JobTable, files: JobFiles, lease_s: float) -> None:
        self._table = table
        self.files = files
        self.reader = JobReader()
        self._lease_s = lease_s
        # Since when the lease of a running job, by its ID and token, is over: `time.monotonic`.
        self._over_since: dict[tuple[str, int], float] = {}
        self._leases_due_at = 0.0
        self.keep_name = table.keep_name

    async def open(self) -> None:
        """Raises `CommandError`."""
        for place, name in ((self._table, "GATEWAY_JOBS"), (self.files, "GATEWAY_JOBS_FOLDER")):
            try:
                await place.open()
            except (JobsFull, JobsUnavailable) as exc:
                raise CommandError(f"{name} cannot be used: {exc.detail}") from None

    async def close(self) -> None:
        await self.files.close()
        await self._table.close()

    async def add(self, job: Job, max_unfinished: int) -> Job:
        """Keep a new job, whose body file is written; return it when it is durable.

        Returns the job that has the owner's `idempotency_key` instead, if there is one.
        Raises `TooManyJobs` or `JobsFull`.
        """
        change = replace(self._build_change(job), max_length=max_unfinished)
        while (kept_id := await self._table.change(change)) != job.id:
            if kept_id == TOO_MANY:
                raise TooManyJobs(max_unfinished)
            if (kept := await self.find(kept_id)) is not None:
                return kept
            change = replace(change, lost_id=kept_id)
        return job

    async def find(self, job_id: str) -> Job | None:
        return next(iter(self.reader.read(await self._table.read(job_id))), None)

    async def find_unknown(self, job_ids: Sequence[str]) -> Set[str]:
        """Return those of the IDs that no job has."""
        stored = await self._table.read(*job_ids)
        return set(job_ids) - {each.id.decode() for each in stored if each.document is not None}

    async def find_by_key(self, owner: str, idempotency_key: str) -> Job | None:
        job_id = await self._table.keep_name(name_key(owner, idempotency_key), "")
        return await self.find(job_id) if job_id else None

    async def replace(self, job: Job, seen_token: int) -> bool:
        """Replace a job whose token still is the one that was seen; return whether it was.

        A worker reports the progress of its job with the job's own token, which does not change then.
        """
        return await self._table.change(self._build_change(job, seen_token)) == job.id

    async def delete(self, job: Job) -> None:
        """Forget a job, whose files are deleted."""
        scores = dict.fromkeys(list_scores(job))
        change = self._build_change(job, ANY_TOKEN)
        await self._table.change(replace(change, document=b"", size_bytes=0, scores=scores))

    def _build_change(self, job: Job, seen_token: int | None = None) -> Change:
        is_running = job.state is JobState.running
        return Change(
            job.id,
            job.owner,
            encode_job(job),
            job.token,
            seen_token,
            size_bytes=job.size_bytes,
            scores=list_scores(job),
            queue=QUEUE + job.owner,
            limited=UNFINISHED + job.owner,
            name=name_key(job.owner, job.idempotency_key) if job.idempotency_key else "",
            lease_s=self._lease_s if is_running else 0.0,
            is_start=is_running,
        )

    async def _select(
        self,
        name: str,
        limit: int,
        matches: Callable[[Job], bool],
        *,
        until: float | None = inf,
        is_reverse: bool = False,
    ) -> list[Job]:
        """Return the first jobs of a list that can be read and are wanted."""
        found: list[Job] = []
        first = 0
        count = limit
        while len(found) < limit:
            ids = await self._table.list_ids(name, first, count, until, is_reverse=is_reverse)
            for start in range(0, len(ids), PAGE):
                stored = await self._table.read(*ids[start : start + PAGE])
                found += filter(matches, self.reader.read(stored))
                if len(found) >= limit:
                    break
            if len(ids) < count:
                break
            first += count
            count = ID_PAGE
        return found[:limit]

    async def list_jobs(self, query: JobQuery) -> Sequence[Job]:
        name = ALL if query.owner is None else OWNER + query.owner
        if not query.after:
            return await self._select(name, query.limit, query.matches, is_reverse=True)
        last = await self.find(query.after)
        if last is None or query.owner not in (None, last.owner):
            return []
        place = (last.created_at, last.id)

        def is_next(job: Job) -> bool:
            return (job.created_at, job.id) < place and query.matches(job)

        # The lists have the times of creation, and among equal ones the order of the IDs.
        until = last.created_at
        return await self._select(name, query.limit, is_next, until=until, is_reverse=True)

    async def _list_turns(self) -> Sequence[str]:
        """Return the callers with queued jobs, the next one first."""
        return await self._table.list_ids(TURNS, 0, MAX_TURNS, inf, is_reverse=False)

    async def find_position(self, job: Job) -> int:
        """Return the number of queued jobs before this one, if none is delayed."""
        owners = await self._list_turns()
        rank = await self._table.find_rank(QUEUE + job.owner, job.id)
        if rank is None or job.owner not in owners:
            return 0
        lengths = await self._table.count(*(QUEUE + owner for owner in owners))
        own_turn = owners.index(job.owner)
        # In each round before, and in its own one the callers whose turns come first.
        rounds = [rank + (turn < own_turn) for turn in range(len(owners))]
        return sum(map(min, lengths, rounds))

    async def claim(
        self, count: int, now: float, running: Collection[Job] = ()
    ) -> AsyncIterator[Job]:
        """Yield at most `count` jobs that this process runs from now on, each with a lease.

        They were queued and due. No caller gets more than a share of the places, with those of the `running`
        jobs. Jobs whose lease is over are queued again, or failed.
        """
        if time.monotonic() >= self._leases_due_at:
            self._leases_due_at = time.monotonic() + LEASES_PERIOD_S
            await self._end_leases(now, {job.id for job in running})
        max_per_owner = ceil(MAX_SHARE_OF_PLACES * (count + len(running)))
        by_owner = Counter(job.owner for job in running)
        seen: set[str] = set()
        turns = deque(await self._list_turns())
        while count > 0 and turns:
            owner = turns.popleft()
            if by_owner[owner] >= max_per_owner:
                continue
            is_next = partial(is_queued, owner, seen)
            waiting = await self._select(QUEUE + owner, 1, is_next, until=now)
            if not waiting:
                continue
            turns.append(owner)
            seen.add(waiting[0].id)  # also if another process has just started it
            job = waiting[0].start(now)
            if await self.replace(job, waiting[0].token):
                by_owner[owner] += 1
                count -= 1
                yield job

    async def _end_leases(self, now: float, running: Set[str]) -> None:
        """Take back the jobs whose lease is over, once their workers had time to renew it after an outage."""
        seen_at = time.monotonic()
        over_since = {}

        def is_over(job: Job) -> bool:
            return job.state is JobState.running and job.id not in running

        for job in await self._select(LEASES, PAGE, is_over, until=None):
            since = self._over_since.get((job.id, job.token), seen_at)
            if seen_at - since < self._table.renewal_s:
                over_since[job.id, job.token] = since
            else:
                await self.replace(job.lose_worker(now, self._lease_s), job.token)
        self._over_since = over_since

    async def renew(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Renew the leases; return those whose token is another one: they were cancelled or taken over."""
        tokens = {job.id: job.token for job in jobs}
        lost = await self._table.renew(tokens, self._lease_s)
        return [job for job in jobs if job.id in lost]

    async def count_jobs(self) -> JobCounts:
        counts = await self._table.count(*(STATE + state.value for state in JobState))
        queued = STATE + JobState.queued.value
        oldest = await self._select(queued, 1, partial(has_state, JobState.queued))
        by_state = dict(zip(JobState, counts, strict=True))
        size_bytes = await self._table.measure()
        return JobCounts(by_state, oldest[0].created_at if oldest else None, size_bytes)

    async def find_outdated(self, when: float, limit: int) -> Sequence[Job]:
        """Return jobs that ended before `when`, and queued ones that were created before."""
        outdated: list[Job] = []
        for state in JobState:
            name = STATE + state.value
            if state is not JobState.running:
                outdated += await self._select(name, limit, partial(has_state, state), until=when)
        return outdated

    async def find_due_deliveries(
        self, host: str, now: float, lease_s: float, limit: int
    ) -> Sequence[Job]:
        """Return jobs whose callback to this host is due, and make each due again after the lease.

        Who delivers it stores the outcome with `replace`, and the time of the next attempt.
        """

        def is_due(job: Job) -> bool:
            return job.callback_host == host and 0 < job.callback_due_at <= now

        taken = []
        for job in await self._select(CALLBACKS + host, limit, is_due, until=now):
            later = job.postpone_callback(now + lease_s)
            if await self.replace(later, job.token):
                taken.append(later)
        return taken


def name_key(owner: str, idempotency_key: str) -> str:
    return f"key:{owner}\n{idempotency_key}"


def is_queued(owner: str, seen: Set[str], job: Job) -> bool:
    return job.owner == owner and job.state is JobState.queued and job.id not in seen


def has_state(state: JobState, job: Job) -> bool:
    return job.state is state


def list_scores(job: Job) -> dict[str, float | None]:
    """Return the scores of a job in all lists in which it could be, None where it is not.

    The score of a lease is set by the table.
    """
    has_ended = job.has_ended
    starts_at = max(job.created_at, job.due_at)
    scores: dict[str, float | None] = {
        ALL: job.created_at,
        OWNER + job.owner: job.created_at,
        UNFINISHED + job.owner: None if has_ended else job.created_at,
        QUEUE + job.owner: starts_at if job.state is JobState.queued else None,
    }
    for state in JobState:
        at = job.ended_at if has_ended else job.created_at
        scores[STATE + state.value] = at if state is job.state else None
    if job.callback_host:
        scores[CALLBACKS + job.callback_host] = job.callback_due_at or None
    return scores
