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

from gateway.capabilities.openai.routes import relay_chunks
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

MODEL = "text_org/model-7b"  # a name as vLLM's models have
ANY = "text_any/"  # the server accepts every name that begins like this
MESSAGES: Any = [{"role": "user", "content": "hello"}]


async def in_single_bytes(text: str) -> AsyncIterator[str | bytes]:
    for byte in f"data: {json.dumps(text, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode():
        yield bytes([byte])


class CompletionServer:
    """A server of OpenAI's chat API, which answers with the words of the request in capitals."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.ended_streams = 0
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.complete)
        (self.port,) = free_ports(1)
        config = uvicorn.Config(self.app, port=self.port, log_level="error")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def complete(self, request: Request) -> Response:
        document = await request.json()
        self.bodies.append(await request.body())
        self.requests.append(document)
        self.headers.append(dict(request.headers))
        if document["model"] != MODEL and not document["model"].startswith(ANY):
            error = {"message": "no such model", "type": "NotFoundError", "param": None}
            return JSONResponse({"error": {**error, "code": 404}}, 404)
        if document.get("user") == "busy":
            return JSONResponse({"error": "busy"}, 503, {"Retry-After": "7"})
        if document.get("user") == "page":
            return Response("<script>", media_type="text/html")
        if document.get("stream"):
            chunks = self.stream(document)
            if document.get("user") == "bytes":
                chunks = in_single_bytes(document["messages"][0]["content"])
            return StreamingResponse(chunks, media_type="text/event-stream")
        message = {"role": "assistant", "content": document["messages"][0]["content"].upper()}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse(
            {
                "id": "c",
                "object": "chat.completion",
                "created": 1,
                "model": MODEL,
                "choices": [choice],
            }
        )

    async def stream(self, document: dict[str, Any]) -> AsyncIterator[str | bytes]:
        try:
            for number in range(document.get("max_tokens", 3)):
                choice = {"index": 0, "delta": {"content": f"{number} "}, "finish_reason": None}
                chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
                yield f"data: {json.dumps({**chunk, 'choices': [choice]})}\n\n"
                await asyncio.sleep(0.05)
            if document.get("user") == "broken":
                raise ConnectionError
            yield "data: [DONE]\n\n"
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
        yield client


def connect(gateway: httpx.Client, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.base_url}/v1", api_key=key, max_retries=0)


def test_completion_is_relayed_without_the_key(
    gateway: httpx.Client, server: CompletionServer
) -> None:
    completion = connect(gateway, TEXTS).chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0.5
    )
    assert completion.choices[0].message.content == "HELLO"
    assert server.requests[-1] == {"model": MODEL, "messages": MESSAGES, "temperature": 0.5}
    assert "authorization" not in server.headers[-1]
    assert TEXTS not in str(server.headers[-1])


def test_command_for_a_completion_prints_what_the_document_says(server: CompletionServer) -> None:
    page = LANGUAGE_MODELS
    ((_, command, answer),) = [each for each in examples([page]) if COMPLETIONS in each[1]]
    (nobody,) = free_ports(1)
    with gateway_before(f"http://127.0.0.1:{nobody}", openai_urls=server.url) as client:
        assert_prints(client, command.replace("llama-3.1-8b", MODEL), answer)


def test_stream_is_relayed_as_it_arrives_and_ends_at_the_server_with_its_client(
    gateway: httpx.Client, server: CompletionServer
) -> None:
    before = server.ended_streams
    stream = connect(gateway, TEXTS).chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, max_tokens=100_000
    )
    assert [next(stream).choices[0].delta.content for _ in range(3)] == ["0 ", "1 ", "2 "]
    stream.close()
    wait_until(lambda: server.ended_streams == before + 1)


def test_key_for_other_models_is_refused_before_the_server(
    gateway: httpx.Client, server: CompletionServer
) -> None:
    count = len(server.requests)
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        connect(gateway, TEXTS).chat.completions.create(model="secret/model", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        connect(gateway, "tgw_wrong").chat.completions.create(model=MODEL, messages=MESSAGES)
    assert len(server.requests) == count


def test_server_receives_only_the_model_name_that_was_checked(
    gateway: httpx.Client, server: CompletionServer
) -> None:
    """Which one of several equal keys counts, and whether case matters, differs between servers."""
    path, headers = "/v1/chat/completions", bearer(TEXTS)
    document = json.dumps({"model": MODEL, "messages": MESSAGES})
    ambiguous = f'{{"model": "secret", "mod\\u0065l": "secret", {document[1:]}'
    assert gateway.post(path, content=ambiguous, headers=headers).status_code == 200
    assert json.loads(server.bodies[-1]) == json.loads(document)
    assert server.bodies[-1].count(b'model":') == 1
    count = len(server.requests)
    for more in ('"Model": "secret"', '"messages": ' + "[" * 1000 + "]" * 1000):
        refused = gateway.post(path, content=f"{document[:-1]}, {more}}}", headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "MALFORMED_REQUEST"
    assert len(server.requests) == count


def test_html_of_a_server_is_an_attachment(gateway: httpx.Client) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "user": "page"}
    answer = gateway.post("/v1/chat/completions", json=body, headers=bearer(TEXTS))
    assert answer.headers["content-disposition"] == "attachment"


def test_stream_that_its_server_aborts_is_aborted(server: CompletionServer) -> None:
    (nobody,) = free_ports(1)
    body = {"model": MODEL, "messages": MESSAGES, "stream": True, "user": "broken"}
    with real_gateway(f"http://127.0.0.1:{nobody}", openai_urls=server.url) as (client, command):
        with pytest.raises(httpx.RemoteProtocolError):
            client.post("/v1/chat/completions", json=body)
        command.wait_for("the response was aborted")


def test_line_of_a_relayed_stream_is_a_line_for_every_reader(gateway: httpx.Client) -> None:
    text = "\v\f\x1c\x1d\x1e\x85\u2028\u2029\u2027é€\u00a0\U0001f600"
    messages = [{"role": "user", "content": text}]
    body = {"model": MODEL, "messages": messages, "stream": True, "user": "bytes"}
    headers = {"Authorization": f"Bearer {TEXTS}"}
    response = gateway.post("/v1/chat/completions", json=body, headers=headers)
    event, empty, *rest = response.content.decode().splitlines()
    assert json.loads(event.removeprefix("data: ")) == text
    assert (empty, rest) == ("", ["data: [DONE]", ""])


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


def test_completions_are_counted_by_model_and_errors_of_the_server_relayed(
    gateway: httpx.Client,
) -> None:
    client = connect(gateway, ADMIN)
    client.chat.completions.create(model=MODEL, messages=MESSAGES)
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.chat.completions.create(model="nothing", messages=MESSAGES)
    busy = {"model": MODEL, "messages": MESSAGES, "user": "busy"}
    answer = gateway.post("/v1/chat/completions", json=busy, headers=bearer(ADMIN))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    page = gateway.get("/metrics", headers=bearer(ADMIN)).text
    assert f'model="{MODEL}"' in page
    assert 'model="nothing"' not in page


@pytest.mark.parametrize("stream", [False, True])
def test_time_of_completions_is_counted_by_caller(gateway: httpx.Client, stream: bool) -> None:
    series = f'gateway_caller_inference_seconds_total{{caller="admin",model="{MODEL}"}}'
    with httpx.Client(base_url=gateway.base_url, headers=bearer(ADMIN)) as client:
        before_s = metric(client, series)
        document = {"model": MODEL, "messages": MESSAGES, "stream": stream}
        client.post("/v1/chat/completions", json=document).raise_for_status()
        wait_until(lambda: metric(client, series) > before_s)


@pytest.mark.fault(
    "thousands of unknown model names, and names that a server of completions accepts"
)
def test_invented_model_names_have_few_metric_series(
    gateway: httpx.Client, server: CompletionServer
) -> None:
    body = {"messages": MESSAGES}
    for number in range(80):
        document = {**body, "model": f"{ANY}{number}"}
        answer = gateway.post("/v1/chat/completions", json=document, headers=bearer(TEXTS))
        assert answer.status_code == 200
    page = gateway.get("/metrics", headers=bearer(ADMIN)).text
    names = set(re.findall(r'gateway_request_bytes_total.*model="([^"]*)"', page))
    assert len(names & {f"{ANY}{number}" for number in range(80)}) <= 64
    assert "other" in names
    assert server.requests[-1]["model"] == f"{ANY}79"
    count = len(server.requests)
    long = gateway.post(
        "/v1/chat/completions", json={**body, "model": "text_" + "a" * 252}, headers=bearer(TEXTS)
    )
    assert long.status_code == 400
    assert "at most 256 characters" in long.json()["error"]["message"]
    assert len(server.requests) == count


@pytest.mark.fault(
    "a key for inference provokes errors of replicas, servers of completions and loads"
)
def test_completion_without_a_server_is_refused_with_the_setting_or_a_retry_delay() -> None:
    nobody, gone = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    with gateway_before(nobody) as client:
        for path in ("/v1/chat/completions", "/v1/completions"):
            response = client.post(path, json={"model": "m", "messages": MESSAGES})
            assert response.status_code == 501
            assert response.json()["error"]["code"] == "NO_OPENAI_SERVER"
            assert "GATEWAY_OPENAI_URLS" in response.json()["error"]["message"]
    with real_gateway(nobody, openai_urls=gone) as (client, command):
        response = client.post("/v1/chat/completions", json={"model": MODEL})
        assert response.status_code == 503
        assert not re.search(r"\d+\.\d+\.\d+|localhost|:\d{3,}", response.text)
        command.wait_for(f"OpenAI server {gone.removeprefix('http://')} cannot be reached")
        assert response.json()["error"]["type"] == "server_error"
        assert response.headers["Retry-After"]
