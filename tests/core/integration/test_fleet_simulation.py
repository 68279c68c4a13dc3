"""The fleet's classes with simulated replicas, of which a machine has room for a hundred."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import shutil
import socket
import statistics
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import Settings
from gateway.errors import (
    BadUpstream,
    Conflict,
    DeadlinePassed,
    GatewayError,
    ModelNotReady,
    UnknownModel,
)
from gateway.fleet.balancer import choose_less_loaded
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.health import SLOW_INDEX_S, HealthState
from gateway.fleet.index import parse_index
from gateway.fleet.pool import NoReplica, ReplicaPool, UnknownReplica
from gateway.fleet.probe import PROBE_TIMEOUT_S
from gateway.fleet.replica import Replica, ReplicaAddress
from gateway.fleet.signatures import SignatureCache
from gateway.fleet.transports import HttpCall
from gateway.http_client.client import UpstreamResponse
from gateway.repository.maintenance import Maintenance
from gateway.repository.models_file import ModelsFile
from gateway.repository.operations import PartialFailure
from gateway.repository.plan import INITIAL_BACKOFF_S, ReplicaView, plan_actions
from gateway.repository.reconciler import MAX_ABSENCE_S, RECONCILE_INTERVAL_S
from gateway.repository.repository import Repository, build_repository
from gateway.repository.state.content import ALL, CONFIRMED, CORDONS, DesiredModel
from gateway.repository.state.places import open_state_store
from gateway.triton.error_mapping import LoadFailed
from gateway.triton.request_target import RequestTarget
from tests.support.calls import count_calls
from tests.support.dns import DnsAnswers
from tests.support.simulated_replicas import SimulatedTriton, simulated_replicas
from tests.support.state import opened
from tests.support.wait import TIMEOUT_S, wait_until_async

REPLICAS, MODELS = 100, 200
POLL_S = 0.5
CONNECT_TIMEOUT_S = 30.0  # of connections that are not to be given up
NEVER_S = 3600.0


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward; between that it goes on as any other."""

    _skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


with_skips = pytest.mark.parametrize(
    "anyio_backend", [pytest.param(("asyncio", {"loop_factory": SkippingLoop}), id="skipping")]
)


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


def watching(
    addresses: Iterable[ReplicaAddress],
    poll_s: float = POLL_S,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
) -> ReplicaPool:
    settings = Settings(connect_timeout_s=connect_timeout_s, poll_interval_s=poll_s)
    return ReplicaPool(list(addresses), settings)


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
    async with build_repository(
        pool, signatures, open_state_store(state), models_file=file, settings=Settings()
    ) as repository:
        yield repository
    signatures.close()


def declaring(path: Path, text: str) -> ModelsFile:
    path.write_text(text)
    return ModelsFile(path)


# Callers.


@functools.lru_cache(16)
def dispatcher_of(pool: ReplicaPool) -> Dispatcher:
    """Return the dispatcher of a pool, which remembers what it sent."""
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


class RequestBody(list[bytes | memoryview]):
    """A body that can be referenced weakly."""


class FailingCall(HttpCall):
    async def send(self, *_: object) -> UpstreamResponse:
        raise BadUpstream("no answer")


async def test_error_of_a_request_does_not_keep_its_body() -> None:
    """The error and the frame that raises it are no cycle, which would stay until a garbage collection."""

    async def send(pool: ReplicaPool) -> weakref.ref[RequestBody]:
        body = RequestBody([b"{}"])
        call = FailingCall(RequestTarget("m"), b"POST", b"/v2/models/m/infer", [], body)
        with suppress(BadUpstream):
            await dispatcher_of(pool).send(call, TIMEOUT_S)
        return weakref.ref(body)

    async with simulated_replicas(1) as fakes, over(fakes) as pool:
        gc.disable()
        try:
            assert (await send(pool))() is None
        finally:
            gc.enable()


@dataclass
class Load:
    """The outcomes of the callers' requests."""

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
    """Send requests concurrently: all replicas are chosen before the first response."""
    found = Load()
    await asyncio.gather(*(found.ask(pool, timeout_s) for _ in range(count)))
    return found


async def in_turns(pool: ReplicaPool, count: int, callers: int = 1) -> Load:
    """Send requests from callers that each wait for a response before the next request."""
    found = Load()
    requests = iter(range(count))

    async def call() -> None:
        for _ in requests:
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
    """Sum a metric's sample over all other labels."""
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


# Costs.


