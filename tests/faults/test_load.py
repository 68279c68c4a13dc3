"""More than it can serve: of requests, connections, restarts, and of everything that wears a process out."""

from __future__ import annotations

import asyncio
import io
import itertools
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
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.http as triton_http
import uvloop
from PIL import Image

from tests.support.fleet import write_echo
from tests.support.load import (
    ECHO,
    QUIET,
    Asked,
    Connection,
    Offering,
    Pool,
    by_v1,
    by_v2,
    get,
    in_turns,
    median_ms,
    p99_ms,
    post,
)
from tests.support.model_zoo.zoo import Names, image, write_repository
from tests.support.servers import Command, Triton, free_ports, gateway
from tests.support.wait import wait_until

RESTARTS = int(os.environ.get("TRITON_GATEWAY_RESTARTS", "4"))
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


# A client that keeps its connections.


BUSY = by_v1("busy", -BUSY_S, 0), by_v2("busy", -BUSY_S, 0)


def port_of(client: Any) -> int:
    return int(client.base_url.port)


# Overload.


@dataclass(frozen=True)
class Served:
    """What a gateway can do before a model whose every inference takes 50 ms."""

    port: int
    per_s: float
    alone_s: float


def good_per_s(seen: Sequence[Asked], began: float, seconds: float) -> float:
    good = [each for each in seen if each.status == 200]
    return sum(began <= each.at + each.took_s < began + seconds for each in good) / seconds


@pytest.fixture(scope="module")
def served(triton: Triton) -> Iterator[Served]:
    limits = {"max_inflight": "64", "max_model_inflight": "8", "max_queue": "8"}
    with gateway(triton.options.url, **limits, **QUIET) as (client, _):
        port = port_of(client)
        alone = in_turns(port, BUSY, 1, 1)
        began = time.monotonic()
        crowd = in_turns(port, BUSY, 8, 4)
        assert {each.status for each in alone + crowd} == {200}
        per_s = good_per_s(crowd, began + 0.5, 3.5)
        yield Served(port, per_s, statistics.median(each.took_s for each in alone))


@pytest.mark.long
@pytest.mark.parametrize(("times", "least"), [(2, 0.9), (10, 0.8)])
def test_more_than_its_capacity_costs_it_none_of_it(
    served: Served, times: int, least: float
) -> None:
    with Offering(Pool(served.port), BUSY, times * served.per_s, 5) as offering:
        seen = offering.all()
    began, ended = min(each.at for each in seen), max(each.at for each in seen)

    def is_as_before() -> bool:
        (single, *_) = in_turns(served.port, BUSY, 1, 0.001)
        return single.status == 200 and single.took_s < 1.5 * served.alone_s + 0.02

    recovered_s = wait_until(is_as_before)
    part = good_per_s(seen, began + 1, 4) / served.per_s
    refused = [each for each in seen if each.status == 429]
    late_ms = sorted(each.late_s for each in seen)[int(len(seen) * 0.99)] * 1000
    print(
        f"capacity {served.per_s:.1f}/s, alone {served.alone_s * 1000:.1f} ms; "
        f"{times}×: {len(seen) / (ended - began):.0f}/s offered (p99 {late_ms:.1f} ms late), "
        f"{Counter(each.status for each in seen)}; goodput {part:.1%}; "
        f"refusals median {median_ms(refused):.1f} and p99 {p99_ms(refused):.1f} ms; "
        f"recovered after {recovered_s:.2f} s"
    )
    assert {each.status for each in seen} == {200, 429}
    assert all(each.retry_after.isdigit() for each in refused)
    assert part >= least
    assert p99_ms(refused) < 10


# A rolling restart.


