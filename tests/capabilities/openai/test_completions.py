"""Completions are relayed to servers of OpenAI's API; the client is OpenAI's own.

The server stands for vLLM, which needs a GPU.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from gateway.capabilities.openai.servers import relay_chunks
from tests.capabilities.openai.support.lazy import LazyModule
from tests.support.documents import COMPLETIONS, LANGUAGE_MODELS, assert_prints, examples
from tests.support.keys import ADMIN, TEXTS, bearer, entry, written
from tests.support.metrics import metric
from tests.support.servers import free_ports, gateway_before
from tests.support.servers import gateway as real_gateway
from tests.support.wait import wait_until

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

PATH = "/v1/chat/completions"
MODEL = "text_org/model-7b"  # a name as vLLM's models have
ANY = "text_any/"  # the server accepts every name that begins like this
MESSAGES: Any = [{"role": "user", "content": "hello"}]
SEPARATORS = "\v\f\x1c\x1d\x1e\x85\u2028\u2029\u2027é€\u00a0\U0001f600"
REQUEST = {"model": MODEL, "messages": MESSAGES}


class CompletionServer:
    """A server of OpenAI's chat API, which answers in capitals, or as the user's name says."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.ended_streams = 0
        self.app = FastAPI()
        self.app.post(PATH)(self.complete)
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=self.port, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    async def complete(self, request: Request) -> Response:
        document = await request.json()
        self.bodies.append(await request.body())
        self.headers.append(dict(request.headers))
        if document["model"] != MODEL and not document["model"].startswith(ANY):
            error = {"message": "no such model", "type": "NotFoundError", "param": None}
            return JSONResponse({"error": {**error, "code": 404}}, 404)
        user = document.get("user")
        if user == "busy":
            return JSONResponse({"error": "busy"}, 503, {"Retry-After": "7"})
        if user == "page":
            return Response("<script>", media_type="text/html")
        if document.get("stream"):
            return StreamingResponse(self.stream(document), media_type="text/event-stream")
        message = {"role": "assistant", "content": document["messages"][0]["content"].upper()}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        completion = {"id": "c", "object": "chat.completion", "created": 1, "model": MODEL}
        return JSONResponse({**completion, "choices": [choice]})

    async def stream(self, document: dict[str, Any]) -> AsyncIterator[bytes]:
        try:
            count = document.get("max_tokens", 3)
            if document.get("user") == "bytes":
                count = 0
                text = json.dumps(document["messages"][0]["content"], ensure_ascii=False)
                for byte in f"data: {text}\n\n".encode():
                    yield bytes([byte])
            for number in range(count):
                choice = {"index": 0, "delta": {"content": f"{number} "}, "finish_reason": None}
                chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
                yield f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\n".encode()
                await asyncio.sleep(0.05)
            if document.get("user") == "broken":
                raise ConnectionError
            yield b"data: [DONE]\n\n"
        finally:
            self.ended_streams += 1

    def __enter__(self) -> CompletionServer:
        self.thread.start()
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[CompletionServer]:
    with CompletionServer() as server:
        yield server


@pytest.fixture(scope="module")
def gateway(
    server: CompletionServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    entries = [entry(ADMIN, "admin", "infer"), entry(TEXTS, "infer", models=["text_*"])]
    keys = written(tmp_path_factory.mktemp("keys") / "keys.yaml", entries)
    (nobody, gone) = free_ports(2)  # the second server is not there
    urls = f"http://127.0.0.1:{gone},{server.url}"
    with gateway_before(
        f"http://127.0.0.1:{nobody}", openai_urls=urls, keys_file=str(keys), max_inflight="4"
    ) as client:
        client.headers.update(bearer(TEXTS))
        yield client


def connect(gateway: httpx.Client, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.base_url}/v1", api_key=key, max_retries=0)


def test_completion_is_relayed_without_the_key(
    gateway: httpx.Client, server: CompletionServer
) -> None:
    create = connect(gateway, TEXTS).chat.completions.create
    completion = create(model=MODEL, messages=MESSAGES, temperature=0.5)
    assert completion.choices[0].message.content == "HELLO"
    assert json.loads(server.bodies[-1]) == {**REQUEST, "temperature": 0.5}
    assert "authorization" not in server.headers[-1]
    assert TEXTS not in str(server.headers[-1])


def test_stream_is_relayed_as_it_arrives_and_ends_at_the_server_with_its_client(
    gateway: httpx.Client, server: CompletionServer
) -> None:
    before = server.ended_streams
    create = connect(gateway, TEXTS).chat.completions.create
    stream = create(model=MODEL, messages=MESSAGES, stream=True, max_tokens=100_000)
    assert [next(stream).choices[0].delta.content for _ in range(3)] == ["0 ", "1 ", "2 "]
    stream.close()
    wait_until(lambda: server.ended_streams == before + 1)


def test_errors_are_those_of_openais_client(
    gateway: httpx.Client, server: CompletionServer
) -> None:
    count = len(server.bodies)
    for key, model, error, words in (
        (TEXTS, "secret/model", openai.NotFoundError, "unknown model"),
        ("tgw_wrong", MODEL, openai.AuthenticationError, "key"),
        (ADMIN, "nothing", openai.NotFoundError, "no such model"),  # of the server
    ):
        with pytest.raises(error, match=words):
            connect(gateway, key).chat.completions.create(model=model, messages=MESSAGES)
    long = gateway.post(PATH, json={**REQUEST, "model": "text_" + "a" * 252})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "MALFORMED_REQUEST")
    assert len(server.bodies) == count + 1


