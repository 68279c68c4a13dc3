"""Mutated bytes for every parser of what a client or a replica sends."""

from __future__ import annotations

import time

import pytest

from tests.attacks.fuzz_targets import targets
from tests.attacks.fuzzing import Target, fuzz

TARGETS = targets()
every_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


@pytest.mark.long
@every_target
def test_mutated_bytes_are_read_or_refused(target: Target) -> None:
    """The same mutations each time; times are not compared, because other processes run as well."""
    findings = fuzz(target, seed=0, calls=60)
    wrong = [failure for failure in findings.failures if "of CPU for" not in failure]
    assert not wrong, "\n".join(wrong)
    assert findings.calls == 60


@pytest.mark.soak
@every_target
def test_mutated_bytes_for_ten_minutes_cost_little_time(target: Target) -> None:
    seed = time.time_ns()
    findings = fuzz(target, seed, until=time.monotonic() + 600 / len(TARGETS))
    assert not findings.failures, f"seed {seed}:\n" + "\n".join(findings.failures)