class Instance:
    """A gateway on a port of its own, ended and started again."""

    def __init__(self, triton: Triton) -> None:
        (self.port,) = free_ports(1)
        self._environment = {
            "GATEWAY_TRITON_URLS": triton.options.url,
            "GATEWAY_DRAIN_S": "0.4",
            "GATEWAY_LOG_LEVEL": "warning",
        }
        self._command: Command | None = None

    def __enter__(self) -> Instance:
        command = Command("serve", "--port", str(self.port), environment=self._environment)
        self._command = command
        return self

    def __exit__(self, *_: object) -> None:
        assert self._command is not None
        self._command.__exit__()

    def restart(self) -> None:
        """As it is done to a pod: it is asked to end, ends by itself, and another comes."""
        assert self._command is not None
        with self._command as command:
            os.kill(command.pid, signal.SIGTERM)
            assert command.end() == 0, command.output
        self.__enter__()


class Service:
    """Sends a request to the next gateway that is ready, as a Service of Kubernetes does; and no second time.

    Who is ready is asked of each, again and again. A connection is changed only when the server has said
    that it closes it, or has closed it before the request.
    """

    LOOK_EVERY_S = 0.05

    def __init__(self, ports: Sequence[int]) -> None:
        self.ready: frozenset[int] = frozenset()
        self.seen: Counter[str] = Counter()
        self.nobody = 0
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
                self.nobody += 1
        await asyncio.gather(*tasks)
        for task in looking:
            task.cancel()

    async def _send(self, port: int, wire: bytes) -> None:
        try:
            answer = await asyncio.wait_for(self._pools[port].ask(wire), 30)
            self.seen[str(answer.status)] += 1
        except (OSError, EOFError, asyncio.TimeoutError) as exc:
            self.seen[f"{type(exc).__name__}: {exc}"] += 1

    async def _look(self, port: int) -> None:
        while True:
            is_ready = False
            with suppress(OSError, EOFError, asyncio.TimeoutError), Pool(port) as fresh:
                answer = await asyncio.wait_for(fresh.ask(get("/readyz")), 5)
                is_ready = answer.status == 200
            self.ready = self.ready | {port} if is_ready else self.ready - {port}
            await asyncio.sleep(self.LOOK_EVERY_S)


@pytest.mark.long
@pytest.mark.timeout(60 + 15 * RESTARTS)
def test_no_request_is_lost_while_two_gateways_are_restarted_again_and_again(
    triton: Triton,
) -> None:
    # Some take longer than there is time between the signal and the end.
    wires = [*[by_v1("echo", 1, 2), by_v2("echo", 1, 2)] * 8, by_v2("busy", -0.6, 0)]
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
    print(
        f"{RESTARTS} restarts in {took_s:.0f} s under {seen.total() / took_s:.0f}/s: {seen}; "
        f"{service.nobody} times nobody was ready"
    )
    assert set(seen) == {"200"}
    assert service.nobody == 0
    assert seen["200"] > 50 * took_s


# Idle connections.

IDLE = 5000


