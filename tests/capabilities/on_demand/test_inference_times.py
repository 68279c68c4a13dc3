"""The last inference of a model, by the statistics of its replica."""

from __future__ import annotations

import math
import time

from gateway.capabilities.on_demand.loader import InferenceTimes
from gateway.config.settings import Settings
from gateway.fleet.pool import ReplicaPool
from tests.support.simulated_replicas import simulated_replicas


async def test_statistics_that_cannot_be_read_keep_the_last_known_time() -> None:
    async with simulated_replicas(1) as (fake,), ReplicaPool([fake.address], Settings()) as pool:
        times, (replica,) = InferenceTimes(), pool.replicas.values()
        fake.last_inference_ms = int(time.time() * 1000) - 60_000
        ran_at = await times.read(replica, "m")
        assert -61 < ran_at - time.perf_counter() < -59
        fake.denies = True
        assert await times.read(replica, "m") == -math.inf
        fake.denies = False
        assert await times.read(replica, "m") == ran_at
