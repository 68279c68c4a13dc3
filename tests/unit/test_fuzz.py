"""A short form of `make fuzz`: the same mutations each time."""

from __future__ import annotations

import pytest

from tests.support.fuzz_targets import targets
from tests.support.fuzzing import Target, fuzz

CALLS = 60


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_mutated_bytes_are_read_or_refused(target: Target) -> None:
    """Times are for `make fuzz`: beside other work they say nothing."""
    findings = fuzz(target, seed=0, calls=CALLS)
    wrong = [failure for failure in findings.failures if "of CPU for" not in failure]
    assert not wrong, "\n".join(wrong)
    assert findings.calls == CALLS
