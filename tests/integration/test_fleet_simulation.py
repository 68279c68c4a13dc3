"""The fleet's objects before more replicas than a machine has room for: scripted ones, in their place.

A replica here is what the gateway sees of a Triton: an index, loads and unloads, inferences. It has no
gRPC, so that management takes its way over HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import socket
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
import uvloop

from gateway.errors import (
    BadUpstream,
    DeadlinePassed,
    GatewayError,
    ModelNotReady,
)
from gateway.fleet.declared import ModelsFile
from gateway.fleet.health import State
from gateway.fleet.index import index_of
from gateway.fleet.models import Models
from gateway.fleet.plan import actions
from gateway.fleet.pool import NoReplica, Pool
from gateway.fleet.replica import Address, Replica, Source, Wire
from gateway.fleet.repository import Repository, Terms
from gateway.state.store import Memory
from gateway.state.wishes import Wish
from gateway.triton.complaints import Asked
from tests.support.servers import free_ports
from tests.support.wait import wait_until_async

REPLICAS, MODELS = 100, 200
PATIENCE_S = 10.0  # what must not be waited for in vain
POLL_S = 0.5
CONNECT_TIMEOUT_S = 0.5
NEVER_S = 3600.0
NAME = "tritons.example"


def on_uvloop(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """What the gateway runs on."""

    @functools.wraps(scenario)
    def test(*arguments: Any, **named: Any) -> None:
        uvloop.run(scenario(*arguments, **named))

    return test


def say(line: str) -> None:
    """A number that was seen; pytest -rP shows it."""
    print(line)


# The replicas.


@dataclass
class Fake:
    """A Triton with these models, of which some are loaded; it does what its fields say."""

    models: dict[str, bool]
    host: str = "127.0.0.1"
    port: int = 0
    grpc_port: int = 1
    delay_s: float = 0.0  # of an inference
    load_s: float = 0.0
    hangs: bool = False  # accepts, and never answers
    garbles: bool = False  # answers an inference with what is not HTTP
    denies: bool = False  # says of every model that it is not ready
    says: bytes | None = None  # instead of its index
    requests: Counter[str] = field(default_factory=Counter)  # by the last part of the path
    inferences: Counter[str] = field(default_factory=Counter)  # by model
    _server: asyncio.Server | None = None
    connections: set[asyncio.Transport] = field(default_factory=set)

    @property
    def address(self) -> Address:
        return Address(self.host, self.port, self.grpc_port)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        talk = functools.partial(Conversation, self, loop)
        self._server = await loop.create_server(talk, self.host, self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As when its process dies."""
        if self._server is not None:
            self._server.close()
            for transport in list(self.connections):
                transport.abort()
            await self._server.wait_closed()
            self._server = None

    async def __aenter__(self) -> Fake:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def answer(self, method: str, path: str) -> tuple[float, bytes]:
        """After how long, and what."""
        *_, model, verb = path.split("/")
        self.requests[verb] += 1
        if verb == "index":
            return 0.0, ok(self.index() if self.says is None else self.says)
        if verb in ("load", "unload"):
            if model not in self.models:
                return 0.0, bad(f"failed to load '{model}', failed to poll from model repository")
            asyncio.get_running_loop().call_later(self.load_s, self.settle, model, verb == "load")
            return self.load_s, ok(b"")
        if verb == "config":
            return 0.0, ok(orjson.dumps({"name": model}))
        self.inferences[model] += 1
        if self.garbles:
            return self.delay_s, b"no answer\r\n\r\n"
        if self.denies:
            return self.delay_s, bad(f"Model '{model}' is not ready")
        if not self.models.get(model):
            return 0.0, bad(f"Request for unknown model: '{model}' is not found")
        return self.delay_s, ok(b"{}")

    def settle(self, model: str, loaded: bool) -> None:
        self.models[model] = loaded

    def index(self) -> bytes:
        return orjson.dumps(
            [
                {"name": name, "version": "1", "state": "READY"}
                if loaded
                else {"name": name, "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
                for name, loaded in self.models.items()
            ]
        )


class Conversation(asyncio.Protocol):
    """As much HTTP as the gateway needs of a replica."""

    def __init__(self, fake: Fake, loop: asyncio.AbstractEventLoop) -> None:
        self._fake = fake
        self._loop = loop
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._fake.connections.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fake.connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, found, rest = self._read.partition(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if not found or len(rest) < length:
            return
        self._read = b""
        method, path, _ = head.split(b" ", 2)
        delay_s, answer = self._fake.answer(method.decode(), path.decode())
        if self._fake.hangs:
            return
        if delay_s:
            self._loop.call_later(delay_s, self._say, answer)
        else:
            self._say(answer)

    def _say(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def bad(error: str) -> bytes:
    body = orjson.dumps({"error": error})
    return b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@asynccontextmanager
async def replicas(
    count: int, models: Iterable[str] = ("m",), **how: Any
) -> AsyncIterator[list[Fake]]:
    """Replicas on addresses of their own and one port, with the models loaded, until the end."""
    loaded = dict.fromkeys(models, True)
    port, grpc_port = free_ports(2)
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                Fake(dict(loaded), f"127.0.1.{number}", port, grpc_port, **how)
            )
            for number in range(1, count + 1)
        ]


def watching(addresses: Iterable[Address], poll_s: float = POLL_S) -> Pool:
    return Pool([Source(address) for address in addresses], Wire(CONNECT_TIMEOUT_S), poll_s=poll_s)


def over(fakes: Iterable[Fake], poll_s: float = POLL_S) -> Pool:
    return watching([fake.address for fake in fakes], poll_s)


@asynccontextmanager
async def managing(pool: Pool, file: ModelsFile | None = None) -> AsyncIterator[Repository]:
    models = Models(pool)
    async with Repository(pool, models, Memory(), file or ModelsFile(None), Terms()) as repository:
        yield repository
    models.close()


def declaring(path: Path, text: str) -> ModelsFile:
    path.write_text(text)
    file = ModelsFile(path)
    file.open()
    return file


# The callers.


async def infer(pool: Pool, model: str = "m", timeout_s: float = PATIENCE_S) -> None:
    path = f"/v2/models/{model}/infer".encode()
    headers = [(b"content-length", b"2")]
    answer = await pool.send(Asked(model, "", timeout_s), b"POST", path, headers, b"{}")
    try:
        await answer.read()
    finally:
        answer.close()


@dataclass
class Load:
    """What callers experienced."""

    took_s: list[float] = field(default_factory=list)
    errors: list[GatewayError] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        return statistics.quantiles(self.took_s, n=100)[98]

    async def ask(self, pool: Pool, timeout_s: float = PATIENCE_S) -> None:
        began = time.perf_counter()
        try:
            await infer(pool, timeout_s=timeout_s)
        except GatewayError as exc:
            self.errors.append(exc)
        self.took_s.append(time.perf_counter() - began)


async def load(pool: Pool, per_s: float, for_s: float, timeout_s: float = PATIENCE_S) -> Load:
    """Requests that come at a rate, however long the answers take."""
    found, loop = Load(), asyncio.get_running_loop()
    began, asking = loop.time(), []
    for number in range(int(per_s * for_s)):
        await asyncio.sleep(began + number / per_s - loop.time())
        asking.append(asyncio.create_task(found.ask(pool, timeout_s)))
    await asyncio.gather(*asking)
    return found


async def at_once(pool: Pool, count: int, timeout_s: float = PATIENCE_S) -> Load:
    """Of so many, every replica gets some."""
    found = Load()
    await asyncio.gather(*(found.ask(pool, timeout_s) for _ in range(count)))
    return found


def replica_of(pool: Pool, fake: Fake) -> Replica:
    return next(
        found for address, found in pool.replicas.items() if str(address) == str(fake.address)
    )


def counted(pool: Pool, sample: str) -> float:
    """Over all labels."""
    found = (each for metric in pool.metrics.collect() for each in metric.samples)
    return sum(each.value for each in found if each.name == sample)


def states(pool: Pool) -> Counter[State]:
    return Counter(map(pool.state, pool.replicas.values()))


# What it costs.


def serve(count: int, models: int, pipe: Connection) -> None:
    """A process of replicas, until its parent lets go of the pipe."""

    async def serving() -> None:
        async with AsyncExitStack() as stack:
            names = [f"model_{number}" for number in range(models)]
            fakes = [
                await stack.enter_async_context(Fake(dict.fromkeys(names, True)))
                for _ in range(count)
            ]
            pipe.send([fake.port for fake in fakes])
            ended = asyncio.Event()
            asyncio.get_running_loop().add_reader(pipe.fileno(), ended.set)
            await ended.wait()
            asyncio.get_running_loop().remove_reader(pipe.fileno())

    uvloop.run(serving())


@pytest.fixture(scope="module")
def hundred() -> Iterator[list[Address]]:
    """A hundred replicas with two hundred models, in a process of their own."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    process = spawning.Process(target=serve, args=(REPLICAS, MODELS, theirs), daemon=True)
    process.start()
    theirs.close()
    with ours:
        yield [Address("127.0.0.1", port) for port in ours.recv()]
    process.join(PATIENCE_S)
    process.close()


def fastest(work: Callable[[], object], times: int) -> float:
    """CPU seconds; the best of some runs, as others use this machine."""
    spent = []
    for _ in range(times):
        began = time.process_time()
        work()
        spent.append(time.process_time() - began)
    return min(spent)


@on_uvloop
async def test_choosing_a_replica_takes_microseconds(hundred: list[Address]) -> None:
    async with watching(hundred) as pool:
        names = [f"model_{number}" for number in range(MODELS)]

        def choose() -> None:
            for name in names * 10:
                pool.choose(name)

        choose()
        spent_s = fastest(choose, 10) / (MODELS * 10)
        anew_s = fastest(lambda: [pool._look_up(name, "") for name in names], 5) / MODELS
        say(f"choosing one of {REPLICAS}: {spent_s * 1e6:.2f} µs; anew: {anew_s * 1e6:.0f} µs")
        assert spent_s < 20e-6


@on_uvloop
async def test_looking_at_a_hundred_replicas_leaves_the_core_to_the_requests(
    hundred: list[Address],
) -> None:
    async with watching(hundred) as pool:
        await wait_until_async(lambda: states(pool)[State.UP] == REPLICAS)
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(3)
        share = (time.process_time() - cpu) / (time.perf_counter() - began)
        say(f"looking at {REPLICAS} replicas with {MODELS} models: {share:.1%} of a core")
        assert share < 0.15
        assert states(pool)[State.UP] == REPLICAS


def test_planning_for_a_hundred_replicas_does_not_hold_the_requests_up() -> None:
    said = [{"name": f"model_{n}", "version": "1", "state": "READY"} for n in range(MODELS)]
    indexes = [index_of(said) for _ in range(REPLICAS)]
    wishes = {entry["name"]: Wish(True) for entry in said}

    def plan() -> None:
        assert not any(list(actions(wishes, index)) for index in indexes)

    spent_s = fastest(plan, 10)
    say(f"planning for {REPLICAS} replicas with {MODELS} models: {spent_s * 1e3:.1f} ms")
    assert spent_s < 0.02


@on_uvloop
async def test_a_pool_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()
    async with replicas(3) as fakes:
        async with over(fakes) as pool, managing(pool):
            await load(pool, 100, 0.1)
        assert asyncio.all_tasks() == before
        await asyncio.sleep(0.01)
        assert not any(fake.connections for fake in fakes)


# Who there is.


@dataclass
class Names:
    """What a name stands for, as the tests say."""

    hosts: list[str] = field(default_factory=list)
    error: OSError | None = None
    asked: int = 0

    async def __call__(self, name: str) -> list[str]:
        assert name == NAME
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.hosts

    def pool(self, fake: Fake, **how: Any) -> Pool:
        named = Source(Address(NAME, fake.port, fake.grpc_port), by_dns=True)
        return Pool([named], Wire(CONNECT_TIMEOUT_S), dns_s=0.1, resolve=self, **how)


@on_uvloop
async def test_a_new_replica_gets_its_models_with_nobody_doing_anything() -> None:
    async with replicas(3, ["a", "b", "c"]) as fakes:
        for fake in fakes:
            fake.models = dict.fromkeys(fake.models, False)
            fake.load_s = 0.05
        names = Names([fake.host for fake in fakes[:2]])
        async with names.pool(fakes[0]) as pool, managing(pool) as repository:
            for model in ("a", "b"):
                document = (await repository.load(model, {})).document()
                assert document["state"] == "READY"
                assert len(document["replicas"]) == 2
            assert fakes[1].models == {"a": True, "b": True, "c": False}
            names.hosts = [fake.host for fake in fakes]
            took_s = await wait_until_async(lambda: fakes[2].models == fakes[1].models)
            await wait_until_async(lambda: replica_of(pool, fakes[2]).index.ready("b"))
            say(f"a new replica had its models after {took_s:.1f} s")
            assert took_s < 5
            await asyncio.gather(*(infer(pool, "b") for _ in range(60)))
            assert all(fake.inferences["b"] > 10 for fake in fakes)


@on_uvloop
async def test_a_replica_that_restarts_gets_its_models_again_and_loses_what_was_unloaded() -> None:
    async with replicas(2, ["a", "b"]) as fakes, over(fakes) as pool, managing(pool) as repository:
        await repository.load("a", {})
        await repository.unload("b", unload_dependents=False)
        await fakes[1].stop()
        await wait_until_async(lambda: states(pool)[State.DOWN] == 1)
        fakes[1].models = {"a": False, "b": True}
        await fakes[1].start()
        await wait_until_async(lambda: fakes[1].models == {"a": True, "b": False})


@on_uvloop
async def test_declared_models_are_loaded_wherever_they_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    file = declaring(path, "models: [a]")
    async with replicas(3, ["a", "b"]) as fakes, over(fakes) as pool:
        fakes[0].models["a"] = fakes[2].models["b"] = False
        async with managing(pool, file):
            await wait_until_async(lambda: fakes[0].models["a"])
            path.write_text("models: [a, b]")
            await wait_until_async(lambda: fakes[2].models["b"])
            fakes[1].models["a"] = False  # behind our back
            await wait_until_async(lambda: fakes[1].models["a"])


@on_uvloop
async def test_a_declared_model_that_cannot_be_loaded_is_tried_more_and_more_rarely(
    tmp_path: Path,
) -> None:
    file = declaring(tmp_path / "models.yaml", "models: [nowhere, m]")
    async with (
        replicas(2) as fakes,
        over(fakes) as pool,
        managing(pool, file) as repository,
    ):
        await asyncio.sleep(1.6)
        assert all(1 < fake.requests["load"] <= 3 for fake in fakes)
        assert "failed to poll" in repository.errors["nowhere"]
        await infer(pool)


@on_uvloop
async def test_an_address_that_is_gone_gets_nothing_more() -> None:
    async with replicas(3) as fakes:
        names = Names([fake.host for fake in fakes])
        async with names.pool(fakes[0]) as pool:
            assert states(pool)[State.UP] == 3
            names.hosts = [fake.host for fake in fakes[1:]]
            await wait_until_async(lambda: len(pool.replicas) == 2)
            before = fakes[0].requests.copy()
            assert not (await load(pool, 100, 0.5)).errors
            assert fakes[0].requests == before


@on_uvloop
async def test_of_addresses_that_come_and_go_nothing_stays() -> None:
    async with replicas(3) as fakes:
        names = Names([fake.host for fake in fakes])
        async with names.pool(fakes[0]) as pool, managing(pool) as repository:
            assert not (await load(pool, 100, 0.2)).errors
            await repository.load("m", {})
            pool.metrics.flush()
            gone = replica_of(pool, fakes[0]).name
            assert gone in told_of(pool)
            names.hosts = [fake.host for fake in fakes[1:]]
            await wait_until_async(lambda: len(pool.replicas) == 2)
            await wait_until_async(lambda: gone not in repository._behind)
            assert gone not in told_of(pool)
            assert len(told_of(pool)) == 2


def told_of(pool: Pool) -> set[str]:
    """The replicas in the metrics."""
    samples = (sample for metric in pool.metrics.collect() for sample in metric.samples)
    return {sample.labels["replica"] for sample in samples if "replica" in sample.labels}


@on_uvloop
async def test_what_is_under_way_at_an_address_that_is_gone_comes_to_its_end() -> None:
    async with replicas(1, delay_s=0.5) as (fake,):
        names = Names([fake.host])
        async with names.pool(fake) as pool:
            asking = asyncio.create_task(infer(pool))
            await wait_until_async(lambda: fake.inferences["m"])
            names.hosts = ["127.0.1.9"]
            await wait_until_async(
                lambda: [address.host for address in pool.replicas] == ["127.0.1.9"]
            )
            await asking


@on_uvloop
async def test_a_load_on_an_address_that_is_gone_is_not_waited_for() -> None:
    async with replicas(2) as fakes:
        for fake in fakes:
            fake.models["m"] = False
        fakes[0].load_s = 3600
        names = Names([fake.host for fake in fakes])
        async with names.pool(fakes[0]) as pool, managing(pool) as repository:
            loading = asyncio.create_task(repository.load("m", {}))
            await wait_until_async(lambda: fakes[0].requests["load"] and fakes[1].models["m"])
            names.hosts = [fakes[1].host]
            with pytest.raises(GatewayError) as told:
                await asyncio.wait_for(loading, PATIENCE_S)
            assert told.value.status == 502
            assert (await repository.load("m", {})).document()["state"] == "READY"


@on_uvloop
async def test_a_name_that_cannot_be_looked_up_keeps_what_it_stood_for() -> None:
    async with replicas(3) as fakes:
        names = Names([fake.host for fake in fakes[:2]])
        async with names.pool(fakes[0]) as pool:
            for error, hosts in ((OSError("SERVFAIL"), ["127.0.1.9"]), (None, list[str]())):
                names.error, names.hosts = error, hosts
                asked = names.asked
                await wait_until_async(lambda asked=asked: names.asked > asked + 2)
                assert states(pool) == {State.UP: 2}
                assert not (await load(pool, 100, 0.2)).errors
            names.hosts = [fake.host for fake in fakes]
            await wait_until_async(lambda: states(pool) == {State.UP: 3})


@on_uvloop
async def test_a_name_that_stands_for_nothing_at_the_start_is_looked_up_again() -> None:
    async with replicas(1) as (fake,):
        names = Names(error=OSError("NXDOMAIN"))
        async with names.pool(fake) as pool:
            with pytest.raises(NoReplica):
                await infer(pool)
            names.error, names.hosts = None, [fake.host]
            await wait_until_async(lambda: states(pool) == {State.UP: 1})
            await infer(pool)


# What it survives.


@on_uvloop
async def test_a_slow_replica_gets_little_and_costs_the_callers_little() -> None:
    """At the same time as a fleet without one, so that both have the same machine."""
    async with (
        replicas(3, delay_s=0.005) as well,
        replicas(3, delay_s=0.005) as one_slow,
        over(well) as pool,
        over(one_slow) as other,
    ):
        one_slow[0].delay_s = 0.505
        # Until its first answers are there, nothing tells it from the others.
        await asyncio.gather(load(pool, 200, 1), load(other, 200, 1))
        well[0].inferences.clear()
        one_slow[0].inferences.clear()
        base, found = await asyncio.gather(load(pool, 200, 3.5), load(other, 200, 3.5))
        share = one_slow[0].inferences["m"] / len(found.took_s)
        fair = well[0].inferences["m"] / len(base.took_s)
        say(f"the slow one got {share:.1%}, fair would be {fair:.1%}")
        say(f"p99 {found.p99_s * 1000:.1f} ms, without a slow one {base.p99_s * 1000:.1f} ms")
        assert not base.errors + found.errors
        assert share < 1 / 3 / 4
        assert found.p99_s < 1.3 * base.p99_s + 0.01


@on_uvloop
async def test_a_replica_that_is_slow_no_more_gets_its_share_again() -> None:
    async with replicas(3, delay_s=0.02) as fakes, over(fakes, poll_s=0.05) as pool:
        fakes[0].delay_s = 0.2
        await load(pool, 400, 0.4)
        assert replica_of(pool, fakes[0]).pace.slowness > 1.5
        fakes[0].delay_s = 0.02
        await wait_until_async(lambda: replica_of(pool, fakes[0]).pace.slowness < 1.4)
        fakes[0].inferences.clear()
        await load(pool, 400, 0.4)
        assert fakes[0].inferences["m"] > 160 / 3 / 2


@on_uvloop
async def test_a_refused_connection_is_not_the_callers_business() -> None:
    async with replicas(3) as fakes, over(fakes, poll_s=NEVER_S) as pool:
        assert not (await at_once(pool, 20)).errors
        await fakes[0].stop()
        await asyncio.sleep(0.05)
        assert not (await at_once(pool, 20)).errors
        assert pool.state(replica_of(pool, fakes[0])) is State.DOWN
        await fakes[0].start()
        replica_of(pool, fakes[0]).doubted.set()
        await wait_until_async(lambda: pool.state(replica_of(pool, fakes[0])) <= State.EJECTED)


@contextmanager
def black_hole(address: Address) -> Iterator[None]:
    """Connections to there are neither accepted nor refused: the queue of a socket that nobody serves."""
    with socket.socket() as listening, contextlib.ExitStack() as stack:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address.host, address.port))
        listening.listen(0)
        for _ in range(4):
            queued = stack.enter_context(socket.socket())
            queued.setblocking(False)
            with suppress(BlockingIOError):
                queued.connect((address.host, address.port))
        yield


@on_uvloop
async def test_a_black_hole_costs_a_few_callers_half_a_second_and_then_nobody_anything() -> None:
    async with replicas(3) as fakes, over(fakes, poll_s=0.1) as pool:
        await fakes[0].stop()
        with black_hole(fakes[0].address):
            first = await at_once(pool, 20)
            assert not first.errors
            assert CONNECT_TIMEOUT_S - 0.1 < max(first.took_s) < CONNECT_TIMEOUT_S + 0.3
            assert sum(took_s > 0.3 for took_s in first.took_s) < 10
            await wait_until_async(lambda: pool.state(replica_of(pool, fakes[0])) is State.SLOW)
            then = await load(pool, 50, 0.3)
            assert not then.errors
            assert max(then.took_s) < 0.3
        await fakes[0].start()
        await wait_until_async(lambda: pool.state(replica_of(pool, fakes[0])) <= State.EJECTED)


@on_uvloop
async def test_a_replica_that_accepts_and_never_answers_is_left_alone() -> None:
    async with replicas(3) as fakes, over(fakes, poll_s=0.1) as pool:
        fakes[0].hangs = True
        first = await at_once(pool, 20, timeout_s=1)
        hung = len(first.errors)
        assert {type(error) for error in first.errors} == {DeadlinePassed}
        assert hung == fakes[0].inferences["m"] < 10
        assert sorted(first.took_s)[-hung - 1] < 0.3
        await wait_until_async(lambda: pool.state(replica_of(pool, fakes[0])) is State.SLOW)
        hung = fakes[0].inferences["m"]
        then = await load(pool, 50, 0.3)
        assert not then.errors
        assert fakes[0].inferences["m"] == hung
        fakes[0].hangs = False
        await wait_until_async(lambda: pool.state(replica_of(pool, fakes[0])) <= State.EJECTED)


@on_uvloop
async def test_where_all_replicas_fail_no_more_than_half_are_ejected_until_they_are_well() -> None:
    async with replicas(10, garbles=True) as fakes, over(fakes, poll_s=NEVER_S) as pool:
        seen = Counter[int]()
        for _ in range(60):
            found = await load(pool, 1000, 0.01)
            assert {type(error) for error in found.errors} == {BadUpstream}
            assert len(found.errors) == len(found.took_s)  # each may have run: none is retried
            seen[states(pool)[State.EJECTED]] += 1
        assert max(seen) == 5
        assert states(pool) == {State.UP: 5, State.EJECTED: 5}
        assert counted(pool, "gateway_upstream_ejections_total") == 5
        ejected = [fake for fake in fakes if pool.state(replica_of(pool, fake)) is State.EJECTED]
        for fake in fakes:
            fake.garbles = False
            fake.inferences.clear()
        assert not (await load(pool, 200, 0.3)).errors
        assert not any(fake.inferences["m"] for fake in ejected)
        await wait_until_async(lambda: states(pool) == {State.UP: 10})
        await asyncio.sleep(0.01)
        assert not (await load(pool, 400, 0.5)).errors
        assert all(fake.inferences["m"] for fake in ejected)


@on_uvloop
async def test_an_ejected_replica_is_asked_where_no_other_is_left() -> None:
    async with replicas(2) as fakes, over(fakes, poll_s=NEVER_S) as pool:
        fakes[0].garbles = True
        while not states(pool)[State.EJECTED]:
            await load(pool, 1000, 0.01)
        fakes[0].garbles = False
        await fakes[1].stop()
        await asyncio.sleep(0.05)
        assert not (await load(pool, 100, 0.2)).errors


@on_uvloop
async def test_short_deadlines_do_not_eject_a_replica_that_is_well() -> None:
    async with replicas(4, delay_s=0.2) as fakes, over(fakes) as pool:
        found = await load(pool, 200, 0.6, timeout_s=0.02)
        assert {type(error) for error in found.errors} == {DeadlinePassed}
        assert states(pool) == {State.UP: 4}


@on_uvloop
async def test_a_model_that_was_unloaded_behind_our_back_is_asked_elsewhere_at_once() -> None:
    async with replicas(3) as fakes, over(fakes, poll_s=NEVER_S) as pool:
        fakes[0].models["m"] = False
        found = await load(pool, 200, 0.5)
        assert not found.errors
        assert fakes[0].inferences["m"] == 1
        assert not replica_of(pool, fakes[0]).index.ready("m")
        await wait_until_async(
            lambda: replica_of(pool, fakes[0]).index_bytes
        )  # it was looked at again
        assert replica_of(pool, fakes[0]).index.state("m").reason == "unloaded"


@on_uvloop
async def test_other_models_are_asked_on_a_replica_that_lost_one() -> None:
    async with replicas(2, ["m", "other"]) as fakes, over(fakes) as pool:
        fakes[0].models["m"] = False
        for _ in range(10):
            await infer(pool)
        assert fakes[0].inferences["m"] <= 1
        await asyncio.gather(*(infer(pool, "other") for _ in range(40)))
        assert fakes[0].inferences["other"] > 10


@on_uvloop
async def test_retries_do_not_double_the_load_of_a_fleet_that_refuses_everything() -> None:
    async with replicas(4, denies=True) as fakes, over(fakes, poll_s=0.1) as pool:
        found = await load(pool, 400, 1)
        sent = sum(fake.inferences["m"] for fake in fakes)
        say(f"{len(found.took_s)} requests became {sent}")
        assert {type(error) for error in found.errors} == {ModelNotReady}
        assert len(found.errors) == len(found.took_s)
        assert len(found.took_s) < sent <= 1.2 * len(found.took_s) + 10


@on_uvloop
async def test_a_load_that_one_of_three_cannot_take_is_told_of_and_made_up_for() -> None:
    async with replicas(3, ["a"]) as fakes, over(fakes) as pool:
        for fake in fakes:
            fake.models["a"] = False
        await fakes[2].stop()
        async with managing(pool) as repository:
            with pytest.raises(GatewayError) as told:
                await repository.load("a", {})
            report: Any = told.value.report
            assert (told.value.status, told.value.code) == (502, "PARTLY_DONE")
            assert {found["state"] for found in report["replicas"].values()} == {
                "READY",
                "UNREACHABLE",
            }
            for _ in range(20):
                await infer(pool, "a")
            await fakes[2].start()
            assert await wait_until_async(lambda: fakes[2].models["a"]) < 15
            await wait_until_async(lambda: replica_of(pool, fakes[2]).index.ready("a"))


@on_uvloop
async def test_many_loads_and_unloads_of_a_model_follow_one_another() -> None:
    async with (
        replicas(2, ["a"], load_s=0.02) as fakes,
        over(fakes) as pool,
        managing(pool) as repository,
    ):
        calls: list[Awaitable[Any]] = []
        for _ in range(10):
            calls.append(repository.unload("a", unload_dependents=False))
            calls.append(repository.load("a", {}))
        reports = await asyncio.gather(*calls)
        assert {report.document()["state"] for report in reports} == {"READY", "UNAVAILABLE"}
        assert repository.wishes["a"].loaded
        assert all(fake.models == {"a": True} for fake in fakes)


@on_uvloop
async def test_an_index_that_is_none_costs_its_replica_and_nobody_else() -> None:
    hostile = [b"", b"{}", b"[1]", b'[{"name":"m","version":' + b"[" * 900 + b"]" * 900 + b"}]"]
    async with replicas(3) as fakes, over(fakes, poll_s=0.1) as pool:
        for body in hostile:
            fakes[0].says = body
            await wait_until_async(lambda: pool.state(replica_of(pool, fakes[0])) is State.SLOW)
            assert not (await load(pool, 100, 0.1)).errors
            fakes[0].says = None
            await wait_until_async(lambda: states(pool)[State.UP] == 3)
