"""All requests of a sequence go to the replica that has its state, or get an error if it is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.http as triton_http

from gateway.errors import InputMismatch, MalformedRequest, SequenceNotRunning
from gateway.fleet.balancer import SequenceRouter
from gateway.triton.sequence import SequenceStep, parse_sequence_headers, parse_sequence_parameters
from tests.support.model_zoo.zoo import COUNTING, Names, write_repository
from tests.support.servers import Triton, gateway_before
from tests.support.wait import TIMEOUT_S, wait_until

V1, V2 = f"/v1/models/{COUNTING.name}/infer", f"/v2/models/{COUNTING.name}/infer"
ONE = np.array([[1]], np.int32)


# The choice of a replica.


class Named(NamedTuple):
    name: str


def named(*names: str) -> list[Named]:
    return [Named(name) for name in names]


class Table:
    """A router of replicas that join and leave, with a clock that is set by hand."""

    def __init__(self, *names: str, most: int = 1000) -> None:
        self.now = 0.0
        self.replicas = named(*names)
        self.sequences = SequenceRouter(lambda: self.now, idle_s=60, max_sequences=most)

    def start(self, sequence_id: int | str) -> str:
        return self.go_on(sequence_id, start=True)

    def go_on(self, sequence_id: int | str, *, start: bool = False, end: bool = False) -> str:
        step = SequenceStep(sequence_id, start, end)
        chosen = self.sequences.choose_replica("m", step, self.replicas, self.replicas).name
        self.sequences.finish_step("m", step)
        return chosen


def test_routers_without_shared_state_choose_the_same_replicas_evenly() -> None:
    one, other = Table("a", "b", "c"), Table("c", "a", "b")
    chosen = [one.start(number) for number in range(900)]
    assert [other.go_on(number) for number in range(900)] == chosen
    assert min(Counter(chosen).values()) > 200
    # A number and a text are two sequences.
    assert [one.start(n) for n in range(20)] != [one.start(str(n)) for n in range(20)]


def test_replica_that_joins_takes_no_running_sequence() -> None:
    table = Table("a", "b", "c")
    before = [table.start(number) for number in range(400)]
    table.replicas += named("d")
    assert [table.go_on(number) for number in range(400)] == before
    after = [table.start(number) for number in range(400)]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"d"}
    assert 50 < len(moved) < 150


def test_sequence_whose_replica_left_must_start_again() -> None:
    table = Table("a", "b")
    lost = table.start(7)
    (kept,) = table.replicas = [each for each in table.replicas if each.name != lost]
    for _ in range(2):
        with pytest.raises(
            SequenceNotRunning, match=r"sequence 7 of model 'm'.*its replica is no longer available"
        ):
            table.go_on(7)
    assert table.start(7) == kept.name
    table.replicas += named(lost)
    assert table.go_on(7) == kept.name


def test_sequences_that_ended_are_idle_or_too_many_are_forgotten() -> None:
    table = Table("a", "b", most=10)
    table.start(1)
    table.go_on(1, end=True)
    assert len(table.sequences) == 0
    table.start("idle")
    table.now = 59
    table.start("used")
    table.now = 61
    table.go_on("used")
    assert len(table.sequences) == 1
    for number in range(100):
        table.start(number)
    assert len(table.sequences) == 10


# Names of steps.


def test_parameters_name_the_step_of_a_sequence_or_are_refused() -> None:
    steps: list[tuple[dict[str, Any], SequenceStep | None]] = [
        ({}, None),
        ({"sequence_id": 0}, None),
        ({"priority": 1}, None),
        ({"sequence_id": 7}, SequenceStep(7)),
        ({"sequence_id": 2**64 - 1, "sequence_start": True}, SequenceStep(2**64 - 1, is_start=True)),
        ({"sequence_id": "é", "sequence_end": True}, SequenceStep("é", is_end=True)),
    ]  # fmt: skip
    for parameters, step in steps:
        assert parse_sequence_parameters(parameters) == step
    invalid: list[dict[str, Any]] = [
        {"sequence_id": -1},
        {"sequence_id": 2**64},
        {"sequence_id": 1.0},
        {"sequence_id": True},
        {"sequence_id": "é" * 65},
        {"sequence_id": 7, "sequence_start": 1},
        {"sequence_id": 7, "sequence_end": "yes"},
        {"sequence_start": True},
        {"sequence_id": "", "sequence_end": True},
    ]
    for parameters in invalid:
        with pytest.raises(InputMismatch, match="sequence"):
            parse_sequence_parameters(parameters)


def test_headers_name_the_step_of_a_sequence_or_are_refused() -> None:
    steps: list[tuple[str | None, str | None, SequenceStep | None]] = [
        (None, None, None),
        ("7", None, SequenceStep(7)),
        ("7", "start", SequenceStep(7, is_start=True)),
        ("a-b", " END ,", SequenceStep("a-b", is_end=True)),
        (str(2**64 - 1), "start, end", SequenceStep(2**64 - 1, is_start=True, is_end=True)),
    ]
    for sequence_id, flags, step in steps:
        assert parse_sequence_headers(sequence_id, flags) == step
    ids = ("", "0", str(2**64), "x" * 129, "1" * 5000, "\xe9", "a\tb")
    for headers in ((None, "start"), ("7", "begin"), *((each, None) for each in ids)):
        with pytest.raises(MalformedRequest, match="X-Sequence"):
            parse_sequence_headers(*headers)


# Real replicas.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counting")
    write_repository(folder, Names(), [COUNTING])
    return folder


@pytest.fixture(scope="module")
def tritons(folder: Path) -> Iterator[list[Triton]]:
    """Two that run, and one that joins later."""
    with ExitStack() as stack:
        tritons = [Triton(folder, "*") for _ in range(3)]
        stack.callback(tritons[2].end)
        for triton in tritons[:2]:
            triton.start()
            stack.callback(triton.kill)  # it would wait for sequences that nobody ends
        yield tritons


@pytest.fixture(scope="module")
def urls(tritons: list[Triton]) -> list[str]:
    return [f"http://{each.address}?grpc={each.options.grpc_port}" for each in tritons]


@pytest.fixture(scope="module")
def client(urls: list[str]) -> Iterator[httpx.Client]:
    with gateway_before(*urls, connect_timeout_s="10") as client:
        wait_until(lambda: on_how_many(client) == 2)
        yield client


def on_how_many(client: httpx.Client) -> int:
    replicas = client.get("/v1/replicas").json()["replicas"]
    return sum(
        replica["state"] == "UP" and replica["models"].get(COUNTING.name) == "READY"
        for replica in replicas
    )


class Count(NamedTuple):
    """The count of a sequence, and the process that keeps it; or why there is none."""

    status: int
    number: int = 0
    process: int = 0
    code: str = ""


NOT_RUNNING = Count(409, code="SEQUENCE_NOT_RUNNING")


def read_count(answer: httpx.Response) -> Count:
    if answer.status_code != 200:
        return Count(answer.status_code, code=answer.json()["code"])
    text = answer.text
    if text.startswith("id:"):
        text = text.split("data: ", 1)[1].split("\n")[0]
    outputs = json.loads(text)["outputs"]
    if isinstance(outputs, list):
        outputs = {output["name"]: output["data"] for output in outputs}
    return Count(200, *(np.ravel(outputs[name])[0].item() for name in ("COUNT", "PROCESS")))


def parameters(step: SequenceStep) -> dict[str, Any]:
    flags = {"sequence_start": step.is_start, "sequence_end": step.is_end}
    return {"sequence_id": step.sequence_id, **flags}


def headers(step: SequenceStep) -> dict[str, str]:
    flags = [flag for flag in ("start", "end") if getattr(step, f"is_{flag}")]
    named = {"X-Sequence-ID": str(step.sequence_id)}
    return {**named, "X-Sequence": ", ".join(flags)} if flags else named


def tensor(*, binary: bool) -> triton_http.InferInput:
    made = triton_http.InferInput("X", list(ONE.shape), "INT32")
    made.set_data_from_numpy(ONE, binary_data=binary)
    return made


def passed(step: SequenceStep, *, binary: bool) -> dict[str, Any]:
    """Build a request as Triton's own client does."""
    body, length = triton_http.InferenceServerClient.generate_request_body(
        [tensor(binary=binary)],
        outputs=[
            triton_http.InferRequestedOutput(n, binary_data=False) for n in ("COUNT", "PROCESS")
        ],
        **parameters(step),
    )
    named = {"Inference-Header-Content-Length": str(length)} if binary else {}
    return {"url": V2, "content": body, "headers": named}