async def test_choice_of_a_replica_costs_the_same_in_a_large_fleet() -> None:
    names = [f"model_{number}" for number in range(MODELS)]

    async def calls_in(count: int) -> tuple[int, int]:
        """Count the calls to choose a replica for each model, repeatedly and for the first time."""
        async with simulated_replicas(count, names) as fakes, over(fakes, NEVER_S) as pool:
            await wait_until_async(lambda: states(pool)[HealthState.UP] == count)
            again = count_calls(
                lambda: [choose_less_loaded(pool.find_candidates(name).serving) for name in names]
            )
            return again, count_calls(lambda: [pool._group_replicas(name, "") for name in names])

    small, large = await calls_in(10), await calls_in(REPLICAS)
    assert large[0] == small[0]
    assert large[1] <= REPLICAS / 10 * small[1]


async def test_probes_of_a_hundred_replicas_read_only_the_index_that_changed() -> None:
    names = [f"model_{number}" for number in range(MODELS)]
    began = time.perf_counter()
    async with simulated_replicas(REPLICAS, names) as fakes, over(fakes, POLL_S) as pool:
        await wait_until_async(lambda: states(pool)[HealthState.UP] == REPLICAS)
        before = {address: replica.index for address, replica in pool.replicas.items()}
        fakes[0].models["model_7"] = False
        # A probe that was in progress may have read the index before the change.
        await wait_until_async(lambda: not replica_of(pool, fakes[0]).index.is_ready("model_7"))
        await wait_until_async(lambda: all(fake.requests["index"] >= 2 for fake in fakes))
        changed = [
            str(address)
            for address, replica in pool.replicas.items()
            if replica.index is not before[address]
        ]
        assert changed == [str(fakes[0].address)]
        # At the start, by refresh, and at a change.
        most = 3 + (time.perf_counter() - began) / POLL_S
        assert max(fake.requests["index"] for fake in fakes) <= most
        assert states(pool)[HealthState.UP] == REPLICAS


@pytest.mark.long
@pytest.mark.fault(
    "a replica's repository index takes longer than a probe, as with many models in a"
)
@pytest.mark.fault("a replica lists more than 50,000 models")
async def test_replica_with_a_slow_index_is_up_unless_its_index_is_invalid() -> None:
    """Triton lists its repository for each index: in a bucket, that takes seconds for dozens of models."""
    async with simulated_replicas(1, ["a"]) as (fake,):
        fake.index_s = 1.2 * PROBE_TIMEOUT_S
        async with over([fake]) as pool:
            replica = replica_of(pool, fake)
            is_up = functools.partial(pool.is_loaded, "a")
            await wait_until_async(is_up)
            read = fake.requests["index"]
            for _ in range(30):
                await asyncio.sleep(0.1)
                assert states(pool) == {HealthState.UP: 1}
                assert is_up()
            assert fake.requests["index"] - read <= 2
            assert fake.requests["live"] >= 2
            # What contradicts the index lets it be read at once, and once.
            read = fake.requests["index"]
            fake.models["a"] = False
            pool.monitor.mark_unloaded(replica, "a", "")
            await wait_until_async(lambda: fake.requests["index"] > read)
            await asyncio.sleep(2 * fake.index_s)
            assert fake.requests["index"] == read + 1
            fake.index_s = SLOW_INDEX_S
            fake.index_body = b"{}"
            pool.monitor.mark_unloaded(replica, "a", "")  # so that it is read at once
            await wait_until_async(lambda: states(pool) == {HealthState.SLOW: 1})
            probes = fake.requests["live"] + fake.requests["index"]
            await wait_until_async(
                lambda: fake.requests["live"] + fake.requests["index"] > probes + 4
            )
            assert states(pool) == {HealthState.SLOW: 1}
            assert "must be a list" in replica.reason
            fake.index_body = None
            await wait_until_async(lambda: states(pool) == {HealthState.UP: 1})
            fake.index_s = 0.0
            fake.models["b"] = True
            await pool.monitor.probe(replica)  # as after a load
            assert pool.is_loaded("b")
            await fake.stop()
            await wait_until_async(lambda: states(pool) == {HealthState.DOWN: 1})


@pytest.mark.fault(
    "a flood of requests for the repository index, each of which probes every replica"
)
async def test_concurrent_calls_for_the_index_share_their_probes() -> None:
    async with simulated_replicas(2, ["a"]) as fakes, over(fakes, NEVER_S) as pool:
        before = fakes[0].requests["index"]
        first = asyncio.create_task(pool.monitor.probe_all())
        await asyncio.sleep(0)  # lets it start
        fakes[0].models["new"] = True
        cancelled, *others = (asyncio.create_task(pool.monitor.probe_all()) for _ in range(100))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(first, *others)
        assert fakes[0].requests["index"] - before <= 3
        assert all(replica.index.models for replica in pool.replicas.values())
        assert pool.is_listed("new")  # as after any of the calls


