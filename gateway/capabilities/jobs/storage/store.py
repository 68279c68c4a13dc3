"""The protocol of a store of jobs, which `sqlite_store.py` and `redis_store.py` implement.

A store keeps values of `Job` and files. It knows no rules of jobs: what follows from what is in `job.py`, and
`replace` makes sure that no change is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.capabilities.jobs.job import Job, JobReader, JobState

# A caller, or a model, that has this many running jobs for each free place gets no further one.
JOBS_PER_FREE_PLACE: Final = 2


@dataclass(frozen=True)
class JobQuery:
    """A page of a list of jobs, the newest first."""

    owner: str | None  # None: of all callers
    state: JobState | None = None
    model: str = ""
    limit: int = 100
    after: str = ""  # the last ID of the page before


@dataclass(frozen=True)
class JobCounts:
    """Facts about all jobs, for the metrics."""

    by_state: Mapping[JobState, int]
    oldest_queued_at: float | None
    size_bytes: int


@dataclass(frozen=True)
class JobLimits:
    max_bytes: int
    max_per_owner: int


class FreePlaces:
    """The places for further jobs of a process. Of three and more, no caller and no model gets all.

    Alone, a caller or a model gets two thirds of all places, and else two thirds of those that others leave,
    as in the admission queue.
    """

    def __init__(self, count: int, running: Iterable[Job]) -> None:
        self.count = count
        self._by_owner: Counter[str] = Counter()
        self._by_model: Counter[str] = Counter()
        for job in running:
            self._add(job)

    def take(self, job: Job) -> None:
        self.count -= 1
        self._add(job)

    def _add(self, job: Job) -> None:
        self._by_owner[job.owner] += 1
        self._by_model[job.model] += 1

    def list_full_owners(self) -> list[str]:
        return self._list_full(self._by_owner)

    def list_full_models(self) -> list[str]:
        return self._list_full(self._by_model)

    def _list_full(self, counts: Counter[str]) -> list[str]:
        return [name for name, count in counts.items() if count >= JOBS_PER_FREE_PLACE * self.count]


class JobFiles(Protocol):
    """The bodies of jobs, which are written before their job is added, and results, written while it runs.

    Every method raises `JobsUnavailable` if the files cannot be used.
    """

    async def append(self, file: str, data: bytes) -> None:
        """Append to a file, and create it. Raises `JobsFull`."""

    async def write(self, file: str, data: bytes) -> None:
        """Write a whole file, and make it durable. Raises `JobsFull`."""

    async def flush(self, file: str) -> None:
        """Make the file durable."""

    async def read(self, file: str, start: int, length: int) -> bytes:
        """Return a part of a file, which is shorter if the file ends, and empty if there is none."""

    async def delete(self, *files: str) -> None: ...

    async def list_old(self) -> Sequence[str]:
        """Return the files that are left over, of processes that were killed, if they have no job."""


class JobStore(Protocol):
    """Every method raises `JobsUnavailable` if the store cannot be used.

    What it has is read with `reader`: other programs may have written it. Jobs that cannot be read are
    skipped, and no page is shorter for them.
    """

    files: JobFiles
    reader: JobReader

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def add(self, job: Job, limits: JobLimits) -> Job:
        """Keep a new job, whose body file is written; return it when it is durable.

        Returns the job that has the owner's `idempotency_key` instead, if there is one.
        Raises `TooManyJobs` or `JobsFull`.
        """

    async def find(self, job_id: str) -> Job | None: ...

    async def find_by_key(self, owner: str, idempotency_key: str) -> Job | None: ...

    async def replace(self, job: Job, seen_token: int) -> bool:
        """Replace a job whose token still is the one that was seen; return whether it was.

        A worker reports the progress of its job with the job's own token, which does not change then.
        """

    async def delete(self, job: Job) -> None:
        """Forget a job, whose files are deleted."""

    async def find_unknown(self, job_ids: Sequence[str]) -> Set[str]:
        """Return those of the IDs that no job has."""

    async def list_jobs(self, query: JobQuery) -> Sequence[Job]: ...

    async def find_position(self, job: Job) -> int:
        """Return the number of queued jobs before this one."""

    async def claim(self, count: int, now: float, running: Collection[Job] = ()) -> Sequence[Job]:
        """Return at most `count` jobs that this process runs from now on, each with a lease.

        They were queued and due, and have a place beside the `running` ones (`FreePlaces`). Jobs whose lease
        has run out are queued again, or failed.
        """

    async def renew(self, jobs: Sequence[Job]) -> Sequence[Job]:
        """Renew the leases; return those whose token is another one: they were cancelled or taken over."""

    async def count_jobs(self) -> JobCounts: ...

    async def find_outdated(self, when: float, limit: int) -> Sequence[Job]:
        """Return jobs that ended before `when`, and queued ones that were created before.

        Those that ended and cannot be read are forgotten.
        """

    async def find_due_deliveries(
        self, host: str, now: float, lease_s: float, limit: int
    ) -> Sequence[Job]:
        """Return jobs whose callback to this host is due, and make each due again after the lease.

        Who delivers it stores the outcome with `replace`, and the time of the next attempt.
        """

    async def keep_secret(self, name: str, value: str) -> str:
        """Keep a value under a name, unless there is one; return the one that is kept."""
