"""A model's answers as they are made, through gRPC, on a real tritonserver."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.model_zoo.zoo import AS_WRITTEN, Zoo
from tests.support.servers import Command, free_ports, gateway, gateway_before
from tests.support.wait import TIMEOUT_S, lengthening, wait_until

EVENTS, LINES = "text/event-stream", "application/x-ndjson"
PATH = "/v1/models/ticking/infer"
OTHERS = ("failing", "refusing", "single_BYTES", "sleeping")


@pytest.fixture(scope="module")
def served(zoo_triton: EmbeddedTriton) -> Iterator[tuple[httpx.Client, Command]]:
    settings = {"connect_timeout_s": "10", "request_timeout_s": "300"}
    with gateway(zoo_triton.options.url, **settings) as (client, command):
        Zoo(client, AS_WRITTEN).load("ticking", *OTHERS)
        yield client, command


@pytest.fixture(scope="module")
def folder(zoo_triton: EmbeddedTriton) -> Path:
    """Where the models write their notes."""
    return Path(zoo_triton.options.model_repositories[0])


@pytest.fixture(scope="module")
def client(served: tuple[httpx.Client, Command]) -> httpx.Client:
    return served[0]


def ticks(count: int, seconds: float = 0.0) -> dict[str, Any]:
    return {"inputs": {"COUNT": [count], "SECONDS": [seconds]}}


def in_flight(client: httpx.Client) -> float:
    """Beside the one that asks."""
    page = client.get("/metrics").text
    return float(page.partition('gateway_requests_in_flight{route="/v1"} ')[2].split("\n")[0]) - 1


@contextmanager
def streaming(
    client: httpx.Client, body: object, accept: str = EVENTS, path: str = PATH, **headers: str
) -> Iterator[httpx.Response]:
    with client.stream("POST", path, json=body, headers={"Accept": accept, **headers}) as answer:
        yield answer


def parse_events(text: str) -> list[tuple[str, str, Any]]:
    """The events: name, id, data."""
    found = []
    for event in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        found.append((fields.get("event", ""), fields.get("id", ""), json.loads(fields["data"])))
    return found


def address_of(client: httpx.Client) -> tuple[str, int]:
    return client.base_url.host, client.base_url.port or 80


def request_of(body: object) -> bytes:
    """As it is on the wire."""
    content = json.dumps(body).encode()
    lines = [f"POST {PATH} HTTP/1.1", "Host: x", f"Accept: {EVENTS}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(content)}", "", ""]
    return "\r\n".join(lines).encode() + content


class Notes:
    """What the model has written down, since these notes were made."""

    def __init__(self, folder: Path) -> None:
        self._started, self._cancelled = (
            folder / "ticking" / name for name in ("started", "cancelled")
        )
        for note in (self._started, self._cancelled):
            note.unlink(missing_ok=True)

    def started(self) -> bool:
        return self._started.exists()

    def cancelled(self) -> bool:
        return self._cancelled.exists() and self._cancelled.read_text().endswith("\n")

    @property
    def cancelled_at(self) -> float:
        return float(self._cancelled.read_text().split()[1])


def test_what_a_decoupled_model_says_of_itself_works_as_pasted(client: httpx.Client) -> None:
    described = client.get("/v1/models/ticking").json()
    line = shlex.split(described["curl"])
    pasted = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert parse_events(pasted.stdout)[-1][0] == "end"
    assert "outputs" in parse_events(pasted.stdout)[0][2]
    program = [sys.executable, "-c", described["python"]]
    printed = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert "'NUMBER'" in printed.stdout


def test_each_answer_is_an_event_as_it_is_made(client: httpx.Client) -> None:
    for pause_s in lengthening(0.05):
        arrived_at, text = [], ""
        with streaming(client, ticks(5, pause_s)) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith(EVENTS)
            assert answer.headers["cache-control"] == "no-store"
            assert answer.headers["x-accel-buffering"] == "no"
            for piece in answer.iter_text():
                arrived_at += [time.time()] * piece.count("data: ")
                text += piece
        events = parse_events(text)
        assert [name for name, _, _ in events] == [""] * 5 + ["end"]
        assert [number for _, number, _ in events] == ["1", "2", "3", "4", "5", ""]
        answers = [data for _, _, data in events[:-1]]
        assert [data["outputs"]["NUMBER"] for data in answers] == [[n] for n in range(5)]
        assert {data["model"] for data in answers} == {"ticking"}
        assert {data["id"] for data in answers} == {answer.headers["x-request-id"]}
        made_at = [data["outputs"]["MADE"][0] for data in answers]
        if all(at < following for at, following in zip(arrived_at, made_at[1:], strict=False)):
            return
    raise AssertionError("no event arrived before the next one was made")


def test_the_same_as_lines(client: httpx.Client) -> None:
    with streaming(client, ticks(3), LINES) as answer:
        assert answer.headers["content-type"].startswith(LINES)
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert [line["outputs"]["NUMBER"] for line in lines] == [[0], [1], [2]]


def test_the_first_event_is_as_from_triton_itself(
    client: httpx.Client, zoo_triton: EmbeddedTriton
) -> None:
    with streaming(client, ticks(1)) as answer:
        pieces = answer.iter_text()
        ((_, _, data),) = parse_events(next(pieces))
        assert "end" in "".join(pieces)  # whoever leaves at the very end races with it in Triton
    assert data["outputs"]["NUMBER"] == first_of(zoo_triton).as_numpy("NUMBER").tolist()


def first_of(triton: EmbeddedTriton) -> triton_grpc.InferResult:
    """The first response that Triton's own client has."""
    arrived: list[triton_grpc.InferResult] = []
    inputs = []
    for name, kind, value in (("COUNT", "INT32", np.int32(1)), ("SECONDS", "FP32", np.float32(0))):
        tensor = triton_grpc.InferInput(name, [1], kind)
        inputs.append(tensor.set_data_from_numpy(np.array([value])))
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{triton.options.grpc_port}") as direct:
        direct.is_server_live()
        direct.start_stream(lambda result, error: arrived.append(result))
        direct.async_stream_infer("ticking", inputs)
        wait_until(lambda: arrived)
        direct.stop_stream()
    return arrived[0]


