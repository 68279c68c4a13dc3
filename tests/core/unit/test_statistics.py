"""Triton's statistics of one version, added up over its replicas."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

from gateway.config.settings import Settings
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.statistics import MAX_REPLICAS, FleetStatistics, VersionCounts
from gateway.tasks import cancel_tasks
from gateway.triton.request_target import RequestTarget
from tests.support.simulated_replicas import simulated_replicas
from tests.support.wait import wait_until_async


def statistics(count: int, last: int, batch_sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Return what a replica says that has run `count` inferences, all of them with each batch size."""
    duration = {"count": count, "ns": 10 * count}
    return {
        "name": "m",
        "version": "2",
        "last_inference": last,
        "inference_count": count,
        "execution_count": count,
        "inference_stats": {"success": duration, "fail": {"count": 0, "ns": 0}},
        "batch_stats": [{"batch_size": size, "compute_infer": duration} for size in batch_sizes],
        "response_stats": {"0": {"success": duration}},
        **more,
    }


def record(counts: VersionCounts, replica: str, said: dict[str, Any]) -> None:
    counts.record(replica, said, perf_counter())


def test_counts_are_summed_and_the_latest_inference_is_kept() -> None:
    counts = VersionCounts()
    record(counts, "a", statistics(3, 200, (1, 4)))
    record(counts, "b", statistics(5, 100, (4, 8)))
    total = counts.sum(("a", "b"))
    assert (total["name"], total["version"]) == ("m", "2")
    assert (total["last_inference"], total["inference_count"]) == (200, 8)
    assert total["inference_stats"]["success"] == {"count": 8, "ns": 80}
    assert total["response_stats"] == {"0": {"success": {"count": 8, "ns": 80}}}
    batches = {each["batch_size"]: each["compute_infer"]["count"] for each in total["batch_stats"]}
    assert batches == {1: 3, 4: 8, 8: 5}


def test_counts_of_a_replica_that_counts_from_0_again_are_kept() -> None:
    counts = VersionCounts()
    record(counts, "a", statistics(3, 100, (1,)))
    record(counts, "b", statistics(5, 100, (1,)))
    record(counts, "a", statistics(2, 300, (1,)))
    assert counts.sum(("a", "b"))["inference_count"] == 10
    # After more inferences than before, only their time tells that the replica was restarted.
    quick = {"success": {"count": 3, "ns": 6}, "fail": {"count": 0, "ns": 0}}
    record(counts, "a", statistics(3, 400, (1,), inference_stats=quick))
    assert counts.sum(("a", "b"))["inference_count"] == 13


def test_replica_that_leaves_and_returns_is_counted_once() -> None:
    counts = VersionCounts()
    record(counts, "a", statistics(3, 100, (1,)))
    record(counts, "b", statistics(5, 100, (1,)))
    assert counts.sum(("a",))["inference_count"] == 8
    record(counts, "b", statistics(6, 100, (1,)))
    assert counts.sum(("a", "b"))["inference_count"] == 9


def test_counts_of_the_first_of_too_many_replicas_are_kept() -> None:
    counts = VersionCounts()
    for number in range(MAX_REPLICAS + 10):
        record(counts, str(number), statistics(1, 100, (1,)))
    assert counts.sum(())["inference_count"] == MAX_REPLICAS + 10


def test_older_response_is_no_restart() -> None:
    counts, sent_at = VersionCounts(), perf_counter()
    record(counts, "a", statistics(5, 200, (1,)))
    counts.record("a", statistics(3, 100, (1,)), sent_at)
    assert counts.sum(("a",))["inference_count"] == 5


def test_memory_is_that_of_the_replicas_that_answer() -> None:
    def with_memory(size: int) -> dict[str, Any]:
        return statistics(1, 100, (), memory_usage=[{"type": "GPU", "id": 0, "byte_size": size}])

    counts = VersionCounts()
    record(counts, "a", with_memory(100))
    record(counts, "b", with_memory(20))
    assert counts.sum(("a", "b"))["memory_usage"] == [{"type": "GPU", "id": 0, "byte_size": 120}]
    assert counts.sum(("b",))["memory_usage"] == [{"type": "GPU", "id": 0, "byte_size": 20}]


async def test_replica_that_hangs_delays_no_statistics_of_other_models() -> None:
    models = [f"m{number}" for number in range(8)]
    async with simulated_replicas(2, models) as (well, hung):
        addresses = [well.address, hung.address]
        async with ReplicaPool(addresses, Settings()) as pool:
            hung.hangs = True
            read = FleetStatistics(pool).read
            tasks = [
                asyncio.create_task(read(RequestTarget(each, timeout_s=60))) for each in models
            ]
            await wait_until_async(lambda: hung.requests["stats"] == len(models))
            assert well.requests["stats"] == len(models)
            assert not any(task.done() for task in tasks)
            await cancel_tasks(tasks)
