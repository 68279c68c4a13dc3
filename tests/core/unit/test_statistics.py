"""Triton's statistics, added up over the replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from gateway.config.settings import Settings
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.statistics import FleetStatistics, sum_statistics
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


def sum_of(*said: dict[str, Any]) -> dict[str, Any]:
    answers = [orjson.dumps({"model_stats": [each]}) for each in said]
    (total,) = orjson.loads(sum_statistics(answers))["model_stats"]
    return dict(total)


def test_counts_are_summed_and_the_latest_inference_is_kept() -> None:
    total = sum_of(statistics(3, 200, (1, 4)), statistics(5, 100, (4, 8)))
    assert (total["name"], total["version"]) == ("m", "2")
    assert (total["last_inference"], total["inference_count"]) == (200, 8)
    assert total["inference_stats"]["success"] == {"count": 8, "ns": 80}
    assert total["response_stats"] == {"0": {"success": {"count": 8, "ns": 80}}}
    batches = {each["batch_size"]: each["compute_infer"]["count"] for each in total["batch_stats"]}
    assert batches == {1: 3, 4: 8, 8: 5}


def test_memory_of_each_device_is_summed() -> None:
    def with_memory(size: int, device: int) -> dict[str, Any]:
        memory = {"type": "GPU", "id": device, "byte_size": size}
        return statistics(1, 100, (), memory_usage=[memory])

    total = sum_of(with_memory(100, 0), with_memory(20, 0), with_memory(3, 1))
    assert [each["byte_size"] for each in total["memory_usage"]] == [120, 3]


def test_versions_are_summed_apart() -> None:
    answers = [
        orjson.dumps(
            {"model_stats": [statistics(count, 1, ()), {**statistics(1, 1, ()), "version": "3"}]}
        )
        for count in (2, 5)
    ]
    found = orjson.loads(sum_statistics(answers))["model_stats"]
    assert {each["version"]: each["inference_count"] for each in found} == {"2": 7, "3": 2}


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