def test_plan_of_a_replica_costs_the_same_per_model() -> None:
    def plan(models: int) -> int:
        entries = [{"name": f"model_{n}", "version": "1", "state": "READY"} for n in range(models)]
        index = parse_index(entries)
        desired = {entry["name"]: DesiredModel(ALL, revision=1) for entry in entries}
        replica = ReplicaView("a", index, confirmed=dict.fromkeys(desired, "1"))
        assert plan_actions(desired, [replica], {}) == []
        return count_calls(lambda: plan_actions(desired, [replica], {}))

    few, many = plan(MODELS), plan(10 * MODELS)
    assert many <= 10 * few


async def test_pool_that_is_closed_leaves_no_task_or_connection() -> None:
    before = asyncio.all_tasks()
    async with simulated_replicas(3) as fakes:
        async with over(fakes) as pool, managing(pool):
            await at_once(pool, 10)
        assert asyncio.all_tasks() == before
        await wait_until_async(lambda: not any(fake.connections for fake in fakes))


# Replicas that join and leave.


class Names(DnsAnswers):
    def pool(self, fake: SimulatedTriton, poll_s: float = POLL_S) -> ReplicaPool:
        settings = Settings(
            connect_timeout_s=CONNECT_TIMEOUT_S, poll_interval_s=poll_s, dns_interval_s=0.1
        )
        return ReplicaPool([self.find_source(fake.port, fake.grpc_port)], settings)


@pytest.mark.fault("DNS returns new addresses, none, or an error")
async def test_replica_that_joins_gets_the_loaded_models() -> None:
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
            await wait_until_async(lambda: fakes[2].models == fakes[1].models)
            await wait_until_async(lambda: replica_of(pool, fakes[2]).index.is_ready("b"))
            await asyncio.gather(*(infer(pool, "b") for _ in range(60)))
            assert all(fake.inferences["b"] > 10 for fake in fakes)


# Several gateways.


async def several_probes(fake: SimulatedTriton, gateways: int) -> None:
    """Wait until gateways have probed a replica in a few of their rounds."""
    probes = fake.requests["index"] + 3 * gateways * RECONCILE_INTERVAL_S / POLL_S
    await wait_until_async(lambda: fake.requests["index"] > probes)


@pytest.mark.fault("a gateway exits in the middle of a load, or a Triton misses one")
@pytest.mark.parametrize("by", ["leader", "another"])
async def test_load_that_a_replica_missed_is_repeated_there(tmp_path: Path, by: str) -> None:
    """The replica has the model all the while, but an older version of it."""
    state = f"file://{tmp_path}/state.db"
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
async def test_load_that_a_gateway_did_not_finish_is_finished_by_the_next(tmp_path: Path) -> None:
    state = f"file://{tmp_path}/state.db"
    async with simulated_replicas(3) as fakes, over(fakes) as pool:
        async with managing(pool, state=state) as ended:
            await ended.load("m", {})
            for fake in fakes[1:]:
                fake.load_s = 3600
            loading = asyncio.create_task(ended.load("m", {}))
            # One replica after the other, because they serve the model.
            await wait_until_async(lambda: any(fake.requests["load"] == 2 for fake in fakes[1:]))
        loading.cancel()
        for fake in fakes[1:]:
            fake.load_s = 0
        async with managing(pool, state=state) as following:
            await wait_until_async(lambda: not following.outdated_replicas("m"))
            assert sum(fake.requests["load"] for fake in fakes) == 3 + 3 + 1  # that one again
            assert not following.state.list_load_errors()


@with_skips
@pytest.mark.parametrize(
    ("state", "gateways", "status", "code"),
    [
        ("none:", 1, 409, "STATE_NOT_SHARED"),
        pytest.param("none:", 2, 409, "STATE_NOT_SHARED", marks=pytest.mark.long),
        ("file", 1, 503, "STATE_UNAVAILABLE"),
    ],
)
async def test_load_that_cannot_be_recorded_changes_no_replica(
    tmp_path: Path, state: str, gateways: int, status: int, code: str
) -> None:
    url = state if state == "none:" else f"file://{tmp_path}/folder/state.db"
    async with simulated_replicas(2) as fakes, contextlib.AsyncExitStack() as stack:
        pools = [await stack.enter_async_context(over(fakes)) for _ in range(gateways)]
        repositories = [
            await stack.enter_async_context(managing(pool, state=url)) for pool in pools
        ]
        shutil.rmtree(tmp_path / "folder", ignore_errors=True)
        for repository in repositories:
            load, unload = repository.load, repository.unload
            for change in (load("m", {}), unload("m", {})):
                with pytest.raises(GatewayError) as refused:
                    await change
                assert (refused.value.status, refused.value.code) == (status, code)
                assert state == "file" or "GATEWAY_STATE is none:" in refused.value.detail
        probes = fakes[0].requests["index"] + 3 * gateways * RECONCILE_INTERVAL_S / POLL_S
        await skip_until(lambda: fakes[0].requests["index"] > probes)
        assert not any(fake.requests["load"] or fake.requests["unload"] for fake in fakes)


