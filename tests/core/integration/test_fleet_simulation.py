"""The fleet's objects before more replicas than a machine has room for: simulated ones, in their place."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import shutil
import socket
import statistics
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.errors import (
    BadUpstream,
    Conflict,
    DeadlinePassed,
    GatewayError,
    ModelNotReady,
    UnknownModel,
)
from gateway.fleet.balancer import choose_less_loaded
from gateway.fleet.discovery import DnsName
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.health import EJECTION_S, SLOW_INDEX_S, HealthState
from gateway.fleet.index import parse_index
from gateway.fleet.inference_times import InferenceTimes
from gateway.fleet.maintenance import Maintenance, UnknownReplica
from gateway.fleet.models_file import ModelsFile
from gateway.fleet.pool import NoReplica, ReplicaPool
from gateway.fleet.probe import PROBE_TIMEOUT_S
from gateway.fleet.reconcile_plan import INITIAL_BACKOFF_S, plan_actions
from gateway.fleet.reconciler import MAX_ABSENCE_S, RECONCILE_INTERVAL_S
from gateway.fleet.replica import Replica, ReplicaAddress
from gateway.fleet.report import PartialFailure
from gateway.fleet.repository import Repository
from gateway.fleet.signatures import SignatureCache
from gateway.fleet.transports import HttpCall
from gateway.settings import Settings
from gateway.state.desired import DesiredModel
from gateway.state.store import open_state_store
from gateway.triton.error_mapping import LoadFailed, RequestTarget
from tests.support.calls import count_calls
from tests.support.simulated_replicas import SimulatedTriton, simulated_replicas
from tests.support.wait import TIMEOUT_S, wait_until_async

REPLICAS, MODELS = 100, 200
POLL_S = 0.5
CONNECT_TIMEOUT_S = 30.0  # of connections that are not to be given up
NEVER_S = 3600.0
NAME = "tritons.example"


def on_uvloop(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """What the gateway runs on."""

    @functools.wraps(scenario)
    def test(*arguments: Any, **named: Any) -> None:
        uvloop.run(scenario(*arguments, **named))

    return test


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward; between that it goes on as any other."""

    _skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


