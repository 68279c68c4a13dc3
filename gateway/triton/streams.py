"""An inference over gRPC, whose answers come one by one; who leaves it cancels it in Triton.

Triton's HTTP has no way for a model that answers several times but `generate_stream`, and does not
notice that a client is gone.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
import numpy as np
import orjson
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from gateway.errors import BadUpstream, DeadlinePassed, DoesNotFit, GatewayError
from gateway.tensors.signature import Signature
from gateway.triton.complaints import Asked, complaint
from gateway.triton.grpc import STATUSES, UNREACHABLE, NoGrpc, Tls, secured
from gateway.triton.infer import ARGUMENTS, UNREADABLE, class_count, microseconds

IDLE_S: Final = 2.0
# The header `triton_grpc_error` would give errors in a stream their status, and tritonserver 2.51 dies of
# ending one that way: the words have to do.

GRACE_S: Final = 0.1
LEAVING: set[asyncio.Task[None]] = set()  # nobody else holds them

Answer = tuple[dict[str, np.ndarray], str]


class Channel:
    """To one replica, while it is used: an idle one would be waited for by a Triton that stops."""

    def __init__(self, address: str, tls: Tls | None) -> None:
        self._address = address
        self._tls = tls
        self._triton: InferenceServerClient | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._left = False  # a stream in its middle
        self.users = 0

    def take(self) -> InferenceServerClient:
        """Give it back with `give`."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._triton is None:
            self._triton = InferenceServerClient(self._address, **secured(self._tls))
        self.users += 1
        return self._triton

    def give(self, *, ended: bool) -> None:
        self.users -= 1
        self._left = self._left or not ended
        if not self.users:
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.drop_idle)

    def drop_idle(self) -> None:
        """Another is made when one is wanted."""
        if self._triton is not None and not self.users:
            closing, self._triton = self._triton, None
            asyncio.ensure_future(closing.close())  # noqa: RUF006 - the channel holds it
            if self._left:
                # The cancellation's traceback holds the call in a cycle, and a call the connection.
                self._left = False
                gc.collect()


def request(
    signature: Signature,
    arrays: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    parameters: Mapping[str, Any],
    *,
    request_id: str,
    timeout_us: int,
) -> dict[str, Any]:
    """As tritonclient's streams take it. Raises `DoesNotFit`."""
    inputs = []
    for name, array in arrays.items():
        tensor = InferInput(name, list(array.shape), signature.inputs[name].datatype.name)
        inputs.append(tensor.set_data_from_numpy(array))
    custom = {key: value for key, value in parameters.items() if key not in ARGUMENTS}
    classes = class_count(custom.pop("classification", 0))
    named = outputs or (signature.outputs if classes else ())
    return {
        "model_name": signature.model,
        "model_version": signature.version,
        "inputs": inputs,
        "outputs": [InferRequestedOutput(name, class_count=classes) for name in named] or None,
        "request_id": request_id,
        "timeout": microseconds(custom.pop("timeout", timeout_us)),
        "parameters": custom or None,
        **{key: parameters[key] for key in ARGUMENTS if key in parameters},
    }


class Stream:
    """The answers to one inference. Whoever has one closes it, which cancels what is left of it."""

    def __init__(self, channel: Channel, asked: Asked, inference: dict[str, Any]) -> None:
        self._asked = asked
        self._channel = channel
        self._responses: Any = channel.take().stream_infer(only(inference))
        self._reading: asyncio.Task[tuple[Any, Any]] | None = None
        self._open = True
        self._ended = False

    async def next(self, timeout_s: float) -> Answer | None:
        """The outputs by name, and the version; None after the last. Raises what the failure means."""
        arrived = await self._arrived(timeout_s)
        if arrived is None:
            raise DeadlinePassed(self._asked.timeout_s)
        try:
            result, error = arrived.result()
        except grpc.RpcError as exc:
            raise translated(exc, self._asked) from exc
        except InferenceServerException as exc:  # of tritonclient's own, before it sends
            raise DoesNotFit(f"the parameters do not fit: {exc.message()}") from exc
        if error is not None:
            raise complaint(400, told(str(error.message())), self._asked)
        return None if self._ended else decoded(result)

    async def _arrived(self, timeout_s: float) -> asyncio.Task[tuple[Any, Any]] | None:
        """What came in time. Read in a task of its own: gRPC takes a read that is cancelled for the
        wish to cancel the whole call."""
        reading = self._reading = self._reading or asyncio.create_task(self._read())
        await asyncio.wait({reading}, timeout=max(timeout_s, 0))
        if not reading.done():
            return None
        self._reading = None
        return reading

    async def _read(self) -> tuple[Any, Any]:
        """A response or an error; neither at the end, which a task cannot raise."""
        try:
            found: tuple[Any, Any] = await anext(self._responses)
        except StopAsyncIteration:
            self._ended = True
            return None, None
        return found

    def close(self) -> None:
        if self._open:
            self._open = False
            leaving = asyncio.create_task(self._leave())
            LEAVING.add(leaving)
            leaving.add_done_callback(LEAVING.discard)

    async def _leave(self) -> None:
        """Cancel it, unless it ends by itself right now: tritonserver 2.51 can die of a stream that is
        cancelled in the very moment it completes."""
        loop = asyncio.get_running_loop()
        due = loop.time() + GRACE_S
        try:
            with suppress(grpc.RpcError, InferenceServerException):
                while not self._ended and (arrived := await self._arrived(due - loop.time())):
                    arrived.result()
        finally:
            if self._reading is not None:
                self._responses.cancel()
                self._reading.cancel()
            self._responses = None  # while there is a call, the connection outlives its channel
            self._channel.give(ended=self._ended)


async def only(inference: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield inference


def decoded(result: InferResult) -> Answer:
    try:
        response = result.get_response()
        arrays = {output.name: result.as_numpy(output.name) for output in response.outputs}
    except UNREADABLE as exc:
        raise BadUpstream("the replica's answer to an inference cannot be read") from exc
    return arrays, str(response.model_version)


def translated(exc: grpc.RpcError, asked: Asked) -> GatewayError:
    code, details = exc.code().name, str(exc.details())
    if code == "DEADLINE_EXCEEDED":
        return DeadlinePassed(asked.timeout_s)
    if code == "UNAVAILABLE" and UNREACHABLE.search(details):
        return NoGrpc(
            "nobody answers at the replica's gRPC port, which streams need", refused=False
        )
    return complaint(STATUSES.get(code, 400), told(details), asked)


def told(message: str) -> bytes:
    return orjson.dumps({"error": message})
