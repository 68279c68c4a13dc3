"""The advice in the errors of jobs, and the same for Python and for the commands."""

from __future__ import annotations

import pytest

from gateway.client.errors import translate_hints as translate_for_python
from gateway.commands.errors import translate_hints


@pytest.mark.parametrize(
    ("advice", "for_python", "for_commands"),
    [
        (
            "GET /v1/jobs lists yours",
            "request('GET', '/v1/jobs') lists yours",
            "triton-gateway jobs list lists yours",
        ),
        (
            "wait for it with GET /v1/jobs/a1?wait=20",
            "wait_job('a1') waits for it",
            "wait_job('a1') waits for it",
        ),
    ],
)
def test_advice_of_jobs_is_translated(advice: str, for_python: str, for_commands: str) -> None:
    assert translate_for_python(f"no; {advice}") == f"no; {for_python}"
    assert translate_hints(for_python) == for_commands
