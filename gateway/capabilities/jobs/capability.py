"""Requests that outlive their connection: jobs, whose result is fetched later.

`job.py` has a job as a value, and the changes of its state. `store.py` keeps jobs in a table of `sqlite.py`
or `redis.py`. `acceptance.py` makes jobs of requests and batches, `runner.py` runs them, and `routes.py`
serves `/v1/jobs`. `batches.py` has the rows of batches. `callbacks.py` calls the client's server when a job
has ended, if `callback_urls.py` allows its URL.
"""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gateway.capabilities.capability import Attachment, Capability, LaunchPlan
from gateway.capabilities.jobs.settings import SQLITE, JobSettings
from gateway.config.settings import Settings
from gateway.messages import CommandError

if TYPE_CHECKING:
    from gateway.capabilities.jobs.redis import RedisTable
    from gateway.capabilities.jobs.store import JobStore
    from gateway.services import Services


log = logging.getLogger(__name__)


def attach_jobs(settings: Settings) -> Attachment | None:
    job_settings = settings.read(JobSettings)
    if not job_settings.jobs:
        return None
    from gateway.capabilities.jobs.acceptance import JobAcceptance
    from gateway.capabilities.jobs.acceptance import router as batch_router
    from gateway.capabilities.jobs.callbacks import open_callbacks
    from gateway.capabilities.jobs.callbacks import router as callback_router
    from gateway.capabilities.jobs.routes import router

    store = create_store(job_settings)

    async def open_jobs(services: Services, stack: AsyncExitStack) -> None:
        from gateway.capabilities.jobs.runner import JobRunner
        from gateway.capabilities.jobs.service import Jobs

        await store.open()
        stack.push_async_callback(store.close)
        jobs = Jobs(store, job_settings, settings.max_body_bytes)
        services.provide(jobs)
        runner = await stack.enter_async_context(JobRunner(jobs, services))
        services.provide(runner)
        await open_callbacks(jobs, services, stack)

    return Attachment(
        (batch_router, callback_router, router), open=open_jobs, deferral=JobAcceptance()
    )


def create_store(settings: JobSettings) -> JobStore:
    from gateway.capabilities.jobs.files import FILE_THREADS, BlockingCalls, FolderFiles
    from gateway.capabilities.jobs.store import JobStore

    lease_s = settings.job_lease_s
    folder = settings.jobs_folder
    if settings.jobs.startswith(SQLITE):
        from gateway.capabilities.jobs.sqlite import SqliteTable

        place = Path(settings.jobs.removeprefix(SQLITE))
        folder = place / "files"
        table: Any = BlockingCalls(SqliteTable(place, lease_s))
    else:
        table = create_redis_table(settings)
    files: Any = table.files if folder is None else BlockingCalls(FolderFiles(folder), FILE_THREADS)
    return JobStore(table, files, lease_s)


def create_redis_table(settings: JobSettings) -> RedisTable:
    from gateway.capabilities.jobs.redis import RedisTable
    from gateway.repository.state.interface import BadState
    from gateway.repository.state.redis import parse_redis_url

    password = settings.jobs_password.get_secret_value() if settings.jobs_password else ""
    parsed = None
    with suppress(ValueError):  # the port is invalid
        url = urlsplit(settings.jobs)
        parsed = parse_redis_url(url, url.port or 6379, password, "GATEWAY_JOBS")
    if parsed is None:
        raise CommandError("GATEWAY_JOBS is not a valid redis:// URL")
    try:
        return RedisTable(*parsed, settings.job_lease_s)
    except BadState:
        raise CommandError(
            "GATEWAY_JOBS uses Redis, which requires: pip install 'triton-gateway[redis]'"
        ) from None


def prepare_jobs(plan: LaunchPlan) -> None:
    """Keep the jobs of `up` in a folder of the user, one for each choice of models."""
    if not plan.tritons or "GATEWAY_JOBS" in os.environ:
        return
    from gateway.repository.state.places import find_state_folder

    models = sorted(str(Path(each).absolute()) for each in plan.tritons[0].model_repositories)
    name = hashlib.sha256("\0".join(models).encode()).hexdigest()[:12]
    folder = find_state_folder() / f"jobs-{name}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        plan.update_settings(jobs=JobSettings(jobs=f"{SQLITE}{folder}").jobs)
    except (OSError, ValueError) as exc:
        log.warning("this gateway has no jobs: %s", exc)


CAPABILITY = Capability("jobs", attach_jobs, settings=JobSettings, prepare_launch=prepare_jobs)