def test_response_keeps_its_status_delay_and_lines_and_runs_no_script(
    gateway: httpx.Client,
) -> None:
    busy = gateway.post(PATH, json={**REQUEST, "user": "busy"})
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "7")
    page = gateway.post(PATH, json={**REQUEST, "user": "page"})
    assert page.headers["content-disposition"] == "attachment"
    # A line of a stream is a line for every reader.
    body = {**REQUEST, "messages": [{"content": SEPARATORS}], "stream": True, "user": "bytes"}
    event, *rest = gateway.post(PATH, json=body).content.decode().splitlines()
    assert json.loads(event.removeprefix("data: ")) == SEPARATORS
    assert rest == ["", "data: [DONE]", ""]


def test_stream_that_its_server_aborts_is_aborted(server: CompletionServer) -> None:
    (nobody,) = free_ports(1)
    body = {**REQUEST, "stream": True, "max_tokens": 1, "user": "broken"}
    with real_gateway(f"http://127.0.0.1:{nobody}", openai_urls=server.url) as (client, command):
        with pytest.raises(httpx.RemoteProtocolError):
            client.post(PATH, json=body)
        command.wait_for("the response was aborted")
        ((_, shown, answer),) = [
            each for each in examples([LANGUAGE_MODELS]) if COMPLETIONS in each[1]
        ]
        assert_prints(client, shown.replace("llama-3.1-8b", MODEL), answer)


class FastStream:
    """Stands for the response of a server whose next piece arrives in each pass of the event loop."""

    is_complete = False
    is_event_stream = True

    def __init__(self) -> None:
        self.pieces = 0
        self.waiter: asyncio.Future[bytes] | None = None

    def set_timeout(self, _: float) -> None:
        self.is_complete = self.pieces > 1000

    async def next_chunk(self) -> bytes:
        self.waiter = asyncio.get_running_loop().create_future()
        return await self.waiter

    def receive(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.pieces += 1
            self.waiter.set_result(b"piece")


async def test_stream_whose_next_piece_has_arrived_can_be_cancelled() -> None:
    """A task group does not cancel a task whose next piece is there already."""
    stream: Any = FastStream()

    async def relay() -> None:
        async for _ in relay_chunks(stream, 1.0):
            pass

    loop = asyncio.get_running_loop()
    readable, written = socket.socketpair()
    with readable, written:
        written.send(b"never read")
        async with anyio.create_task_group() as group:
            group.start_soon(relay)
            while stream.pieces < 10:
                await asyncio.sleep(0)
                stream.receive()
            await asyncio.sleep(0)
            loop.call_soon(group.cancel_scope.cancel)
            stream.receive()
            loop.add_reader(readable, stream.receive)
        loop.remove_reader(readable)
    assert stream.pieces < 20


@pytest.mark.parametrize("stream", [False, True])
def test_time_of_completions_is_counted_by_caller(gateway: httpx.Client, stream: bool) -> None:
    series = f'gateway_caller_inference_seconds_total{{caller="admin",model="{MODEL}"}}'
    with httpx.Client(base_url=gateway.base_url, headers=bearer(ADMIN)) as client:
        before_s = metric(client, series)
        document = {**REQUEST, "max_tokens": 1, "stream": stream}
        client.post(PATH, json=document).raise_for_status()
        wait_until(lambda: metric(client, series) > before_s)


@pytest.mark.fault(
    "thousands of unknown model names, and names that a server of completions accepts"
)
def test_invented_model_names_have_few_metric_series(gateway: httpx.Client) -> None:
    gateway.post(PATH, json={**REQUEST, "model": "text_nothing"})  # which the server does not know
    invented = {f"{ANY}{number}" for number in range(80)}
    for name in invented:
        assert gateway.post(PATH, json={**REQUEST, "model": name}).status_code == 200
    page = gateway.get("/metrics", headers=bearer(ADMIN)).text
    names = set(re.findall(r'gateway_request_bytes_total.*model="([^"]*)"', page))
    assert 0 < len(names & invented) <= 64
    assert {"other"} < names
    assert "text_nothing" not in names


@pytest.mark.fault(
    "a key for inference provokes errors of replicas, servers of completions and loads"
)
def test_completion_without_a_server_is_refused_with_the_setting_or_a_retry_delay() -> None:
    nobody, gone = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    with gateway_before(nobody) as client:
        for path in (PATH, "/v1/completions"):
            error = client.post(path, json=REQUEST).json()["error"]
            assert error["code"] == "NO_OPENAI_SERVER"
            assert "GATEWAY_OPENAI_URLS" in error["message"]
    with real_gateway(nobody, openai_urls=gone) as (client, command):
        response = client.post(PATH, json=REQUEST)
        assert response.status_code == 503
        assert not re.search(r"\d+\.\d+\.\d+|localhost|:\d{3,}", response.text)
        command.wait_for(f"OpenAI server {gone.removeprefix('http://')} cannot be reached")
        assert response.json()["error"]["type"] == "server_error"
        assert response.headers["Retry-After"]
