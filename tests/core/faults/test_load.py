"""Load, connections and restarts for a long time: what `make soak` measures."""

from __future__ import annotations

import asyncio
import io
import itertools
import math
import os
import random
import resource
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
import tritonclient.http as triton_http
import uvloop
from PIL import Image

from tests.support.fake_triton import port_of
from tests.support.fleet import write_echo
from tests.support.load import (
    ECHO_V1,
    ECHO_V2,
    LOG_WARNINGS,
    Connection,
    OpenLoop,
    Pool,
    Sample,
    closed_loop,
    get,
    infer_v1,
    infer_v2,
    median_ms,
    p99_ms,
    post,
    statuses_of,
)
from tests.support.measurements import assert_number, memory_bytes
from tests.support.model_zoo.zoo import Names, image, write_repository
from tests.support.servers import Command, Triton, free_ports, gateway, gateway_before
from tests.support.wait import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

pytestmark = pytest.mark.soak

RESTARTS = int(os.environ.get("TRITON_GATEWAY_RESTARTS", "4"))
DRAIN_S = 2.0  # the Service below looks forty times meanwhile
BUSY_S = 0.05
BUSY_INSTANCES = 4
MIB = 1 << 20


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    folder = tmp_path_factory.mktemp("models")
    write_echo(folder, "busy", instances=BUSY_INSTANCES)
    write_echo(folder, "echo", instances=2)
    write_repository(folder, Names(), [image("picture", (3, 32, 32), layout="FORMAT_NCHW")])
    with Triton(folder, "*") as running:
        running.wait()
        yield running


BUSY = infer_v1("busy", -BUSY_S, 0), infer_v2("busy", -BUSY_S, 0)


# Overload.


@dataclass(frozen=True)
class Capacity:
    """The capacity of a gateway before a model whose every inference takes 50 ms."""

    port: int
    per_s: float
    alone_ms: float


def good_per_s(samples: Sequence[Sample], start: float, seconds: float) -> float:
    """Return the number of responses per second with status 200 in this time."""
    ends = [each.at + each.took_s for each in samples if each.status == 200]
    return sum(start <= end < start + seconds for end in ends) / seconds


@pytest.fixture(scope="module")
def capacity(triton: Triton) -> Iterator[Capacity]:
    limits = {"max_inflight": "64", "max_model_inflight": "8", "max_queue": "8"}
    with gateway_before(triton.options.url, **limits, **LOG_WARNINGS) as client:
        port = port_of(client)
        alone = closed_loop(port, BUSY, 1, 20)
        crowd = closed_loop(port, BUSY, 8, 320)
        assert set(statuses_of([*alone, *crowd])) == {200}
        began, ended = (choose(each.at for each in crowd) for choose in (min, max))
        per_s = good_per_s(crowd, began + 0.5, ended - began - 0.5)
        yield Capacity(port, per_s, median_ms(alone))


def recovery_s(capacity: Capacity) -> float:
    """Seconds until a request takes about as long as before; infinite when that is not soon."""
    start = time.monotonic()
    while time.monotonic() - start < 20:
        (sample,) = closed_loop(capacity.port, BUSY[:1], 1, 1)
        if sample.status == 200 and sample.took_s * 1000 < 1.5 * capacity.alone_ms + 20:
            return time.monotonic() - start
    return math.inf


@pytest.mark.fault("two and ten times as many requests as can be served")
@pytest.mark.parametrize(("times", "least"), [(2, 90), (10, 80)])
def test_overload_does_not_reduce_the_goodput(capacity: Capacity, times: int, least: int) -> None:
    with OpenLoop(Pool(capacity.port), BUSY, times * capacity.per_s, 5) as loop:
        samples = loop.samples()
    recovered_s = recovery_s(capacity)
    began = min(each.at for each in samples)
    refused = [each for each in samples if each.status == 429]
    assert set(statuses_of(samples)) == {200, 429}
    assert all(each.retry_after.isdigit() for each in refused)
    wait_until(lambda: set(statuses_of(closed_loop(capacity.port, BUSY, 1, 2))) == {200})
    part = good_per_s(samples, began + 1, 4) / capacity.per_s
    assert_number("goodput", part * 100, "% of the capacity", at_least=least)
    assert_number("p99 of the refusals", p99_ms(refused), "ms", at_most=10)
    assert_number("as before after", recovered_s, "s", at_most=5)


