"""A unary inference over gRPC, which is cancelled in Triton when the client disconnects.

Triton's HTTP API does not notice that a client has disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from gateway.errors import DeadlinePassed
from gateway.http_client.connection import Headers
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc.channel import (
    MAX_CANCEL_GRACE_S,
    GrpcChannel,
    build_grpc_metadata,
    choose_grace_s,
    count_output_bytes,
    decode_grpc_response,
    map_grpc_error,
    run_in_background,
)
from gateway.triton.grpc.management import GRPC_CONNECT_TIMEOUT_S, GrpcUnreachable
from gateway.triton.inference import InferResponse, map_tritonclient_error

T = TypeVar("T")
TRITONCLIENT_ERROR_STATUS: Final = "None"  # the status of requests that tritonclient itself rejects


async def infer_unary(
    channel: GrpcChannel, target: RequestTarget, arguments: dict[str, Any], headers: Headers
) -> InferResponse:
    """Return the model's response; cancelling this coroutine cancels the inference.

    Raises `GrpcUnreachable` if it cannot have been sent, `DeadlinePassed` after `target.timeout_s`, and
    the mapped error of Triton.
    """
    triton = channel.acquire()
    call_task = None
    try:
        if channel.is_new:
            await check_server_live(triton)
            channel.mark_available()
        # The deadline is enforced here: gRPC would cancel the call in Triton without the grace period.
        timeout_s = target.timeout_s + 2 * MAX_CANCEL_GRACE_S
        call_task = asyncio.create_task(
            triton.infer(
                **arguments, client_timeout=timeout_s, headers=build_grpc_metadata(headers)
            )
        )
        call_task.add_done_callback(retrieve_exception)
        await asyncio.wait({call_task}, timeout=target.timeout_s)
        if not call_task.done():
            raise DeadlinePassed(target.timeout_s)
        result = call_task.result()
    except InferenceServerException as exc:
        status = str(exc.status())
        if status == TRITONCLIENT_ERROR_STATUS:
            raise map_tritonclient_error(exc) from exc
        code, limit = status.removeprefix("StatusCode."), channel.max_answer_bytes
        raise map_grpc_error(code, str(exc.message()), target, limit) from exc
    finally:
        if call_task is None:
            channel.release(is_complete=False)
        elif call_task.done():
            channel.release(is_complete=not call_task.cancelled() and call_task.exception() is None)
        else:
            run_in_background(finish_or_cancel_call(call_task, channel))
    return await decode_grpc_response(result, count_output_bytes(result))


async def finish_or_cancel_call(call_task: asyncio.Task[Any], channel: GrpcChannel) -> None:
    """Cancel an abandoned call, unless it completes within the grace period."""
    try:
        await asyncio.wait({call_task}, timeout=choose_grace_s())
    finally:
        is_complete = call_task.done()
        call_task.cancel()
        channel.release(is_complete=is_complete)


async def check_server_live(triton: InferenceServerClient) -> None:
    """Raises `GrpcUnreachable` if the port accepts data without responding, unlike a slow model."""
    try:
        await run_in_task(triton.is_server_live(), GRPC_CONNECT_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise GrpcUnreachable(
            "no response from the replica's gRPC port", is_refused=False
        ) from None


async def run_in_task(call: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Return the result of a call, awaited in a separate task. Raises `asyncio.TimeoutError`.

    gRPC replaces a cancellation with its own, which a surrounding deadline would not recognize.
    """
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
    # Otherwise asyncio logs the exception of an abandoned call as never retrieved.
    if not task.cancelled():
        task.exception()
