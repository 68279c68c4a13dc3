"""An inference over gRPC that is answered once, so that whoever leaves stops it in Triton.

Triton's HTTP does not notice that a client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from gateway.errors import DeadlinePassed
from gateway.triton.channel import (
    MOST_GRACE_S,
    Channel,
    decode,
    grace_s,
    keep,
    metadata,
    prepare,
    translated,
)
from gateway.triton.complaints import Asked
from gateway.triton.grpc import CONNECT_TIMEOUT_S, NoGrpc
from gateway.triton.infer import Answer, Inference, misfit
from gateway.triton.wire import Headers

T = TypeVar("T")
NEVER_SENT: Final = "None"  # the status of what tritonclient itself refuses


async def infer(channel: Channel, asked: Asked, inference: Inference, headers: Headers) -> Answer:
    """The model's answer within `asked.timeout_s`; cancelling this cancels the inference.

    Raises `NoGrpc` when it cannot have been sent, and what Triton's refusal means.
    """
    called = await prepare(inference)
    triton = channel.take()
    calling = None
    try:
        if channel.is_new:
            await reached(triton)
            channel.found()
        # The deadline is kept here: gRPC would cancel the call in Triton in its own moment.
        timeout_s = asked.timeout_s + 2 * MOST_GRACE_S
        calling = asyncio.create_task(
            triton.infer(**called, client_timeout=timeout_s, headers=metadata(headers))
        )
        calling.add_done_callback(seen)
        await asyncio.wait({calling}, timeout=asked.timeout_s)
        if not calling.done():
            raise DeadlinePassed(asked.timeout_s)
        result = calling.result()
    except InferenceServerException as exc:
        status = str(exc.status())
        if status == NEVER_SENT:
            raise misfit(exc) from exc
        code, limit = status.removeprefix("StatusCode."), channel.max_answer_bytes
        raise translated(code, str(exc.message()), asked, limit) from exc
    finally:
        if calling is None:
            channel.give(ended=False)
        elif calling.done():
            channel.give(ended=not calling.cancelled() and calling.exception() is None)
        else:
            keep(leave(calling, channel))
    return await decode(result)


async def leave(calling: asyncio.Task[Any], channel: Channel) -> None:
    """Cancel a call that nobody waits for any more, unless it ends by itself soon."""
    try:
        await asyncio.wait({calling}, timeout=grace_s())
    finally:
        ended = calling.done()
        calling.cancel()
        channel.give(ended=ended)


async def reached(triton: InferenceServerClient) -> None:
    """A port that swallows everything is to be told from a model that takes its time."""
    try:
        await apart(triton.is_server_live(), CONNECT_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise NoGrpc("nobody answers at the replica's gRPC port", refused=False) from None


async def apart(call: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """What a call answers, awaited in a task of its own: gRPC raises a cancellation of its own in place of
    the one that came, which a deadline would not know again."""
    task = asyncio.create_task(call)
    task.add_done_callback(seen)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


def seen(task: asyncio.Task[T]) -> None:
    """Of a call that fails as it is given up nobody asks why."""
    if not task.cancelled():
        task.exception()
