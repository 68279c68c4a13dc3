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
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc.channel import (
    MAX_CANCEL_GRACE_S,
    GrpcChannel,
    build_grpc_metadata,
    choose_grace_s,
    decode_grpc_response,
    map_grpc_error,
    prepare_grpc_arguments,
    run_in_background,
)
from gateway.triton.grpc.management import GRPC_CONNECT_TIMEOUT_S, GrpcUnreachable
from gateway.triton.http.connection import Headers
from gateway.triton.inference import InferCall, InferResponse, map_tritonclient_error

T = TypeVar("T")
TRITONCLIENT_ERROR_STATUS: Final = "None"  # the status of what tritonclient itself refuses


async def infer_unary(
    channel: GrpcChannel, target: RequestTarget, inference: InferCall, headers: Headers
) -> InferResponse:
    """The model's answer within `asked.timeout_s`; cancelling this cancels the inference.

    Raises `NoGrpc` when it cannot have been sent, and what Triton's refusal means.
    """
    called = await prepare_grpc_arguments(inference)
    triton = channel.acquire()
    calling = None
    try:
        if channel.is_new:
            await check_server_live(triton)
            channel.mark_available()
        # The deadline is kept here: gRPC would cancel the call in Triton in its own moment.
        timeout_s = target.timeout_s + 2 * MAX_CANCEL_GRACE_S
        calling = asyncio.create_task(
            triton.infer(**called, client_timeout=timeout_s, headers=build_grpc_metadata(headers))
        )
        calling.add_done_callback(retrieve_exception)
        await asyncio.wait({calling}, timeout=target.timeout_s)
        if not calling.done():
            raise DeadlinePassed(target.timeout_s)
        result = calling.result()
    except InferenceServerException as exc:
        status = str(exc.status())
        if status == TRITONCLIENT_ERROR_STATUS:
            raise map_tritonclient_error(exc) from exc
        code, limit = status.removeprefix("StatusCode."), channel.max_answer_bytes
        raise map_grpc_error(code, str(exc.message()), target, limit) from exc
    finally:
        if calling is None:
            channel.release(is_complete=False)
        elif calling.done():
            channel.release(is_complete=not calling.cancelled() and calling.exception() is None)
        else:
            run_in_background(finish_or_cancel_call(calling, channel))
    return await decode_grpc_response(result)


async def finish_or_cancel_call(call_task: asyncio.Task[Any], channel: GrpcChannel) -> None:
    """Cancel a call that nobody waits for any more, unless it ends by itself soon."""
    try:
        await asyncio.wait({call_task}, timeout=choose_grace_s())
    finally:
        ended = call_task.done()
        call_task.cancel()
        channel.release(is_complete=ended)


async def check_server_live(triton: InferenceServerClient) -> None:
    """A port that swallows everything is to be told from a model that takes its time."""
    try:
        await run_in_task(triton.is_server_live(), GRPC_CONNECT_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise GrpcUnreachable(
            "nobody answers at the replica's gRPC port", is_refused=False
        ) from None


async def run_in_task(call: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """What a call answers, awaited in a task of its own: gRPC raises a cancellation of its own in place of
    the one that came, which a deadline would not know again."""
    task = asyncio.create_task(call)
    task.add_done_callback(retrieve_exception)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


def retrieve_exception(task: asyncio.Task[T]) -> None:
    """Of a call that fails as it is given up nobody asks why."""
    if not task.cancelled():
        task.exception()