# A rolling restart.


class Instance:
    """A gateway on a port of its own, ended and started again."""

    def __init__(self, triton: Triton) -> None:
        (self.port,) = free_ports(1)
        self._environment = {
            "GATEWAY_TRITON_URLS": triton.options.url,
            "GATEWAY_CONNECT_TIMEOUT_S": "10",
            "GATEWAY_DRAIN_S": f"{DRAIN_S:g}",
            "GATEWAY_LOG_LEVEL": "warning",
        }
        self._command: Command | None = None

    def __enter__(self) -> Self:
        command = Command("serve", "--port", str(self.port), environment=self._environment)
        self._command = command
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._command is not None
        self._command.__exit__(kind)

    def restart(self) -> None:
        """Restart it like a pod: send SIGTERM, wait for the exit, and start another one."""
        assert self._command is not None
        with self._command as command:
            os.kill(command.pid, signal.SIGTERM)
            assert command.end() == 0, command.output
        self.__enter__()


class Service:
    """Sends each request once, to the next gateway that is ready, as a Service of Kubernetes does.

    Each gateway is probed again and again. A connection is replaced only when the server has announced that
    it closes it, or has closed it before the request.
    """

    LOOK_EVERY_S = 0.05

    def __init__(self, ports: Sequence[int]) -> None:
        self.ready: frozenset[int] = frozenset()
        self.seen: Counter[str] = Counter()
        self.unready_count = 0  # how often no gateway was ready
        self._pools = {port: Pool(port) for port in ports}
        self._turn = itertools.cycle(ports)
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def run(self, rate: float, wires: Sequence[bytes]) -> Counter[str]:
        uvloop.run(self._run(rate, wires))
        return self.seen

    async def _run(self, rate: float, wires: Sequence[bytes]) -> None:
        with ExitStack() as stack:
            for pool in self._pools.values():
                stack.enter_context(pool)
            await self._serve(rate, wires)

    async def _serve(self, rate: float, wires: Sequence[bytes]) -> None:
        looking = [asyncio.create_task(self._look(port)) for port in self._pools]
        tasks: list[asyncio.Task[None]] = []
        turn, due = itertools.cycle(wires), time.monotonic()
        while not self._ended.is_set():
            await asyncio.sleep(due - time.monotonic())
            due += 1 / rate
            if self.ready:
                port = next(port for port in self._turn if port in self.ready)
                tasks.append(asyncio.create_task(self._send(port, next(turn))))
            elif tasks:
                self.unready_count += 1
        await asyncio.gather(*tasks)
        for task in looking:
            task.cancel()

    async def _send(self, port: int, wire: bytes) -> None:
        try:
            answer = await asyncio.wait_for(self._pools[port].ask(wire), TIMEOUT_S)
            self.seen[str(answer.status)] += 1
        except (OSError, EOFError, asyncio.TimeoutError) as exc:
            self.seen[f"{type(exc).__name__}: {exc}"] += 1

    async def _look(self, port: int) -> None:
        while True:
            is_ready = False
            with suppress(OSError, EOFError, asyncio.TimeoutError), Pool(port) as fresh:
                answer = await asyncio.wait_for(fresh.ask(get("/readyz")), TIMEOUT_S)
                is_ready = answer.status == 200
            self.ready = self.ready | {port} if is_ready else self.ready - {port}
            await asyncio.sleep(self.LOOK_EVERY_S)


