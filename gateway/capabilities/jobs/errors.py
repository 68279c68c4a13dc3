"""The errors of jobs."""

from __future__ import annotations

from gateway.errors import Conflict, GatewayError, NotFound, Overloaded
from gateway.messages import quote_text


class JobNotFound(NotFound):
    code = "JOB_NOT_FOUND"

    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"job {quote_text(job_id)} does not exist, or belongs to another caller; "
            "GET /v1/jobs lists yours"
        )


class JobConflict(Conflict):
    """The job is in another state than the call requires."""


class TooManyJobs(Overloaded):
    def __init__(self, limit: int) -> None:
        super().__init__(
            f"this caller has {limit} jobs that have not ended, which is the limit; "
            "wait for some, or cancel some"
        )


class TooManyWaiters(Overloaded):
    def __init__(self, limit: int) -> None:
        super().__init__(
            f"this caller has {limit} requests that wait for jobs or read the rows of batches, which is the "
            "limit; wait for one of them"
        )


class JobsFull(GatewayError):
    """There is no room for another job, or for the result of one."""

    status = 507
    code = "JOBS_FULL"

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"jobs have no more room: {reason}; delete finished jobs with DELETE /v1/jobs/ID, or let them "
            "expire sooner (GATEWAY_JOB_RETENTION_S)"
        )


class JobBytesExceeded(JobsFull):
    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"all jobs together exceed {limit_bytes} bytes (GATEWAY_MAX_JOBS_BYTES)")


class ResultTooLarge(GatewayError):
    status = 507
    code = "RESULT_TOO_LARGE"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(
            f"the result exceeds {limit_bytes} bytes, which is the limit without GATEWAY_JOBS_FOLDER"
        )


class JobsUnavailable(GatewayError):
    """The store of the jobs cannot be read or written."""

    status = 503
    code = "JOBS_UNAVAILABLE"
    retry_after_s = 1

    def __init__(self, reason: str) -> None:
        super().__init__(f"the jobs cannot be read or written: {reason}")


class JobFileLost(GatewayError):
    code = "JOB_FILE_LOST"
    message = (
        "the body or the result of the job is missing or incomplete: it was deleted, or gateways that share "
        "a Redis have different folders in GATEWAY_JOBS_FOLDER; send the request again"
    )


class JobNotTrusted(GatewayError):
    """Nobody whose request the gateway would accept now is known to have sent the job."""

    status = 403
    code = "JOB_NOT_TRUSTED"

    def __init__(self, reason: str) -> None:
        super().__init__(f"the job is not trusted: {reason}; send the request again")


class SubjectRequired(GatewayError):
    status = 422
    code = "JOB_SUBJECT_REQUIRED"
    message = (
        "the token has no subject (sub) that is a text, by which its jobs could be told from those of "
        "others; callers with such tokens have no jobs"
    )


class KeyReused(GatewayError):
    """An Idempotency-Key came with another request before."""

    status = 422
    code = "IDEMPOTENCY_KEY_REUSED"
    message = "this Idempotency-Key belongs to another request; use a new key for each request"