async def test_replica_that_restarts_gets_the_models_and_parameters_of_the_fleet(
    tmp_path: Path,
) -> None:
    """Triton loads its own models at its start, and knows nothing of other parameters."""
    state = f"file://{tmp_path}/state.db"
    async with (
        simulated_replicas(2, ["m", "missing", "unwanted"]) as fakes,
        over(fakes) as first,
        over(fakes) as second,
        managing(first, state=state) as leader,
        managing(second, state=state) as another,
    ):
        await another.load("missing", {})
        await another.unload("unwanted", {})
        await another.load("m", {"unload_dependents": True})  # any parameter
        await fakes[1].stop()
        for pool in (first, second):
            await wait_until_async(is_in(pool, fakes[1], HealthState.DOWN))
        # The loads of a process that has exited are forgotten by the next pass.
        await wait_until_async(lambda: leader.outdated_replicas("m"))
        fakes[1].models = {"m": True, "missing": False, "unwanted": True}
        fakes[1].requests.clear()
        await fakes[1].start()
        wanted = {"m": True, "missing": True, "unwanted": False}
        await wait_until_async(lambda: fakes[1].models == wanted and fakes[1].requests["load"] >= 2)
        await wait_until_async(lambda: not leader.outdated_replicas("m"))
        assert fakes[0].requests["load"] == 2


@pytest.mark.parametrize("is_silent", [False, True])
async def test_replica_that_restarts_between_two_passes_of_the_reconciler_is_loaded_again(
    is_silent: bool,
) -> None:
    """It refuses a connection, or it answers no probe and lacks a model afterwards."""
    async with (
        simulated_replicas(2, ["m", "other"]) as fakes,
        over(fakes, NEVER_S) as pool,
        managing(pool) as repository,
    ):
        for model in ("m", "other"):
            await repository.load(model, {"unload_dependents": True})  # any parameter
        fake = fakes[0]
        replica = replica_of(pool, fake)
        fake.requests.clear()
        if is_silent:
            fake.hangs = True
            await pool.monitor.probe(replica)
            fake.hangs = False
        else:
            await fake.stop()
            await pool.monitor.probe(replica)
            await fake.start()
        fake.models["other"] = False
        await pool.monitor.probe(replica)
        await wait_until_async(lambda: fake.requests["load"] == 2)
        await wait_until_async(lambda: not repository.outdated_replicas("m"))
        assert fakes[1].requests["load"] == 2


async def test_refused_load_does_not_undo_a_later_change_of_another_gateway(tmp_path: Path) -> None:
    state = f"file://{tmp_path}/state.db"
    async with (
        simulated_replicas(2) as fakes,
        over(fakes) as pool,
        managing(pool, state=state) as repository,
        opened(state) as (other_gateway,),
    ):
        for fake in fakes:
            fake.models["m"] = False
            fake.refuses_loads = True
        loading = asyncio.create_task(repository.load("m", {}))
        await wait_until_async(lambda: all(fake.held for fake in fakes))
        # As another gateway does that gets the lease while this one is stopped.
        await other_gateway.set_desired_model("m", DesiredModel(ALL))
        for fake in fakes:
            fake.release()
        with pytest.raises(LoadFailed):
            await loading
        await repository.state.refresh()
        assert repository.state.desired_models["m"].is_loaded


@with_skips
async def test_replica_that_is_lost_during_a_refused_load_gets_the_former_one_again() -> None:
    """It may have the parameters of the refused load."""
    async with (
        simulated_replicas(2) as (lost, refusing),
        over((lost, refusing), 0.1) as pool,
        managing(pool) as repository,
    ):
        await repository.load("m", {"unload_dependents": True})  # any parameter
        lost.load_s, refusing.refuses_loads = NEVER_S, True
        loading = asyncio.create_task(repository.load("m", {}))

        async def lose() -> None:
            await wait_until_async(lambda: lost.requests["load"] == 2)
            lost.hangs = True
            await skip_until(is_in(pool, lost, HealthState.SLOW))

        async def refuse() -> None:
            await wait_until_async(lambda: refusing.held)
            refusing.release()

        await asyncio.gather(lose(), refuse())
        with pytest.raises(LoadFailed):
            await loading
        lost.load_s, lost.hangs = 0.0, False
        await skip_until(lambda: lost.requests["load"] == 3)
        await skip_until(lambda: not repository.outdated_replicas("m"))
        assert refusing.requests["load"] == 2


