"""Streams of a model's responses as they are made, through gRPC, on a real tritonserver."""

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
import psutil
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.model_zoo.zoo import AS_WRITTEN, Zoo
from tests.support.servers import Command, free_ports, gateway
from tests.support.wait import TIMEOUT_S, lengthening, wait_until

EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
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
    """Return the folder in which the models write their notes."""
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
    """Return the name, id and data of each event."""
    found = []
    for event in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        found.append((fields.get("event", ""), fields.get("id", ""), json.loads(fields["data"])))
    return found


def address_of(client: httpx.Client) -> tuple[str, int]:
    return client.base_url.host, client.base_url.port or 80


def request_of(body: object) -> bytes:
    """Return the bytes of the request."""
    content = json.dumps(body).encode()
    lines = [f"POST {PATH} HTTP/1.1", "Host: x", f"Accept: {EVENTS}"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(content)}", "", ""]
    return "\r\n".join(lines).encode() + content


class Notes:
    """The notes that the model has written since this was created."""

    def __init__(self, folder: Path) -> None:
        self._started = folder / "ticking" / "started"
        self._cancelled = folder / "ticking" / "cancelled"
        for note in (self._started, self._cancelled):
            note.unlink(missing_ok=True)

    def has_started(self) -> bool:
        return self._started.exists()

    def is_cancelled(self) -> bool:
        return self._cancelled.exists() and self._cancelled.read_text().endswith("\n")


@pytest.mark.long
def test_examples_of_a_decoupled_model_work_as_pasted(client: httpx.Client) -> None:
    described = client.get("/v1/models/ticking").json()
    line = shlex.split(described["curl"])
    pasted = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert parse_events(pasted.stdout)[-1][0] == "end"
    assert "outputs" in parse_events(pasted.stdout)[0][2]
    program = [sys.executable, "-c", described["python"]]
    printed = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert "'NUMBER'" in printed.stdout


def test_each_response_is_an_event_as_soon_as_it_is_made(client: httpx.Client) -> None:
    for pause_s in lengthening(0.05):
        arrived_at = []
        text = ""
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


def test_each_response_is_a_line_if_the_client_accepts_ndjson(client: httpx.Client) -> None:
    with streaming(client, ticks(3), LINES) as answer:
        assert answer.headers["content-type"].startswith(LINES)
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert [line["outputs"]["NUMBER"] for line in lines] == [[0], [1], [2]]


def test_error_after_responses_is_an_event_before_the_end(client: httpx.Client) -> None:
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


def test_error_before_the_first_response_is_no_stream(
    client: httpx.Client, subtests: pytest.Subtests
) -> None:
    wrong = {"inputs": {"COUNT": ["x"], "SECONDS": [1]}}
    incomplete = {"inputs": {"COUNT": [1]}}
    too_many = {"inputs": {"SECONDS": [0] * 100}}
    table: list[tuple[str, object, int, str, str]] = [
        ("failing", {"inputs": {"X": [1.5]}}, 500, "MODEL_FAULT", "boom"),
        ("none", ticks(1), 404, "MODEL_NOT_FOUND", "none"),
        ("ticking", incomplete, 422, "DOES_NOT_FIT_MODEL", "SECONDS"),
        ("ticking", wrong, 422, "DOES_NOT_FIT_MODEL", "COUNT"),
        ("ticking", "nonsense", 400, "MALFORMED_REQUEST", ""),
        ("sleeping", too_many, 422, "DOES_NOT_FIT_MODEL", "at most"),
    ]
    for accept in (EVENTS, LINES):
        for model, body, status, code, words in table:
            with subtests.test(f"{model} {code} {accept}"):
                with streaming(client, body, accept, f"/v1/models/{model}/infer") as answer:
                    answer.read()
                assert (answer.status_code, answer.json()["code"]) == (status, code)
                assert words in answer.json()["error"]


