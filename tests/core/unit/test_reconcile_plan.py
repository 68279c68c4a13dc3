"""Plans of the reconciler: corrections that something else undoes."""

from __future__ import annotations

from gateway.repository.reconcile_plan import CORRECTION_MEMORY_S, Backoff, with_correction


def test_corrections_that_are_undone_are_made_less_and_less_often() -> None:
    corrections: Backoff | None = None
    now, pauses = 1000.0, []
    for _ in range(12):
        corrections = with_correction(corrections, now)
        pauses.append(corrections.not_before - now)
        now = corrections.not_before + 1
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def test_correction_that_lasted_is_forgotten() -> None:
    corrections = with_correction(with_correction(None, 1000), 1001)
    assert corrections.repetitions == 1
    later = corrections.not_before + CORRECTION_MEMORY_S + 1
    assert with_correction(corrections, later) == Backoff(0, later)
