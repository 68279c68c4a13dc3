"""A replica's gRPC, for inferences: the connection, how answers are read, and what failures mean."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Coroutine
from random import random
from time import perf_counter
from typing import Any, Final

import orjson
import tritonclient.grpc
from tritonclient.grpc import InferResult
from tritonclient.grpc.aio import InferenceServerClient

from gateway.errors import AnswerTooLarge, BadUpstream, DeadlinePassed, GatewayError
from gateway.triton.complaints import Asked, complaint
from gateway.triton.grpc import STATUSES, NoGrpc, Tls, channel_options, secured
from gateway.triton.http import MOST_ANSWER_BYTES
from gateway.triton.infer import (
    INT64,
    MAX_INLINE_ANSWER_BYTES,
    UNREADABLE,
    Answer,
    Inference,
    check_entry,
)
from gateway.triton.wire import Headers

IDLE_S: Final = 2.0
# How long what nobody waits for any more may end by itself before it is cancelled.
LEAST_GRACE_S: Final = 0.1
MOST_GRACE_S: Final = 0.6
MISSING_S: Final = 30.0
# How gRPC's own words begin, which a model's may hold as well: nothing was sent; it may have run.
NOT_SENT: Final = re.compile(
    r"failed to connect|connections to all backends|dns resolution|name resolution|empty address",
    re.I,
)
TOO_LARGE: Final = re.compile(
    r"(?:stream removed \()?(?:client: )?(?:received|decompressed) message larger than max", re.I
)
CUT_OFF: Final = re.compile(
    r"stream removed|socket closed|recvmsg|endpoint|connection (?:reset|closed)|broken pipe|goaway",
    re.I,
)


class Channel:
    """To one replica, while it is used: an idle one would be waited for by a Triton that stops."""

    def __init__(
        self, address: str, tls: Tls | None, max_answer_bytes: int = MOST_ANSWER_BYTES
    ) -> None:
        self._address = address
        self._tls = tls
        self.max_answer_bytes = max_answer_bytes
        self._triton: InferenceServerClient | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._left = False  # a call in its middle
        self._missing_until = 0.0
        self.is_new = True  # nothing has come from there yet
        self.users = 0

    @property
    def is_missing(self) -> bool:
        """Lately nobody answered there, though the replica was well."""
        return perf_counter() < self._missing_until

    def miss(self) -> bool:
        """Do without it for a while; whether that is news."""
        is_news = not self._missing_until
        self._missing_until = perf_counter() + MISSING_S
        return is_news

    def found(self) -> None:
        self.is_new = False
        self._missing_until = 0.0

    def take(self) -> InferenceServerClient:
        """Give it back with `give`."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if self._triton is None:
            options = channel_options(self.max_answer_bytes)
            self._triton = InferenceServerClient(
                self._address, channel_args=options, **secured(self._tls)
            )
            self.is_new = True
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


def grace_s() -> float:
    """Return how long to wait for a call to end by itself before it is cancelled.

    tritonserver before 2.59 can die of a call that is cancelled in the very moment it completes: after
    some tens of thousands of calls of a millisecond that were cancelled at any moment 2.51 did. What
    is short ends within this time; for the rest, chance makes it hard to meet the moment on purpose.
    """
    return LEAST_GRACE_S + random() * (MOST_GRACE_S - LEAST_GRACE_S)  # noqa: S311 - no secret


LEAVING: set[asyncio.Task[None]] = set()  # nobody else holds them


def keep(leaving: Coroutine[Any, Any, None]) -> None:
    """Run what ends a call that nobody waits for any more."""
    task = asyncio.create_task(leaving)
    LEAVING.add(task)
    task.add_done_callback(LEAVING.discard)


async def prepare(inference: Inference) -> dict[str, Any]:
    """Return the arguments of a call, made in a thread if they are large. Raises `DoesNotFit`."""
    if inference.is_large:
        return await asyncio.to_thread(arguments, inference)
    return arguments(inference)


async def decode(result: InferResult) -> Answer:
    """Return the answer, decoded in a thread if it is large. Raises `BadUpstream`."""
    if size_of(result) > MAX_INLINE_ANSWER_BYTES:
        return await asyncio.to_thread(decoded, result)
    return decoded(result)


def arguments(inference: Inference) -> dict[str, Any]:
    """As tritonclient's gRPC takes it. Raises `DoesNotFit`."""
    found = inference.arguments(tritonclient.grpc)
    sequence_id = found.get("sequence_id")
    if isinstance(sequence_id, int) and sequence_id not in INT64:
        found["sequence_id"] = sequence_id - (1 << 64)  # the field has a sign; Triton takes it away
    signature = inference.signature
    return {"model_name": signature.model, "model_version": signature.version, **found}


def decoded(result: InferResult) -> Answer:
    """Raises `BadUpstream`."""
    try:
        response = result.get_response()
        for output in response.outputs:
            check_entry(output.name, output.datatype)
        arrays = {output.name: result.as_numpy(output.name) for output in response.outputs}
    except UNREADABLE as exc:
        raise BadUpstream("the replica's answer to an inference cannot be read") from exc
    return Answer(arrays, str(response.model_version), size_of(result))


def size_of(result: InferResult) -> int:
    return sum(map(len, result.get_response().raw_output_contents))


def translated(code: str, details: str, asked: Asked, max_answer_bytes: int) -> GatewayError:
    """What a failed call means."""
    if code == "RESOURCE_EXHAUSTED" and TOO_LARGE.match(details):
        return AnswerTooLarge(max_answer_bytes)
    if code == "DEADLINE_EXCEEDED":
        return DeadlinePassed(asked.timeout_s)
    if code == "UNAVAILABLE" and NOT_SENT.match(details):
        return NoGrpc("nobody answers at the replica's gRPC port", refused=False)
    if code == "UNAVAILABLE" and CUT_OFF.match(details):
        return BadUpstream("the replica's gRPC connection was cut off")
    return complaint(STATUSES.get(code, 400), told(details), asked)


def told(message: str) -> bytes:
    return orjson.dumps({"error": message})


def metadata(headers: Headers) -> dict[str, str]:
    """gRPC takes printable ASCII only; anything else would be a fault of ours."""
    texts = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
    return {name: value for name, value in texts if value.isascii() and value.isprintable()}