def test_a_failure_in_the_middle_is_an_event_and_the_end_follows(client: httpx.Client) -> None:
    with streaming(client, ticks(-2)) as answer:
        events = parse_events(answer.read().decode())
    assert [name for name, _, _ in events] == ["", "", "error", "end"]
    error = events[2][2]
    assert error.keys() == {"error", "code", "request_id"}
    assert (error["code"], error["request_id"]) == ("MODEL_FAULT", answer.headers["x-request-id"])
    assert "boom -2" in error["error"]
    assert "/srv" not in error["error"]
    with streaming(client, ticks(-2), LINES) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert [line.get("code", "") for line in lines] == ["", "", "MODEL_FAULT"]


@pytest.mark.parametrize(
    ("model", "body", "status", "code"),
    [
        ("failing", {"inputs": {"X": [1.5]}}, 500, "MODEL_FAULT"),
        ("none", ticks(1), 404, "MODEL_NOT_FOUND"),
        ("ticking", {"inputs": {"COUNT": [1]}}, 422, "DOES_NOT_FIT_MODEL"),
        ("ticking", {"inputs": {"COUNT": ["x"], "SECONDS": [1]}}, 422, "DOES_NOT_FIT_MODEL"),
        ("ticking", "nonsense", 400, "MALFORMED_REQUEST"),
    ],
)
@pytest.mark.parametrize("accept", [EVENTS, LINES])
def test_what_fails_before_the_first_answer_is_an_answer_like_any_other(
    client: httpx.Client, model: str, body: object, status: int, code: str, accept: str
) -> None:
    with streaming(client, body, accept, f"/v1/models/{model}/infer") as answer:
        answer.read()
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_any_model_may_be_streamed(client: httpx.Client) -> None:
    path = "/v1/models/single_BYTES/infer"
    with client.stream(
        "POST", path, content="a text", headers={"Accept": EVENTS, "Content-Type": "text/plain"}
    ) as answer:
        events = parse_events(answer.read().decode())
    assert [(name, data.get("outputs")) for name, _, data in events] == [
        ("", {"Y": "a text"}), ("end", None),
    ]  # fmt: skip


def test_a_batch_that_the_model_does_not_take_at_once_is_not_streamed(client: httpx.Client) -> None:
    body = {"inputs": {"SECONDS": [0] * 100}}
    with streaming(client, body, path="/v1/models/sleeping/infer") as answer:
        answer.read()
    assert answer.status_code == 422
    assert "at most" in answer.json()["error"]


