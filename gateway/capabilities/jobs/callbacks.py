"""Callbacks: a signed request to the client's server when a job has ended, repeated until it is accepted.

Also the route of the secret that signs them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import timezone
from email.utils import parsedate_to_datetime
from functools import partial
from math import ceil
from typing import Final

import anyio
import httpx
import orjson
from fastapi import APIRouter, Response

from gateway import __version__
from gateway.capabilities.jobs.callback_urls import CallbackNotAllowed, CallbackUrls
from gateway.capabilities.jobs.errors import JobsFull, JobsUnavailable
from gateway.capabilities.jobs.job import DELIVERED, Job
from gateway.capabilities.jobs.routes import describe_job
from gateway.capabilities.jobs.service import Jobs
from gateway.capabilities.jobs.settings import split_secrets
from gateway.errors import MalformedRequest
from gateway.media_types import JSON
from gateway.messages import format_utc_time
from gateway.routes.dependencies import ServicesForAdministration
from gateway.routes.openapi import (
    STRING_SCHEMA,
    build_list_schema,
    build_object_schema,
    build_responses,
)
from gateway.services import Services
from gateway.tasks import TaskSet, cancel_tasks, repeat, run_step, run_together
from gateway.webhooks import build_headers, generate_secret

log = logging.getLogger(__name__)

LOOP: Final = "job_callbacks"
# Before each attempt, from the end of the one before. They end earlier with the job, when it is removed.
DELAYS_S: Final = tuple(
    60.0 * minutes for minutes in (0, 5 / 60, 5, 30, 120, 300, 600, 840, 1200, 1440)
)
MAX_JITTER: Final = 1.2
MAX_RETRY_AFTER_S: Final = 86400.0
ATTEMPT_TIMEOUT_S: Final = 20.0
STEP_TIMEOUT: Final = httpx.Timeout(ATTEMPT_TIMEOUT_S)
# Longer than an attempt: what a gateway that was killed had begun is begun again after this time.
CLAIM_S: Final = 60.0
POLL_S: Final = 0.5
MAX_ATTEMPTS_PER_HOST: Final = 4  # at a time
MAX_RESPONSE_BYTES: Final = 16 << 10
MAX_PROBLEM_CHARS: Final = 200
GONE_STATUS: Final = 410
TRACE_HEADER: Final = "traceparent"
HEADERS: Final = {"Content-Type": JSON, "User-Agent": f"triton-gateway/{__version__}"}
SECRETS_SCHEMA: Final = build_object_schema(
    {"secrets": build_list_schema(STRING_SCHEMA, "Each callback has a signature by each of them.")},
    title="CallbackSecrets",
)

router = APIRouter(tags=["jobs"])


@dataclass(frozen=True)
class AttemptResult:
    problem: str = ""  # empty: the receiver has accepted the callback
    is_final: bool = False  # further attempts are pointless
    retry_after_s: float = 0.0


class CallbackClient:
    """Sends one callback. It uses no proxy of the environment, follows no redirect, and keeps nothing."""

    def __init__(self, allowed: CallbackUrls, tls: ssl.SSLContext) -> None:
        self._allowed = allowed
        self._tls = tls

    async def send(self, job: Job, signature: Mapping[str, str], body: bytes) -> AttemptResult:
        # It is the client's: httpx sends ASCII alone.
        trace = {
            name: value for name, value in job.headers if name == TRACE_HEADER and value.isascii()
        }
        headers = {**HEADERS, **trace, **signature, "X-Request-ID": job.request_id}
        try:
            url = self._allowed.check_url(job.callback_url)
            with anyio.fail_after(ATTEMPT_TIMEOUT_S):
                return await self._post(url, headers, body)
        except (CallbackNotAllowed, MalformedRequest) as exc:
            return AttemptResult(exc.detail, is_final=True)
        except TimeoutError:
            return AttemptResult(f"there was no complete response within {ATTEMPT_TIMEOUT_S:g} s")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as exc:
            reason = str(exc) or type(exc).__name__
            return AttemptResult(f"the request failed: {reason}"[:MAX_PROBLEM_CHARS])

    async def _post(self, url: httpx.URL, headers: Mapping[str, str], body: bytes) -> AttemptResult:
        async with (
            httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=STEP_TIMEOUT) as client,
            client.stream("POST", url, content=body, headers=headers) as response,
        ):
            received = 0
            async for chunk in response.aiter_raw():
                received += len(chunk)
                if received > MAX_RESPONSE_BYTES:
                    break
            return judge_response(response)


class CallbackSender:
    """Sends the callbacks that are due, a few at a time to each host."""

    def __init__(self, jobs: Jobs, services: Services) -> None:
        self._jobs = jobs
        self._keys_file = services.access.keys_file
        self._store = jobs.store
        self._trust = jobs.trust
        self._allowed = jobs.callback_urls
        self._tasks = TaskSet()
        self._attempts = services.metrics.create.counter(
            "gateway_job_callback_attempts_total",
            "Attempts to deliver callbacks of jobs, by result: delivered, repeated or failed.",
            ("result",),
        )

    async def __aenter__(self) -> None:
        self._client = CallbackClient(self._allowed, ssl.create_default_context())
        for host in self._allowed.list_authorities():
            self._tasks.start(repeat(LOOP, partial(self._serve_host, host)))

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks(self._tasks)

    async def _serve_host(self, host: str) -> None:
        due: Sequence[Job] = ()
        with suppress(JobsUnavailable, JobsFull):
            now = time.time()
            due = await self._store.find_due_deliveries(host, now, CLAIM_S, MAX_ATTEMPTS_PER_HOST)
        attempts = (run_step(LOOP, partial(self._deliver, host, job)) for job in due)
        await run_together(attempts)
        if not due:
            await asyncio.sleep(POLL_S)

    async def _deliver(self, host: str, job: Job) -> None:
        with suppress(JobsUnavailable, JobsFull):  # it is sent again
            if not self._trust.is_signed(job):  # whoever wrote it has chosen the address
                await self._store.replace(replace(job, callback_due_at=0.0), job.token)
                return
            body = self._encode_event(job)
            signature = build_headers(await self._find_secrets(job.caller), job.id, body)
            result = await self._client.send(job, signature, body)
            attempted = record_attempt(job, result, time.time())
            if await self._store.replace(attempted, job.token):
                self._report(host, attempted)

    async def _find_secrets(self, caller: str) -> Sequence[str]:
        """Return the secrets of the caller's key or rule, or else the gateway's."""
        callers = [] if self._keys_file is None else self._keys_file.value.list_callers()
        secrets = (each.callback_secrets for each in callers if each.name == caller)
        return next(secrets, ()) or await read_own_secrets(self._jobs)

    def _encode_event(self, job: Job) -> bytes:
        """Return the body of a callback, which is the same in every attempt."""
        event = {
            "type": f"job.{job.state.value}",
            "timestamp": format_utc_time(job.ended_at, "milliseconds"),
            "data": describe_job(replace(job, callback_url="")),
            "result": f"/v1/jobs/{job.id}/result",
        }
        return orjson.dumps(event)

    def _report(self, host: str, job: Job) -> None:
        if job.callback_outcome == DELIVERED:
            self._attempts.labels("delivered").inc()
            return
        is_repeated = job.callback_due_at > 0
        self._attempts.labels("repeated" if is_repeated else "failed").inc()
        log.warning(
            "attempt %d of the callback of job %s to %s failed: %s; %s",
            *(job.callback_attempts, job.id, host, job.callback_outcome),
            f"the next one is in {ceil(job.callback_due_at - time.time())} s"
            if is_repeated
            else "it was the last one",
        )


async def open_callbacks(jobs: Jobs, services: Services, stack: AsyncExitStack) -> None:
    """Send callbacks from now on, if the settings allow any."""
    sender = CallbackSender(jobs, services)
    if jobs.settings.callback_urls:
        await stack.enter_async_context(sender)


async def read_own_secrets(jobs: Jobs) -> Sequence[str]:
    """Return the secrets of the settings, or one that is kept with the jobs.

    Raises `JobsUnavailable` or `JobsFull`.
    """
    secrets = split_secrets(jobs.settings.callback_secret)
    return secrets or [await jobs.store.keep_name("secret:callback", generate_secret())]


def record_attempt(job: Job, result: AttemptResult, now: float) -> Job:
    attempts = job.callback_attempts + 1
    due_at = 0.0
    if result.problem and not result.is_final and attempts < len(DELAYS_S):
        jitter = random.uniform(1, MAX_JITTER)  # noqa: S311 - not for security
        due_at = now + max(DELAYS_S[attempts] * jitter, result.retry_after_s)
    return replace(
        job,
        callback_attempts=attempts,
        callback_due_at=due_at,
        callback_outcome=result.problem or DELIVERED,
    )


def judge_response(response: httpx.Response) -> AttemptResult:
    status = response.status_code
    if response.is_success:
        return AttemptResult()
    problem = f"the receiver answered with status {status}"
    if response.is_redirect:
        problem += "; redirects are not followed"
    if status == GONE_STATUS:
        return AttemptResult(problem, is_final=True)
    retry_after_s = parse_retry_delay(response.headers.get("retry-after", ""))
    return AttemptResult(problem, retry_after_s=retry_after_s)


def parse_retry_delay(value: str) -> float:
    """Return the seconds of a Retry-After header; 0 if it is invalid."""
    try:
        seconds = float(int(value))
    except (ValueError, OverflowError):
        try:
            date = parsedate_to_datetime(value)
        except (ValueError, TypeError, OverflowError):
            return 0.0
        seconds = date.replace(tzinfo=date.tzinfo or timezone.utc).timestamp() - time.time()
    return min(seconds, MAX_RETRY_AFTER_S) if seconds > 0 else 0.0


@router.get(
    "/v1/jobs/secret",
    operation_id="get_callback_secret",
    summary="The secret that signs callbacks",
    responses=build_responses(SECRETS_SCHEMA, "The secrets.", 403),
)
async def get_callback_secret(services: ServicesForAdministration) -> Response:
    """Return the secrets of callbacks of keys without their own."""
    document = {"secrets": await read_own_secrets(services.get(Jobs))}
    return Response(orjson.dumps(document), headers={"Cache-Control": "no-store"}, media_type=JSON)
