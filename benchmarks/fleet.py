"""What the fleet's own work costs in a large fleet and in a small one, before simulated replicas."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection

import uvloop

from gateway.fleet.index import parse_index
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.reconcile_plan import plan_actions
from gateway.fleet.replica import ReplicaAddress, ReplicaConnectionOptions, ReplicaSource
from gateway.state.desired import DesiredModel
from tests.support.simulated_replicas import SimulatedTriton

SMALL, LARGE, MODELS = 10, 100, 200
NAMES = tuple(f"model_{number}" for number in range(MODELS))
REPEAT, LOOKS = 7, 5
NEVER_S = 3600.0


def serve(count: int, pipe: Connection) -> None:
    """Replicas in a process of their own, until the other end of the pipe is closed."""

    async def serving() -> None:
        async with AsyncExitStack() as stack:
            tritons = [
                await stack.enter_async_context(SimulatedTriton(dict.fromkeys(NAMES, True)))
                for _ in range(count)
            ]
            pipe.send([triton.port for triton in tritons])
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(pipe.fileno(), ended.set)
            await ended.wait()
            asyncio.get_running_loop().remove_reader(pipe.fileno())

    uvloop.run(serving())


@contextmanager
def replicas(count: int) -> Iterator[list[ReplicaAddress]]:
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=serve, args=(count, theirs), daemon=True)
    process.start()
    theirs.close()
    with ours:
        yield [ReplicaAddress("127.0.0.1", port) for port in ours.recv()]
    process.join()


def cpu_us(work: Callable[[], object]) -> float:
    """Of this process, at best."""
    spent = []
    for _ in range(REPEAT):
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return min(spent) * 1e6


async def parts(addresses: Sequence[ReplicaAddress]) -> Mapping[str, float]:
    """Microseconds of one choice, of one look and of one plan."""
    sources = [ReplicaSource(address) for address in addresses]
    async with ReplicaPool(
        sources, ReplicaConnectionOptions(10.0), probe_interval_s=NEVER_S
    ) as pool:
        await pool.probe_all()
        chosen = cpu_us(lambda: [pool.choose_replica(name) for _ in range(10) for name in NAMES])
        anew = cpu_us(lambda: [pool._update_candidates(name, "") for name in NAMES])
        looks = []
        for _ in range(LOOKS):
            began = time.process_time()
            await pool.probe_all()
            looks.append(time.process_time() - began)
    wishes = {name: DesiredModel(True) for name in NAMES}
    said = [{"name": name, "version": "1", "state": "READY"} for name in NAMES]
    indexes = [parse_index(said) for _ in addresses]
    planned = cpu_us(lambda: [list(plan_actions(wishes, index, {})) for index in indexes])
    return {
        "choosing a replica": chosen / (10 * MODELS),
        "choosing one for the first time since a change": anew / MODELS,
        "looking at a replica whose index is as before": min(looks) * 1e6 / len(addresses),
        f"planning for a replica with {MODELS} models": planned / len(addresses),
    }


def table() -> Iterator[str]:
    """Microseconds of this process at best: the machine is shared."""
    found = []
    for count in (SMALL, LARGE):
        with replicas(count) as addresses:
            found.append(uvloop.run(parts(addresses)))
    yield "\n**The fleet's own work, by the number of replicas**\n"
    yield f"| | µs with {SMALL} replicas | µs with {LARGE} | ratio |"
    yield "|---|---|---|---|"
    small, large = found
    for name, few_us, many_us in zip(small, small.values(), large.values(), strict=True):
        yield f"| {name} | {few_us:.1f} | {many_us:.1f} | {many_us / few_us:.1f} |"