WAYS: dict[str, Callable[[SequenceStep], dict[str, Any]]] = {
    "parameters": lambda step: {
        "url": V1,
        "json": {"inputs": [1], "parameters": parameters(step)},
    },
    "headers": lambda step: {"url": V1, "json": {"inputs": [1]}, "headers": headers(step)},
    "a stream": lambda step: {
        "url": V1,
        "json": {"inputs": [1], "parameters": parameters(step)},
        "headers": {"Accept": "text/event-stream"},
    },
    "columns": lambda step: {
        "url": f"/v1/models/{COUNTING.name}:predict",
        "json": {"inputs": [1]},
        "headers": headers(step),
    },
    "passed on, JSON": lambda step: passed(step, binary=False),
    "passed on, binary": lambda step: passed(step, binary=True),
    "passed on, both": lambda step: passed(step, binary=True) | {"headers": {
        **passed(step, binary=True)["headers"], **headers(step)
    }},
}  # fmt: skip


def ask(client: httpx.Client, step: SequenceStep, way: str = "parameters") -> Count:
    return read_count(client.post(**WAYS[way](step)))


async def test_concurrent_sequences_keep_their_counts_and_their_replica(
    client: httpx.Client,
) -> None:
    drawn = random.Random(7)
    ways = itertools.cycle(WAYS)
    steps = 6

    async def run(across: httpx.AsyncClient, sequence_id: int | str) -> list[Count]:
        counts = []
        for number in range(steps):
            step = SequenceStep(sequence_id, is_start=number == 0, is_end=number == steps - 1)
            counts.append(read_count(await across.post(**WAYS[next(ways)](step))))
            await asyncio.sleep(drawn.random() / 50)
        return counts

    ids = [*range(1, 26), *(f"speaker {number}" for number in range(25))]
    async with httpx.AsyncClient(base_url=client.base_url, timeout=TIMEOUT_S) as across:
        sequences = await asyncio.gather(*(run(across, each) for each in ids))
    for counts in sequences:
        assert [each.number for each in counts] == list(range(1, steps + 1)), counts
        assert len({each.process for each in counts}) == 1
    assert len({counts[0].process for counts in sequences}) == 2


