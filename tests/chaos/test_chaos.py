"""A few steps of `make chaos`: a real fleet that is disturbed and changed at random keeps its promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import run

pytestmark = pytest.mark.long

SEED = 3044
STEPS = 12  # almost every kind of fault and change
PATIENCE = 4.0  # other tests run meanwhile


@pytest.mark.fault("a gateway, Redis or a Triton is killed or paused while models are loaded and")
@pytest.mark.timeout(900)
def test_fleet_is_as_acknowledged_after_random_faults(tmp_path: Path) -> None:
    """Takes long: each step waits until the fleet has settled."""
    run(tmp_path, SEED, STEPS, patience=PATIENCE)