async def test_unload_of_a_model_in_no_repository_forgets_it(tmp_path: Path) -> None:
    state = f"file://{tmp_path}/state.db"
    async with (
        simulated_replicas(2) as fakes,
        over(fakes) as pool,
        managing(pool, state=state) as repository,
    ):
        await repository.load("m", {})
        for fake in fakes:
            del fake.models["m"]
        await wait_until_async(lambda: "m" in repository.state.list_load_errors())
        report = (await repository.unload("m", {})).to_dict()
        assert report["state"] == "UNAVAILABLE"
        assert len(report["replicas"]) == 2
        assert repository.state.desired_models == {}
        with pytest.raises(UnknownModel):
            await repository.unload("m", {})


@pytest.mark.long
async def test_model_is_not_unknown_because_an_index_is_late() -> None:
    async with (
        simulated_replicas(1, ["a"]) as (fake,),
        over([fake], NEVER_S) as pool,
        managing(pool) as repository,
    ):
        fake.models["new"] = False
        fake.index_s = 1.2 * PROBE_TIMEOUT_S
        await repository.load("new", {})
        assert fake.models["new"]
        fake.models["newer"] = False
        fake.hangs = True
        with pytest.raises(NoReplica):
            await repository.load("newer", {})


@with_skips
async def test_declared_models_are_loaded_where_they_are_missing(tmp_path: Path) -> None:
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


async def test_replica_loads_two_models_at_a_time(tmp_path: Path) -> None:
    names = ["a", "b", "c", "d"]
    file = declaring(tmp_path / "models.yaml", f"models: [{', '.join(names)}]")
    async with simulated_replicas(2, names, load_s=NEVER_S) as fakes:
        fakes[0].models = dict.fromkeys(names, False)
        async with over(fakes) as pool, managing(pool, file):
            await wait_until_async(lambda: fakes[0].requests["load"] == 2)
            await several_probes(fakes[0], 1)
            assert [fake.requests["load"] for fake in fakes] == [2, 0]


@pytest.mark.fault("a misspelled or slow model is added to the models file")
@with_skips
async def test_model_declared_at_runtime_is_missing_and_takes_no_gateway_out_of_service(
    tmp_path: Path,
) -> None:
    path = tmp_path / "models.yaml"
    file = declaring(path, "models: [a]")
    async with simulated_replicas(2, ["a", "slow"], load_s=12.0) as fakes:
        for fake in fakes:
            fake.models["slow"] = False
        async with over(fakes) as pool, managing(pool, file) as repository:

            def missing() -> set[str]:
                found = repository.readiness.evaluate(is_draining=False)
                assert found.is_ready, found.document
                return set(found.document.get("missing", ()))

            await skip_until(lambda: repository.readiness.evaluate(is_draining=False).is_ready)
            path.write_text("models: [a, slow, misspelt]")
            await skip_until(lambda: missing() == {"slow", "misspelt"})
            await skip_until(lambda: missing() == {"misspelt"})


@pytest.mark.fault("the file of a declared model breaks")
@with_skips
async def test_gateway_becomes_ready_with_all_declared_models_and_stays_so_with_one(
    tmp_path: Path,
) -> None:
    file = declaring(tmp_path / "models.yaml", "models: [a, b]")
    async with simulated_replicas(2, ["a", "b"], load_s=NEVER_S) as fakes:

        def set_models(**are_ready: bool) -> None:
            for fake in fakes:
                fake.models.update(are_ready)

        set_models(b=False)
        async with over(fakes) as pool, managing(pool, file) as repository:

            def state() -> tuple[bool, set[str]]:
                found = repository.readiness.evaluate(is_draining=False)
                return found.is_ready, set(found.document.get("missing", ()))

            await skip_until(lambda: state() == (False, {"b"}))
            set_models(b=True)
            await skip_until(lambda: state() == (True, set()))
            set_models(b=False)
            await skip_until(lambda: state() == (True, {"b"}))
            set_models(a=False)
            await skip_until(lambda: state() == (False, {"a", "b"}))
            set_models(b=True)
            await skip_until(lambda: state() == (True, {"a"}))


