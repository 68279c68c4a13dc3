"""The limit of a model that the gateway chooses: it follows Triton's own queue."""

from __future__ import annotations

import orjson
import pytest

from gateway.fleet.model_limits import SINGLE_RATIO, QueueTimes, choose_limit, parse_queue_times


@pytest.mark.parametrize(
    ("ratio", "count", "is_reached", "expected"),
    [
        (0.5, 100, True, 44),
        (0.5, 100, False, 40),
        (1.6, 100, True, 40),
        (3.0, 100, True, 34),
        (3.0, 4, True, 40),
    ],
    ids=["short queue", "limit not reached", "near the aim", "long queue", "few samples"],
)
def test_limit_follows_the_queue_of_triton(
    ratio: float, count: int, is_reached: bool, expected: int
) -> None:
    times = QueueTimes(count, round(ratio * 1e6), 1_000_000)
    assert choose_limit(40, 2, times, is_reached=is_reached) == expected


def test_queue_without_batches_is_half_of_what_is_computed() -> None:
    limits = [3]
    for _ in range(20):
        # Two instances, and a load beyond the limit.
        times = QueueTimes(100, round((limits[-1] / 2 - 1) * 1e6), 1_000_000)
        limits.append(
            choose_limit(limits[-1], 2, times, is_reached=True, wanted_ratio=SINGLE_RATIO)
        )
    assert set(limits) == {3}


def test_limit_stays_above_the_minimum() -> None:
    assert choose_limit(9, 8, QueueTimes(100, 9_000_000, 1_000_000), is_reached=True) == 8


def test_times_are_summed_over_versions() -> None:
    def version(waited_ns: int, computed_ns: int) -> dict[str, object]:
        phases = {"queue": {"count": 2, "ns": waited_ns}}
        phases["compute_infer"] = {"count": 2, "ns": computed_ns}
        return {"inference_stats": {**phases, "success": {"count": 2, "ns": 9}}}

    document = orjson.dumps({"model_stats": [version(1, 10), version(2, 20)]})
    assert parse_queue_times(document) == QueueTimes(4, 3, 30)
