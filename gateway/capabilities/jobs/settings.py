"""The settings of jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator

from gateway.config.settings import (
    MAX_SETTING_S,
    CapabilitySettings,
    CommaSeparated,
    Fixed,
    PositiveSeconds,
    split_list,
)
from gateway.webhooks import decode_secret

SQLITE: Final = "sqlite://"
REDIS: Final = ("redis://", "rediss://")
MIN_SECRET_CHARS: Final = 32
MAX_SECRETS: Final = 2
OptionalPath = Annotated[Path | None, BeforeValidator(lambda value: value or None)]


class JobSettings(CapabilitySettings):
    jobs: str = ""
    """Where jobs are kept: sqlite:///FOLDER for the gateways of one machine, never on a network file system;
    or redis://HOST:6379/0 for several machines, which requires triton-gateway[redis]. Empty: no jobs; up has
    a folder for its models in the user's state directory (XDG_STATE_HOME)."""
    jobs_password: SecretStr | None = None
    """Password of the Redis in GATEWAY_JOBS, if its URL contains none."""
    jobs_secret: SecretStr | None = Field(None, validate_default=True)
    """Secret with which gateways sign the jobs that they store, of 32 characters at least; whoever writes to
    the store without it cannot run anything. All gateways of a Redis need the same. Two with a comma between
    them while it changes: the first one signs. Empty: with sqlite://, one that is created beside the
    database."""
    jobs_folder: OptionalPath = None
    """Folder that all gateways share, for the bodies and results of jobs in Redis. Empty: Redis has them, and
    bodies over 1 MiB are 413."""
    max_jobs_bytes: int = Field(10 << 30, gt=0)
    """Maximum size of the bodies and results of all jobs, also of those that arrive; further jobs are 507."""
    max_batch_bytes: Fixed[int] = 1 << 30  # of the body of a batch, as received and decompressed
    max_batch_rows: Fixed[int] = 100_000
    max_jobs_per_caller: Fixed[int] = 10_000  # that have not ended
    max_running_jobs: Fixed[int] = 16  # of one process, and rows of each batch
    job_max_run_s: PositiveSeconds = 900.0
    """Time after which a running job, or a row of a batch, fails; X-Request-Timeout shortens it."""
    job_retention_s: PositiveSeconds = MAX_SETTING_S
    """Time for which the result of a job is kept after its end. A job that did not run for this time
    expires."""
    # Without a sign of life for so long, a process loses its jobs to another one.
    job_lease_s: Fixed[float] = 30.0
    callback_urls: CommaSeparated = ()
    """Comma-separated prefixes of the URLs to which X-Callback-URL may lead: https://HOST,
    https://HOST/PATH or http://HOST:PORT/PATH, with whole path segments. Empty: no callbacks."""
    callback_secret: SecretStr | None = None
    """Secret with which callbacks are signed: whsec_ and 24 to 64 random bytes in base64, or two with a comma
    between them while receivers change to the first. Empty: one that is generated and kept with the jobs."""

    @field_validator("callback_urls")
    @classmethod
    def check_callback_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value:  # only then is httpx imported
            from gateway.capabilities.jobs.callback_urls import CallbackUrls  # noqa: PLC0415

            CallbackUrls(value)
        return value

    @field_validator("callback_secret")
    @classmethod
    def check_callback_secret(cls, value: SecretStr | None) -> SecretStr | None:
        for secret in split_secrets(value):
            decode_secret(secret)
        return value

    @field_validator("jobs_secret")
    @classmethod
    def check_jobs_secret(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        secrets = split_secrets(value)
        if any(len(secret) < MIN_SECRET_CHARS for secret in secrets) or len(secrets) > MAX_SECRETS:
            raise ValueError(
                f"expected one secret of {MIN_SECRET_CHARS} characters at least, or two with a comma"
            )
        if not secrets and info.data.get("jobs", "").startswith(REDIS):
            raise ValueError(
                "jobs in Redis require it, because others could write jobs there: the same for all gateways, "
                "such as the output of openssl rand -hex 32"
            )
        return value

    @field_validator("jobs")
    @classmethod
    def check_jobs(cls, value: str) -> str:
        is_folder = value.startswith(f"{SQLITE}/") and not set("%?#") & set(value)
        if value and not is_folder and not value.startswith(REDIS):
            raise ValueError(
                "expected sqlite:///FOLDER, without %, ? and #, or redis://HOST:6379/0"
            )
        return value


def split_secrets(value: SecretStr | None) -> tuple[str, ...]:
    secrets: tuple[str, ...] = split_list(value.get_secret_value()) if value is not None else ()
    return secrets