def with_skips(scenario: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """On a loop that the scenario may put forward, with `skip`."""

    @functools.wraps(scenario)
    def test(*arguments: Any, **named: Any) -> None:
        loop = SkippingLoop()
        try:
            loop.run_until_complete(scenario(*arguments, **named))
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()

    return test


def skip(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skip(seconds)


async def skip_until(condition: Callable[[], bool], step_s: float = 0.05) -> None:
    """Put the clock forward in small steps, each of which leaves time to do what is due."""

    def check() -> bool:
        skip(step_s)
        return condition()

    await wait_until_async(check)


def say(line: str) -> None:
    """A number that was seen; pytest -rP shows it."""
    print(line)


def watching(
    addresses: Iterable[ReplicaAddress],
    poll_s: float = POLL_S,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
) -> ReplicaPool:
    settings = Settings(connect_timeout_s=connect_timeout_s)
    return ReplicaPool(
        list(addresses),
        settings.model_copy(update={"poll_interval_s": poll_s}),  # NEVER_S is no valid setting
    )


@contextlib.asynccontextmanager
async def over(
    fakes: Iterable[SimulatedTriton], poll_s: float = POLL_S
) -> AsyncIterator[ReplicaPool]:
    async with watching([fake.address for fake in fakes], poll_s) as pool:
        if poll_s == NEVER_S:  # a first probe that a busy machine made late is not repeated
            await wait_until_async(lambda: probe_unready(pool))
        yield pool


def probe_unready(pool: ReplicaPool) -> bool:
    """Ask for a probe of every replica that is not up; return whether all are."""
    unready = [
        replica
        for replica in pool.replicas.values()
        if pool.replica_state(replica) is not HealthState.UP
    ]
    for replica in unready:
        replica.probe_requested.set()
    return not unready


@asynccontextmanager
async def managing(
    pool: ReplicaPool, file: ModelsFile | None = None, state: str = "memory:"
) -> AsyncIterator[Repository]:
    signatures = SignatureCache(dispatcher_of(pool))
    file = file or ModelsFile(None)
    async with Repository(
        pool, signatures, open_state_store(state), file, Settings()
    ) as repository:
        yield repository
    signatures.close()


def declaring(path: Path, text: str) -> ModelsFile:
    path.write_text(text)
    return ModelsFile(path)


# The callers.


@functools.lru_cache(16)
def dispatcher_of(pool: ReplicaPool) -> Dispatcher:
    """The one of this pool, which remembers what it sent."""
    return Dispatcher(pool)


async def infer(pool: ReplicaPool, model: str = "m", timeout_s: float = TIMEOUT_S) -> None:
    path = f"/v2/models/{model}/infer".encode()
    headers = [(b"content-length", b"2")]
    target = RequestTarget(model, "", timeout_s)
    call = HttpCall(target, b"POST", path, headers, b"{}")
    answer = await dispatcher_of(pool).send(call, timeout_s)
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

    async def ask(self, pool: ReplicaPool, timeout_s: float = TIMEOUT_S) -> None:
        began = time.perf_counter()
        try:
            await infer(pool, timeout_s=timeout_s)
        except GatewayError as exc:
            self.errors.append(exc)
        self.took_s.append(time.perf_counter() - began)


async def at_once(pool: ReplicaPool, count: int, timeout_s: float = TIMEOUT_S) -> Load:
    """Of so many, every replica gets some: all are chosen for before the first answer."""
    found = Load()
    await asyncio.gather(*(found.ask(pool, timeout_s) for _ in range(count)))
    return found


async def in_turns(pool: ReplicaPool, count: int, callers: int = 1) -> Load:
    """As many requests of some callers, each of whom waits for an answer before the next request."""
    found = Load()

    async def call() -> None:
        for _ in range(count // callers):
            await found.ask(pool)

    await asyncio.gather(*(call() for _ in range(callers)))
    return found


def replica_of(pool: ReplicaPool, fake: SimulatedTriton) -> Replica:
    return next(
        found for address, found in pool.replicas.items() if str(address) == str(fake.address)
    )


def is_in(pool: ReplicaPool, fake: SimulatedTriton, state: HealthState) -> Callable[[], bool]:
    return lambda: pool.replica_state(replica_of(pool, fake)) is state


def is_back(pool: ReplicaPool, fake: SimulatedTriton) -> Callable[[], bool]:
    return lambda: pool.replica_state(replica_of(pool, fake)) <= HealthState.EJECTED


def counted(pool: ReplicaPool, sample: str, **labels: str) -> float:
    """Over all other labels."""
    pool.metrics.flush()
    found = (each for metric in pool.metrics.collect() for each in metric.samples)
    return sum(
        each.value
        for each in found
        if each.name == sample and labels.items() <= each.labels.items()
    )


def refusals(pool: ReplicaPool, fake: SimulatedTriton) -> float:
    """Requests that found no connection to this replica."""
    name = str(fake.address)
    return counted(pool, "gateway_upstream_attempts_total", replica=name, outcome="refused")


def states(pool: ReplicaPool) -> Counter[HealthState]:
    return Counter(map(pool.replica_state, pool.replicas.values()))


async def kill(pool: ReplicaPool, fake: SimulatedTriton) -> None:
    """Its process dies, and the gateway has seen that its connections are closed."""
    await fake.stop()
    http = replica_of(pool, fake).http
    await wait_until_async(
        lambda: not any(connection.is_usable for connection in http._idle_connections)
    )


# What it costs.


@on_uvloop
async def test_choosing_a_replica_costs_no_more_in_a_large_fleet_than_in_a_small_one() -> None:
    names = [f"model_{number}" for number in range(MODELS)]

    async def calls_in(count: int) -> tuple[int, int]:
        """To choose for each model, again and anew."""
        async with simulated_replicas(count, names) as fakes, over(fakes, NEVER_S) as pool:
            await wait_until_async(lambda: states(pool)[HealthState.UP] == count)
            again = count_calls(
                lambda: [choose_less_loaded(pool.get_candidates(name)) for name in names]
            )
            return again, count_calls(lambda: [pool.update_candidates(name, "") for name in names])

    small, large = await calls_in(10), await calls_in(REPLICAS)
    say(f"calls for {MODELS} models, again and anew: {small} of 10, {large} of {REPLICAS} replicas")
    assert large[0] == small[0]
    assert large[1] <= REPLICAS / 10 * small[1]


@on_uvloop
async def test_looking_at_a_hundred_replicas_reads_only_what_has_changed() -> None:
    names = [f"model_{number}" for number in range(MODELS)]
    began = time.perf_counter()
    async with simulated_replicas(REPLICAS, names) as fakes, over(fakes, POLL_S) as pool:
        await wait_until_async(lambda: states(pool)[HealthState.UP] == REPLICAS)
        before = {address: replica.index for address, replica in pool.replicas.items()}
        fakes[0].models["model_7"] = False
        # A probe that was in progress may have read the index before the change.
        await wait_until_async(lambda: not replica_of(pool, fakes[0]).index.is_ready("model_7"))
        read_again = [
            str(address)
            for address, replica in pool.replicas.items()
            if replica.index is not before[address]
        ]
        assert read_again == [str(fakes[0].address)]
        looks = {fake.requests["index"] for fake in fakes}
        most = (
            3 + (time.perf_counter() - began) / POLL_S
        )  # at the start, by refresh, and at a change
        assert 2 <= min(looks) <= max(looks) <= most
        assert states(pool)[HealthState.UP] == REPLICAS


@pytest.mark.long
@pytest.mark.fault(
    "a replica's repository index takes longer than a probe, as with many models in a"
)
@on_uvloop
async def test_a_replica_with_a_slow_index_is_up_and_its_index_is_read_seldom() -> None:
    """Triton lists its repository for each index: in a bucket, that takes seconds for dozens of models."""
    async with simulated_replicas(1, ["a"]) as (fake,):
        fake.index_s = 1.2 * PROBE_TIMEOUT_S
        async with over([fake]) as pool:
            replica = replica_of(pool, fake)
            is_up = functools.partial(pool.is_ready, "a")
            await wait_until_async(is_up)
            read = fake.requests["index"]
            for _ in range(30):
                await asyncio.sleep(0.1)
                assert states(pool) == {HealthState.UP: 1}
                assert is_up()
            say(
                f"in 3 s, {fake.requests['index'] - read} indexes and {fake.requests['live']} probes"
            )
            assert fake.requests["index"] - read <= 2
            assert fake.requests["live"] >= 2
            # What contradicts the index lets it be read at once, and once.
            read = fake.requests["index"]
            fake.models["a"] = False
            pool.mark_unloaded(replica, "a", "")
            await wait_until_async(lambda: fake.requests["index"] > read)
            await asyncio.sleep(2 * fake.index_s)
            assert fake.requests["index"] == read + 1
            fake.index_s = 0.0
            fake.models["b"] = True
            await pool.monitor.probe(replica)  # as after a load
            assert pool.is_ready("b")
            await fake.stop()
            await wait_until_async(lambda: states(pool) == {HealthState.DOWN: 1})


@pytest.mark.long
@pytest.mark.fault("a replica lists more than 50,000 models")
@on_uvloop
async def test_a_slow_index_that_becomes_invalid_makes_a_live_replica_unavailable() -> None:
    async with simulated_replicas(1, ["a"]) as (fake,):
        fake.index_s = SLOW_INDEX_S
        async with over([fake]) as pool:
            await wait_until_async(lambda: pool.is_ready("a"))
            fake.index_body = b"{}"
            pool.mark_unloaded(replica_of(pool, fake), "a", "")  # so that it is read at once
            await wait_until_async(lambda: states(pool) == {HealthState.SLOW: 1})
            probes = fake.requests["live"] + fake.requests["index"]
            await wait_until_async(
                lambda: fake.requests["live"] + fake.requests["index"] > probes + 4
            )
            assert states(pool) == {HealthState.SLOW: 1}
            assert "must be a list" in replica_of(pool, fake).reason
            fake.index_body = None
            await wait_until_async(lambda: states(pool) == {HealthState.UP: 1})


@pytest.mark.fault(
    "a flood of requests for the repository index, each of which probes every replica"
)
@on_uvloop
async def test_calls_for_the_index_share_the_probes_that_they_wait_for() -> None:
    async with simulated_replicas(2, ["a"]) as fakes, over(fakes, NEVER_S) as pool:
        before = fakes[0].requests["index"]
        first = asyncio.create_task(pool.monitor.probe_all())
        await asyncio.sleep(0)  # it has begun
        fakes[0].models["new"] = True
        cancelled, *others = (asyncio.create_task(pool.monitor.probe_all()) for _ in range(100))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(first, *others)
        say(f"100 calls at the same time cost {fakes[0].requests['index'] - before} probes")
        assert fakes[0].requests["index"] - before <= 3
        assert all(replica.index.models for replica in pool.replicas.values())
        assert pool.has_model("new")  # as after any of the calls


def test_planning_costs_as_much_for_each_model_however_many_there_are() -> None:
    def plan(models: int) -> int:
        said = [{"name": f"model_{n}", "version": "1", "state": "READY"} for n in range(models)]
        index = parse_index(said)
        wishes = {entry["name"]: DesiredModel(True, revision=1) for entry in said}
        loads = dict.fromkeys(wishes, "1")
        assert not list(plan_actions(wishes, index, loads))
        return count_calls(lambda: list(plan_actions(wishes, index, loads)))

    few, many = plan(MODELS), plan(10 * MODELS)
    say(f"planning for a replica with {MODELS} models: {few} calls, with ten times as many: {many}")
    assert many <= 10 * few


@on_uvloop
async def test_a_pool_leaves_nothing_behind() -> None:
    before = asyncio.all_tasks()
    async with simulated_replicas(3) as fakes:
        async with over(fakes) as pool, managing(pool):
            await at_once(pool, 10)
        assert asyncio.all_tasks() == before
        await wait_until_async(lambda: not any(fake.connections for fake in fakes))


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

    def pool(self, fake: SimulatedTriton, poll_s: float = POLL_S) -> ReplicaPool:
        named = DnsName(ReplicaAddress(NAME, fake.port, fake.grpc_port), resolver=self)
        settings = Settings(
            connect_timeout_s=CONNECT_TIMEOUT_S, poll_interval_s=poll_s, dns_interval_s=0.1
        )
        return ReplicaPool([named], settings)


@pytest.mark.fault("DNS returns new addresses, none, or an error")
@on_uvloop
async def test_a_new_replica_gets_its_models_with_nobody_doing_anything() -> None:
    async with simulated_replicas(3, ["a", "b", "c"]) as fakes:
        for fake in fakes:
            fake.models = dict.fromkeys(fake.models, False)
            fake.load_s = 0.05
        names = Names([fake.host for fake in fakes[:2]])
        async with names.pool(fakes[0]) as pool, managing(pool) as repository:
            for model in ("a", "b"):
                document = (await repository.load(model, {})).to_dict()
                assert document["state"] == "READY"
                assert len(document["replicas"]) == 2
            assert fakes[1].models == {"a": True, "b": True, "c": False}
            names.hosts = [fake.host for fake in fakes]
            took_s = await wait_until_async(lambda: fakes[2].models == fakes[1].models)
            await wait_until_async(lambda: replica_of(pool, fakes[2]).index.is_ready("b"))
            say(f"a new replica had its models after {took_s:.1f} s")
            await asyncio.gather(*(infer(pool, "b") for _ in range(60)))
            assert all(fake.inferences["b"] > 10 for fake in fakes)


@with_skips
async def test_a_replica_that_restarts_gets_its_models_again_and_loses_what_was_unloaded() -> None:
    async with (
        simulated_replicas(2, ["a", "b"]) as fakes,
        over(fakes) as pool,
        managing(pool) as repository,
    ):
        await repository.load("a", {})
        await repository.unload("b", {})
        await fakes[1].stop()
        await skip_until(lambda: states(pool)[HealthState.DOWN] == 1)
        fakes[1].models = {"a": False, "b": True}
        await fakes[1].start()
        await skip_until(lambda: fakes[1].models == {"a": True, "b": False})


# Several gateways.


async def restart(pools: Sequence[ReplicaPool], fake: SimulatedTriton) -> None:
    """End a replica, and start it again with its models loaded by itself."""
    await fake.stop()
    await wait_until_async(lambda: all(is_in(pool, fake, HealthState.DOWN)() for pool in pools))
    fake.models = dict.fromkeys(fake.models, True)
    fake.requests.clear()
    await fake.start()


async def several_looks(fake: SimulatedTriton, gateways: int) -> None:
    """Wait until gateways have looked at a replica for a few of their rounds."""
    looks = fake.requests["index"] + 3 * gateways * RECONCILE_INTERVAL_S / POLL_S
    await wait_until_async(lambda: fake.requests["index"] > looks)


@pytest.mark.fault("a gateway exits in the middle of a load, or a Triton misses one")
@pytest.mark.parametrize("by", ["leader", "another"])
@on_uvloop
async def test_a_load_that_a_replica_missed_is_made_good(tmp_path: Path, by: str) -> None:
    """The replica has the model all the while, but an older version of it."""
    state = f"file://{tmp_path}/state.json"
    async with simulated_replicas(3) as fakes, over(fakes) as first, over(fakes) as second:
        async with managing(first, state=state) as leader:
            await leader.load("m", {})
            async with managing(second, state=state) as another:
                await fakes[2].stop()
                for pool in (first, second):
                    await wait_until_async(is_in(pool, fakes[2], HealthState.DOWN))
                with pytest.raises(PartialFailure):
                    await (leader if by == "leader" else another).load("m", {})
                assert leader.outdated_replicas("m") or by == "another"
                fakes[2].requests.clear()
                await fakes[2].start()
                await wait_until_async(lambda: fakes[2].requests["load"])
                await wait_until_async(lambda: not leader.outdated_replicas("m"))
                await wait_until_async(lambda: not another.outdated_replicas("m"))
        loads = [fake.requests["load"] for fake in fakes]
        assert loads == [2, 2, 1]


@pytest.mark.fault("a gateway exits in the middle of a load, or a Triton misses one")
@on_uvloop
async def test_a_load_that_a_gateway_did_not_finish_is_finished_by_the_next(tmp_path: Path) -> None:
    state = f"file://{tmp_path}/state.json"
    async with simulated_replicas(3) as fakes, over(fakes) as pool:
        async with managing(pool, state=state) as ended:
            await ended.load("m", {})
            for fake in fakes[1:]:
                fake.load_s = 3600
            loading = asyncio.create_task(ended.load("m", {}))
            await wait_until_async(lambda: all(fake.requests["load"] == 2 for fake in fakes))
            await wait_until_async(
                lambda: len(ended.outdated_replicas("m")) == 0
            )  # under way, or done
        loading.cancel()
        for fake in fakes[1:]:
            fake.load_s = 0
        async with managing(pool, state=state) as following:
            await wait_until_async(
                lambda: (
                    [fake.requests["load"] for fake in fakes[1:]] == [3, 3]
                    and not following.outdated_replicas("m")
                )
            )
            assert not following.loader.load_errors


@pytest.mark.long
@pytest.mark.fault("the gateway is killed or restarted during a staged load")
@on_uvloop
async def test_a_staged_load_that_a_gateway_did_not_finish_is_not_finished_by_the_next(
    tmp_path: Path,
) -> None:
    state = f"file://{tmp_path}/state.json"
    async with simulated_replicas(3) as fakes, over(fakes) as pool:
        async with managing(pool, state=state) as ended:
            await ended.load("m", {})
            before = ended.state.desired_models
            fakes[1].load_s = 3600
            loading = asyncio.create_task(ended.load("m", {"staged": True}))
            await wait_until_async(lambda: fakes[1].requests["load"] == 2)
        loading.cancel()
        fakes[1].load_s = 0
        async with managing(pool, state=state) as following:
            assert following.state.desired_models == before
            # Whatever was begun is undone.
            await wait_until_async(
                lambda: (
                    [fake.requests["load"] for fake in fakes[:2]] == [3, 3]
                    and not following.outdated_replicas("m")
                )
            )
            await several_looks(fakes[2], 1)
            assert fakes[2].requests["load"] == 1


@pytest.mark.parametrize("state", ["none:", "file"])
@on_uvloop
async def test_a_staged_load_changes_no_replica_unless_it_can_be_recorded(
    tmp_path: Path, state: str
) -> None:
    url = state if state == "none:" else f"file://{tmp_path}/folder/state.json"
    async with (
        simulated_replicas(2) as fakes,
        over(fakes) as pool,
        managing(pool, state=url) as repository,
    ):
        shutil.rmtree(tmp_path / "folder", ignore_errors=True)
        with pytest.raises(GatewayError) as refused:
            await repository.load("m", {"staged": True})
        assert refused.value.code in ("STATE_NOT_SHARED", "STATE_UNAVAILABLE")
        assert not any(fake.requests["load"] for fake in fakes)


@on_uvloop
async def test_a_replica_that_restarts_gets_the_config_that_was_loaded(tmp_path: Path) -> None:
    """Triton loads its models at its start, and knows nothing of other parameters."""
    state = f"file://{tmp_path}/state.json"
    async with (
        simulated_replicas(2) as fakes,
        over(fakes) as first,
        over(fakes) as second,
        managing(first, state=state) as leader,
        managing(second, state=state) as another,
    ):
        await another.load("m", {"unload_dependents": True})  # any parameter
        await restart([first, second], fakes[1])
        await wait_until_async(lambda: fakes[1].requests["load"])
        await wait_until_async(lambda: not leader.outdated_replicas("m"))
        assert fakes[0].requests["load"] == 1


@pytest.mark.long
@pytest.mark.fault("a gateway exits in the middle of a load, or a Triton misses one")
@on_uvloop
async def test_gateways_that_load_at_once_come_to_rest(tmp_path: Path) -> None:
    state = f"file://{tmp_path}/state.json"
    async with simulated_replicas(3, load_s=0.01) as fakes, contextlib.AsyncExitStack() as stack:
        repositories = [
            await stack.enter_async_context(
                managing(await stack.enter_async_context(over(fakes)), state=state)
            )
            for _ in range(3)
        ]
        for _ in range(5):
            await asyncio.gather(*(repository.load("m", {}) for repository in repositories))
        # Which of several concurrent loads was the last is unknown: a round may need one more.
        await several_looks(fakes[0], 3)
        await wait_until_async(
            lambda: not any(each.outdated_replicas("m") for each in repositories)
        )
        loads = [fake.requests["load"] for fake in fakes]
        await several_looks(fakes[0], 3)
        assert [fake.requests["load"] for fake in fakes] == loads
        assert max(loads) <= 3 * 5 + 5  # at most one more in each round


@on_uvloop
async def test_a_refused_load_does_not_undo_a_later_one_of_another_gateway(tmp_path: Path) -> None:
    state = f"file://{tmp_path}/state.json"
    async with (
        simulated_replicas(2) as fakes,
        over(fakes) as first,
        over(fakes) as second,
        managing(first, state=state) as refused,
        managing(second, state=state) as loaded,
    ):
        for fake in fakes:
            fake.refuses_loads = True
        loading = asyncio.create_task(refused.load("m", {}))
        await wait_until_async(lambda: all(fake.held for fake in fakes))
        for fake in fakes:
            fake.refuses_loads = False
        await loaded.load("m", {})
        for fake in fakes:
            fake.release()
        with pytest.raises(LoadFailed):
            await loading
        for repository in (refused, loaded):
            await repository.state.refresh()
            assert repository.state.desired_models["m"].is_loaded


@pytest.mark.long
@on_uvloop
async def test_gateways_that_share_no_state_refuse_changes() -> None:
    async with (
        simulated_replicas(2) as fakes,
        over(fakes) as first,
        over(fakes) as second,
        managing(first, state="none:") as one,
        managing(second, state="none:") as other,
    ):
        for repository in (one, other):
            for change in (repository.load("m", {}), repository.unload("m", {})):
                with pytest.raises(Conflict, match="GATEWAY_STATE is none:") as refused:
                    await change
                assert (refused.value.status, refused.value.code) == (409, "STATE_NOT_SHARED")
        await several_looks(fakes[0], 2)
        assert not any(fake.requests["load"] or fake.requests["unload"] for fake in fakes)


@on_uvloop
async def test_unloading_a_model_that_is_in_no_repository_forgets_it(tmp_path: Path) -> None:
    state = f"file://{tmp_path}/state.json"
    async with (
        simulated_replicas(2) as fakes,
        over(fakes) as pool,
        managing(pool, state=state) as repository,
    ):
        await repository.load("m", {})
        for fake in fakes:
            del fake.models["m"]
        await wait_until_async(lambda: "m" in repository.loader.load_errors)
        report = (await repository.unload("m", {})).to_dict()
        assert report["state"] == "UNAVAILABLE"
        assert len(report["replicas"]) == 2
        assert repository.state.desired_models == {}
        with pytest.raises(UnknownModel):
            await repository.unload("m", {})


@with_skips
async def test_declared_models_are_loaded_wherever_they_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    file = declaring(path, "models: [a]")
    async with simulated_replicas(3, ["a", "b"]) as fakes, over(fakes) as pool:
        fakes[0].models["a"] = fakes[2].models["b"] = False
        async with managing(pool, file):
            await skip_until(lambda: fakes[0].models["a"])
            path.write_text("models: [a, b]")
            await skip_until(lambda: fakes[2].models["b"])
            fakes[1].models["a"] = False  # behind our back
            await skip_until(lambda: fakes[1].models["a"])


@pytest.mark.fault("a misspelled or slow model is added to the models file")
@with_skips
async def test_what_is_declared_while_the_gateway_runs_counts_once_it_was_ready(
    tmp_path: Path,
) -> None:
    path = tmp_path / "models.yaml"
    file = declaring(path, "models: [a]")
    async with simulated_replicas(2, ["a", "slow"], load_s=12.0) as fakes:
        for fake in fakes:
            fake.models["slow"] = False
        async with over(fakes) as pool, managing(pool, file) as repository:

            def pending() -> set[str]:
                found = repository.readiness.check(is_draining=False)
                assert found.is_ready, found.document
                return set(found.document.get("pending", ()))

            path.write_text("models: [a, slow, misspelt]")
            await skip_until(lambda: pending() == {"slow", "misspelt"})
            await skip_until(lambda: pending() == {"misspelt"})
            await skip_until(lambda: all(fake.models["slow"] for fake in fakes))
            for fake in fakes:
                fake.load_s = NEVER_S  # it is not loaded again before both were seen without it
                fake.models["slow"] = False
            await skip_until(lambda: not repository.readiness.check(is_draining=False).is_ready)


@with_skips
async def test_a_declared_model_that_cannot_be_loaded_is_tried_more_and_more_rarely(
    tmp_path: Path,
) -> None:
    file = declaring(tmp_path / "models.yaml", "models: [nowhere, m]")
    async with (
        simulated_replicas(2) as fakes,
        over(fakes, NEVER_S) as pool,
        managing(pool, file) as repository,
    ):
        await skip_until(lambda: all(len(fake.loads_at) > 3 for fake in fakes))
        for fake in fakes:
            pauses_s = [after - before for before, after in itertools.pairwise(fake.loads_at)]
            say(f"tried again after {[f'{pause_s:.1f} s' for pause_s in pauses_s]}")
            assert all(
                pause_s >= INITIAL_BACKOFF_S * 2**number for number, pause_s in enumerate(pauses_s)
            )
        assert "failed to poll" in repository.loader.load_errors["nowhere"]
        await infer(pool)


@pytest.mark.fault("DNS returns new addresses, none, or an error")
@on_uvloop
async def test_an_address_that_is_gone_gets_nothing_more() -> None:
    async with simulated_replicas(3) as fakes:
        names = Names([fake.host for fake in fakes])
        async with names.pool(fakes[0], poll_s=0.1) as pool:
            assert states(pool)[HealthState.UP] == 3
            names.hosts = [fake.host for fake in fakes[1:]]
            await wait_until_async(lambda: len(pool.replicas) == 2)
            await wait_until_async(lambda: not fakes[0].connections)
            before = fakes[0].requests.copy()
            looks = fakes[1].requests["index"]
            assert not (await at_once(pool, 50)).errors
            await wait_until_async(lambda: fakes[1].requests["index"] > looks + 2)
            assert fakes[0].requests == before


@on_uvloop
async def test_of_addresses_that_come_and_go_nothing_stays() -> None:
    async with simulated_replicas(3) as fakes:
        names = Names([fake.host for fake in fakes])
        async with names.pool(fakes[0]) as pool, managing(pool) as repository:
            assert not (await at_once(pool, 20)).errors
            await repository.load("m", {})
            gone = replica_of(pool, fakes[0]).name
            assert gone in replicas_in_metrics(pool)
            names.hosts = [fake.host for fake in fakes[1:]]
            await wait_until_async(lambda: len(pool.replicas) == 2)
            await wait_until_async(lambda: gone not in repository.state.loads)
            assert gone not in replicas_in_metrics(pool)
            assert len(replicas_in_metrics(pool)) == 2


@on_uvloop
async def test_a_cordon_ends_when_the_address_leaves_and_not_when_its_process_does() -> None:
    async with simulated_replicas(3) as fakes:
        names = Names([fake.host for fake in fakes])
        async with names.pool(fakes[0]) as pool, managing(pool) as repository:
            leaving, restarting = (replica_of(pool, fake).name for fake in fakes[:2])
            maintenance = Maintenance(pool, dispatcher_of(pool), repository.state)
            for name in (leaving, restarting):
                await maintenance.cordon(name)
            for _ in range(20):
                await infer(pool)
            assert [fake.inferences["m"] for fake in fakes] == [0, 0, 20]
            await fakes[1].stop()
            await wait_until_async(is_in(pool, fakes[1], HealthState.DOWN))
            await fakes[1].start()
            await wait_until_async(is_in(pool, fakes[1], HealthState.UP))
            names.hosts = [fake.host for fake in fakes[1:]]
            await wait_until_async(lambda: pool.cordoned == {restarting})
            # Another replica may get the address.
            names.hosts = [fake.host for fake in fakes]
            await wait_until_async(lambda: len(pool.replicas) == 3)
            await wait_until_async(is_in(pool, fakes[0], HealthState.UP))
            assert pool.cordoned == {restarting}


@pytest.mark.parametrize("gateways", [1, 2])
@on_uvloop
async def test_cordons_at_once_leave_a_replica_that_serves(tmp_path: Path, gateways: int) -> None:
    state = f"file://{tmp_path}/state.json"
    async with simulated_replicas(2) as fakes, contextlib.AsyncExitStack() as stack:
        callers = []
        for _ in range(gateways):
            pool = await stack.enter_async_context(over(fakes))
            repository = await stack.enter_async_context(managing(pool, state=state))
            callers.append(Maintenance(pool, dispatcher_of(pool), repository.state))
        names = [str(fake.address) for fake in fakes]
        for _ in range(5):
            results = await asyncio.gather(
                *(caller.cordon(name) for caller, name in zip(callers * 2, names, strict=False)),
                return_exceptions=True,
            )
            assert [type(result) for result in results].count(Conflict) == 1
            assert len(callers[0].pool.cordoned | callers[-1].pool.cordoned) == 1
            for name in names:
                await callers[0].uncordon(name)


@pytest.mark.long
@with_skips
async def test_the_state_of_a_replica_that_nobody_saw_leave_is_deleted_later(
    tmp_path: Path,
) -> None:
    state, gone = f"file://{tmp_path}/state.json", "127.0.9.9:8000"
    store = open_state_store(state)
    await store.set_cordon(gone, is_cordoned=True)
    token, _ = await store.begin_load(gone, "m")
    await store.end_load(gone, "m", token, "1")
    async with (
        simulated_replicas(2) as fakes,
        over(fakes) as pool,
        managing(pool, state=state) as repository,
    ):
        present = replica_of(pool, fakes[0]).name
        await repository.state.set_cordon(present, is_cordoned=True)
        await wait_until_async(lambda: gone in pool.cordoned)
        skip(MAX_ABSENCE_S / 2)
        await repository.state.refresh()
        assert gone in repository.state.loads
        await skip_until(lambda: pool.cordoned == {present})
        await skip_until(lambda: gone not in repository.state.loads)
        assert await store.read_cordons() == {present}
    await store.close()


@on_uvloop
async def test_a_replica_that_is_absent_can_be_uncordoned() -> None:
    async with simulated_replicas(2) as fakes, over(fakes) as pool, managing(pool) as repository:
        maintenance = Maintenance(pool, dispatcher_of(pool), repository.state)
        await repository.state.set_cordon("127.0.9.9:8000", is_cordoned=True)
        pool.set_cordoned(repository.state.cordoned)
        assert (await maintenance.uncordon("127.0.9.9:8000")).is_finished
        assert pool.cordoned == frozenset()
        with pytest.raises(UnknownReplica):
            await maintenance.uncordon("127.0.9.9:8000")


@on_uvloop
async def test_statistics_that_cannot_be_read_are_no_inference() -> None:
    async with simulated_replicas(1) as fakes, over(fakes) as pool:
        times, replica = InferenceTimes(), replica_of(pool, fakes[0])
        fakes[0].last_inference_ms = int(time.time() * 1000) - 60_000
        ran_at = await times.read(replica, "m")
        assert -61 < ran_at - time.perf_counter() < -59
        fakes[0].denies = True
        assert await times.read(replica, "m") == -math.inf
        fakes[0].denies = False
        assert await times.read(replica, "m") == ran_at


def replicas_in_metrics(pool: ReplicaPool) -> set[str]:
    pool.metrics.flush()
    samples = (sample for metric in pool.metrics.collect() for sample in metric.samples)
    return {sample.labels["replica"] for sample in samples if "replica" in sample.labels}


@on_uvloop
async def test_what_is_under_way_at_an_address_that_is_gone_comes_to_its_end() -> None:
    async with simulated_replicas(1) as (fake,):
        fake.holds = True
        names = Names([fake.host])
        async with names.pool(fake) as pool:
            asking = asyncio.create_task(infer(pool))
            await wait_until_async(lambda: fake.inferences["m"])
            names.hosts = ["127.0.1.9"]
            await wait_until_async(
                lambda: [address.host for address in pool.replicas] == ["127.0.1.9"]
            )
            assert not asking.done()
            fake.release()
            await asking
            # Its series are gone as well.
            assert {name.split(":")[0] for name in replicas_in_metrics(pool)} == {"127.0.1.9"}


@on_uvloop
async def test_a_load_on_an_address_that_is_gone_is_not_waited_for() -> None:
    async with simulated_replicas(2) as fakes:
        for fake in fakes:
            fake.models["m"] = False
        fakes[0].load_s = 3600
        names = Names([fake.host for fake in fakes])
        async with names.pool(fakes[0]) as pool, managing(pool) as repository:
            loading = asyncio.create_task(repository.load("m", {}))
            await wait_until_async(lambda: fakes[0].requests["load"] and fakes[1].models["m"])
            names.hosts = [fakes[1].host]
            with pytest.raises(GatewayError) as told:
                await asyncio.wait_for(loading, TIMEOUT_S)
            assert told.value.status == 502
            assert (await repository.load("m", {})).to_dict()["state"] == "READY"


@pytest.mark.fault("DNS returns new addresses, none, or an error")
@on_uvloop
async def test_a_name_that_cannot_be_looked_up_keeps_what_it_stood_for() -> None:
    async with simulated_replicas(3) as fakes:
        names = Names([fake.host for fake in fakes[:2]])
        async with names.pool(fakes[0]) as pool:
            for error, hosts in ((OSError("SERVFAIL"), ["127.0.1.9"]), (None, list[str]())):
                names.error, names.hosts = error, hosts
                names.asked = 0
                await wait_until_async(lambda: names.asked > 2)
                assert states(pool) == {HealthState.UP: 2}
                assert not (await at_once(pool, 20)).errors
            names.hosts = [fake.host for fake in fakes]
            await wait_until_async(lambda: states(pool) == {HealthState.UP: 3})


@pytest.mark.fault("DNS returns new addresses, none, or an error")
@on_uvloop
async def test_a_name_that_stands_for_nothing_at_the_start_is_looked_up_again() -> None:
    async with simulated_replicas(1) as (fake,):
        names = Names(error=OSError("NXDOMAIN"))
        async with names.pool(fake) as pool:
            with pytest.raises(NoReplica):
                await infer(pool)
            names.error, names.hosts = None, [fake.host]
            await wait_until_async(lambda: states(pool) == {HealthState.UP: 1})
            await infer(pool)


# What it survives.


async def shares(
    pool: ReplicaPool, fakes: Sequence[SimulatedTriton], callers: int, count: int
) -> list[float]:
    """The parts of the requests that each replica gets from callers who wait for their answers."""
    for fake in fakes:
        fake.inferences.clear()
    assert not (await in_turns(pool, count, callers)).errors
    seen = [fake.inferences["m"] for fake in fakes]
    found = [number / sum(seen) for number in seen]
    say(f"{callers} callers: " + ", ".join(f"{share:.1%}" for share in found))
    return found


@pytest.mark.long
@pytest.mark.parametrize("callers", [1, 2, 8, 32])
@on_uvloop
async def test_equal_replicas_get_equal_shares(callers: int) -> None:
    async with simulated_replicas(3, delay_s=0.001) as fakes, over(fakes) as pool:
        found = await shares(pool, fakes, callers, 1536)
    assert all(abs(share - 1 / 3) < 0.05 for share in found)


@pytest.mark.long
@pytest.mark.parametrize("callers", [1, 8])
@on_uvloop
async def test_a_replica_whose_first_answers_are_slow_gets_its_share(callers: int) -> None:
    async with simulated_replicas(3, delay_s=0.001) as fakes, over(fakes) as pool:
        fakes[0].cold_s = 0.5
        while fakes[0].cold_s:
            await in_turns(pool, 64, callers)
        found = await shares(pool, fakes, callers, 1536)
    assert all(abs(share - 1 / 3) < 0.05 for share in found)


@pytest.mark.long
@on_uvloop
async def test_slower_replicas_get_less_and_each_gets_some() -> None:
    async with simulated_replicas(4) as fakes, over(fakes) as pool:
        for fake, delay_s in zip(fakes, (0.01, 0.01, 0.03, 0.1), strict=True):
            fake.delay_s = delay_s
        one, other, slower, slowest = await shares(pool, fakes, 16, 3000)
    assert abs(one - other) < 0.1
    assert min(one, other) > slower > slowest > 0


@pytest.mark.fault("a Triton becomes 500 ms slower than the others")
@on_uvloop
async def test_a_slow_replica_gets_little_and_costs_the_callers_little() -> None:
    async with simulated_replicas(3, delay_s=0.005) as fakes, over(fakes) as pool:
        fakes[0].delay_s = 0.505
        # Until its first answers are there, nothing tells it from the others.
        first, found = await at_once(pool, 6), await in_turns(pool, 194, callers=2)
        slow = fakes[0].inferences["m"]
        say(f"the slow one got {slow} of 200; p99 of the later ones {found.p99_s * 1000:.0f} ms")
        assert not first.errors + found.errors
        assert 0 < slow < 200 / 3 / 4


@on_uvloop
async def test_a_replica_that_is_slow_no_more_gets_its_share_again() -> None:
    async with simulated_replicas(3, delay_s=0.04) as fakes, over(fakes, poll_s=0.05) as pool:
        pace = replica_of(pool, fakes[0]).latency
        fakes[0].delay_s = 0.3
        while pace.ratio < 1.5:
            await at_once(pool, 3)
        fakes[0].delay_s = 0.04
        await wait_until_async(lambda: pace.ratio < 1.4)
        fakes[0].inferences.clear()
        await at_once(pool, 90)
        assert fakes[0].inferences["m"] > 90 / 3 / 2


@pytest.mark.fault("a Triton cannot be connected to: refused, dropped, reset")
@on_uvloop
async def test_a_refused_connection_is_not_the_callers_business() -> None:
    async with simulated_replicas(3) as fakes, over(fakes, poll_s=NEVER_S) as pool:
        assert not (await at_once(pool, 20)).errors
        await kill(pool, fakes[0])
        assert not (await at_once(pool, 20)).errors
        assert pool.replica_state(replica_of(pool, fakes[0])) is HealthState.DOWN
        await fakes[0].start()
        replica_of(pool, fakes[0]).probe_requested.set()
        await wait_until_async(is_back(pool, fakes[0]))


@contextmanager
def black_hole(address: ReplicaAddress) -> Iterator[None]:
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


@pytest.mark.fault("a Triton cannot be connected to: refused, dropped, reset")
@on_uvloop
async def test_a_black_hole_costs_a_few_callers_half_a_second_and_then_nobody_anything() -> None:
    async with (
        simulated_replicas(3) as fakes,
        watching([fake.address for fake in fakes], 0.1, connect_timeout_s=0.5) as pool,
    ):
        await fakes[0].stop()
        with black_hole(fakes[0].address):
            first = await at_once(pool, 20)
            say(f"the slowest of the first took {max(first.took_s):.2f} s")
            assert not first.errors
            assert max(first.took_s) > 0.49
            assert 0 < refusals(pool, fakes[0]) < 10
            await wait_until_async(is_in(pool, fakes[0], HealthState.SLOW))
            before = refusals(pool, fakes[0])
            then = await at_once(pool, 20)
            assert not then.errors
            assert refusals(pool, fakes[0]) == before
        await fakes[0].start()
        await wait_until_async(is_back(pool, fakes[0]))


@pytest.mark.fault("a Triton accepts requests and never responds")
@on_uvloop
async def test_a_replica_that_accepts_and_never_answers_is_left_alone() -> None:
    async with simulated_replicas(3) as fakes, over(fakes, poll_s=0.1) as pool:
        fakes[0].hangs = True
        first = Load()
        asking = [asyncio.create_task(first.ask(pool)) for _ in range(20)]
        await wait_until_async(lambda: sum(fake.inferences["m"] for fake in fakes) == 20)
        hung = fakes[0].inferences["m"]
        assert 0 < hung < 10
        await wait_until_async(lambda: len(first.took_s) == 20 - hung)  # nobody else waits for it
        assert not first.errors
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        late = await at_once(pool, 20, timeout_s=0.3)
        assert len(late.errors) >= fakes[0].inferences["m"] - hung > 0
        assert {type(error) for error in late.errors} == {DeadlinePassed}

        await wait_until_async(is_in(pool, fakes[0], HealthState.SLOW))
        hung = fakes[0].inferences["m"]
        then = await at_once(pool, 20)
        assert not then.errors
        assert fakes[0].inferences["m"] == hung
        fakes[0].hangs = False
        await wait_until_async(is_back(pool, fakes[0]))


@with_skips
async def test_where_all_replicas_fail_no_more_than_half_are_ejected_until_they_are_well() -> None:
    async with (
        simulated_replicas(10, garbles=True) as fakes,
        over(fakes, poll_s=NEVER_S) as pool,
    ):
        for _ in range(30):
            found = await at_once(pool, 10)
            assert {type(error) for error in found.errors} == {BadUpstream}
            assert len(found.errors) == 10  # each may have run: none is retried
            assert states(pool)[HealthState.EJECTED] <= 5
        skip(EJECTION_S)
        await wait_until_async(lambda: states(pool) == {HealthState.UP: 10})
        while states(pool)[HealthState.EJECTED] < 5:
            await at_once(pool, 10)
        ejected = [fake for fake in fakes if is_in(pool, fake, HealthState.EJECTED)()]
        for fake in fakes:
            fake.garbles = False
            fake.inferences.clear()
        assert not (await at_once(pool, 60)).errors
        assert not any(fake.inferences["m"] for fake in ejected)
        skip(2 * EJECTION_S)  # as long as a second ejection lasts
        await wait_until_async(lambda: states(pool) == {HealthState.UP: 10})
        await asyncio.sleep(0.01)
        assert not (await at_once(pool, 200)).errors
        assert all(fake.inferences["m"] for fake in ejected)


@on_uvloop
async def test_an_ejected_replica_is_asked_where_no_other_is_left() -> None:
    async with simulated_replicas(2) as fakes, over(fakes, poll_s=NEVER_S) as pool:
        fakes[0].garbles = True
        while not states(pool)[HealthState.EJECTED]:
            await at_once(pool, 10)
        fakes[0].garbles = False
        await kill(pool, fakes[1])
        assert not (await in_turns(pool, 20)).errors


@on_uvloop
async def test_short_deadlines_do_not_eject_a_replica_that_is_well() -> None:
    async with (
        simulated_replicas(4, delay_s=30) as fakes,
        over(fakes, poll_s=1) as pool,
    ):
        for _ in range(15):  # a few at a time: a pause of this process is the failure of as many
            found = await at_once(pool, 8, timeout_s=0.02)
            assert len(found.errors) == 8
            assert {type(error) for error in found.errors} == {DeadlinePassed}
        assert states(pool) == {HealthState.UP: 4}


@on_uvloop
async def test_a_model_that_was_unloaded_behind_our_back_is_asked_elsewhere_at_once() -> None:
    async with simulated_replicas(3) as fakes, over(fakes, poll_s=NEVER_S) as pool:
        fakes[0].models["m"] = False
        while not fakes[0].inferences["m"]:
            assert not (await at_once(pool, 2)).errors  # two go to different replicas
        assert not (await at_once(pool, 50)).errors
        assert fakes[0].inferences["m"] == 1
        assert not replica_of(pool, fakes[0]).index.is_ready("m")
        # It is looked at again.
        await wait_until_async(lambda: replica_of(pool, fakes[0]).raw_index)
        assert replica_of(pool, fakes[0]).index.model_state("m").reason == "unloaded"


@on_uvloop
async def test_other_models_are_asked_on_a_replica_that_lost_one() -> None:
    async with simulated_replicas(2, ["m", "other"]) as fakes, over(fakes) as pool:
        fakes[0].models["m"] = False
        for _ in range(10):
            await infer(pool)
        assert fakes[0].inferences["m"] <= 1
        await asyncio.gather(*(infer(pool, "other") for _ in range(40)))
        assert fakes[0].inferences["other"] > 10


@on_uvloop
async def test_retries_do_not_double_the_load_of_a_fleet_that_refuses_everything() -> None:
    async with simulated_replicas(4, denies=True) as fakes, over(fakes, poll_s=0.05) as pool:
        for _ in range(10):
            found = await at_once(pool, 40)
            assert {type(error) for error in found.errors} == {ModelNotReady}
            assert len(found.errors) == 40
            await wait_until_async(
                lambda: all(each.index.is_ready("m") for each in pool.replicas.values())
            )
        sent = sum(fake.inferences["m"] for fake in fakes)
        say(f"400 requests became {sent}")
        assert 400 < sent <= 1.2 * 400 + 10


@pytest.mark.fault("a load reaches two of three Tritons")
@on_uvloop
async def test_a_load_that_one_of_three_cannot_take_is_told_of_and_made_up_for() -> None:
    async with simulated_replicas(3, ["a"]) as fakes, over(fakes) as pool:
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
            await wait_until_async(lambda: fakes[2].models["a"])
            await wait_until_async(lambda: replica_of(pool, fakes[2]).index.is_ready("a"))


@pytest.mark.fault("fifty concurrent loads and unloads of one model")
@on_uvloop
async def test_many_loads_and_unloads_of_a_model_follow_one_another() -> None:
    async with (
        simulated_replicas(2, ["a"], load_s=0.02) as fakes,
        over(fakes) as pool,
        managing(pool) as repository,
    ):
        calls: list[Awaitable[Any]] = []
        for _ in range(10):
            calls.append(repository.unload("a", {}))
            calls.append(repository.load("a", {}))
        reports = await asyncio.gather(*calls)
        assert {report.to_dict()["state"] for report in reports} == {"READY", "UNAVAILABLE"}
        assert repository.state.desired_models["a"].is_loaded
        assert all(fake.models == {"a": True} for fake in fakes)


@on_uvloop
async def test_an_index_that_is_none_costs_its_replica_and_nobody_else() -> None:
    hostile = [b"", b"{}", b"[1]", b'[{"name":"m","version":' + b"[" * 900 + b"]" * 900 + b"}]"]
    async with simulated_replicas(3) as fakes, over(fakes, poll_s=0.05) as pool:
        for body in hostile:
            fakes[0].index_body = body
            await wait_until_async(is_in(pool, fakes[0], HealthState.SLOW))
            assert not (await at_once(pool, 10)).errors
            fakes[0].index_body = None
            await wait_until_async(lambda: states(pool)[HealthState.UP] == 3)
