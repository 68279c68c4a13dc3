"""Cancellation in Triton when the client disconnects or a deadline passes, for cancellable models."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from fastapi import FastAPI

from gateway.access.auth import CORE_PATHS
from gateway.config.settings import Settings
from gateway.routes.error_responses import ErrorBoundary
from gateway.routes.middleware import GatewayMiddleware
from gateway.services import build_components, run_services
from gateway.tensors.inputs import InferInputs
from gateway.tensors.signature import build_signature
from gateway.triton.grpc.byte_channel import INFER_METHOD, GrpcByteChannel, send_bytes
from gateway.triton.grpc.messages import encode_grpc_request
from gateway.triton.inference import InferRequest
from gateway.triton.request_target import RequestTarget
from tests.support.model_zoo.zoo import CANCELLABLE, PATIENT, Names, write_repository
from tests.support.servers import ROOT, Command, Triton, free_ports, gateway
from tests.support.wait import TIMEOUT_S, lengthening, wait_until, wait_until_async

NAMED = replace(PATIENT, name="named_by_a_glob")
SETTINGS = {
    "cancellable_models": "none, named_*",
    "connect_timeout_s": "10",
    # No deadline but a request's own stops an inference here.
    "request_timeout_s": "3600",
    "max_request_timeout_s": "3600",
}
DIALECTS = {"infer": "inputs", "predict": "instances"}


class Model:
    """The notes that the inferences of a model have written since this was created."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = f"/v1/models/{name}"
        self._starts = folder / name / "started"
        self._ends = folder / name / "ends"
        for note in (self._starts, self._ends):
            note.unlink(missing_ok=True)

    def count_starts(self) -> int:
        return self._starts.stat().st_size if self._starts.exists() else 0

    def ends(self) -> list[tuple[str, float]]:
        """Return how each inference ended, and after how many seconds."""
        if not self._ends.exists():
            return []
        text = self._ends.read_text()
        words = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
        return [(how, float(after)) for how, after, _ in words]

    def wait_for_ends(self, count: int = 1) -> list[tuple[str, float]]:
        wait_until(lambda: len(self.ends()) >= count)
        return self.ends()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("patient")
    write_repository(folder, Names(), [CANCELLABLE, PATIENT, NAMED])
    return folder


@pytest.fixture(scope="module")
def triton(folder: Path) -> Iterator[Triton]:
    with Triton(folder, "*") as triton:
        triton.wait()
        yield triton


def url_of(triton: Triton, grpc_port: int | None = None) -> str:
    return f"http://{triton.address}?grpc={grpc_port or triton.options.grpc_port}"


@pytest.fixture(scope="module")
def client(triton: Triton) -> Iterator[httpx.Client]:
    with gateway(url_of(triton), **SETTINGS) as (client, _):
        wait_until(lambda: ready(client, CANCELLABLE.name))
        yield client


@pytest.fixture
def model(folder: Path) -> Callable[[str], Model]:
    return lambda name: Model(folder, name)


def ready(client: httpx.Client, model: str) -> bool:
    answer = client.post(f"/v1/models/{model}/infer", json=waiting(0))
    return answer.status_code == 200


def count_replicas(client: httpx.Client, model: str) -> int:
    replicas = client.get("/v1/replicas").json()["replicas"]
    return sum(replica["models"].get(model) == "READY" for replica in replicas)


