"""CPU time of the fleet's own work, with a small and a large number of simulated replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import uvloop

from benchmarks.run import Run
from benchmarks.simulated_fleet import name_models, simulated_fleet
from gateway.config.settings import Settings
from gateway.fleet.balancer import choose_less_loaded
from gateway.fleet.index import parse_index
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import ReplicaAddress
from gateway.repository.plan import ReplicaView, plan_actions
from gateway.repository.state.content import ALL, DesiredModel

SMALL, LARGE, MODELS = 10, 100, 200
NAMES = name_models(MODELS)
REPEAT, PROBES = 7, 5
NEVER_S = 3600.0


def cpu_us(work: Callable[[], object]) -> float:
    # The minimum is the least affected by other load on the machine.
    spent_s = []
    for _ in range(REPEAT):
        started = time.process_time()
        work()
        spent_s.append(time.process_time() - started)
    return min(spent_s) * 1e6


async def measure_parts(addresses: Sequence[ReplicaAddress]) -> Mapping[str, float]:
    """Return the microseconds of each choice, probe and plan."""
    settings = Settings(connect_timeout_s=10.0, poll_interval_s=NEVER_S)
    async with ReplicaPool(addresses, settings) as pool:
        await pool.monitor.probe_all()
        chosen = cpu_us(
            lambda: [
                choose_less_loaded(pool.find_candidates(name).serving)
                for _ in range(10)
                for name in NAMES
            ]
        )
        updated = cpu_us(lambda: [pool._group_replicas(name, "") for name in NAMES])
        probes_s = []
        for _ in range(PROBES):
            started = time.process_time()
            await pool.monitor.probe_all()
            probes_s.append(time.process_time() - started)
    desired_models = {name: DesiredModel(ALL) for name in NAMES}
    index_entries = [{"name": name, "version": "1", "state": "READY"} for name in NAMES]
    replicas = [ReplicaView(str(each), parse_index(index_entries)) for each in addresses]
    planned = cpu_us(lambda: plan_actions(desired_models, replicas, {}))
    return {
        "choosing a replica": chosen / (10 * MODELS),
        "choosing a replica, first time after a change": updated / MODELS,
        "probing a replica with an unchanged index": min(probes_s) * 1e6 / len(addresses),
        f"planning for a replica with {MODELS} models": planned / len(addresses),
    }


def table(stack: ExitStack, run: Run) -> Iterator[str]:
    measured = []
    for count in (SMALL, LARGE):
        with simulated_fleet(count, NAMES) as ports:
            addresses = [ReplicaAddress("127.0.0.1", port) for port in ports]
            measured.append(uvloop.run(measure_parts(addresses)))
    yield "\n**The fleet's own work, by the number of replicas**\n"
    yield f"| | µs with {SMALL} replicas | µs with {LARGE} | ratio |"
    yield "|---|---|---|---|"
    small, large = measured
    for name, few_us, many_us in zip(small, small.values(), large.values(), strict=True):
        yield f"| {name} | {few_us:.1f} | {many_us:.1f} | {many_us / few_us:.1f} |"
