"""Who wrote a stored job: the HMAC over what a job is, with a secret that is not in the store.

Whoever can write to the store can change what became of a job, and withhold or delete it, but cannot invent
one, change its request or give it to another caller.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Final

import orjson

from gateway.capabilities.jobs.errors import JobNotTrusted
from gateway.capabilities.jobs.job import Job
from gateway.capabilities.jobs.settings import MIN_SECRET_CHARS, SQLITE, JobSettings, split_secrets
from gateway.config.settings import describe_os_errors
from gateway.messages import CommandError

SECRET_FILE: Final = "secret"  # noqa: S105 - the name of a file
SECRET_BYTES: Final = 32
# All that never changes: the caller, the request with its body, and the callback.
SIGNED_FIELDS: Final = (
    *("id", "owner", "model", "kind", "path", "query", "headers", "body_bytes", "body_digest"),
    *("caller_id", "caller", "subject", "client", "request_id", "created_at", "is_rate_counted"),
    *("idempotency_key", "request_digest", "total_rows", "callback_url", "callback_host"),
)


class JobTrust:
    """Signs jobs with the first of its secrets, and verifies them with each."""

    def __init__(self, secrets: Sequence[str]) -> None:
        self._secrets = [secret.encode() for secret in secrets]

    def sign(self, job: Job) -> Job:
        return replace(job, signature=sign(job, self._secrets[0]))

    def is_signed(self, job: Job) -> bool:
        signatures = (sign(job, secret) for secret in self._secrets)
        return any(hmac.compare_digest(each, job.signature) for each in signatures)

    def check(self, job: Job) -> None:
        """Raises `JobNotTrusted`."""
        if not self.is_signed(job):
            raise JobNotTrusted(
                "no gateway with the secret of this one signed it; if all have the same GATEWAY_JOBS_SECRET, "
                "somebody else wrote it"
            )


def sign(job: Job, secret: bytes) -> str:
    content = orjson.dumps([getattr(job, name) for name in SIGNED_FIELDS])
    return hmac.new(secret, content, hashlib.sha256).hexdigest()


def open_job_trust(settings: JobSettings) -> JobTrust:
    """Return the secrets of the settings, or the one beside the database. Raises `CommandError`."""
    secrets = split_secrets(settings.jobs_secret)
    if not secrets:
        path = Path(settings.jobs.removeprefix(SQLITE)) / SECRET_FILE
        with describe_os_errors(CommandError, f"the secret of the jobs, {str(path)!r}"):
            secrets = (keep_secret_file(path),)
        if len(secrets[0]) < MIN_SECRET_CHARS:
            raise CommandError(f"the secret of the jobs, {str(path)!r}, is damaged; delete it")
    return JobTrust(secrets)


def keep_secret_file(path: Path) -> str:
    """Return the secret in a file that only its owner may read, and create it. Raises `OSError`."""
    if not path.exists():
        new = path.with_name(f"{path.name}.{token_hex(8)}")
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w") as stream:
            stream.write(token_hex(SECRET_BYTES))
            stream.flush()
            os.fsync(file)
        with suppress(FileExistsError):  # another process was first
            os.link(new, path)
        new.unlink()
    return path.read_text()
