"""The contract of every state: in memory, in a file, and in a real Redis. Others may write there, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError, MalformedRequest, TooLarge
from gateway.repository.models_file import ModelsFile
from gateway.repository.shared_state import SharedState
from gateway.repository.state.content import (
    ALL,
    CONFIRMED,
    CORDONS,
    MAX_EVENTS,
    MAX_MODEL_BYTES,
    MODELS,
    DesiredModel,
    EventId,
    decode_event,
)
from gateway.repository.state.store import LEASE_S, StateStore
from tests.support.redis_server import RedisServer
from tests.support.servers import free_ports, gateway
from tests.support.state import (
    ID,
    LABELS,
    LOADED,
    UNLOADED,
    FileIntruder,
    Intruder,
    RedisIntruder,
    is_leader,
    opened,
)
from tests.support.wait import wait_until_async

Address = Callable[[], str]  # returns the URL of a state that nobody has used
LATER = {"of_a_later_release": {"deep": [1]}}


@pytest.fixture(scope="module", name="server")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


def create_address(kind: str, request: pytest.FixtureRequest) -> Address:
    if kind == "redis":
        server: RedisServer = request.getfixturevalue("server")
        return server.url
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    return lambda: "memory:" if kind == "memory" else f"file://{factory.mktemp('state')}/state.db"


@pytest.fixture(scope="module", params=["memory", "file", "redis"])
def fresh(request: pytest.FixtureRequest) -> Address:
    return create_address(request.param, request)


@pytest.fixture(scope="module", params=["file", "redis"])
def shared(request: pytest.FixtureRequest) -> Address:
    return create_address(request.param, request)


# Each call: the model, its desired state, the expected revision, the resulting revision (0: refused), and the
# revisions of the models that are stored then.
CHANGES: list[tuple[str, DesiredModel | None, int | None, int, dict[str, int]]] = [
    ("m", UNLOADED, 1, 0, {}),
    ("m", UNLOADED, 0, 1, {"m": 1}),
    ("m", LOADED, 0, 0, {"m": 1}),
    ("m", LOADED, 2, 0, {"m": 1}),
    ("m", LOADED, 1, 2, {"m": 2}),
    ("m", LOADED, None, 3, {"m": 3}),
    ("m", DesiredModel(ALL, {}, 2), None, 4, {"m": 2}),
    ('é"\0', LOADED, 0, 5, {"m": 2, 'é"\0': 5}),
    ("", LOADED, None, 6, {"m": 2, 'é"\0': 5, "": 6}),
    ("nobody knows it", None, None, 7, {"m": 2, 'é"\0': 5, "": 6}),
    ("m", None, 1, 0, {"m": 2, 'é"\0': 5, "": 6}),
    ("m", None, 2, 8, {'é"\0': 5, "": 6}),
]


async def test_desired_models_change_only_from_the_expected_revision(fresh: Address) -> None:
    async with opened(fresh()) as (store,):
        for number, (model, desired, expected, revision, stored) in enumerate(CHANGES):
            assert await store.set_desired_model(model, desired, expected) == revision, number
            before = store.get(MODELS)
            models = await store.read(MODELS)
            assert {name: each.revision for name, each in models.items()} == stored, number
            assert before == models
            if revision and desired is not None:
                assert models[model] == replace(desired, revision=stored[model])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
DESIRED_MODELS = st.dictionaries(
    st.text(),
    st.builds(
        DesiredModel, st.sampled_from([0, 1, ALL]), st.dictionaries(st.text(), JSON, max_size=3)
    ),
    max_size=5,
)


@given(desired_models=DESIRED_MODELS)
async def test_any_desired_model_is_read_as_it_was_stored(
    shared: Address, desired_models: dict[str, DesiredModel]
) -> None:
    async with opened(shared(), 2) as (one, other):
        for model, desired in desired_models.items():
            await one.set_desired_model(model, desired)
        for store in (one, other):
            found = (await store.read(MODELS)).items()
            assert {name: replace(each, revision=0) for name, each in found} == desired_models


def nest(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


# Parameters that could be stored, but not be read within the limits.
UNREADABLE: list[tuple[Any, type[GatewayError]]] = [
    (nest(99), MalformedRequest),
    (nest(300), MalformedRequest),
    ("\ud800", MalformedRequest),
    ([0] * 100_000, MalformedRequest),
    ("x" * MAX_MODEL_BYTES, TooLarge),
]


async def test_what_could_not_be_read_again_is_not_stored() -> None:
    async with opened("memory:") as (store,):
        await store.set_desired_model("m", DesiredModel(ALL, {"config": nest(98)}))
        for value, error in UNREADABLE:
            with pytest.raises(error):
                await store.set_desired_model("m", DesiredModel(ALL, {"config": value}))
        assert (await store.read(MODELS))["m"].revision == 1


async def test_what_a_replica_confirmed_is_known_until_it_is_forgotten(shared: Address) -> None:
    model = 'é"\0'
    async with opened(shared(), 2) as (one, other):
        for replica, generation in (("a:8000", "7"), ("b:8000", "8/abc")):
            await one.write(CONFIRMED, (replica, model), generation)
        assert await other.read(CONFIRMED) == {"a:8000": {model: "7"}, "b:8000": {model: "8/abc"}}
        await other.write(CONFIRMED, ("b:8000", model), None)
        await other.forget_replica(CONFIRMED, "a:8000")
        assert await one.read(CONFIRMED) == {}


async def test_entries_last_until_they_are_deleted(fresh: Address) -> None:
    stable, canary = {"version": "2"}, {"versions": {"9": 90, "10": 10}, **LATER}
    async with opened(fresh()) as (store,):
        for name in ("a:8000", "[::1]:8000", "a:8000"):
            await store.write(CORDONS, (name,), True)
        assert (await store.read(CORDONS)).keys() == {"a:8000", "[::1]:8000"}
        for name in ("a:8000", "unknown:1"):
            await store.write(CORDONS, (name,), None)
        assert await store.read(CORDONS) == {"[::1]:8000": True}
        for keys, value in ((("m", "a"), stable), (("m", "b"), stable), (("m", "b"), canary)):
            await store.write(LABELS, keys, value)
        await store.write(LABELS, ('é"\0', "a"), canary)
        labels = await store.read(LABELS)
        assert labels == {"m": {"a": stable, "b": canary}, 'é"\0': {"a": canary}}
        assert list(labels["m"]["b"]["versions"]) == ["9", "10"]
        for keys in (("m", "a"), ("m", "nobody knows it"), ('é"\0', "a")):
            await store.write(LABELS, keys, None)
        assert await store.read(LABELS) == {"m": {"b": canary}}


async def test_each_change_of_one_process_is_read_once_by_another(shared: Address) -> None:
    async with opened(shared(), 2) as (one, other):
        assert await other.read(MODELS) == {}
        for turn in range(20):
            await one.set_desired_model("core", DesiredModel(ALL, {"turn": turn}))
            models = await other.read(MODELS)
            assert models["core"].parameters == {"turn": turn}
            assert await other.read(MODELS) is models
        await one.write(CORDONS, ("a:8000",), True)
        await other.write(LABELS, ("core", "stable"), {"version": "1"})
        assert await one.read(LABELS) == await other.read(LABELS) != {}
        assert await one.read(CORDONS) == await other.read(CORDONS) != {}
        assert await one.read(MODELS) == models
        await one.set_desired_model("core", models["core"])
        assert await other.read(MODELS) == models


INVALID_IDS = ("", "../state", "A" * 32, "0" * 31, f"{ID}\n", f"{ID}/x", "٣" * 32, "\0" * 32)


async def test_operation_is_read_as_it_was_last_recorded(fresh: Address) -> None:
    async with opened(fresh()) as (store,):
        assert await store.read_operation(ID) is None
        for state in ("running", "succeeded"):
            record = {"id": ID, "operation": state, "replicas": {"a:8000": {"state": "READY"}}}
            await store.record_operation(ID, record)
            assert await store.read_operation(ID) == record
        for other in (ID[::-1], *INVALID_IDS):
            assert await store.read_operation(other) is None


async def test_events_are_read_in_order_from_the_last_or_from_any_id_on(fresh: Address) -> None:
    async with opened(fresh()) as (store,):
        assert list(await store.read_events(None, 5)) == []
        for number in (0, 1, 1, 2, 3):  # 1 again, if the response to the first was lost
            await store.append_event(orjson.dumps({"number": number, **LATER}))
        everything = await store.read_events(EventId(0), 5)
        documents = [decode_event(event) for event in everything]
        assert documents == [{"number": number, **LATER} for number in range(4)]
        ids = [event.id for event in everything]
        assert ids == sorted(set(ids))
        assert list(await store.read_events(None, 2)) == list(everything[2:])
        assert list(await store.read_events(ids[1], 2)) == list(everything[1:3])
        assert list(await store.read_events(ids[1].next, 9)) == list(everything[2:])
        assert list(await store.read_events(ids[-1].next, 9)) == []


async def test_only_the_last_events_are_kept(shared: Address) -> None:
    async with opened(shared(), 2) as stores:
        work = [
            store.append_event(b'{"store":%d,"number":%d}' % (index, number))
            for number in range(MAX_EVENTS // 2 + 10)
            for index, store in enumerate(stores)
        ]
        await asyncio.gather(*work)
        views = [await store.read_events(EventId(0), 2 * MAX_EVENTS) for store in stores]
    assert list(views[0]) == list(views[1])
    assert len({event.raw for event in views[0]}) == len({event.id for event in views[0]})
    assert len(views[0]) == MAX_EVENTS


# A quota of 10 requests: each count, and what is used of it then.
COUNTS = [(0, 0), (4, 4), (6, 10), (1, 10), (-3, 7), (4, 7), (3, 10), (-99, 0), (0, 0)]


async def test_quota_is_exact(shared: Address) -> None:
    async with opened(shared(), 2) as (one, other):
        for count, used in COUNTS:
            counted = await one.add("ops", {"2026-11-26": 10, "2026-11": 99}, count)
            assert counted.used == (used, used)
            assert (await other.add("ops", {"2026-11": 0}, 0)).used == (used,)
        await asyncio.gather(*(each.add("ops", {"d": 15}, 1) for each in [one, other] * 10))
        assert (await one.add("ops", {"d": 15}, 0)).used == (15,)
        assert (await one.add("another", {"d": 15}, 0)).used == (0,)


# Stores a, b and c: `a+` acquires or renews the lease and gets it, `a-` does not get it, `a!` releases it,
# `a.` closes its store.
LEASES = [
    "a+ a+ b- c- a! b+ a- c-",
    "a+ b! b- a! c+ c+",
    "a+ a. b+ c-",
]


@pytest.mark.parametrize("calls", LEASES)
async def test_lease_belongs_to_one_process_until_it_releases_it_or_closes(
    shared: Address, calls: str
) -> None:
    url = shared()
    async with AsyncExitStack() as all_stores:
        stacks = {name: await all_stores.enter_async_context(AsyncExitStack()) for name in "abc"}
        stores = {}
        for name, stack in stacks.items():
            (stores[name],) = await stack.enter_async_context(opened(url))
        for name, action in map(tuple, calls.split()):
            if action == ".":
                await stacks[name].aclose()
            elif action == "!":
                await stores[name].release_lease("replica:a")
            else:
                is_granted = await stores[name].acquire_lease("replica:a")
                assert is_granted == (action == "+"), (name, action)


async def test_single_process_gets_any_lease_and_leads(fresh: Address) -> None:
    async with opened(fresh()) as (store,):
        for name in ("replica:a", "replica:a", "replica:b"):
            assert await store.acquire_lease(name)
        await store.release_lease("replica:a")
        await store.release_lease("never taken")
        assert await store.exchange_reports({"own": 1}) == []
        assert [await is_leader(store), await is_leader(store)] == [True, True]


@pytest.mark.long
async def test_leases_and_reports_last_five_seconds(shared: Address) -> None:
    async with opened(shared(), 3) as (first, second, third):
        assert await first.exchange_reports({"of": "first", "ages": {"a b": 1.5}}) == []
        await first.exchange_reports({"of": "first", "ages": {}})
        assert await second.exchange_reports({"of": "second"}) == [{"of": "first", "ages": {}}]
        found = await third.exchange_reports({"of": "third"})
        assert sorted(each["of"] for each in found) == ["first", "second"]
        assert await first.acquire_lease("a")
        assert not await second.acquire_lease("a")
        await wait_until_async(lambda: second.acquire_lease("a"), LEASE_S + 2)
        await second.exchange_reports({"of": "second"})
        assert await third.exchange_reports({}) == [{"of": "second"}]


# What others have written.

NESTED = b"[" * 10_000 + b"]" * 10_000
LARGE = b'"' + b"x" * (5 << 20) + b'"'
NO_OBJECTS = [
    b"",
    b"{",
    b"\xff",
    b"5",
    b"null",
    b'"text"',
    b"[1]",
    NESTED,
    b'{"a":' * 200 + b"1" + b"}" * 200,
]
MANY = b'{"a":[' + b"1," * 100_000 + b"1]}"
HOSTILE_ENTRIES: dict[str, list[tuple[str | bytes, bytes]]] = {
    "models": [
        *((f"{number}", raw) for number, raw in enumerate([*NO_OBJECTS, MANY])),
        *(
            (f"replicas {number}", b'{"replicas":%b,"parameters":{},"origin":"api"}' % replicas)
            for number, replicas in enumerate((b"true", b"-1", b'"some"', b"1.5"))
        ),
        ("list", b'{"replicas":"all","parameters":[],"origin":"api"}'),
        ("origin", b'{"replicas":"all","parameters":{},"origin":"declared"}'),
        ("missing", b'{"replicas":"all"}'),
        ("64 MiB", b'"' + b"x" * (64 << 20) + b'"'),
        ("n" * 2000, b'{"replicas":"all","parameters":{},"origin":"api"}'),
        (b"\xff", b'{"replicas":"all","parameters":{},"origin":"api"}'),
    ],
    "cordons": [*((f"{number}", raw) for number, raw in enumerate(NO_OBJECTS)), ("b", LARGE)],
    "labels": [
        *((f'["m","{number}"]', raw) for number, raw in enumerate([*NO_OBJECTS, MANY, LARGE])),
        *(
            (key, b'{"version":"1"}')
            for key in ("5", '["m"]', '[["m"],"a"]', '["m",5]', '["m", "a"]')
        ),
        (NESTED, b'{"version":"1"}'),
        (b"\xff", b'{"version":"1"}'),
    ],
    "confirmed": [
        *((f'["a","{number}"]', raw) for number, raw in enumerate([*NO_OBJECTS, LARGE])),
        ('["a","long"]', b'"' + b"1" * 300 + b'"'),
        ('{"a":1,"b":2}', b'"1"'),
    ],
}
HOSTILE_OPERATIONS = [
    *NO_OBJECTS,
    LARGE,
    b"{}",
    b'{"id":"%b"}' % ID[::-1].encode(),
    *(
        b'{"id":"%b",%b}' % (ID.encode(), each)
        for each in (
            b'"model":5',
            b'"replicas":[]',
            b'"replicas":{"a":{"state":5}}',
            b'"updated_at":"1"',
        )
    ),
]
HOSTILE_EVENTS = [
    *NO_OBJECTS,
    b'{"time":5}',
    b'{"file":["a"]}',
    b'{"a":"' + b"x" * (16 << 10) + b'"}',
]
HOSTILE_REPORTS = [*NO_OBJECTS, LARGE]


@pytest.fixture
def intruded(shared: Address, request: pytest.FixtureRequest) -> Iterator[tuple[str, Intruder]]:
    """Yield the URL of a state, and somebody else who writes there."""
    url = shared()
    if url.startswith("file:"):
        yield url, FileIntruder(Path(url.removeprefix("file://")))
        return
    with request.getfixturevalue("server").client() as client:
        yield url, RedisIntruder(client, url.partition("prefix=")[2])


@pytest.mark.fault("somebody writes anything else into the state")
async def test_hostile_document_costs_its_own_reading_only(
    intruded: tuple[str, Intruder], caplog: pytest.LogCaptureFixture
) -> None:
    url, intruder = intruded
    async with opened(url, 2) as (store, other):
        await store.set_desired_model("core", LOADED)
        await store.write(LABELS, ("m", "stable"), {"version": "1"})
        await store.write(CORDONS, ("a:8000",), True)
        await store.write(CONFIRMED, ("a:8000", "core"), "1")
        await store.append_event(b'{"number":1}')
        for table, entries in HOSTILE_ENTRIES.items():
            for key, raw in entries:
                intruder.put_entry(table, key, raw)
        for _ in range(2):  # each is counted and logged once
            assert (await store.read(MODELS)).keys() == {"core"}
            assert store.get(CORDONS) == {"a:8000": True}
            assert store.get(LABELS) == {"m": {"stable": {"version": "1"}}}
            assert store.get(CONFIRMED) == {"a:8000": {"core": "1"}}
        counts = {table: len(entries) for table, entries in HOSTILE_ENTRIES.items()}
        assert {name: store.unreadable_counts[name] for name in counts} == counts
        ignored = [each for each in caplog.messages if "in the state is ignored" in each]
        assert len(ignored) == sum(counts.values())
        for raw in HOSTILE_EVENTS:
            intruder.put_event(raw)
        await store.append_event(b'{"number":2}')
        events = await store.read_events(None, 2)
        assert [event.raw for event in events] == [b'{"number":1}', b'{"number":2}']
        assert await store.read_events(EventId(0), 2) == events
        for raw in HOSTILE_OPERATIONS:
            intruder.put_value(f"operation:{ID}", raw)
            assert await store.read_operation(ID) is None
        await other.exchange_reports({"of": "other"})
        for number, raw in enumerate(HOSTILE_REPORTS):
            intruder.put_report(f"{number}", raw)
        assert await store.exchange_reports({}) == [{"of": "other"}]
        for raw in (b"", b"many", b"-5", b"1e30", b"9" * 40, NESTED):
            intruder.put_value("quota:2026-11:ops", raw)
            assert (await store.add("ops", {"2026-11": 9}, 1)).used == (1,)
        for kind in ("events", "operations", "reports", "quotas"):
            assert store.unreadable_counts[kind]
        # They can be replaced, and a reconciler goes on.
        state = SharedState(store, ModelsFile(None), can_upload=False)
        await state.refresh()
        assert await state.set_desired_model("0", LOADED, 0)
        assert await state.set_desired_model("64 MiB", UNLOADED, 0)
        await store.write(CORDONS, ("0",), None)
        await other.refresh()
        assert other.get(MODELS).keys() == {"core", "0", "64 MiB"}
        assert store.is_available


@pytest.mark.fault("somebody writes anything else into the state")
async def test_key_of_another_kind_is_replaced_by_the_last_known_state(server: RedisServer) -> None:
    url = server.url()
    with server.client() as client:
        prefix = url.partition("prefix=")[2]
        async with opened(url, 2) as (store, new):
            await store.set_desired_model("core", LOADED)
            await store.write(LABELS, ("m", "stable"), {"version": "1"})
            for name in ("state:models", "state:changes", "state:revision", "state:labels"):
                for value in ("lpush", "set", "delete"):
                    client.delete(f"{prefix}{name}")
                    if value != "delete":
                        getattr(client, value)(f"{prefix}{name}", "text")
                    assert (await store.read(MODELS)).keys() == {"core"}
                    assert store.get(LABELS).keys() == {"m"}
            assert (await new.read(MODELS)).keys() == {"core"}
            for name in ("lease:a", "reports", "events", f"operation:{ID}", "quota:d:ops"):
                client.rpush(f"{prefix}{name}", "text")
            assert await store.acquire_lease("a")
            assert await store.exchange_reports({}) == []
            assert list(await store.read_events(None, 5)) == []
            await store.append_event(b"{}")
            assert await store.read_operation(ID) is None
            assert (await store.add("ops", {"d": 9}, 1)).used == (1,)
            client.xadd(f"{prefix}events", {"event": "{}"}, f"{2**64 - 1}-1")
            await store.append_event(b'{"number":1}')
            assert [each.raw for each in await store.read_events(None, 5)] == [b'{"number":1}']
            client.set(f"{prefix}lease:b", "somebody")  # it would never end
            assert await store.acquire_lease("b")
            # A gateway that knows nothing yet goes on without the table.
            client.delete(f"{prefix}state:models")
            client.set(f"{prefix}state:models", "text")
            async with opened(url) as (last,):
                assert await last.read(MODELS) == {}
                assert last.unreadable_counts["models"]
                assert await last.set_desired_model("late", LOADED, 0)
                assert (await last.read(MODELS)).keys() == {"late"}
            assert store.is_available


@pytest.mark.fault("somebody writes anything else into the state")
def test_gateway_serves_with_any_state(intruded: tuple[str, Intruder]) -> None:
    url, intruder = intruded
    (nobody,) = free_ports(1)
    with gateway(f"http://127.0.0.1:{nobody}", state=url) as (client, command):
        for table, entries in HOSTILE_ENTRIES.items():
            for key, raw in entries:
                intruder.put_entry(table, key, raw)
        intruder.put_entry("models", "good", b'{"replicas":"all","parameters":{},"origin":"api"}')
        command.wait_for("added 'good'")
        for raw in HOSTILE_EVENTS:
            intruder.put_event(raw)
        for report in (
            b"5",
            b'{"ages":5}',
            b'{"load_errors":{"m":[]}}',
            b'{"demand":{"requests":"x"}}',
        ):
            intruder.put_report("stranger", report)
            assert client.get("/v1/models").status_code == 503  # there is no Triton
        for raw in HOSTILE_OPERATIONS:
            intruder.put_value(f"operation:{ID}", raw)
            assert client.get(f"/v1/operations/{ID}").status_code == 404
        assert list(client.get("/v1/state").json()["models"]) == ["good"]
        assert client.get("/v1/events").json()["events"] == []
        metrics = client.get("/metrics").text
        count = len(HOSTILE_ENTRIES["labels"])
        assert f'gateway_state_unreadable_total{{kind="labels"}} {count}.0' in metrics
        assert "gateway_state_up 1.0" in metrics


# A place that loses the state.


def read_all(store: StateStore) -> tuple[object, ...]:
    return (dict(store.get(MODELS)), store.get(LABELS), store.get(CORDONS))


@pytest.mark.fault("Redis loses its data while gateways run, or the state file is removed")
async def test_state_that_was_lost_is_written_again_from_the_newest_copy(
    intruded: tuple[str, Intruder], caplog: pytest.LogCaptureFixture
) -> None:
    url, intruder = intruded
    async with opened(url, 2) as (first, second):
        await first.set_desired_model("core", LOADED)
        await first.write(LABELS, ("core", "stable"), {"version": "1"})
        await first.write(CONFIRMED, ("a:8000", "core"), "1")
        await second.refresh()
        await first.write(CORDONS, ("a:8000",), True)
        await first.set_desired_model("other", UNLOADED)
        newest = read_all(first)
        intruder.lose_everything()
        await second.refresh()  # an older copy, until the newest one is written
        assert second.get(MODELS).keys() == {"core"}
        for store in (first, second, first):
            await store.refresh()
            assert read_all(store) == newest
        assert (first.loss_count, second.loss_count) == (1, 1)
        assert await second.read(CONFIRMED) == {"a:8000": {"core": "1"}}
        intruder.lose_everything()
        await second.set_desired_model("core", None)  # the loss is noticed before a change
        await first.refresh()
        assert first.get(MODELS).keys() == second.get(MODELS).keys() == {"other"}
        assert read_all(first)[1:] == newest[1:]
    lost = [each for each in caplog.messages if "the state was lost" in each]
    assert "2 models, labels of 1 models, 1 cordons" in lost[1]