def outstanding(client: httpx.Client) -> float:
    """Return the number of requests sent to replicas and not answered, by the metrics."""
    page = client.get("/metrics").text
    found = re.findall(r"^gateway_upstream_outstanding\{.*\} (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


def waiting(*seconds: float, key: str = "inputs") -> dict[str, Any]:
    return {key: list(seconds)}


@contextmanager
def asking(client: httpx.Client, path: str, body: object) -> Iterator[None]:
    """Send a request, and disconnect at the end."""
    address = client.base_url.host, client.base_url.port or 80
    with socket.create_connection(address, TIMEOUT_S) as connection:
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        yield


# Longer than any test waits: an inference that is over by then was stopped.
LONG_S = 2 * TIMEOUT_S


@pytest.mark.parametrize("verb", DIALECTS)
@pytest.mark.parametrize("name", [CANCELLABLE.name, NAMED.name], ids=["by config", "by setting"])
def test_client_that_disconnects_cancels_the_inference(
    client: httpx.Client, model: Callable[[str], Model], name: str, verb: str
) -> None:
    asked = model(name)
    path = f"{asked.path}/infer" if verb == "infer" else f"{asked.path}:predict"
    with asking(client, path, waiting(LONG_S, key=DIALECTS[verb])):
        wait_until(asked.count_starts)
    ((how, _),) = asked.wait_for_ends()
    assert how == "cancelled"


def test_deadline_that_passes_cancels_the_inference(
    client: httpx.Client, model: Callable[[str], Model]
) -> None:
    asked = model(CANCELLABLE.name)
    for deadline_s in lengthening(0.2):
        headers = {"X-Request-Timeout": str(deadline_s)}
        answer = client.post(f"{asked.path}/infer", json=waiting(LONG_S), headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (504, "DEADLINE_PASSED")
        if asked.count_starts():  # in time, on this machine
            break
    assert {how for how, _ in asked.wait_for_ends()} == {"cancelled"}


def test_model_that_is_not_cancellable_runs_to_its_end(
    client: httpx.Client, model: Callable[[str], Model]
) -> None:
    asked = model(PATIENT.name)
    with asking(client, f"{asked.path}/infer", waiting(0.5)):
        wait_until(asked.count_starts)
    ((how, after_s),) = asked.wait_for_ends()
    assert how == "finished"
    assert after_s >= 0.5


def test_batch_that_is_split_is_cancelled_in_all_its_parts(
    client: httpx.Client, model: Callable[[str], Model]
) -> None:
    asked = model(CANCELLABLE.name)
    pieces = -(-10 // CANCELLABLE.max_batch_size)
    seconds = [0.01 * number for number in range(10)]
    answer = client.post(f"{asked.path}/infer", json=waiting(*seconds))
    assert answer.json()["outputs"]["Y"] == pytest.approx(seconds)
    assert [how for how, _ in asked.wait_for_ends(pieces)] == ["finished"] * pieces
    # They run one after the other; those that have not started never do, or end at once.
    with asking(client, f"{asked.path}/infer", waiting(*[LONG_S] * 10)):
        wait_until(lambda: asked.count_starts() > pieces)
    asked.wait_for_ends(pieces + 1)
    assert ready(client, CANCELLABLE.name)
    *stopped, (last, _) = asked.ends()[pieces:]
    assert {how for how, _ in stopped} == {"cancelled"}
    assert last == "finished"  # that of `ready`


@pytest.mark.parametrize(
    "silent",
    [
        pytest.param(False, id="nobody listens"),
        pytest.param(True, id="nobody speaks", marks=pytest.mark.soak),
    ],
)
def test_inference_without_grpc_uses_http_with_one_warning(triton: Triton, silent: bool) -> None:
    with ExitStack() as stack:
        (port,) = free_ports(1)
        if silent:
            listening = stack.enter_context(socket.socket())
            listening.bind(("127.0.0.1", port))
            listening.listen()
        client, command = stack.enter_context(gateway(url_of(triton, port), **SETTINGS))
        wait_until(lambda: ready(client, CANCELLABLE.name))
        for _ in range(5):
            assert ready(client, CANCELLABLE.name)
        wait_until(lambda: warnings_of(command))  # a thread writes the log
        assert len(warnings_of(command)) == 1
        assert client.get("/v1/replicas").json()["replicas"][0]["state"] == "UP"


def warnings_of(command: Command) -> list[str]:
    return [
        line for line in command.lines if "client disconnects do not cancel inference there" in line
    ]


def test_cancelled_inference_leaves_no_connection_to_triton(
    client: httpx.Client, triton: Triton, model: Callable[[str], Model]
) -> None:
    asked = model(CANCELLABLE.name)

    def connected() -> bool:
        return any(
            connection.laddr.port == triton.options.grpc_port and connection.status == "ESTABLISHED"
            for connection in psutil.Process(triton.pid).net_connections("tcp")
        )

    with asking(client, f"{asked.path}/infer", waiting(LONG_S)):
        wait_until(asked.count_starts)
        assert connected()
    asked.wait_for_ends()
    wait_until(lambda: not connected())


LEAVERS = 16
CALLS = 50_000
MOST_WAIT_S = 0.005


@pytest.mark.fault("callers of a cancellable model disconnect at any moment, fifty thousand times")
@pytest.mark.soak
def test_tritonserver_survives_fifty_thousand_cancellations(triton: Triton) -> None:
    """Cancelled at once, half as many ended tritonserver 2.51."""
    url = f"http://{triton.address}/v2/models/{PATIENT.name}"
    pid = triton.pid
    metadata, config = (
        httpx.get(f"{url}{path}", timeout=TIMEOUT_S).json() for path in ("", "/config")
    )
    described = build_signature(metadata, config)
    seconds = {Names().tensor("SECONDS"): np.zeros((1, 1), np.float32)}

    async def call(channel: GrpcByteChannel, drawn: random.Random) -> Counter[str]:
        ends: Counter[str] = Counter()
        for _ in range(CALLS // LEAVERS):
            asked = RequestTarget(PATIENT.name, timeout_s=TIMEOUT_S)
            request = InferRequest(asked, described, InferInputs(seconds), (), {}, "", 0.0, [])
            message = encode_grpc_request(request, TIMEOUT_S)
            sending = send_bytes(channel, asked, INFER_METHOD, message, ())
            calling = asyncio.create_task(sending)
            await asyncio.wait({calling}, timeout=drawn.uniform(0, MOST_WAIT_S))
            ends["answered" if calling.done() else "left"] += 1
            calling.cancel()
            with suppress(asyncio.CancelledError):
                await calling
        return ends

    async def leave_often() -> Counter[str]:
        channel = GrpcByteChannel(f"127.0.0.1:{triton.options.grpc_port}", None)
        calls = (call(channel, random.Random(seed)) for seed in range(LEAVERS))
        found = sum(await asyncio.gather(*calls), Counter[str]())
        await wait_until_async(lambda: not channel.active_calls)
        channel.drop_idle()
        return found

    ends = asyncio.run(leave_often())
    assert min(ends["answered"], ends["left"]) > CALLS / 20
    assert triton.pid == pid
    assert httpx.get(f"{url}/ready", timeout=TIMEOUT_S).status_code == 200


@pytest.mark.soak
def test_inference_that_may_have_run_is_not_sent_again(
    triton: Triton, folder: Path, model: Callable[[str], Model]
) -> None:
    with Triton(folder, CANCELLABLE.name) as other:
        other.wait()
        urls = url_of(triton), url_of(other)
        with gateway(*urls, **SETTINGS) as (client, _):
            wait_until(lambda: count_replicas(client, CANCELLABLE.name) == 2)
            asked = model(CANCELLABLE.name)
            statuses = []

            def ask() -> None:
                answer = client.post(f"{asked.path}/infer", json=waiting(2))
                statuses.append(answer.status_code)

            askers = [threading.Thread(target=ask) for _ in range(4)]
            for asker in askers:
                asker.start()
            # One on each, and behind it another one.
            wait_until(lambda: asked.count_starts() >= 2 and outstanding(client) == 4)
            other.kill()
            for asker in askers:
                asker.join()
            cut_off = len([status for status in statuses if status != 200])
            assert 0 < cut_off < 4
            assert set(statuses) <= {200, 502}
            assert len(asked.ends()) == 4 - cut_off


@pytest.mark.long
def test_request_that_is_cancelled_stays_cancelled() -> None:
    # In a process of its own, because the services tune the interpreter.
    program = f"from {__name__} import cancel_request; print(cancel_request())"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert result.stdout.strip() == "True", result.stderr


def cancel_request() -> bool:
    """Return whether the task of a request that is cancelled ends as cancelled."""

    async def run() -> bool:
        framework = FastAPI()
        has_begun = asyncio.Event()

        async def wait(*_: object) -> None:
            has_begun.set()
            await asyncio.Event().wait()

        settings = Settings(state="memory:", triton_urls=("127.0.0.1:9",))
        middleware = GatewayMiddleware(framework, ErrorBoundary(wait, (), {}), CORE_PATHS)
        async with run_services(settings, build_components(settings)) as services:
            middleware.services = services
            request = asyncio.create_task(middleware(SCOPE, receive_nothing, send_nothing))
            await has_begun.wait()
            request.cancel()
            await asyncio.wait([request])
        return request.cancelled()

    return asyncio.run(run())


SCOPE: dict[str, Any] = {
    "type": "http",
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "path": "/wait",
    "raw_path": b"/wait",
    "query_string": b"",
    "client": ("127.0.0.1", 1),
    "headers": [(b"host", b"localhost")],
}


async def receive_nothing() -> dict[str, Any]:
    return {"type": "http.request"}


async def send_nothing(_: Any) -> None:
    pass
