"""Requests that outlive their connection: jobs, whose result is fetched later.

`job.py` has a job as a value, and the changes of its state. `store.py` says what a store of jobs can do;
`sqlite_store.py` and `redis_store.py` are the two. `acceptance.py` answers requests with
`Prefer: respond-async`, `runner.py` runs the jobs, `routes.py` serves `/v1/jobs`.
"""

from __future__ import annotations

from gateway.capabilities.jobs.settings import JobSettings
from gateway.capability import Attachment, Capability
from gateway.settings import Settings


def attach_jobs(settings: Settings) -> Attachment | None:
    if not settings.read(JobSettings).jobs:
        return None
    return Attachment()


CAPABILITY = Capability("jobs", attach_jobs, settings=JobSettings)