def send_padded(client: httpx.Client, step: SequenceStep, size: int, **options: Any) -> Count:
    """Send JSON of about so many bytes, of which the sequence is the last, in two pieces."""
    document = {
        "inputs": [{"name": "X", "shape": [1, 1], "datatype": "INT32", "data": [1]}],
        "parameters": {"padding": "x" * size, **parameters(step)},
    }
    body = json.dumps(document).encode()

    def pieces() -> Iterator[bytes]:
        yield body[: len(body) - 40]
        time.sleep(0.02)
        yield body[-40:]

    return read_count(client.post(V2, content=pieces(), **options))


def test_sequence_is_found_anywhere_in_the_json_up_to_its_limit(client: httpx.Client) -> None:
    for size in (10_000, 90_000, 120_000):
        steps = [SequenceStep(f"long {size}", is_start=number == 0) for number in range(8)]
        counts = [send_padded(client, step, size) for step in steps]
        assert [each.number for each in counts] == list(range(1, 9)), counts
        assert len({each.process for each in counts}) == 1
    # A larger body must name its sequence in a header.
    step = SequenceStep("too long", is_start=True, is_end=True)
    assert send_padded(client, step, 200_000) == Count(400, code="DOES_NOT_FIT_MODEL")
    assert send_padded(client, step, 200_000, headers=headers(step)).number == 1