@pytest.mark.fault("SIGTERM under load, rolling restarts")
@pytest.mark.timeout(60 + 30 * RESTARTS)
def test_rolling_restarts_of_two_gateways_lose_no_request(
    triton: Triton,
) -> None:
    """Takes 20 s: each of the restarts waits until the gateway has said for a while that it ends."""
    # A few take longer than there is time between the signal and the end.
    wires = [*[ECHO_V1, ECHO_V2] * 40, infer_v2("busy", -(DRAIN_S + 0.3), 0)]
    with (
        Instance(triton) as one,
        Instance(triton) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        service = Service((one.port, other.port))
        running = pool.submit(service.run, 100, wires)
        try:
            wait_until(lambda: len(service.ready) == 2)
            began = time.monotonic()
            for _, instance in zip(range(RESTARTS), itertools.cycle((one, other)), strict=False):
                instance.restart()
                wait_until(lambda: len(service.ready) == 2)
            took_s = time.monotonic() - began
        finally:
            service.end()
        seen = running.result()
    assert set(seen) == {"200"}, seen
    assert service.unready_count == 0
    assert_number("requests", seen["200"] / took_s, "per second", at_least=50)


# Idle connections.

IDLE = 5000


@contextmanager
def many_files(count: int) -> Iterator[None]:
    """Allow this process to open so many files; the gateway raises its own limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"{count} files must be open at a time, and {hard} may be: ulimit -Hn {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def open_connections(port: int, count: int) -> list[Connection]:
    """Open connections that each had a response before they became idle."""
    few = asyncio.Semaphore(100)

    async def one() -> Connection:
        async with few:
            connection = await Connection.to(port)
            assert (await connection.ask(get("/livez"))).status == 200
            return connection

    return await asyncio.gather(*(one() for _ in range(count)))


@pytest.mark.fault("5,000 idle connections")
def test_idle_connections_cost_little_memory_and_delay_no_request(
    triton: Triton,
) -> None:
    settings = {
        "max_connections": str(IDLE + 500),
        "max_connections_per_client": "0",
        "keep_alive_s": "600",
    }
    with (
        many_files(2 * IDLE + 2000),
        gateway(triton.options.url, **settings, **LOG_WARNINGS) as (client, command),
    ):
        port = port_of(client)
        process = psutil.Process(command.pid)
        closed_loop(port, [ECHO_V1], 4, 500)
        without = closed_loop(port, [ECHO_V1], 1, 1000)
        before = memory_bytes(command.pid)

        async def scenario() -> list[Connection]:
            connections = await open_connections(port, IDLE)
            during.extend(await asyncio.to_thread(closed_loop, port, [ECHO_V1], 1, 1000))
            grown.append(memory_bytes(command.pid) - before)
            assert process.num_fds() > IDLE
            assert all(connection.is_open for connection in connections)
            for connection in connections:
                connection.leave()
            return connections

        during, grown = list[Sample](), list[int]()
        uvloop.run(scenario())
        wait_until(lambda: process.num_fds() < 200)
    assert grown[0] <= 100 * MIB, f"{grown[0] / IDLE / 1024:.1f} KiB for each connection"
    assert set(statuses_of(during)) == {200}
    assert_number("median with", median_ms(during), "ms", at_most=2 * median_ms(without) + 2)
    assert_number("p99 with", p99_ms(during), "ms", at_most=2 * p99_ms(without) + 50)


# Wear.

WARM_UP, MIXED = 3000, 10_000
UNKNOWN_V2 = 1200  # more than the paths that /v2 remembers


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def picture(kind: str) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((96, 64), 50).convert("RGB").save(file, kind)
    return file.getvalue()


def binary() -> bytes:
    """Build the request as Triton's own client sends it."""
    tensor = triton_http.InferInput("X", [2], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2], np.float32))
    body, length = triton_http.InferenceServerClient.generate_request_body([tensor])
    field = f"Inference-Header-Content-Length: {length}"
    return post("/v2/models/echo/infer", body, "application/octet-stream", field)


Request = Callable[[Pool], Awaitable[str]]


def whole(wire: bytes) -> Request:
    async def request(pool: Pool) -> str:
        return str((await pool.ask(wire)).status)

    return request


def refused_early(wire: bytes) -> Request:
    """Send a request that is never complete."""

    async def request(pool: Pool) -> str:
        connection = await Connection.to(pool.port)
        answer = await connection.ask(wire)
        connection.leave()
        return str(answer.status)

    return request