@contextmanager
def many_files(count: int) -> Iterator[None]:
    """So many may be open here; the gateway allows them to itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"{count} files must be open at a time, and {hard} may be: ulimit -Hn {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def opened(port: int, count: int) -> list[Connection]:
    """Each had an answer before it became idle."""
    few = asyncio.Semaphore(100)

    async def one() -> Connection:
        async with few:
            connection = await Connection.to(port)
            assert (await connection.ask(get("/livez"))).status == 200
            return connection

    return await asyncio.gather(*(one() for _ in range(count)))


@pytest.mark.long
def test_five_thousand_idle_connections_cost_little_and_nobody_else_anything(
    triton: Triton,
) -> None:
    settings = {"max_connections": str(IDLE + 500), "max_connections_per_client": "0"}
    with (
        many_files(2 * IDLE + 2000),
        gateway(triton.options.url, **settings, **QUIET) as (client, command),
    ):
        port = port_of(client)
        process = psutil.Process(command.pid)
        in_turns(port, [ECHO], 4, 1)
        without = in_turns(port, [ECHO], 1, 2)
        before = process.memory_info().rss

        async def scenario() -> list[Connection]:
            connections = await opened(port, IDLE)
            during.extend(await asyncio.to_thread(in_turns, port, [ECHO], 1, 2))
            grown.append(process.memory_info().rss - before)
            assert process.num_fds() > IDLE
            assert all(connection.is_open for connection in connections)
            for connection in connections:
                connection.leave()
            return connections

        during, grown = list[Asked](), list[int]()
        uvloop.run(scenario())
        wait_until(lambda: process.num_fds() < 200)
    print(
        f"{IDLE} idle connections: {grown[0] / MIB:.1f} MiB, {grown[0] / IDLE / 1024:.1f} KiB each; "
        f"others' p99 {p99_ms(without):.1f} ms without, {p99_ms(during):.1f} ms with them"
    )
    assert grown[0] <= 100 * MIB
    assert {each.status for each in during} == {200}
    assert median_ms(during) < 2 * median_ms(without) + 2
    assert p99_ms(during) < 2 * p99_ms(without) + 50


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
    """As Triton's own client sends it."""
    tensor = triton_http.InferInput("X", [2], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2], np.float32))
    body, length = triton_http.InferenceServerClient.generate_request_body([tensor])
    field = f"Inference-Header-Content-Length: {length}"
    return post("/v2/models/echo/infer", body, "application/octet-stream", field)


Request = Callable[[Pool], Awaitable[str]]


def answered(wire: bytes) -> Request:
    async def request(pool: Pool) -> str:
        return str((await pool.ask(wire)).status)

    return request


def answered_early(wire: bytes) -> Request:
    """The request is never sent whole."""

    async def request(pool: Pool) -> str:
        connection = await Connection.to(pool.port)
        answer = await connection.ask(wire)
        connection.leave()
        return str(answer.status)

    return request


def deserted(wire: bytes, after_s: float) -> Request:
    """The client leaves before there is an answer."""

    async def request(pool: Pool) -> str:
        connection = await Connection.to(pool.port)
        connection.say(wire)
        await asyncio.sleep(after_s)
        connection.leave()
        return "left"

    return request


def unknown(pool: Pool) -> Awaitable[str]:
    name = f"nobody-{random.randrange(10**9)}"
    wire = random.choice((by_v1(name, 1), by_v2(name, 1)))
    return answered(wire)(pool)


def mixture() -> list[Request]:
    array = npy(np.array([1, 2], np.float32))
    infer = "/v1/models/echo/infer"
    too_large = f"POST {infer} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\n".encode()
    pictures = [
        post("/v1/models/picture/infer", picture(kind), f"image/{kind}") for kind in ("png", "jpeg")
    ]
    return [
        *[answered(by_v1("echo", 1, 2))] * 3,
        *[answered(by_v2("echo", 1, 2))] * 2,
        *[answered(binary())] * 3,
        *[answered(post(infer, array, "application/x-npy"))] * 2,
        *map(answered, pictures),
        answered(by_v1("echo", 1, 2, 3)),
        answered(by_v2("echo", 1, 2, 3)),
        answered(post(infer, b'{"inputs": [1,')),
        answered(post("/v1/models/picture/infer", b"<html>", "image/png")),
        answered_early(too_large),
        unknown,
        deserted(by_v1("busy", -0.02, 0), 0.01),
        deserted(by_v2("busy", -0.02, 0), 0.01),
        deserted(by_v1("echo", 1, 2)[:-5], 0.01),
    ]


async def worn(port: int, requests: Sequence[Request], count: int) -> Counter[str]:
    """So many of them by eight clients, in an order drawn at random."""
    seen, drawn, left = Counter[str](), random.Random(count), iter(range(count))

    async def client(pool: Pool) -> None:
        for _ in left:
            seen[await drawn.choice(requests)(pool)] += 1

    with Pool(port) as pool:
        await asyncio.gather(*(client(pool) for _ in range(8)))
    return seen


