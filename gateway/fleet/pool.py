"""The fleet as one Triton: who is asked, and what the models look like."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import orjson

from gateway.errors import (
    BadUpstream,
    DoesNotFit,
    ModelNotReady,
    RefusedByModel,
    UnknownModel,
    listed,
    quoted,
)
from gateway.fleet.replica import Address
from gateway.tensors.inputs import Inputs
from gateway.tensors.outputs import Result, joined
from gateway.tensors.signature import Signature, signature
from gateway.triton import infer
from gateway.triton.complaints import Asked, complaint
from gateway.triton.http import Headers, Reply, Upstream

FRESH_S = 2.0  # a signature older than this is asked for again, while it goes on serving
METADATA_TIMEOUT_S = 5.0
# What a path's segment may hold as it is (RFC 3986, section 3.3); Triton does not decode the rest.
UNQUOTED = "!$&'()*+,;=:@"
# Triton and what we know of the model disagree: read it again.
CONTRADICTIONS = (UnknownModel, ModelNotReady, DoesNotFit)


@dataclass(frozen=True)
class Call:
    """What the caller wants beside the tensors."""

    outputs: tuple[str, ...]
    parameters: Mapping[str, Any]
    request_id: str
    deadline: float  # in the loop's time
    headers: Headers = field(default_factory=list)


@dataclass(frozen=True)
class Wire:
    """How replicas are reached."""

    connect_timeout_s: float
    tls: ssl.SSLContext | None = None


class Replica:
    """One Triton and the connections to it."""

    def __init__(self, address: Address, wire: Wire) -> None:
        self.address = address
        self.http = Upstream(
            address.host,
            address.port,
            tls=wire.tls if address.tls else None,
            connect_timeout_s=wire.connect_timeout_s,
        )
        # Triton's metrics port speaks plain HTTP, whatever stands before the other.
        self.metrics = Upstream(
            address.host, address.metrics_port, connect_timeout_s=wire.connect_timeout_s
        )

    def close(self) -> None:
        self.http.close()
        self.metrics.close()


@dataclass
class Known:
    """A signature, when it was read, and the task that reads it again."""

    signature: Signature
    read_at: float
    refresh: asyncio.Task[Signature] | None = None


class Fleet:
    """All replicas. The first is asked; the others are for when there is more than one."""

    def __init__(self, addresses: Sequence[Address], wire: Wire) -> None:
        self.replicas = [Replica(address, wire) for address in addresses]
        self._known: dict[tuple[str, str], Known] = {}
        self._reading: dict[tuple[str, str], asyncio.Task[Signature]] = {}

    def close(self) -> None:
        for task in self._reading.values():
            task.cancel()
        for known in self._known.values():
            if known.refresh is not None:
                known.refresh.cancel()
        for replica in self.replicas:
            replica.close()

    def choose(self) -> Replica:
        return self.replicas[0]

    async def ask(
        self, method: bytes, path: str, body: bytes = b"", *, asked: Asked, timeout_s: float
    ) -> Any:
        """A JSON answer of Triton's, or its complaint as an error of ours."""
        reply = await self.choose().http.ask(method, path.encode(), body, timeout_s=timeout_s)
        if reply.status != 200:
            raise complaint(reply.status, reply.body, asked)
        try:
            return orjson.loads(reply.body) if reply.body else None
        except orjson.JSONDecodeError as exc:
            raise BadUpstream("the replica answered what is not JSON") from exc

    async def signature(self, model: str, version: str = "") -> Signature:
        """What a model takes and gives. Raises `UnknownModel` or `ModelNotReady`."""
        if version and not (version.isascii() and version.isdigit() and len(version) < 20):
            raise UnknownModel(model, version)
        version = version and str(int(version))
        key, now = (model, version), asyncio.get_running_loop().time()
        known = self._known.get(key)
        if known is None:
            return await self._first_read(key)
        if now - known.read_at > FRESH_S and known.refresh is None:
            known.refresh = asyncio.create_task(self._read_signature(model, version))
            known.refresh.add_done_callback(lambda task: self._refreshed(key, task))
        return known.signature

    async def _first_read(self, key: tuple[str, str]) -> Signature:
        """Read once, however many ask at the same time."""
        task = self._reading.get(key)
        if task is None:
            task = self._reading[key] = asyncio.create_task(self._read_signature(*key))
            task.add_done_callback(lambda task: self._first_known(key, task))
        return await asyncio.shield(task)

    def _first_known(self, key: tuple[str, str], task: asyncio.Task[Signature]) -> None:
        if self._reading.get(key) is not task:
            return  # forgotten meanwhile: what it read may be old
        del self._reading[key]
        self._refreshed(key, task)

    def forget(self, model: str) -> None:
        """What was known of a model is doubtful: it was loaded, unloaded, or contradicts us."""
        for key in [key for key in self._known if key[0] == model]:
            known = self._known.pop(key)
            if known.refresh is not None:
                known.refresh.cancel()
        for key in [key for key in self._reading if key[0] == model]:
            self._reading.pop(key)

    def _refreshed(self, key: tuple[str, str], task: asyncio.Task[Signature]) -> None:
        if task.cancelled():
            return
        if task.exception() is not None:
            self._known.pop(key, None)
        else:
            self._known[key] = Known(task.result(), asyncio.get_running_loop().time())

    async def _read_signature(self, model: str, version: str) -> Signature:
        asked, path = Asked(model, version), model_path(model, version)
        metadata, config = await asyncio.gather(
            self.ask(b"GET", path, asked=asked, timeout_s=METADATA_TIMEOUT_S),
            self.ask(b"GET", f"{path}/config", asked=asked, timeout_s=METADATA_TIMEOUT_S),
        )
        try:
            return signature(metadata, config, version)
        except (KeyError, TypeError, AttributeError) as exc:
            raise BadUpstream(f"the replica's metadata of model '{model}' cannot be read") from exc

    async def infer(self, model: Signature, inputs: Inputs, call: Call) -> Result:
        """The model's answer; a batch larger than it takes is cut, sent side by side, and joined."""
        pieces = list(inputs.cut(model.max_batch_size))
        if len(pieces) == 1:
            return await self._infer_piece(model, pieces[0], call)
        tasks = [asyncio.create_task(self._infer_part(model, piece, call)) for piece in pieces]
        try:
            return joined(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _infer_part(self, model: Signature, piece: Inputs, call: Call) -> Result:
        """A piece of a batch; what the model says of «item 2» is counted within the piece."""
        try:
            return await self._infer_piece(model, piece, call)
        except (RefusedByModel, DoesNotFit) as exc:
            first, last = piece.offset + 1, piece.offset + piece.batch_size
            exc.detail = f"in the part of the batch with items {first} to {last}: {exc.detail}"
            raise

    async def _infer_piece(self, model: Signature, inputs: Inputs, call: Call) -> Result:
        timeout_s = call.deadline - asyncio.get_running_loop().time()
        headers, body = infer.encoded(
            model,
            inputs.arrays,
            call.outputs,
            call.parameters,
            request_id=call.request_id,
            timeout_us=max(int(timeout_s * 1e6), 1),
        )
        path = f"{model_path(model.model, model.version)}/infer".encode()
        reply = await self._posted(path, [*headers, *call.headers], body, timeout_s)
        if reply.status != 200:
            error = complaint(
                reply.status, reply.body, Asked(model.model, model.version, timeout_s)
            )
            if isinstance(error, CONTRADICTIONS):
                self.forget(model.model)
            raise error
        arrays, version = infer.decoded(reply)
        return Result(
            model,
            arrays,
            inputs.batched,
            call.request_id,
            version,
            classified=bool(call.parameters.get("classification")),
        )

    async def _posted(self, path: bytes, headers: Headers, body: bytes, timeout_s: float) -> Reply:
        answer = await self.choose().http.send(b"POST", path, headers, body, timeout_s=timeout_s)
        try:
            return Reply(answer.status, answer.headers, await answer.read())
        finally:
            answer.close()


def model_path(model: str, version: str = "") -> str:
    """Triton's path of a model. Triton does not decode it: what must be quoted is no model's name."""
    path = f"/v2/models/{quote(model, safe=UNQUOTED)}"
    return f"{path}/versions/{version}" if version else path


def output_names(model: Signature, wanted: Sequence[str]) -> tuple[str, ...]:
    """The outputs to ask for; none are all. Raises `DoesNotFit` for one that the model does not have."""
    unknown = [name for name in wanted if name not in model.outputs]
    if unknown:
        raise DoesNotFit(
            f"the model has no output {quoted(unknown[0])}; its outputs are {listed(model.outputs)}"
        )
    return tuple(wanted)


def repository_path(model: str, action: str) -> str:
    return f"/v2/repository/models/{quote(model, safe=UNQUOTED)}/{action}"