def test_model_with_one_response_is_streamed(client: httpx.Client) -> None:
    path = "/v1/models/single_BYTES/infer"
    with client.stream(
        "POST", path, content="a text", headers={"Accept": EVENTS, "Content-Type": "text/plain"}
    ) as answer:
        events = parse_events(answer.read().decode())
    assert [(name, data.get("outputs")) for name, _, data in events] == [
        ("", {"Y": "a text"}), ("end", None),
    ]  # fmt: skip


def test_decoupled_model_without_a_stream_names_the_header(
    client: httpx.Client,
) -> None:
    inputs = [
        {"name": "COUNT", "shape": [1], "datatype": "INT32", "data": [1]},
        {"name": "SECONDS", "shape": [1], "datatype": "FP32", "data": [0]},
    ]
    passed_on = "/v2/models/ticking/infer"
    for path, body, status in ((PATH, ticks(1), 422), (passed_on, {"inputs": inputs}, 400)):
        answer = client.post(path, json=body)
        assert answer.status_code == status
        assert "Accept: text/event-stream" in answer.json()["error"]


@pytest.mark.fault("a client disconnects")
@pytest.mark.parametrize("has_started", [True, False], ids=["in the middle", "before the first"])
def test_client_that_disconnects_cancels_the_stream(
    client: httpx.Client, folder: Path, has_started: bool
) -> None:
    notes = Notes(folder)
    with socket.create_connection(address_of(client), TIMEOUT_S) as connection:
        connection.sendall(request_of(ticks(300, 0.1 if has_started else 0.5)))
        if has_started:
            assert connection.recv(10)
        else:
            wait_until(notes.has_started)
    wait_until(notes.is_cancelled)  # which is so only of a stream that did not end
    wait_until(lambda: in_flight(client) == 0)


def test_deadline_applies_to_each_response_and_cancels(client: httpx.Client, folder: Path) -> None:
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
        if notes.has_started():  # in time, on this machine
            break
    wait_until(notes.is_cancelled)


@pytest.mark.long
async def test_concurrent_streams_keep_their_events_and_their_order(client: httpx.Client) -> None:
    async def run(across: httpx.AsyncClient) -> list[Any]:
        answer = await across.post(PATH, json=ticks(100), headers={"Accept": EVENTS})
        events = parse_events(answer.text)
        assert {data["id"] for _, _, data in events[:-1]} == {answer.headers["x-request-id"]}
        assert events[-1][0] == "end"
        return [data["outputs"]["NUMBER"][0] for _, _, data in events[:-1]]

    limits = httpx.Limits(max_connections=100)
    url = str(client.base_url)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=TIMEOUT_S) as across:
        streams = await asyncio.gather(*(run(across) for _ in range(100)))
    assert streams == [list(range(100))] * 100


@pytest.mark.long
def test_client_that_does_not_read_pauses_the_stream(
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
        grown = [0.0]
        spent = [-1.0]
        while len(spent) < 6 or spent[-1] - spent[-6] > 0.02:  # until it waits
            time.sleep(0.1)
            grown.append((process.memory_info().rss - before) / 2**20)
            spent.append(sum(process.cpu_times()[:2]))
    assert max(grown) < 16
    wait_until(lambda: in_flight(client) == 0)


@pytest.mark.usefixtures("served")  # which loads the model
def test_stream_without_grpc_is_an_error_of_the_request(
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
            assert (
                "gRPC port, which ?grpc=PORT in GATEWAY_TRITON_URLS sets" in answer.json()["error"]
            )
        (replica,) = client.get("/v1/replicas").json()["replicas"]
        reason = f"streams: no (gRPC port {closed} is unreachable; set ?grpc=PORT)"
        assert (replica["state"], replica["reason"]) == ("UP", reason)
        attempts = f'attempts_total{{replica="127.0.0.1:{port}",outcome="refused"}} 7.0'
        assert attempts in client.get("/metrics").text
        body = {"inputs": {"X": ["x"]}}
        assert client.post("/v1/models/single_BYTES/infer", json=body).status_code == 200
        assert client.get("/readyz").status_code == 200


def test_stream_leaves_no_connection_to_triton(
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
