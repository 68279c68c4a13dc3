"""The secrets that sign jobs."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from gateway.capabilities.jobs.settings import JobSettings
from gateway.capabilities.jobs.trust import JobTrust, open_job_trust
from gateway.messages import CommandError
from tests.capabilities.jobs.unit.test_job import QUEUED

OLD, NEW = "an old secret of 32 characters…", "a new secret of 32 characters …."
REDIS = "redis://127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("signing", "verifying", "is_signed"),
    [
        ([OLD], [OLD], True),
        ([OLD], [NEW, OLD], True),
        ([NEW, OLD], [NEW], True),
        ([NEW, OLD], [OLD], False),
        ([OLD], [NEW], False),
    ],
)
def test_first_secret_signs_and_each_verifies(
    signing: list[str], verifying: list[str], is_signed: bool
) -> None:
    job = JobTrust(signing).sign(QUEUED)
    assert JobTrust(verifying).is_signed(job.start(5.0)) is is_signed
    assert not JobTrust(verifying).is_signed(QUEUED)


@pytest.mark.parametrize(
    ("jobs", "secret", "reason"),
    [
        (REDIS, None, "jobs in Redis require it"),
        (REDIS, "", "jobs in Redis require it"),
        (REDIS, "short", "32 characters"),
        (REDIS, ",".join([OLD * 2] * 3), "or two with a comma"),
        ("sqlite:///jobs", "short", "32 characters"),
    ],
)
def test_secret_that_protects_nothing_is_refused(
    jobs: str, secret: str | None, reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        JobSettings(jobs=jobs, jobs_secret=None if secret is None else SecretStr(secret))


def test_secret_of_a_database_is_beside_it_and_stays_the_same(tmp_path: Path) -> None:
    settings = JobSettings(jobs=f"sqlite://{tmp_path}")
    signed = open_job_trust(settings).sign(QUEUED)
    file = tmp_path / "secret"
    assert [*tmp_path.iterdir()] == [file]
    assert file.stat().st_mode & 0o777 == 0o600
    assert open_job_trust(settings).is_signed(signed)
    file.write_text("")
    with pytest.raises(CommandError, match="is damaged"):
        open_job_trust(settings)
