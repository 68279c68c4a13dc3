"""Decisions of the fleet as values: health, choice, plan, readiness and the models file."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.access.keys import KeysFile
from gateway.config.files import WatchedFile
from gateway.fleet.balancer import choose_less_loaded
from gateway.fleet.discovery import DnsName, ReplicaSource, parse_replica_source
from gateway.fleet.health import Health, HealthState, RetryBudget
from gateway.fleet.index import (
    LOADING,
    READY,
    UNAVAILABLE,
    UNLOADING,
    Index,
    VersionState,
    build_index_entry,
    merge_indexes,
    model_names,
    parse_index,
)
from gateway.fleet.replica import BadAddress, ReplicaAddress
from gateway.repository.models_file import (
    BadModelsFile,
    DeclaredModel,
    ModelsFile,
    parse_models_file,
)
from gateway.repository.readiness import (
    Readiness,
    ReplicaStatus,
    evaluate_readiness,
    explain_unreadiness,
)

# Health.

EVENTS: Mapping[str, Callable[[Health], Health]] = {
    "answer": Health.with_probe_answer,
    "timeout": Health.with_probe_timeout,
    "refusal": Health.with_refusal,
}


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ("", HealthState.DOWN),
        ("timeout timeout", HealthState.DOWN),
        ("answer", HealthState.UP),
        ("answer refusal", HealthState.DOWN),
        ("answer refusal answer", HealthState.UP),
        ("answer timeout", HealthState.UP),
        ("answer timeout timeout", HealthState.SLOW),
        ("answer timeout answer timeout", HealthState.UP),
        ("answer timeout timeout answer", HealthState.UP),
        ("answer timeout timeout refusal", HealthState.DOWN),
    ],
)
def test_health_after_events_has_state(events: str, state: HealthState) -> None:
    health = Health()
    for event in events.split():
        health = EVENTS[event](health)
    assert health.state is state


@given(st.lists(st.booleans(), max_size=400))
@example([False] * 10_000 + [True] * 10_000)
def test_retries_are_a_fifth_of_the_requests_and_ten_saved(retried: list[bool]) -> None:
    budget = RetryBudget()
    spent = 0
    for request_count, is_retried in enumerate(retried, 1):
        budget.earn()
        spent += is_retried and budget.try_spend()
        assert spent <= 10 + 0.2 * request_count + 1e-9
        assert 0 <= budget.tokens < 10.2 + 1e-9
    assert spent >= int(0.2 * sum(retried))


# Choice.


@dataclass(eq=False)
class Candidate:
    outstanding: int = 0


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_replica_with_fewer_outstanding_requests_is_chosen(few: int, many: int) -> None:
    chosen = choose_less_loaded([Candidate(few), Candidate(many)])
    assert chosen.outstanding == min(few, many)


@pytest.fixture
def fixed_chance() -> Iterator[None]:
    before = random.getstate()
    random.seed(20)
    yield
    random.setstate(before)


def chi_squared(seen: Sequence[int], expected: Sequence[float]) -> float:
    return sum((n - m) ** 2 / m for n, m in zip(seen, expected, strict=True))


def chosen_often(candidates: Sequence[Candidate], times: int) -> list[int]:
    chosen = Counter(id(choose_less_loaded(candidates)) for _ in range(times))
    return [chosen[id(candidate)] for candidate in candidates]


@pytest.mark.usefixtures("fixed_chance")
def test_replica_is_chosen_the_more_often_the_less_loaded_it_is() -> None:
    only = Candidate(10**9)
    assert choose_less_loaded([only]) is only
    for count in (2, 3, 10):
        chosen = chosen_often([Candidate(3) for _ in range(count)], 5_000)
        # 9 degrees of freedom: less than once in 10,000.
        assert chi_squared(chosen, [5_000 / count] * count) < 35
    chosen = chosen_often([Candidate(load) for load in range(10)], 20_000)
    assert chosen[9] == 0
    expected = [20_000 * 2 * (9 - rank) / 90 for rank in range(9)]
    assert chi_squared(chosen[:9], expected) < 35


# The index.

DEEP = orjson.loads("[" * 1000 + "]" * 1000)
TRACEBACK = "Internal: ValueError: no weights\n\nAt:\n  /srv/m/1/model.py(3): initialize\n"
INDEX = [
    {"name": "never"},
    {"name": "well", "version": "1", "state": "READY"},
    {"name": "well", "version": "2", "state": "UNAVAILABLE", "reason": "no file"},
    {"name": "coming", "version": "1", "state": "LOADING"},
    {"name": "going", "version": "3", "state": "UNLOADING"},
    {"name": "gone", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
    {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": TRACEBACK},
    {"name": "odd", "version": "1", "state": "DREAMING"},
]


def test_index_gives_state_of_each_model() -> None:
    index = parse_index(INDEX)
    assert index.is_ready("well")
    assert index.is_ready("well", "1")
    assert not index.is_ready("well", "2")
    assert not index.is_ready("well", "9")
    for model in ("never", "coming", "going", "gone", "broken", "odd", "unheard of"):
        assert not index.is_ready(model)
    assert [model for model in index.models if index.is_changing(model)] == ["coming", "going"]
    assert [model for model in index.models if index.is_unloaded(model)] == [
        "never",
        "gone",
        "broken",
    ]
    assert model_names([index]) == {entry["name"] for entry in INDEX}
    # Of several versions, the best one counts.
    assert index.model_state("well") == VersionState(READY)
    assert index.model_state("gone") == VersionState(UNAVAILABLE, "unloaded")
    assert index.model_state("never") == VersionState(UNAVAILABLE)
    assert index.model_state("unheard of").reason == "not in this replica's repository"
    # The reason names no files.
    assert index.model_state("broken") == VersionState(UNAVAILABLE, "no weights")


def test_index_with_model_unloaded_changes_only_that_model() -> None:
    index = parse_index(INDEX).with_model_unloaded("well")
    assert not index.is_ready("well")
    assert index.is_unloaded("well")
    assert index.is_changing("coming")
    assert "unheard of" in index.with_model_unloaded("unheard of").models


def test_invalid_index_raises_value_error() -> None:
    entry = {"name": "m", "version": "1", "state": READY, "reason": ""}
    documents = [None, {}, "READY", 1, [1], [{}], [{"name": 1}], [["name"]], DEEP]
    documents += [[{**entry, key: DEEP}] for key in entry]
    for document in documents:
        with pytest.raises(ValueError, match="repository index"):
            parse_index(document)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
STATES = st.sampled_from([READY, LOADING, UNLOADING, UNAVAILABLE])
HOSTILE = st.lists(
    st.fixed_dictionaries(
        {"name": st.text() | JSON},
        optional={
            "version": st.text(st.characters(categories=["Nd", "No"])) | JSON,
            "state": STATES | JSON,
            "reason": st.text() | JSON,
        },
    )
)


@pytest.mark.long
@given(JSON | HOSTILE)
@example([{"name": "m", "version": "²"}])
@example([{"name": "m", "version": "9" * 5000}])
def test_drawn_document_is_an_index_or_raises_value_error(document: Any) -> None:
    try:
        index = parse_index(document)
    except ValueError:
        return
    entries = merge_indexes({"a": index, "b": parse_index(INDEX)})
    assert {entry["name"] for entry in entries} == model_names([index, parse_index(INDEX)])
    for model in index.models:
        (
            index.is_ready(model),
            index.is_changing(model),
            index.is_unloaded(model),
            index.model_state(model),
        )
        assert not index.with_model_unloaded(model).is_ready(model)


def versions_of(**states: str) -> Index:
    return Index({"m": {number[1:]: VersionState(state) for number, state in states.items()}})


@pytest.mark.parametrize(
    ("states", "state", "reason"),
    [
        ((READY, READY, READY), READY, None),
        ((READY, LOADING, READY), LOADING, "on b"),
        ((LOADING, UNLOADING, READY), UNLOADING, "on b"),
        ((UNAVAILABLE, LOADING, UNAVAILABLE), UNAVAILABLE, "on a, c"),
        ((UNAVAILABLE, UNAVAILABLE, UNAVAILABLE), UNAVAILABLE, None),
        (("DREAMING", READY, READY), "DREAMING", "on a"),
    ],
)
def test_merged_index_has_worst_state_and_its_replicas(
    states: tuple[str, ...], state: str, reason: str | None
) -> None:
    indexes = {name: versions_of(v1=each) for name, each in zip("abc", states, strict=True)}
    (entry,) = merge_indexes(indexes)
    assert (entry["state"], entry.get("reason")) == (state, reason)


def test_merged_index_names_replicas_without_a_version_and_sorts_by_number() -> None:
    indexes = {"a": versions_of(v1=READY, v2=READY), "b": versions_of(v1=READY), "c": Index({})}
    assert merge_indexes(indexes) == [
        {"name": "m", "version": "1", "state": UNAVAILABLE, "reason": "on c: not loaded"},
        {"name": "m", "version": "2", "state": UNAVAILABLE, "reason": "on b, c: not loaded"},
    ]
    detail = build_index_entry(indexes, merge_indexes(indexes)[1])
    missing = {"state": UNAVAILABLE, "reason": "not loaded"}
    assert detail["replicas"] == {"a": {"state": READY}, "b": missing, "c": missing}
    index = versions_of(v10=READY, v9=READY, v1=READY)
    assert [entry["version"] for entry in merge_indexes({"a": index})] == ["1", "9", "10"]


MODELS = st.sampled_from(["a", "b", "c", "d"])
VERSIONS = st.builds(VersionState, STATES, st.sampled_from(["", "unloaded", "no file"]))
INDEXES = st.builds(
    Index,
    st.dictionaries(MODELS, st.dictionaries(st.sampled_from(["1", "2", "10"]), VERSIONS)),
)


@given(st.dictionaries(st.sampled_from(["x", "y", "z"]), INDEXES, min_size=1))
def test_merged_index_has_what_is_ready_on_every_replica(indexes: dict[str, Index]) -> None:
    for entry in merge_indexes(indexes):
        if "version" in entry:
            everywhere = all(
                index.is_ready(entry["name"], entry["version"]) for index in indexes.values()
            )
            assert everywhere == (entry["state"] == READY)
    for name, index in indexes.items():
        assert parse_index(merge_indexes({name: index})) == index


# The models file.


@pytest.mark.parametrize(
    ("text", "models"),
    [
        ("", {}),
        ("# nothing\n---\n", {}),
        ("models:\n", {}),
        ("models: []", {}),
        ("models: [a, b]", {"a": DeclaredModel("a"), "b": DeclaredModel("b")}),
        ("models:\n- name: a\n  versions: [1, '3']\n", {"a": DeclaredModel("a", ("1", "3"))}),
        (
            "models: [{name: a, config: {max_batch_size: 4}}]",
            {"a": DeclaredModel("a", (), {"max_batch_size": 4})},
        ),
        ("models: [{name: a, config: '{}'}]", {"a": DeclaredModel("a", (), "{}")}),
        (
            "models: [{name: a, required: always}]",
            {"a": DeclaredModel("a", is_always_required=True)},
        ),
        ("models: ['no', '1', grün]", {name: DeclaredModel(name) for name in ("no", "1", "grün")}),
    ],
)
def test_models_file_is_parsed(text: str, models: dict[str, DeclaredModel]) -> None:
    assert parse_models_file(text) == models


BOMB = "models:\n-\n  - &a0 [x, x]\n" + "".join(
    f"  - &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)
)
CONFIG_BOMB = "models:\n- name: m\n  config:\n    k0: &a0 [x, x]\n" + "".join(
    f"    k{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)
)


@pytest.mark.parametrize(
    "text",
    [
        "models: [",
        "\x00",
        "\t- a",
        "a: b: c",
        "[a, b]",
        "a",
        "7",
        "model: [a]",
        "{models: [a], more: 1}",
        "models: a",
        "models: 0",
        "models: {a: 1}",
        "models: [1]",
        "models: [null]",
        "models: ['']",
        "models: [[a]]",
        "models: [{versions: [1]}]",
        "models: [{name: ''}]",
        "models: [{name: 5}]",
        "models: [{name: a, version: 1}]",
        "models: [{name: a, versions: 1}]",
        "models: [{name: a, versions: [x]}]",
        "models: [{name: a, versions: [-1]}]",
        "models: [{name: a, versions: [1.5]}]",
        "models: [{name: a, versions: ['²']}]",
        "models: [{name: a, config: 7}]",
        "models: [{name: a, required: true}]",
        "models: [{name: a, required: never}]",
        "models: [{name: a, required: }]",
        "models: [{name: a, required: [always]}]",
        "models: [{name: a, config: [x]}]",
        "models: [a, a]",
        "models: [a, {name: a}]",
        "models: [a]\nmodels: [b]",
        "models: [{name: a, name: b}]",
        "models: [{name: a, config: {x: 1, x: 2}}]",
        "models: [{name: a, config: {1: 2}}]",
        "models: [{name: a, config: {x: !!set {b}}}]",
        "models: [{name: a, config: {x: !!binary aGk=}}]",
        "models: [{name: a, config: &x {x: *x}}]",
        "models: [!!python/object/apply:os.getpid []]",
        "models: [!!int x]",
        "models: [!!bool x]",
        "models: [!!timestamp x]",
        "models: [2020-13-45]",
        "models: [0x_]",
        f"models: [{'9' * 5000}]",
        '{? {a: b} : c}',
        "models: [a]\n--- \nmodels: [b]",
        "models: " + "[" * 1000,
        "models: " + "[" * 1_000_000,
        f"models: [{'1:' * 100_000}1]",
        "- " * 1000,
        "models: [{name: a, config: " + "{x: " * 300 + "1" + "}" * 300 + "}]",
        BOMB,
        CONFIG_BOMB,
        "models: &a [*a]",
        'models: ["\\ud800"]',
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_broken_models_file_is_explained_in_one_sentence(text: str) -> None:
    with pytest.raises(BadModelsFile) as caught:
        parse_models_file(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@given(st.text() | st.text("models: [{name}],&*!-'\"\n 0x_1"))
def test_drawn_models_file_is_parsed_or_explained(text: str) -> None:
    for written in (text, f"models: {text}", f"models: [{text}]"):
        try:
            models = parse_models_file(written)
        except BadModelsFile:
            continue
        assert all(name == model.name for name, model in models.items())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.write_text("["), "cannot be parsed"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "can't decode"),
        (os.mkfifo, "regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "regular file"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.write_text(" " * 10_000_001), "larger than 10 MB"),
    ],
    ids=["missing", "not YAML", "not UTF-8", "pipe", "device", "folder", "large"],
)
def test_models_file_that_is_broken_or_of_another_kind_fails_at_start(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    path = tmp_path / "models.yaml"
    make(path)
    with pytest.raises(BadModelsFile, match=rf"models\.yaml: .*{reason}"):
        ModelsFile(path)


def opened(path: Path, text: str) -> ModelsFile:
    path.write_text(text)
    return ModelsFile(path)


async def test_change_of_models_file_is_noticed_once(tmp_path: Path) -> None:
    """Kubernetes replaces the link to a folder; what is mounted is a link through that."""

    def publish(folder: str, text: str) -> None:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "models.yaml").write_text(text)
        os.utime(tmp_path / folder / "models.yaml", ns=(10**18, 10**18))
        (tmp_path / "..new").symlink_to(folder)
        (tmp_path / "..new").replace(tmp_path / "..data")

    no_file = ModelsFile(None)
    assert not await no_file.reload_if_changed()
    assert no_file.models == {}
    path = tmp_path / "models.yaml"
    path.symlink_to("..data/models.yaml")
    publish("..1", "models: [a]")
    file = ModelsFile(path)
    assert not await file.reload_if_changed()
    # Another file of the same length and time.
    publish("..2", "models: [c]")
    assert await file.reload_if_changed()
    assert set(file.models) == {"c"}
    assert not await file.reload_if_changed()
    path.write_text("models: [a, b]")
    assert await file.reload_if_changed()
    assert set(file.models) == {"a", "b"}
    assert not await file.reload_if_changed()
    path.write_text("models: [a, b]  # the same, written differently")
    assert not await file.reload_if_changed()


@pytest.mark.parametrize(
    "broken",
    ["models: [a, ", "models: [!!int x]", "models: 1", "[" * 1000, None],
    ids=["cut off", "no integer", "no list", "brackets", "removed"],
)
async def test_broken_or_removed_models_file_keeps_the_old_models_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    path = tmp_path / "models.yaml"
    file = opened(path, "models: [a]")
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    for _ in range(3):
        assert not await file.reload_if_changed()
        assert set(file.models) == {"a"}
    assert len(caplog.records) == 1
    path.write_text("models: [repaired]")
    assert await file.reload_if_changed()
    assert set(file.models) == {"repaired"}


@pytest.mark.fault("the keys file, the models file or the certificate becomes a pipe")
async def test_large_keys_file_is_read_beside_the_event_loop(tmp_path: Path) -> None:
    def write(names: Iterable[str]) -> None:
        hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
        lines = [
            f"- {{name: {name}, sha256: '{hashes[name]}', roles: [infer]}}\n" for name in names
        ]
        path.write_text("keys:\n" + "".join(lines))

    path = tmp_path / "keys.yaml"
    write(["key-0"])
    file = KeysFile(path)
    write([f"key-{number}" for number in range(5000)])

    async def reload() -> None:
        while not await file.reload_in_background():  # noqa: ASYNC110 - it took two seconds
            await asyncio.sleep(0)

    reading = asyncio.create_task(reload())
    # CPU times, in which other processes do not count: of the thread of the event loop, and of all threads.
    began_s = time.process_time()
    times = [time.thread_time()]
    while not reading.done():
        await asyncio.sleep(0.0001)
        times.append(time.thread_time())
    longest_s = max(later - earlier for earlier, later in pairwise(times))
    assert longest_s < (time.process_time() - began_s) / 4
    assert len(times) > 10, "the event loop waited for the file"
    assert len(file.value.callers) == 5000
    kept = file.find_caller(hashlib.sha256(b"key-1").digest())
    write([f"key-{number}" for number in range(2)])
    assert await file.reload_in_background()
    assert kept is not None
    assert file.find_caller(kept.digest) is kept


async def test_file_that_cannot_be_read_is_rejected_in_time_and_holds_one_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, disk_is_back = tmp_path / "file", threading.Event()
    path.write_text("first")

    def read(path: Path) -> str:
        text = path.read_text()
        if text != "first":
            disk_is_back.wait()
        return text

    file = WatchedFile(path, read)
    path.write_text("second")
    threads = threading.active_count()
    assert not await file.reload_in_background()  # after two seconds
    for _ in range(3):
        assert not await file.reload_in_background()
        assert not file.reload_if_changed()
    assert (file.value, file.is_valid) == ("first", False)
    assert len(caplog.records) == 1
    assert "could not be read within 2 s; the last valid version stays in use" in caplog.text
    assert threading.active_count() == threads + 1
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "config-file")
    disk_is_back.set()
    while not await file.reload_in_background():  # noqa: ASYNC110 - the thread ends soon
        await asyncio.sleep(0.01)
    assert (file.value, file.is_valid) == ("second", True)


# Readiness.


def seen(
    address: str, state: HealthState = HealthState.UP, reason: str = "", **models: str
) -> ReplicaStatus:
    index = Index({name: {"1": VersionState(state)} for name, state in models.items()})
    return ReplicaStatus(address, state, index, reason)


def ready_with(
    *replicas: ReplicaStatus,
    declared: Sequence[DeclaredModel] = (),
    quorum: int = 1,
    was_ready: bool = False,
    draining: bool = False,
) -> Readiness:
    models = {model.name: model for model in declared}
    return evaluate_readiness(replicas, models, quorum, was_ready=was_ready, is_draining=draining)


def test_gateway_is_ready_with_one_live_replica_unless_it_drains() -> None:
    assert ready_with(seen("a")).document == {"ready": True, "replicas": {"a": "ready"}}
    assert ready_with(seen("a", HealthState.DOWN, "refused"), seen("b")).is_ready
    assert ready_with(seen("a", HealthState.EJECTED)).is_ready
    assert not ready_with().is_ready
    found = ready_with(seen("a", HealthState.DOWN, "nobody there"), seen("b", HealthState.SLOW))
    assert found.document == {
        "ready": False,
        "replicas": {"a": "down: nobody there", "b": "slow"},
    }
    draining = ready_with(seen("a"), draining=True)
    assert (draining.is_ready, draining.document["draining"]) == (False, True)


@pytest.mark.parametrize(
    ("quorum", "states", "ready"),
    [
        (1, (READY, UNAVAILABLE, UNAVAILABLE), True),
        (1, (LOADING, UNAVAILABLE, UNLOADING), False),
        (2, (READY, UNAVAILABLE, UNAVAILABLE), False),
        (2, (READY, READY, LOADING), True),
        (3, (READY, READY, LOADING), False),
        (3, (READY, READY, READY), True),
        (9, (READY, READY, READY), True),  # all, if there are fewer
        (9, (READY, READY, LOADING), False),
    ],
)
def test_declared_model_must_be_ready_on_a_quorum(
    quorum: int, states: tuple[str, ...], ready: bool
) -> None:
    replicas = [seen(name, m=state) for name, state in zip("abc", states, strict=True)]
    found = ready_with(*replicas, declared=[DeclaredModel("m")], quorum=quorum)
    assert found.is_ready == found.document["ready"] == ready
    missing = found.document.get("missing", {}).get("m", {})
    expected = {name for name, state in zip("abc", states, strict=True) if state != READY}
    assert set(missing) == (set() if ready else expected)


def test_missing_model_is_listed_with_the_reason_of_each_replica() -> None:
    dead = seen("a", HealthState.DOWN, "refused", m=READY)
    index = Index({"m": {"1": VersionState(UNAVAILABLE, "no model file")}})
    failed_load = ReplicaStatus("b", HealthState.UP, index)
    found = ready_with(
        dead, failed_load, seen("c"), seen("d", m=UNAVAILABLE), declared=[DeclaredModel("m")]
    )
    assert not found.is_ready
    assert found.document["missing"]["m"] == {
        "a": "down: refused",
        "b": "UNAVAILABLE: no model file",
        "c": "UNAVAILABLE: not in this replica's repository",
        "d": UNAVAILABLE,
    }


def test_declared_versions_must_be_ready_on_the_same_replica() -> None:
    both = ReplicaStatus("a", HealthState.UP, versions_of(v1=READY, v2=READY))
    one = ReplicaStatus("b", HealthState.UP, versions_of(v1=READY))
    other = ReplicaStatus("c", HealthState.UP, versions_of(v2=READY))
    declared = [DeclaredModel("m", ("1", "2"))]
    assert ready_with(both, one, declared=declared).is_ready
    assert not ready_with(one, other, declared=declared).is_ready
    assert not ready_with(both, one, declared=declared, quorum=2).is_ready


M, REQUIRED_M = DeclaredModel("m"), DeclaredModel("m", is_always_required=True)
OTHER, REQUIRED_OTHER = DeclaredModel("other"), DeclaredModel("other", is_always_required=True)
CORDONED = replace(seen("a", m=READY, other=READY), is_cordoned=True)


@pytest.mark.parametrize(
    ("declared", "quorum", "replicas", "ready"),
    [
        ([M, OTHER], 1, [seen("a", other=READY)], True),
        ([M, OTHER], 1, [seen("a", other=READY), seen("b", other=READY)], True),
        ([M, OTHER], 2, [seen("a", other=READY), seen("b")], True),  # on any replica is enough
        ([M, OTHER], 1, [seen("a")], False),  # none can be served
        ([M, OTHER], 1, [seen("a", HealthState.DOWN, other=READY), seen("b")], False),
        ([M, OTHER], 1, [seen("a", HealthState.DOWN, m=READY, other=READY)], False),
        ([M, OTHER], 1, [], False),
        ([REQUIRED_M, OTHER], 1, [seen("a", other=READY)], False),
        ([M, REQUIRED_OTHER], 1, [seen("a", other=READY)], True),
        ([M, REQUIRED_OTHER], 2, [seen("a", m=READY, other=READY), seen("b", m=READY)], False),
        ([M, REQUIRED_OTHER], 2, [seen("a", other=READY), seen("b", other=READY)], True),
        ([REQUIRED_M, REQUIRED_OTHER], 1, [seen("a", m=READY)], False),
        ([M, OTHER], 1, [CORDONED, seen("b", m=READY)], True),
        ([M, OTHER], 1, [CORDONED, seen("b")], False),
    ],
)
def test_gateway_that_was_ready_needs_the_always_required_models_and_one(
    declared: Sequence[DeclaredModel],
    quorum: int,
    replicas: Sequence[ReplicaStatus],
    ready: bool,
) -> None:
    found = ready_with(*replicas, declared=declared, quorum=quorum, was_ready=True)
    assert found.is_ready == found.document["ready"] == ready
    if any(replica.is_usable for replica in replicas):
        assert found.document["missing"]
    assert not ready_with(*replicas, declared=declared, quorum=quorum).is_ready
    assert not ready_with(
        *replicas, declared=declared, quorum=quorum, was_ready=True, draining=True
    ).is_ready


def test_model_that_is_added_takes_no_gateway_out_of_service_unless_it_is_always_required() -> None:
    replicas = [ReplicaStatus("a", HealthState.UP, versions_of(v1=READY))]
    other_version = DeclaredModel("m", ("2",))
    for declared, ready in (
        ([M, OTHER], True),
        ([other_version], True),
        ([M, REQUIRED_OTHER], False),
    ):
        found = ready_with(*replicas, declared=declared, was_ready=True)
        assert found.is_ready == ready
        assert list(found.document["missing"]) == [declared[-1].name]


@pytest.mark.parametrize(
    ("replicas", "declared", "sentence"),
    [
        ([], [], "no Triton has been found at triton (DNS: 0 addresses)"),
        ([seen("a", HealthState.DOWN, "refused")], [], "no Triton can be used: a is down: refused"),
        (
            [seen("a"), seen("b", x=LOADING)],
            [DeclaredModel("x")],
            "model x is on 0 of 2 replicas: UNAVAILABLE: not in this repository on a and LOADING on b",
        ),
        (
            [seen("a")],
            [DeclaredModel(str(number)) for number in range(7)],
            "in this repository on a; 2 more models are missing",
        ),
    ],
)
def test_sentence_names_what_readiness_waits_for(
    replicas: list[ReplicaStatus], declared: list[DeclaredModel], sentence: str
) -> None:
    document = ready_with(*replicas, declared=declared).document
    explained = explain_unreadiness(document, ["triton (DNS: 0 addresses)"])
    assert explained.replace("this replica's", "this").endswith(sentence)
    assert len(explained) < 700


DECLARED = st.dictionaries(MODELS, st.just({}), max_size=3).map(
    lambda found: {name: DeclaredModel(name, (), {"declared": True}) for name in found}
)
REPLICAS = st.lists(
    st.builds(ReplicaStatus, st.uuids().map(str), st.sampled_from(HealthState), INDEXES), max_size=6
)


@given(REPLICAS, DECLARED, st.integers(1, 8), st.booleans())
def test_readiness_is_explained_or_complete(
    replicas: list[ReplicaStatus], declared: dict[str, DeclaredModel], quorum: int, draining: bool
) -> None:
    found = evaluate_readiness(replicas, declared, quorum, was_ready=False, is_draining=draining)
    assert orjson.loads(orjson.dumps(found.document)) == found.document
    alive = [replica for replica in replicas if replica.state <= HealthState.EJECTED]
    reasons = not alive or "missing" in found.document or "draining" in found.document
    assert found.is_ready != reasons
    if found.is_ready:
        for name in declared:
            there = sum(replica.index.is_ready(name) for replica in alive)
            assert there >= min(quorum, len(replicas))


# Addresses.


@pytest.mark.parametrize(
    ("url", "found", "shown"),
    [
        ("http://triton", ReplicaAddress("triton", 8000), "triton:8000"),
        ("http://triton:9000/", ReplicaAddress("triton", 9000), "triton:9000"),
        ("triton", ReplicaAddress("triton", 8000), "triton:8000"),
        ("triton:9000", ReplicaAddress("triton", 9000), "triton:9000"),
        ("10.0.0.1:9000", ReplicaAddress("10.0.0.1", 9000), "10.0.0.1:9000"),
        ("http://h:1?grpc=2&metrics=3", ReplicaAddress("h", 1, 2, 3), "h:1"),
        ("http://[::1]:9?grpc=10", ReplicaAddress("::1", 9, 10), "[::1]:9"),
        ("http://h?metrics=65535", ReplicaAddress("h", 8000, 8001, 65535), "h:8000"),
        ("https://h", ReplicaAddress("h", 8000, tls=True), "h:8000"),
        ("http://[::1]", ReplicaAddress("::1", 8000), "[::1]:8000"),
        (
            "https://[2001:db8::7]:9",
            ReplicaAddress("2001:db8::7", 9, tls=True),
            "[2001:db8::7]:9",
        ),
        (
            "dns+http://triton:9000",
            DnsName(ReplicaAddress("triton", 9000)),
            "triton",
        ),
        (
            "dns+https://triton.ml.svc?grpc=7",
            DnsName(ReplicaAddress("triton.ml.svc", 8000, 7, tls=True)),
            "triton.ml.svc",
        ),
        (
            "dns+http://triton?grpc=7&prefer=triton-ready&metrics=8",
            DnsName(ReplicaAddress("triton", 8000, 7, 8), "triton-ready"),
            "triton",
        ),
        ("HTTP://TRITON", ReplicaAddress("triton", 8000), "triton:8000"),
    ],
)
def test_replica_address_is_parsed(url: str, found: ReplicaSource, shown: str) -> None:
    assert parse_replica_source(url) == found
    assert str(found) == shown
    if isinstance(found, ReplicaAddress):  # gRPC is on the same host
        assert found.grpc_target == f"{shown.rpartition(':')[0]}:{found.grpc_port}"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "ftp://triton",
        "grpc://triton:8001",
        "dns://triton",
        "http://triton/v2",
        "http://triton:port",
        "http://triton:99999",
        "http://triton:-1",
        "http://triton:0",
        "http://triton?grpc",
        "http://triton?grpc=",
        "http://triton?grpc=0",
        "http://triton?grpc=65536",
        "http://triton?grpc=-1",
        "http://triton?grpc=²",
        f"http://triton?grpc={'9' * 5000}",
        "http://triton?http=8000",
        "http://triton?prefer=triton-ready",
        "dns+http://triton?prefer=",
        "dns+http://triton?prefer=a&prefer=b",
        "dns+http://triton?prefer=a:8000",
        "http://[::1",
        "http://::1]:8000",
        "::1",
        "http://℀",
    ],
    ids=lambda url: url[:40],
)
def test_invalid_replica_address_raises(url: str) -> None:
    with pytest.raises(BadAddress):
        parse_replica_source(url)


@given(st.text() | st.text("dnshttp+:/[]?=&grpc.0189%"))
def test_drawn_address_is_parsed_or_raises_bad_address(text: str) -> None:
    for url in (text, f"http://{text}", f"http://h?{text}", f"dns+https://h:{text}"):
        try:
            source = parse_replica_source(url)
        except BadAddress:
            continue
        address = source.address if isinstance(source, DnsName) else source
        assert isinstance(address, ReplicaAddress)
        assert address.host
        assert all(0 < port < 65536 for port in (address.port, address.grpc_port))