@with_skips
async def test_declared_model_that_cannot_be_loaded_is_tried_with_backoff(
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
            assert all(
                pause_s >= INITIAL_BACKOFF_S * 2**number for number, pause_s in enumerate(pauses_s)
            )
        assert "failed to poll" in repository.state.list_load_errors()["nowhere"]
        await infer(pool)


@pytest.mark.fault("DNS returns new addresses, none, or an error")
async def test_address_that_leaves_the_dns_finishes_its_requests_and_leaves_nothing() -> None:
    async with simulated_replicas(3) as fakes:
        leaving = fakes[0]
        names = Names([fake.host for fake in fakes])
        async with names.pool(leaving, poll_s=0.1) as pool, managing(pool) as repository:
            assert states(pool)[HealthState.UP] == 3
            await repository.load("m", {})
            name = replica_of(pool, leaving).name
            leaving.holds = True
            first = Load()
            asking = [asyncio.create_task(first.ask(pool)) for _ in range(20)]
            await wait_until_async(lambda: sum(fake.inferences["m"] for fake in fakes) == 20)
            assert leaving.inferences["m"] > 0
            assert name in replicas_in_metrics(pool)
            names.hosts = [fake.host for fake in fakes[1:]]
            await wait_until_async(lambda: len(pool.replicas) == 2)
            leaving.release()
            await asyncio.wait(asking)
            assert not first.errors
            await wait_until_async(lambda: not leaving.connections)
            requests = leaving.requests.copy()
            probes = fakes[1].requests["index"]
            assert not (await at_once(pool, 50)).errors
            await wait_until_async(lambda: fakes[1].requests["index"] > probes + 2)
            assert leaving.requests == requests
            await wait_until_async(lambda: name not in repository.state.confirmed)
            assert replicas_in_metrics(pool) == {replica_of(pool, fake).name for fake in fakes[1:]}


@pytest.mark.fault("DNS returns new addresses, none, or an error")
async def test_replica_that_leaves_the_preferred_name_gets_no_request_that_another_can_serve() -> (
    None
):
    async with simulated_replicas(3, ["m", "rare"]) as fakes:
        leaving = fakes[0]
        for fake in fakes[1:]:
            fake.models["rare"] = False
        hosts = [fake.host for fake in fakes]
        names = Names(hosts, preferred=hosts)
        async with names.pool(leaving) as pool:
            assert not (await at_once(pool, 60)).errors
            assert leaving.inferences["m"] > 0
            leaving.holds = True
            first = Load()
            asking = [asyncio.create_task(first.ask(pool)) for _ in range(20)]
            await wait_until_async(lambda: sum(fake.inferences["m"] for fake in fakes) == 80)
            names.preferred = hosts[1:]
            await wait_until_async(lambda: len(pool.avoided) == 1)
            inferences = leaving.inferences["m"]
            assert not (await at_once(pool, 60)).errors
            assert leaving.inferences["m"] == inferences
            # What was inside ends, and what no other can serve goes on.
            leaving.release()
            await asyncio.wait(asking)
            assert not first.errors
            await infer(pool, "rare")
            assert leaving.inferences["rare"] == 1
            # The last known answer counts while the DNS does not work.
            names.lookups = 0
            names.error = socket.gaierror(socket.EAI_AGAIN, "SERVFAIL")
            await wait_until_async(lambda: names.lookups > 4)
            assert len(pool.avoided) == 1
            # Without a preferred address, all replicas are equal.
            for error in (socket.gaierror(socket.EAI_NONAME, "NXDOMAIN"), None):
                names.error = error
                names.preferred = []
                await wait_until_async(lambda: not pool.avoided)
                assert len(pool.replicas) == 3
                names.error = None
                names.preferred = hosts[1:]
                await wait_until_async(lambda: len(pool.avoided) == 1)
            # Without the others, the requests find it.
            for fake in fakes[1:]:
                await fake.stop()
            await wait_until_async(lambda: states(pool)[HealthState.DOWN] == 2)
            assert not (await at_once(pool, 10)).errors
            assert leaving.inferences["m"] == inferences + 10
            for fake in fakes[1:]:
                await fake.start()
            await wait_until_async(lambda: states(pool)[HealthState.UP] == 3)
            names.preferred = hosts
            await wait_until_async(lambda: not pool.avoided)
            assert not (await at_once(pool, 60)).errors
            assert leaving.inferences["m"] > inferences + 10


async def test_cordon_ends_when_the_address_leaves_and_not_when_the_replica_restarts() -> None:
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
            # A replica that is absent can be uncordoned.
            absent = "127.0.9.9:8000"
            await repository.state.set_cordon(absent, is_cordoned=True)
            pool.set_cordoned(repository.state.cordoned)
            assert (await maintenance.uncordon(absent)).is_finished
            assert pool.cordoned == {restarting}
            with pytest.raises(UnknownReplica):
                await maintenance.uncordon(absent)


@pytest.mark.parametrize("gateways", [1, 2])
async def test_concurrent_cordons_leave_one_replica_serving(tmp_path: Path, gateways: int) -> None:
    state = f"file://{tmp_path}/state.db"
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
async def test_state_of_a_replica_that_was_never_seen_is_deleted_later(
    tmp_path: Path,
) -> None:
    state, gone = f"file://{tmp_path}/state.db", "127.0.9.9:8000"
    store = open_state_store(state)
    await store.write(CORDONS, (gone,), True)
    await store.write(CONFIRMED, (gone, "m"), "1")
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
        assert gone in repository.state.confirmed
        await skip_until(lambda: pool.cordoned == {present})
        await skip_until(lambda: gone not in repository.state.confirmed)
        assert await store.read(CORDONS) == {present: True}
    await store.close()


def replicas_in_metrics(pool: ReplicaPool) -> set[str]:
    pool.metrics.flush()
    samples = (sample for metric in pool.metrics.collect() for sample in metric.samples)
    return {sample.labels["replica"] for sample in samples if "replica" in sample.labels}


async def test_load_does_not_wait_for_an_address_that_left() -> None:
    async with simulated_replicas(2) as fakes:
        for fake in fakes:
            fake.models["m"] = False
        fakes[0].load_s = 3600
        names = Names([fake.host for fake in fakes])
        async with names.pool(fakes[0]) as pool, managing(pool) as repository:
            loading = asyncio.create_task(repository.load("m", {}))
            await wait_until_async(lambda: fakes[0].requests["load"] and fakes[1].models["m"])
            names.hosts = [fakes[1].host]
            with pytest.raises(GatewayError) as refused:
                await asyncio.wait_for(loading, TIMEOUT_S)
            assert refused.value.status == 502
            assert (await repository.load("m", {})).to_dict()["state"] == "READY"


@pytest.mark.fault("DNS returns new addresses, none, or an error")
async def test_dns_error_keeps_the_known_addresses_and_is_tried_again() -> None:
    async with simulated_replicas(3) as fakes:
        names = Names(error=OSError("NXDOMAIN"))
        async with names.pool(fakes[0]) as pool:
            with pytest.raises(NoReplica):
                await infer(pool)
            names.error = None
            names.hosts = [fake.host for fake in fakes[:2]]
            await wait_until_async(lambda: states(pool) == {HealthState.UP: 2})
            for error, hosts in ((OSError("SERVFAIL"), ["127.0.1.9"]), (None, list[str]())):
                names.error = error
                names.hosts = hosts
                names.lookups = 0
                await wait_until_async(lambda: names.lookups > 2)
                assert states(pool) == {HealthState.UP: 2}
                assert not (await at_once(pool, 20)).errors
            names.hosts = [fake.host for fake in fakes]
            await wait_until_async(lambda: states(pool) == {HealthState.UP: 3})


# Load balancing and failures.


@pytest.mark.long
@pytest.mark.parametrize(
    ("delays_s", "callers"),
    [
        pytest.param([0.001] * 3, 1, id="equal"),
        pytest.param([0.001] * 3, 2, id="equal-2-callers"),
        pytest.param([0.001] * 3, 8, id="equal-8-callers"),
        pytest.param([0.001] * 3, 32, id="equal-32-callers"),
        pytest.param([0.01, 0.01, 0.03, 0.1], 16, id="different"),
    ],
)
async def test_requests_are_shared_by_the_speed_of_the_replicas(
    delays_s: list[float], callers: int
) -> None:
    async with simulated_replicas(len(delays_s)) as fakes, over(fakes) as pool:
        for fake, delay_s in zip(fakes, delays_s, strict=True):
            fake.delay_s = delay_s
        assert not (await in_turns(pool, 1536, callers)).errors
        counts = [fake.inferences["m"] for fake in fakes]
    shares = [count / sum(counts) for count in counts]
    assert shares[0] == pytest.approx(shares[1], abs=0.1)
    if len(set(delays_s)) == 1:
        assert shares == pytest.approx([1 / len(fakes)] * len(fakes), abs=0.05)
    else:
        one, other, slower, slowest = shares
        assert min(one, other) > slower > slowest > 0


@pytest.mark.fault("a Triton becomes 500 ms slower than the others")
async def test_replica_that_is_much_slower_gets_few_requests() -> None:
    async with simulated_replicas(3, delay_s=0.005) as fakes, over(fakes) as pool:
        fakes[0].delay_s = 0.505
        found = await in_turns(pool, 200, callers=2)
        slow = fakes[0].inferences["m"]
        assert not found.errors
        assert 0 < slow < 200 / 3 / 4


@pytest.mark.fault("a Triton cannot be connected to: refused, dropped, reset")
async def test_connection_that_is_refused_is_retried_on_another_replica() -> None:
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
async def test_replica_that_drops_connections_costs_the_connect_timeout_until_it_is_slow() -> None:
    async with (
        simulated_replicas(3) as fakes,
        watching([fake.address for fake in fakes], 0.1, connect_timeout_s=0.5) as pool,
    ):
        await fakes[0].stop()
        with black_hole(fakes[0].address):
            first = await at_once(pool, 20)
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
async def test_replica_that_never_answers_costs_only_the_requests_that_it_has() -> None:
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


async def test_ejected_replica_serves_if_no_other_is_available() -> None:
    async with simulated_replicas(2) as fakes, over(fakes, poll_s=NEVER_S) as pool:
        fakes[0].garbles = True
        while not states(pool)[HealthState.EJECTED]:
            await at_once(pool, 10)
        fakes[0].garbles = False
        await kill(pool, fakes[1])
        assert not (await in_turns(pool, 20)).errors


async def test_short_deadlines_do_not_eject_a_healthy_replica() -> None:
    async with (
        simulated_replicas(4, delay_s=30) as fakes,
        over(fakes, poll_s=1) as pool,
    ):
        for _ in range(15):  # a few at a time: a pause of this process is the failure of as many
            found = await at_once(pool, 8, timeout_s=0.02)
            assert len(found.errors) == 8
            assert {type(error) for error in found.errors} == {DeadlinePassed}
            # The error of the attempt.
            assert {type(error.__cause__) for error in found.errors} == {DeadlinePassed}
        assert states(pool) == {HealthState.UP: 4}


async def test_model_that_one_replica_unloads_itself_is_served_by_the_others_at_once() -> None:
    names = ["m", "other"]
    async with simulated_replicas(3, names) as fakes, over(fakes, poll_s=NEVER_S) as pool:
        fakes[0].models["m"] = False
        while not fakes[0].inferences["m"]:
            assert not (await at_once(pool, 2)).errors  # two go to different replicas
        assert not (await at_once(pool, 50)).errors
        assert fakes[0].inferences["m"] == 1
        assert not replica_of(pool, fakes[0]).index.is_ready("m")
        # Its index is read again.
        await wait_until_async(lambda: replica_of(pool, fakes[0]).raw_index)
        assert replica_of(pool, fakes[0]).index.model_state("m").reason == "unloaded"
        # It serves its other models.
        await asyncio.gather(*(infer(pool, "other") for _ in range(60)))
        assert fakes[0].inferences["other"] > 10


async def test_retries_are_bounded_if_every_replica_refuses() -> None:
    async with simulated_replicas(4, denies=True) as fakes, over(fakes, poll_s=0.05) as pool:
        for _ in range(10):
            found = await at_once(pool, 40)
            assert {type(error) for error in found.errors} == {ModelNotReady}
            assert len(found.errors) == 40
            await wait_until_async(
                lambda: all(each.index.is_ready("m") for each in pool.replicas.values())
            )
        sent = sum(fake.inferences["m"] for fake in fakes)
        assert 400 < sent <= 1.2 * 400 + 10


@pytest.mark.fault("fifty concurrent loads and unloads of one model")
async def test_concurrent_loads_and_unloads_of_a_model_run_one_after_the_other() -> None:
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


async def test_index_that_is_invalid_makes_only_its_replica_unavailable() -> None:
    hostile = [b"", b"{}", b"[1]", b'[{"name":"m","version":' + b"[" * 900 + b"]" * 900 + b"}]"]
    async with simulated_replicas(3) as fakes, over(fakes, poll_s=0.05) as pool:
        for body in hostile:
            fakes[0].index_body = body
            await wait_until_async(is_in(pool, fakes[0], HealthState.SLOW))
            assert not (await at_once(pool, 10)).errors
            fakes[0].index_body = None
            await wait_until_async(lambda: states(pool)[HealthState.UP] == 3)


async def test_request_that_may_have_run_is_not_sent_again() -> None:
    async with simulated_replicas(2, garbles=True) as fakes, over(fakes, poll_s=NEVER_S) as pool:
        found = await at_once(pool, 4)
        assert {type(error) for error in found.errors} == {BadUpstream}
        assert sum(fake.inferences["m"] for fake in fakes) == 4


@with_skips
@pytest.mark.fault("a model hangs on one of three replicas that is otherwise well")
async def test_replica_on_which_a_model_hangs_is_avoided_and_back_within_30_s() -> None:
    async with simulated_replicas(3, ["m", "other"]) as fakes, over(fakes) as pool:
        fakes[0].holds = True
        for _ in range(30):
            found = await at_once(pool, 12, timeout_s=0.1)
            assert {type(error) for error in found.errors} <= {DeadlinePassed}
        assert 0 < fakes[0].inferences["m"] <= 12
        assert pool.failures.list_models(str(fakes[0].address)) == ["m"]
        fakes[0].release()
        waited_s = 0
        while pool.failures.list_models(str(fakes[0].address)):
            await at_once(pool, 3)
            skip(1)
            waited_s += 1
            assert waited_s <= 30
        before = fakes[0].inferences["m"]
        assert not (await in_turns(pool, 90)).errors
        assert fakes[0].inferences["m"] - before > 15
