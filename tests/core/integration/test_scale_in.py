"""Tritons that end on purpose, as pods do: their address leaves the DNS, and later they get SIGTERM."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import httpx
import pytest

from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.health import HealthState
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.transports import HttpCall
from gateway.triton.request_target import RequestTarget
from tests.support.dns import DnsAnswers
from tests.support.fleet import write_echo
from tests.support.servers import Triton, free_ports
from tests.support.wait import TIMEOUT_S, wait_until_async

HOSTS = ["127.0.0.1", "127.0.0.2"]
MODEL = "echo"
RATE_PER_S = 100
# Seconds in the model: some requests are inside at any moment.
DURATIONS_S = (0.0, 0.0, 0.0, 0.02)
SETTINGS = Settings(dns_interval_s=0.1, poll_interval_s=0.1, connect_timeout_s=10)


class OpenLoad:
    """Sends requests at a steady rate, whatever became of the earlier ones."""

    def __init__(self, pool: ReplicaPool) -> None:
        self.outcomes: Counter[str] = Counter()
        self._dispatcher = Dispatcher(pool)
        self._requests: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        for duration_s in itertools.cycle(DURATIONS_S):
            request = asyncio.create_task(self._send(duration_s))
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)
            await asyncio.sleep(1 / RATE_PER_S)

    async def finish(self) -> None:
        await asyncio.gather(*self._requests)

    async def _send(self, duration_s: float) -> None:
        body = (
            b'{"inputs":[{"name":"X","datatype":"FP32","shape":[2],"data":[%f,0]}]}' % -duration_s
        )
        length = str(len(body)).encode()
        target = RequestTarget(MODEL, "", TIMEOUT_S)
        path = f"/v2/models/{MODEL}/infer".encode()
        call = HttpCall(target, b"POST", path, [(b"content-length", length)], body)
        try:
            response = await self._dispatcher.send(call, TIMEOUT_S)
            await response.read_complete()
            self.outcomes["answered"] += 1
        except GatewayError as exc:
            self.outcomes[repr(exc)] += 1


async def wait_for_requests(outcomes: Counter[str], count: int = RATE_PER_S // 4) -> None:
    enough = outcomes.total() + count
    await wait_until_async(lambda: outcomes.total() >= enough)


async def count_executions(triton: Triton) -> int:
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"http://{triton.address}/v2/models/{MODEL}/stats")
    (statistics,) = answer.json()["model_stats"]
    return int(statistics["inference_count"])


def is_up(pool: ReplicaPool, host: str) -> bool:
    return any(
        replica.address.host == host
        and pool.replica_state(replica) is HealthState.UP
        and replica.index.is_ready(MODEL)
        for replica in pool.replicas.values()
    )


async def scale_in(
    triton: Triton, names: DnsAnswers, pool: ReplicaPool, outcomes: Counter[str]
) -> None:
    """End a Triton as the kubelet does, while its DNS knows it no longer, or among all pods only."""
    host = triton.options.host
    others = [each for each in HOSTS if each != host]
    (replica,) = (each for each in pool.replicas.values() if each.address.host == host)
    if names.preferred is None:
        names.hosts = others
    else:
        names.preferred = others

    def is_left_out() -> bool:
        known = {address.host for address in pool.replicas.keys() - pool.avoided}
        return host not in known

    await wait_until_async(is_left_out)
    # It serves: what is inside ends, and nothing new comes. Triton counts an execution after its response.
    await wait_until_async(lambda: not replica.outstanding)
    await wait_for_requests(outcomes)
    executions = await count_executions(triton)
    assert executions > 0
    await wait_for_requests(outcomes)
    assert await count_executions(triton) == executions
    triton.signal(signal.SIGTERM)
    await asyncio.to_thread(triton.ended)
    names.hosts = others


async def scale_out(triton: Triton, names: DnsAnswers, pool: ReplicaPool) -> None:
    await asyncio.to_thread(triton.end)
    triton.start()
    await asyncio.to_thread(triton.wait)
    names.hosts = HOSTS
    await wait_until_async(lambda: is_up(pool, triton.options.host))
    if names.preferred is not None:
        names.preferred = HOSTS
        await wait_until_async(lambda: not pool.avoided)


@pytest.mark.fault("a Triton leaves the DNS, or its preferred name, and is ended later")
@pytest.mark.parametrize("has_preferred_name", [False, True], ids=["one-name", "preferred-name"])
@pytest.mark.parametrize(
    ("times", "requests"), [(1, 0), pytest.param(20, 5000, marks=pytest.mark.long)]
)
@pytest.mark.timeout(600)
async def test_planned_scale_in_loses_no_request(
    tmp_path: Path, times: int, requests: int, has_preferred_name: bool
) -> None:
    """The address leaves while the pod serves; the process gets SIGTERM after its preStop hook."""
    write_echo(tmp_path, MODEL, instances=2)
    ports = free_ports(3)
    names = DnsAnswers(HOSTS, HOSTS if has_preferred_name else None)
    with ExitStack() as processes:
        tritons = [Triton(tmp_path, MODEL, host=host, ports=ports) for host in HOSTS]
        for triton in tritons:
            processes.enter_context(triton)
        for triton in tritons:
            await asyncio.to_thread(triton.wait)
        async with (
            ReplicaPool([names.find_source(*ports)], SETTINGS) as pool,
            AsyncExitStack() as stack,
        ):
            await wait_until_async(lambda: all(is_up(pool, host) for host in HOSTS))
            load = OpenLoad(pool)
            running = asyncio.create_task(load.run())
            stack.callback(running.cancel)
            for _, triton in zip(range(times), itertools.cycle(tritons), strict=False):
                await scale_in(triton, names, pool, load.outcomes)
                await scale_out(triton, names, pool)
                await wait_for_requests(load.outcomes)
            await wait_for_requests(load.outcomes, requests - load.outcomes.total())
            running.cancel()
            await load.finish()
    assert load.outcomes.keys() == {"answered"}, load.outcomes