class Watch:
    """The memory of a process, looked at all the time."""

    def __init__(self, process: psutil.Process) -> None:
        self.samples: list[int] = []
        self._process = process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            self.samples.append(self._process.memory_info().rss)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def ends(self) -> tuple[float, float]:
        """The medians of the first tenth and of the last."""
        tenth = len(self.samples) // 10
        return statistics.median(self.samples[:tenth]), statistics.median(self.samples[-tenth:])


@pytest.mark.long
def test_ten_thousand_requests_of_all_kinds_leave_nothing_behind(triton: Triton) -> None:
    with gateway(triton.options.url, **QUIET) as (client, command):
        port = port_of(client)
        process = psutil.Process(command.pid)
        requests = mixture()
        names = [answered(by_v2(f"nobody-{number}", 1)) for number in range(UNKNOWN_V2)]
        uvloop.run(worn(port, names, 2 * UNKNOWN_V2))
        uvloop.run(worn(port, requests, WARM_UP))
        held = process.num_fds(), process.num_threads()
        began = time.monotonic()
        with Watch(process) as watch:
            seen = uvloop.run(worn(port, requests, MIXED))
        took_s = time.monotonic() - began
        first, last = watch.ends
        slope = (last - first) / 0.9 / (MIXED / 10_000)
        print(
            f"{MIXED} requests in {took_s:.0f} s: {seen}; memory {first / MIB:.2f} → {last / MIB:.2f} MiB, "
            f"{slope / MIB:+.2f} MiB per 10,000; descriptors and threads {held} → "
            f"{(process.num_fds(), process.num_threads())}"
        )
        assert set(seen) == {"200", "400", "404", "413", "422", "left"}
        assert slope < MIB
        assert process.num_threads() <= held[1]
        wait_until(lambda: process.num_fds() <= held[0])


# Who leaves.

LEAVERS = {
    "while /v1 waits for Triton": by_v1("busy", -1, 0),
    "while /v2 waits for Triton": by_v2("busy", -1, 0),
}


@pytest.mark.parametrize("name", LEAVERS)
def test_who_leaves_frees_its_place_at_once(triton: Triton, name: str) -> None:
    limits = {"max_model_inflight": "1", "max_queue": "0"}
    with gateway(triton.options.url, **limits, **QUIET) as (client, _):
        took = uvloop.run(freed(port_of(client), LEAVERS[name]))
    print(f"{name}: free after {', '.join(f'{each * 1000:.0f} ms' for each in took)}")
    assert max(took) < 0.2


@pytest.mark.parametrize("path", ["/v1", "/v2"])
def test_who_is_still_sending_holds_no_place(triton: Triton, path: str) -> None:
    half = (by_v1 if path == "/v1" else by_v2)("busy", -1, 0)[:-5]
    with gateway(triton.options.url, max_model_inflight="1", max_queue="0", **QUIET) as (client, _):
        assert uvloop.run(beside_halves(port_of(client), half)) == [200] * 5


async def beside_halves(port: int, half: bytes) -> list[int]:
    """The statuses of requests beside five clients that are in the middle of their body."""
    with Pool(port) as pool, Pool(port) as senders:
        sending = [asyncio.create_task(senders.ask(half)) for _ in range(5)]
        try:
            await asyncio.sleep(0.2)
            return [(await pool.ask(by_v2("busy", 1, 2))).status for _ in range(5)]
        finally:
            for each in sending:
                each.cancel()
            await asyncio.gather(*sending, return_exceptions=True)


async def freed(port: int, wire: bytes) -> list[float]:
    """Seconds from a client's leaving until another one's request is let in; three times."""
    took: list[float] = []
    fast = by_v2("busy", 1, 2)
    with Pool(port) as pool:
        assert (await pool.ask(fast)).status == 200
        for _ in range(3):
            with Pool(port) as leaver:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(leaver.ask(wire), 0.1)
                assert (await pool.ask(fast)).status == 429
            left = time.monotonic()
            while (await pool.ask(fast)).status != 200:
                assert time.monotonic() - left < 5
            took.append(time.monotonic() - left)
    return took