@pytest.mark.parametrize(
    "path", [PATH, "/v2/models/ticking/infer"], ids=["friendly", "passed through"]
)
def test_who_does_not_stream_a_model_that_answers_several_times_is_told_how(
    client: httpx.Client, path: str
) -> None:
    inputs = [
        {"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [1]},
        {"name": "SECONDS", "shape": [1], "datatype": "FP32", "data": [0]},
    ]
    answer = client.post(path, json={"inputs": inputs} if "v2" in path else ticks(1))
    assert answer.status_code == 422
    assert "Accept: text/event-stream" in answer.json()["error"]


@pytest.mark.fault("a client disconnects")
@pytest.mark.parametrize("started", [True, False], ids=["in the middle", "before the first"])
def test_who_leaves_cancels_the_inference(
    client: httpx.Client, folder: Path, started: bool
) -> None:
    notes = Notes(folder)
    with socket.create_connection(address_of(client), TIMEOUT_S) as connection:
        connection.sendall(request_of(ticks(300, 0.1 if started else 0.5)))
        if started:
            assert connection.recv(10)
        else:
            wait_until(notes.started)
        left = time.time()
    wait_until(notes.cancelled)  # which is so only of one that is not at its end
    print(f"seen by the model after {notes.cancelled_at - left:.2f} s")
    wait_until(lambda: in_flight(client) == 0)


def test_a_deadline_is_for_each_answer_and_cancels_when_it_passes(
    client: httpx.Client, folder: Path
) -> None:
    for pause_s in lengthening(0.1):  # all of it takes longer than the deadline
        headers = {"X-Request-Timeout": str(3 * pause_s)}
        with streaming(client, ticks(4, pause_s), **headers) as answer:
            text = answer.read().decode()
        if answer.status_code == 200 and len(parse_events(text)) == 5:
            break
    else:
        raise AssertionError("no stream came to its end")
    notes = Notes(folder)
    for deadline_s in lengthening(0.2):
        headers = {"X-Request-Timeout": str(deadline_s)}
        with streaming(client, ticks(4, 5 * deadline_s), **headers) as answer:
            answer.read()
        assert (answer.status_code, answer.json()["code"]) == (504, "DEADLINE_PASSED")
        if notes.started():  # in time, on this machine
            break
    wait_until(notes.cancelled)


def test_a_hundred_streams_of_a_hundred_events_lose_mix_and_turn_nothing(
    client: httpx.Client,
) -> None:
    async def one(across: httpx.AsyncClient) -> list[Any]:
        headers = {"Accept": EVENTS}
        answer = await across.post(PATH, json=ticks(100), headers=headers)
        identity = answer.headers["x-request-id"]
        events = parse_events(answer.text)
        assert {data["id"] for _, _, data in events[:-1]} == {identity}
        assert events[-1][0] == "end"
        return [data["outputs"]["NUMBER"][0] for _, _, data in events[:-1]]

    async def all_of_them() -> list[list[Any]]:
        limits = httpx.Limits(max_connections=100)
        url = str(client.base_url)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=TIMEOUT_S) as across:
            return await asyncio.gather(*(one(across) for _ in range(100)))

    assert asyncio.run(all_of_them()) == [list(range(100))] * 100


@pytest.mark.long
def test_a_reader_that_sleeps_holds_the_stream_back_and_not_the_memory(
    served: tuple[httpx.Client, Command],
) -> None:
    """Takes as long as Triton's and gRPC's windows take to fill, which is some seconds."""
    client, command = served
    process = psutil.Process(command.pid)
    before = process.memory_info().rss
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address_of(client))
        connection.sendall(request_of(ticks(200_000)))
        connection.recv(10)
        grown, spent = [0.0], [-1.0]
        while len(spent) < 6 or spent[-1] - spent[-6] > 0.02:  # until it waits
            time.sleep(0.1)
            grown.append((process.memory_info().rss - before) / 2**20)
            spent.append(sum(process.cpu_times()[:2]))
    print(f"grown by {max(grown):.1f} MiB")
    assert max(grown) < 16
    wait_until(lambda: in_flight(client) == 0)


@pytest.mark.parametrize("accept", [EVENTS, LINES])
def test_a_stream_that_has_ended_holds_no_place(zoo_triton: EmbeddedTriton, accept: str) -> None:
    with gateway_before(zoo_triton.options.url, max_model_inflight="1", max_queue="0") as client:
        Zoo(client, AS_WRITTEN).load("ticking")

        def is_served() -> bool:
            with streaming(client, ticks(1), accept) as answer:
                answer.read()
            return answer.status_code == 200

        for _ in range(3):
            wait_until(is_served)


def test_without_grpc_it_is_said_and_the_replica_goes_on_serving(
    zoo_triton: EmbeddedTriton,
) -> None:
    (closed,) = free_ports(1)
    port = zoo_triton.options.http_port
    with gateway(f"http://127.0.0.1:{port}?grpc={closed}") as (client, _):
        wait_until(lambda: client.get("/readyz").status_code == 200)
        for _ in range(7):
            with streaming(client, ticks(1)) as answer:
                answer.read()
            assert answer.status_code in (502, 503)
            assert "gRPC" in answer.json()["error"]
        attempts = f'attempts_total{{replica="127.0.0.1:{port}",outcome="refused"}} 7.0'
        assert attempts in client.get("/metrics").text
        body = {"inputs": {"X": ["x"]}}
        assert client.post("/v1/models/single_BYTES/infer", json=body).status_code == 200
        assert client.get("/readyz").status_code == 200


def test_no_connection_is_left_that_a_stopping_triton_would_wait_for(
    served: tuple[httpx.Client, Command], zoo_triton: EmbeddedTriton
) -> None:
    client, command = served

    def connected() -> bool:
        return any(
            connection.raddr and connection.raddr.port == zoo_triton.options.grpc_port
            for connection in psutil.Process(command.pid).net_connections("tcp")
        )

    with streaming(client, ticks(1)) as answer:
        assert connected()
        answer.read()
    wait_until(lambda: not connected())
