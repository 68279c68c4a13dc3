"""Simulated replicas: what the gateway sees of a Triton, on the event loop of the test.

A replica here has an index, loads and unloads, and inferences. It has no gRPC, so that management takes
its way over HTTP.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import orjson

from gateway.fleet.replica import ReplicaAddress
from tests.support.servers import free_ports


@dataclass
class SimulatedTriton:
    """A Triton with these models, of which some are loaded; it does what its fields say."""

    models: dict[str, bool]
    host: str = "127.0.0.1"
    port: int = 0
    grpc_port: int = 1
    delay_s: float = 0.0  # of an inference
    load_s: float = 0.0
    index_s: float = 0.0  # of an index, as if it listed a bucket
    hangs: bool = False  # accepts, and never answers
    holds: bool = False  # answers no inference until `release`
    garbles: bool = False  # answers an inference with what is not HTTP
    denies: bool = False  # says of every model that it is not ready
    refuses_loads: bool = False  # which are answered by `release`
    index_body: bytes | None = None  # instead of its index
    last_inference_ms: int = 0  # of each model, in its statistics
    requests: Counter[str] = field(default_factory=Counter)  # by the last part of the path
    inferences: Counter[str] = field(default_factory=Counter)  # by model
    loads_at: list[float] = field(default_factory=list)  # by the loop's time
    connections: set[asyncio.Transport] = field(default_factory=set)
    held: list[Callable[[], None]] = field(default_factory=list)
    _server: asyncio.Server | None = None

    @property
    def address(self) -> ReplicaAddress:
        return ReplicaAddress(self.host, self.port, self.grpc_port)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        talk = functools.partial(_Conversation, self, loop)
        self._server = await loop.create_server(talk, self.host, self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop it like a process that dies."""
        if self._server is not None:
            self._server.close()
            for transport in list(self.connections):
                transport.abort()
            await self._server.wait_closed()
            self._server = None

    async def __aenter__(self) -> SimulatedTriton:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def release(self) -> None:
        """Answer what was held."""
        self.holds = self.refuses_loads = False
        for answer in self.held:
            answer()
        self.held.clear()

    def answer(self, path: str) -> tuple[float, bytes]:
        """After how long, and what."""
        *_, model, verb = path.split("/")
        self.requests[verb] += 1
        if verb == "index":
            return self.index_s, ok(self.index() if self.index_body is None else self.index_body)
        if verb == "live":
            return 0.0, ok(b"")
        if verb in ("load", "unload"):
            return self._manage(model, load=verb == "load")
        if verb == "config":
            return 0.0, ok(orjson.dumps({"name": model}))
        if verb == "stats" and not self.denies:
            none = {"count": 0, "ns": 0}
            counts = {"inference_count": 0, "execution_count": 0}
            version = {"name": model, "version": "1", "last_inference": self.last_inference_ms}
            versions = [{**version, **counts, "inference_stats": {"success": none, "fail": none}}]
            return 0.0, ok(orjson.dumps({"model_stats": versions}))
        self.inferences[model] += 1
        if self.garbles:
            return self.delay_s, b"no answer\r\n\r\n"
        if self.denies:
            return self.delay_s, bad(f"Model '{model}' is not ready")
        if not self.models.get(model):
            return 0.0, bad(f"Request for unknown model: '{model}' is not found")
        return self.delay_s, ok(b"{}")

    def _manage(self, model: str, *, load: bool) -> tuple[float, bytes]:
        loop = asyncio.get_running_loop()
        if load:
            self.loads_at.append(loop.time())
        if model not in self.models or self.refuses_loads:
            return 0.0, bad(f"failed to load '{model}', failed to poll from model repository")
        loop.call_later(self.load_s, self.models.__setitem__, model, load)
        return self.load_s, ok(b"")

    def index(self) -> bytes:
        return orjson.dumps(
            [
                {"name": name, "version": "1", "state": "READY"}
                if loaded
                else {"name": name, "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
                for name, loaded in self.models.items()
            ]
        )


class _Conversation(asyncio.Protocol):
    """The part of HTTP that the gateway needs of a replica."""

    def __init__(self, triton: SimulatedTriton, loop: asyncio.AbstractEventLoop) -> None:
        self._triton = triton
        self._loop = loop
        self._read = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._triton.connections.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._triton.connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, found, rest = self._read.partition(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        if not found or len(rest) < length:
            return
        self._read = b""
        path = head.split(b" ", 2)[1].decode()
        delay_s, answer = self._triton.answer(path)
        if self._triton.hangs:
            return
        if (self._triton.holds and path.endswith("/infer")) or (
            self._triton.refuses_loads and path.endswith("/load")
        ):
            self._triton.held.append(functools.partial(self._write, answer))
        elif delay_s:
            self._loop.call_later(delay_s, self._write, answer)
        else:
            self._write(answer)

    def _write(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def bad(error: str) -> bytes:
    body = orjson.dumps({"error": error})
    return b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@asynccontextmanager
async def simulated_replicas(
    count: int,
    models: Iterable[str] = ("m",),
    *,
    delay_s: float = 0.0,
    load_s: float = 0.0,
    garbles: bool = False,
    denies: bool = False,
) -> AsyncIterator[list[SimulatedTriton]]:
    """Replicas on addresses of their own and one port, with the models loaded, until the end."""
    loaded = dict.fromkeys(models, True)
    port, grpc_port = free_ports(2)
    async with AsyncExitStack() as stack:
        tritons = []
        for number in range(1, count + 1):
            triton = SimulatedTriton(dict(loaded), f"127.0.1.{number}", port, grpc_port)
            triton.delay_s = delay_s
            triton.load_s = load_s
            triton.garbles = garbles
            triton.denies = denies
            tritons.append(await stack.enter_async_context(triton))
        yield tritons
