"""The contract of every state store; the tests of each kind provide a fixture that makes a new one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.repository.models_file import ModelsFile
from gateway.repository.reconciler import LEADER_LEASE
from gateway.repository.shared_state import SharedState
from gateway.repository.state.content import (
    CORDONS,
    MODELS,
    DesiredModel,
    EventId,
    Loads,
    create_raw_table,
    decode_event,
    is_in_progress,
)
from gateway.repository.state.file import REPORT_TTL_S
from gateway.repository.state.interface import StateStore
from gateway.repository.state.store import open_state_store
from tests.support.wait import wait_until_async

Scenario = Coroutine[Any, Any, None]
Fresh = Callable[[], str]  # the address of a state that nobody has used
ID = "0123456789abcdef" * 2
LABELS = create_raw_table("labels")
STABLE = {"version": "2"}
CANARY = {"versions": {"9": 90, "10": 10}, "shadow": {"version": "3", "percent": 12.5}}
LATER = {"of_a_later_release": {"deep": [1]}}
LOADED, UNLOADED = DesiredModel(True), DesiredModel(False)


@asynccontextmanager
async def opened(url: str, count: int = 1) -> AsyncIterator[list[StateStore]]:
    """Open stores of one state, like so many processes would."""
    store = [open_state_store(url) for _ in range(count)]
    try:
        yield store
    finally:
        for one in store:
            await one.close()


async def is_leader(store: StateStore) -> bool:
    state = SharedState(store, ModelsFile(None), can_upload=False)
    return await state.renew_lease(LEADER_LEASE)


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
    st.builds(DesiredModel, st.booleans(), st.dictionaries(st.text(), JSON, max_size=3)),
    max_size=5,
)


def known(loads: Loads) -> dict[str, dict[str, str]]:
    """The replicas of which anything is known."""
    return {replica: dict(models) for replica, models in loads.items() if models}


class StateContract:
    """Tests of any state; `fresh` is a fixture of the module that runs them."""

    async def test_desired_model_is_read_as_last_set_with_its_own_or_a_higher_revision(
        self, fresh: Fresh
    ) -> None:
        async with opened(fresh()) as (store,):
            given = []
            for desired in (LOADED, LOADED, None, LOADED, UNLOADED):
                given.append(await store.set_desired_model("core", desired))
                found = (await store.read(MODELS)).get("core")
                assert found == (desired and replace(desired, revision=given[-1]))
            assert given == sorted(set(given))
            before = (await store.read(MODELS))["core"]
            await store.set_desired_model("core", LOADED)
            await store.set_desired_model("core", before)
            assert (await store.read(MODELS))["core"] == before
            assert await store.set_desired_model("core", LOADED) > before.revision
            await store.set_desired_model("text_core", UNLOADED)
            await store.set_desired_model("core", None)
            await store.set_desired_model("nobody knows it", None)
            assert list(await store.read(MODELS)) == ["text_core"]

    async def test_change_that_expects_an_old_revision_is_refused(self, fresh: Fresh) -> None:
        async with opened(fresh()) as (store,):
            assert await store.set_desired_model("core", UNLOADED, 1) == 0
            assert await store.read(MODELS) == {}
            first = await store.set_desired_model("core", UNLOADED, 0)
            second = await store.set_desired_model("core", LOADED, first)
            for reverted in (None, UNLOADED):
                for expected in (0, first):
                    assert await store.set_desired_model("core", reverted, expected) == 0
            found = await store.read(MODELS)
            assert found == {"core": replace(LOADED, revision=second)}
            assert await store.set_desired_model("core", None, second)
            assert await store.read(MODELS) == {}

    async def test_load_is_known_once_it_is_confirmed_unless_another_was_concurrent(
        self, fresh: Fresh
    ) -> None:
        async with opened(fresh()) as (store,):
            assert await store.read_loads() == {}
            load = await store.begin_load("a:8000", "core")
            assert load.confirmed_load == ""
            assert await store.read_loads() == {"a:8000": {"core": load.token}}
            assert is_in_progress(load.token)
            for _ in range(2):  # again, if the response to the first was lost
                await store.end_load("a:8000", "core", load.token, "7")
                assert await store.read_loads() == {"a:8000": {"core": "7"}}
            load = await store.begin_load("a:8000", "core")
            assert load.confirmed_load == "7"
            await store.end_load("a:8000", "core", load.token, "")
            assert known(await store.read_loads()) == {}
            first = (await store.begin_load("a:8000", "core")).token
            second = await store.begin_load("a:8000", "core")
            assert second.confirmed_load == ""
            await store.end_load("a:8000", "core", second.token, "8")
            assert await store.read_loads() == {"a:8000": {"core": "8"}}
            await store.end_load("a:8000", "core", first, "7")
            assert known(await store.read_loads()) == {}

    async def test_loads_of_a_removed_replica_are_forgotten(self, fresh: Fresh) -> None:
        async with opened(fresh()) as (store,):
            for replica in ("a:8000", "b:8000"):
                for model in ("core", "[::1]", 'é"\0'):
                    token = (await store.begin_load(replica, model)).token
                    await store.end_load(replica, model, token, "1")
            await store.forget_loads("a:8000")
            await store.forget_loads("c:8000")
            assert known(await store.read_loads()) == {
                "b:8000": {"core": "1", "[::1]": "1", 'é"\0': "1"}
            }

    async def test_cordon_lasts_until_it_is_ended(self, fresh: Fresh) -> None:
        async with opened(fresh()) as (store,):
            assert await store.read(CORDONS) == frozenset()
            for name in ("a:8000", "[::1]:8000", "a:8000"):
                await store.write(CORDONS, (name,), True)
            assert await store.read(CORDONS) == {"a:8000", "[::1]:8000"}
            for name in ("a:8000", "unknown:1"):
                await store.write(CORDONS, (name,), None)
            assert await store.read(CORDONS) == {"[::1]:8000"}

    async def test_operation_is_read_as_it_was_last_recorded(self, fresh: Fresh) -> None:
        async with opened(fresh()) as (store,):
            assert await store.read_operation(ID) is None
            await store.record_operation(ID, {"state": "running", "replicas": {}})
            last = {"state": "succeeded", "replicas": {"a:8000": "READY"}}
            await store.record_operation(ID, last)
            assert await store.read_operation(ID) == last
            assert await store.read_operation(ID[::-1]) is None
            invalid_ids = (
                "",
                "../state",
                "A" * 32,
                "0" * 31,
                f"{ID}\n",
                f"{ID}/x",
                "٣" * 32,
                "\0" * 32,
            )
            for invalid in invalid_ids:
                assert await store.read_operation(invalid) is None

    async def test_label_is_stored_until_it_is_deleted(self, fresh: Fresh) -> None:
        async with opened(fresh()) as (store,):
            assert await store.read(LABELS) == {}
            await store.set_desired_model("core", LOADED)
            await store.write(LABELS, ("core", "stable"), STABLE)
            await store.write(LABELS, ("core", "canary"), STABLE)
            await store.write(LABELS, ("core", "canary"), CANARY)
            await store.write(LABELS, ('é"\0', "stable"), CANARY)
            labels = await store.read(LABELS)
            core = {"stable": STABLE, "canary": CANARY}
            assert labels == {"core": core, 'é"\0': {"stable": CANARY}}
            assert list(labels["core"]["canary"]["versions"]) == ["9", "10"]
            await store.write(LABELS, ("core", "stable"), None)
            await store.write(LABELS, ("core", "nobody knows it"), None)
            await store.write(LABELS, ('é"\0', "stable"), None)
            assert await store.read(LABELS) == {"core": {"canary": CANARY}}
            assert list(await store.read(MODELS)) == ["core"]

    async def test_single_process_gets_any_lease_and_leads(self, fresh: Fresh) -> None:
        async with opened(fresh()) as (store,):
            assert await store.acquire_lease("replica:a")
            assert await store.acquire_lease("replica:a")  # renewed
            assert await store.acquire_lease("replica:b")
            await store.release_lease("replica:a")
            await store.release_lease("never taken")
            assert await store.acquire_lease("replica:a")
            assert await store.exchange_reports({"own": 1}) == []
            assert [await is_leader(store), await is_leader(store)] == [True, True]

    async def test_events_are_read_in_order_from_the_last_or_from_any_id_on(
        self, fresh: Fresh
    ) -> None:
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


class SharedStateContract:
    """Tests of a state of several processes, as far as one process can have their views of it."""

    @given(desired_models=DESIRED_MODELS)
    async def test_any_desired_model_is_read_as_it_was_stored(
        self, shared: Fresh, desired_models: dict[str, DesiredModel]
    ) -> None:
        async with opened(shared(), 2) as (one, other):
            for model, desired in desired_models.items():
                await one.set_desired_model(model, desired)
            for store in (one, other):
                found = await store.read(MODELS)
                assert {
                    name: replace(desired, revision=0) for name, desired in found.items()
                } == desired_models

    async def test_load_of_an_ended_process_is_not_in_progress(self, shared: Fresh) -> None:
        url = shared()
        async with opened(url) as (one,):
            async with opened(url) as (other,):
                token = (await other.begin_load("a:8000", "core")).token
                confirmed = (await other.begin_load("b:8000", "core")).token
                await other.end_load("b:8000", "core", confirmed, "3")
                assert await one.read_loads() == {
                    "a:8000": {"core": token},
                    "b:8000": {"core": "3"},
                }
            assert known(await one.read_loads()) == {"b:8000": {"core": "3"}}
            await one.forget_loads("a:8000")
            assert await one.read_loads() == {"b:8000": {"core": "3"}}

    async def test_each_change_of_one_process_is_read_once_by_another(self, shared: Fresh) -> None:
        async with opened(shared(), 2) as (one, other):
            assert await other.read(MODELS) == {}
            await one.set_desired_model("core", DesiredModel(True, {"config": "{}"}))
            await one.record_operation(ID, {"state": "running"})
            await one.write(CORDONS, ("a:8000",), True)
            assert await other.read(CORDONS) == {"a:8000"}
            assert await other.read(MODELS) == await one.read(MODELS)
            assert await other.read_operation(ID) == {"state": "running"}
            assert await other.read(LABELS) == {}
            await one.write(LABELS, ("core", "stable"), STABLE)
            await other.write(LABELS, ("core", "canary"), CANARY)
            both = {"core": {"stable": STABLE, "canary": CANARY}}
            assert await one.read(LABELS) == await other.read(LABELS) == both
            found = await one.read(LABELS)
            assert await one.read(LABELS) is found
            for turn in range(1000, 1050):
                await one.set_desired_model("core", DesiredModel(True, {"turn": turn}))
                models = await other.read(MODELS)
                assert models["core"].parameters == {"turn": turn}
                assert await other.read(MODELS) is models
            await one.set_desired_model("core", DesiredModel(True, {"turn": turn}))
            assert await other.read(MODELS) is not models

    async def test_events_of_concurrent_processes_are_all_kept(self, shared: Fresh) -> None:
        async with opened(shared(), 2) as stores:
            work = [
                store.append_event(b'{"store":%d,"number":%d}' % (index, number))
                for number in range(20)
                for index, store in enumerate(stores)
            ]
            await asyncio.gather(*work)
            views = [await store.read_events(EventId(0), 100) for store in stores]
        assert list(views[0]) == list(views[1])
        assert len({event.raw for event in views[0]}) == len({event.id for event in views[0]}) == 40

    async def test_lease_belongs_to_one_process_until_it_releases_it_or_closes(
        self, shared: Fresh
    ) -> None:
        url = shared()
        async with opened(url, 3) as several:
            first, second, _ = several
            assert await first.acquire_lease("replica:a")
            assert not await second.acquire_lease("replica:a")
            assert await second.acquire_lease("replica:b")
            await second.release_lease("replica:a")  # not its own
            async with opened(url) as (leader,):
                assert not await leader.acquire_lease("replica:a")
                await first.release_lease("replica:a")
                assert await leader.acquire_lease("replica:a")
                assert await is_leader(leader)
                for _ in range(3):
                    assert not any([await is_leader(store) for store in several])
                    assert await is_leader(leader)
            for _ in range(3):
                assert [await is_leader(store) for store in several] == [True, False, False]
            await wait_until_async(lambda: first.acquire_lease("replica:a"))

    @pytest.mark.long
    async def test_reports_of_other_processes_are_read_until_they_expire(
        self, shared: Fresh
    ) -> None:
        async with opened(shared(), 3) as (first, second, third):
            assert await first.exchange_reports({"of": "first", "ages": {"a b": 1.5}}) == []
            await first.exchange_reports({"of": "first", "ages": {}})
            assert await second.exchange_reports({"of": "second"}) == [{"of": "first", "ages": {}}]
            found = await third.exchange_reports({"of": "third"})
            assert sorted(each["of"] for each in found) == ["first", "second"]
            await asyncio.sleep(REPORT_TTL_S)
            await second.exchange_reports({"of": "second"})
            assert await third.exchange_reports({}) == [{"of": "second"}]