def abandoned(wire: bytes, after_s: float) -> Request:
    """Disconnect before there is a response."""

    async def request(pool: Pool) -> str:
        connection = await Connection.to(pool.port)
        connection.say(wire)
        await asyncio.sleep(after_s)
        connection.leave()
        return "left"

    return request


def unknown(pool: Pool) -> Awaitable[str]:
    name = f"nobody-{random.randrange(10**9)}"
    wire = random.choice((infer_v1(name, 1), infer_v2(name, 1)))
    return whole(wire)(pool)


def mixture() -> list[Request]:
    array = npy(np.array([1, 2], np.float32))
    infer = "/v1/models/echo/infer"
    too_large = f"POST {infer} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
    pictures = [
        post("/v1/models/picture/infer", picture(kind), f"image/{kind}") for kind in ("png", "jpeg")
    ]
    return [
        *[whole(infer_v1("echo", 1, 2))] * 3,
        *[whole(infer_v2("echo", 1, 2))] * 2,
        *[whole(binary())] * 3,
        *[whole(post(infer, array, "application/x-npy"))] * 2,
        *map(whole, pictures),
        whole(infer_v1("echo", 1, 2, 3)),
        whole(infer_v2("echo", 1, 2, 3)),
        whole(post(infer, b'{"inputs": [1,')),
        whole(post("/v1/models/picture/infer", b"<html>", "image/png")),
        refused_early(too_large),
        unknown,
        abandoned(infer_v1("busy", -0.02, 0), 0.01),
        abandoned(infer_v2("busy", -0.02, 0), 0.01),
        abandoned(infer_v1("echo", 1, 2)[:-5], 0.01),
    ]


async def send_mixture(port: int, requests: Sequence[Request], count: int) -> Counter[str]:
    """Send so many of the requests by eight clients, in random order."""
    seen, drawn, left = Counter[str](), random.Random(count), iter(range(count))

    async def client(pool: Pool) -> None:
        for _ in left:
            seen[await drawn.choice(requests)(pool)] += 1

    with Pool(port) as pool:
        await asyncio.gather(*(client(pool) for _ in range(8)))
    return seen


class Watch:
    """Samples the memory of a process and its children continuously."""

    def __init__(self, pid: int) -> None:
        self.samples: list[int] = []
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            self.samples.append(memory_bytes(self._pid))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def ends(self) -> tuple[float, float]:
        """Return the medians of the first tenth and of the last."""
        tenth = len(self.samples) // 10
        return statistics.median(self.samples[:tenth]), statistics.median(self.samples[-tenth:])


@pytest.mark.fault("requests of all kinds for a long time")
def test_ten_thousand_mixed_requests_leak_no_memory_descriptors_or_threads(triton: Triton) -> None:
    """Takes 15 s: what a few thousand requests leave behind is less than what memory varies by."""
    with gateway(triton.options.url, **LOG_WARNINGS) as (client, command):
        port = port_of(client)
        process = psutil.Process(command.pid)
        requests = mixture()
        names = [whole(infer_v2(f"nobody-{number}", 1)) for number in range(UNKNOWN_V2)]
        uvloop.run(send_mixture(port, names, 2 * UNKNOWN_V2))
        uvloop.run(send_mixture(port, requests, WARM_UP))
        descriptors, threads = process.num_fds(), process.num_threads()
        with Watch(command.pid) as watch:
            seen = uvloop.run(send_mixture(port, requests, MIXED))
        first, last = watch.ends
        slope = (last - first) / 0.9 / (MIXED / 10_000)
        assert set(seen) == {"200", "400", "404", "413", "422", "left"}, seen
        assert slope < 16 * MIB, f"memory {first / MIB:.2f} → {last / MIB:.2f} MiB"
        assert_number("growth", slope / MIB, "MiB per 10,000", at_most=1)
        assert process.num_threads() <= threads
        wait_until(lambda: process.num_fds() <= descriptors)
