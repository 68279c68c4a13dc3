"""The gateway in one process with a client and a replica that do no I/O, for `benchmarks.count`.

The client feeds bytes to `HttpProtocol`. The event loop opens connections to the replica in memory and
lets no time pass, so that no timer adds work: every run executes the same instructions.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import orjson
import typer
from uvicorn.lifespan.on import LifespanOn
from uvicorn.server import ServerState

from benchmarks.credentials import KEY, write_credentials
from benchmarks.requests import Request, encode_form, encode_jpeg, encode_npy, encode_v2_infer
from gateway.app import create_app
from gateway.capabilities.installed import SETTINGS
from gateway.config.settings import read_settings
from gateway.server.http import Loop, create_uvicorn_config
from gateway.telemetry import logs

HEADER_END: Final = b"\r\n\r\n"
LENGTH_FIELD: Final = b"\r\ncontent-length: "
NEVER_S: Final = 1e6
MARK_FUNCTION: Final = "getpriority"  # of the C library; nothing else calls it


def find_message_end(data: bytes) -> int:
    """Return the length of the message at the beginning of `data`, by its Content-Length."""
    head_end = data.index(HEADER_END)
    start = data.index(LENGTH_FIELD, 0, head_end) + len(LENGTH_FIELD)
    return head_end + len(HEADER_END) + int(data[start : data.index(b"\r", start)])


class MemoryTransport(asyncio.Transport):
    """A transport that passes each complete message to a function."""

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 8080)})
        self._on_message = on_message
        self._received = b""
        self._missing_bytes = 0
        self._is_closing = False

    def write(self, data: Any) -> None:
        if not self._missing_bytes:
            self._missing_bytes = find_message_end(data)
        self._received += data
        self._missing_bytes -= len(data)
        if not self._missing_bytes:
            message, self._received = self._received, b""
            self._on_message(message)

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class MemoryReplica(NamedTuple):
    """A Triton that answers each path with the same bytes."""

    responses: Mapping[bytes, bytes]

    def respond(self, request: bytes) -> bytes:
        return self.responses[request[request.index(b"/") : request.index(b" HTTP/1.1")]]


class TimelessLoop(Loop):
    """The gateway's event loop, with connections to a replica in memory. No timer fires."""

    replica = MemoryReplica({})
    time = itertools.repeat(1000.0).__next__  # costs no Python call

    def call_later(  # type: ignore[override]  # the type variable of the callback's arguments
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return super().call_later(NEVER_S, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # the type variable of the callback's arguments
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return super().call_later(NEVER_S, callback, *args, context=context)

    async def create_connection(self, protocol_factory: Any, *_: Any, **__: Any) -> Any:
        protocol = protocol_factory()

        def answer(request: bytes) -> None:
            self.call_soon(protocol.data_received, self.replica.respond(request))

        transport = MemoryTransport(answer)
        protocol.connection_made(transport)
        return transport, protocol


class MemoryClient:
    """A client connection to the gateway, which sends one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        self._loop = loop
        self._protocol = protocol
        self._response: asyncio.Future[bytes] = loop.create_future()
        protocol.connection_made(MemoryTransport(self._finish))

    def _finish(self, response: bytes) -> None:
        self._response.set_result(response)

    async def send(self, request: bytes) -> bytes:
        self._response = self._loop.create_future()
        self._protocol.data_received(request)
        return await self._response


def encode_response(body: bytes, *headers: bytes) -> bytes:
    lines = (b"HTTP/1.1 200 OK", *headers, b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + HEADER_END + body


def encode_infer_response(model: str, array: np.ndarray, datatype: str) -> bytes:
    """Return an inference response with the binary output `Y`, as Triton sends it."""
    output = {
        "name": "Y",
        "datatype": datatype,
        "shape": array.shape,
        "parameters": {"binary_data_size": array.nbytes},
    }
    head = orjson.dumps({"model_name": model, "model_version": "1", "outputs": [output]})
    field = b"inference-header-content-length: %d" % len(head)
    return encode_response(head + array.tobytes(), b"content-type: application/octet-stream", field)


def describe_model(model: str, x: tuple[str, int], y: tuple[str, int]) -> dict[bytes, bytes]:
    """Return the metadata and config of a batching model with the input `X` and the output `Y`."""
    metadata = {
        "name": model,
        "versions": ["1"],
        "platform": "python",
        "inputs": [{"name": "X", "datatype": x[0], "shape": [-1, x[1]]}],
        "outputs": [{"name": "Y", "datatype": y[0], "shape": [-1, y[1]]}],
    }

    def describe(name: str, datatype: str, size: int) -> dict[str, Any]:
        kind = "STRING" if datatype == "BYTES" else datatype
        return {"name": name, "data_type": f"TYPE_{kind}", "dims": [size]}

    config = {
        "name": model,
        "max_batch_size": 64,
        "input": [describe("X", *x)],
        "output": [describe("Y", *y)],
    }
    documents = {"": metadata, "/config": config}
    return {
        f"/v2/models/{model}{path}".encode(): encode_response(orjson.dumps(document))
        for path, document in documents.items()
    }


SMALL: Final = np.random.default_rng(0).random((1, 256), np.float32)
PIXELS: Final = np.random.default_rng(0).random((1, 3 * 224 * 224), np.float32)
VERSIONS: Final = (("small", "1"), ("blob", "1"), ("split", "1"), ("split", "2"), ("array", "1"))
INDEX: Final = [{"name": name, "version": each, "state": "READY"} for name, each in VERSIONS]
LABELS: Final = "models: [{name: split, labels: {canary: {versions: {1: 90, 2: 10}}}}]"
REPLICA: Final = MemoryReplica(
    {
        b"/v2/repository/index": encode_response(orjson.dumps(INDEX)),
        **describe_model("small", ("FP32", 256), ("FP32", 256)),
        **describe_model("blob", ("BYTES", 1), ("INT32", 1)),
        **describe_model("array", ("FP32", 3 * 224 * 224), ("INT32", 1)),
        b"/v2/models/small/infer": encode_infer_response("small", SMALL, "FP32"),
        b"/v2/models/split/versions/1/infer": encode_infer_response("split", SMALL, "FP32"),
        b"/v2/models/split/versions/2/infer": encode_infer_response("split", SMALL, "FP32"),
        b"/v2/models/blob/infer": encode_infer_response("blob", np.ones((1, 1), np.int32), "INT32"),
        b"/v2/models/array/infer": encode_infer_response(
            "array", np.ones((1, 1), np.int32), "INT32"
        ),
    }
)
BLOB: Final = "/v1/models/blob/infer"
KEY_REQUEST: Final = "/v2, 1 KB infer, a key"
TOKEN_REQUEST: Final = "/v2, 1 KB infer, a known token"


def encode_request(path: str, request: Request) -> bytes:
    headers = {"Host": "localhost:8080", "content-length": str(len(request.body))}
    fields = "".join(f"{name}: {value}\r\n" for name, value in (headers | request.headers).items())
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n".encode() + request.body


def build_requests() -> Mapping[str, bytes]:
    """Return the requests to count, as a client sends them."""
    small = encode_v2_infer(SMALL, "FP32")
    text = Request(b"The ship left the harbour at dawn.", {"Content-Type": "text/plain"})
    picture = encode_jpeg()
    jpeg = Request(picture, {"Content-Type": "image/jpeg"})
    form = encode_form("X", [picture, picture], "image/jpeg")
    array = Request(encode_npy(PIXELS), {"Content-Type": "application/x-npy"})
    return {
        "/v2, 1 KB infer": encode_request("/v2/models/small/infer", small),
        "/v1, text to BYTES": encode_request(BLOB, text),
        "/v1, JPEG to BYTES": encode_request(BLOB, jpeg),
        "/v1, form of 2 JPEGs to BYTES": encode_request(BLOB, form),
        "/v1, .npy to FP32 3×224×224": encode_request("/v1/models/array/infer", array),
        "/v2, 1 KB infer, a label's split": encode_request(
            "/v2/models/split/versions/canary/infer", small
        ),
    }


def build_requests_with(token: str) -> Mapping[str, bytes]:
    """Return the same request with a key, and with a token that the gateway knows after the first one."""
    request = encode_v2_infer(SMALL, "FP32")
    credentials = {KEY_REQUEST: KEY, TOKEN_REQUEST: token}
    return {
        name: encode_request(
            "/v2/models/small/infer",
            Request(request.body, {**request.headers, "Authorization": f"Bearer {secret}"}),
        )
        for name, secret in credentials.items()
    }


async def connect(loop: asyncio.AbstractEventLoop, **more: Any) -> MemoryClient:
    """Start a gateway with these settings, and connect a client to it.

    Without timers, a gateway cannot shut down.
    """
    settings = read_settings(
        *SETTINGS,
        triton_urls=("http://127.0.0.1:8000",),
        state="memory:",
        log_level="warning",
        **more,
    )
    logs.configure(settings)
    config = create_uvicorn_config(create_app(settings), settings, "127.0.0.1", 8080)
    config.load()
    lifespan = LifespanOn(config)
    await lifespan.startup()
    if lifespan.should_exit:
        raise RuntimeError("the gateway did not start")
    protocol = cast("type[Any]", config.http_protocol_class)(
        config=config, server_state=ServerState(), app_state=lifespan.state, _loop=loop
    )
    return MemoryClient(loop, protocol)


def mark() -> None:
    """Call `MARK_FUNCTION`, before which valgrind writes the counts since the last call."""
    os.getpriority(os.PRIO_PROCESS, 0)


async def send_all(folder: Path, warm_up: int, count: int) -> None:
    loop = asyncio.get_running_loop()
    models_file = folder / "models.yaml"
    models_file.write_text(LABELS)
    await send_each(await connect(loop, models_file=models_file), build_requests(), warm_up, count)
    credentials = write_credentials(folder)
    client = await connect(loop, **credentials.settings)
    await send_each(client, build_requests_with(credentials.token), warm_up, count)


async def send_each(
    client: MemoryClient, requests: Mapping[str, bytes], warm_up: int, count: int
) -> None:
    for name, request in requests.items():
        for _ in range(warm_up):
            response = await client.send(request)
            if not response.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"{name}: {response!r}")
        gc.collect()
        mark()
        for _ in range(count):
            await client.send(request)
        mark()


def main(warm_up: int = 20, count: int = 100) -> None:
    """Send each request `warm_up` + `count` times, and mark the beginning and end of the latter."""
    loop = TimelessLoop()
    loop.replica = REPLICA
    with tempfile.TemporaryDirectory() as folder:
        loop.run_until_complete(send_all(Path(folder), warm_up, count))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    typer.run(main)