def test_sequence_that_is_not_running_is_409_however_it_is_named(client: httpx.Client) -> None:
    for way in WAYS:
        assert ask(client, SequenceStep(f"unheard of {way}"), way) == NOT_RUNNING
        assert ask(client, SequenceStep(way, is_start=True, is_end=True), way).number == 1
        assert ask(client, SequenceStep(way), way) == NOT_RUNNING


def test_sequences_stay_when_a_replica_joins_and_end_when_theirs_dies(
    client: httpx.Client, tritons: list[Triton]
) -> None:
    ids = [f"visit {number}" for number in range(24)]
    before = {each: ask(client, SequenceStep(each, is_start=True)).process for each in ids}
    tritons[2].start()
    wait_until(lambda: on_how_many(client) == 3)
    assert {each: ask(client, SequenceStep(each)).process for each in ids} == before
    with gateway_before(
        *(triton.options.url for triton in tritons), connect_timeout_s="10"
    ) as other:
        wait_until(lambda: on_how_many(other) == 3)
        # It saw none of them start, and expects a share of them on the new replica.
        found = {each: ask(other, SequenceStep(each)) for each in ids}
        lost = {each for each, count in found.items() if count == NOT_RUNNING}
        assert 0 < len(lost) < len(ids)
        assert all(found[each].process == before[each] for each in found.keys() - lost)
    after = {each: ask(client, SequenceStep(f"new {each}", is_start=True)).process for each in ids}
    (joined,) = set(after.values()) - set(before.values())

    tritons[2].kill()
    wait_until(lambda: on_how_many(client) == 2)
    for each in ids:
        count = ask(client, SequenceStep(f"new {each}"))
        if after[each] == joined:
            assert count == NOT_RUNNING
            assert ask(client, SequenceStep(f"new {each}", is_start=True)).number == 1
            assert ask(client, SequenceStep(f"new {each}")).number == 2
        else:
            assert count == Count(200, 2, after[each])
    assert {each: ask(client, SequenceStep(each)).process for each in ids} == before


def test_request_that_names_no_valid_step_is_refused(
    client: httpx.Client, subtests: pytest.Subtests
) -> None:
    named = {"inputs": [1], "parameters": {"sequence_id": 5}}
    start = {"X-Sequence-ID": "5", "X-Sequence": "start"}
    one = {"inputs": [1]}
    passed_on = passed(SequenceStep(7, is_start=True), binary=True)
    passed_on["headers"]["X-Sequence"] = "start"
    requests: dict[str, tuple[dict[str, Any], int]] = {
        "no id": ({"url": V1, "json": one, "headers": {"X-Sequence": "start"}}, 400),
        "zero": ({"url": V1, "json": one, "headers": {"X-Sequence-ID": "0"}}, 400),
        "negative": ({"url": V1, "json": {**named, "parameters": {"sequence_id": -1}}}, 422),
        "named twice": ({"url": V1, "json": named, "headers": {"X-Sequence-ID": "5"}}, 400),
        "split": ({"url": V1, "json": {"inputs": [1] * 9}, "headers": start}, 422),
        "passed on without an id": (passed_on, 400),
    }
    for name, (request, status) in requests.items():
        with subtests.test(name):
            answer = client.post(**request)
            assert answer.status_code == status
            assert "equence" in answer.json()["error"]
