"""A streamed inference over gRPC. Closing the stream cancels the inference in Triton.

Triton's HTTP API supports decoupled models only in `generate_stream`, and does not notice that a client
has disconnected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from tritonclient.utils import InferenceServerException

from gateway.errors import DeadlinePassed
from gateway.http_client.connection import Headers
from gateway.triton.error_mapping import RequestTarget, map_triton_error
from gateway.triton.grpc.channel import (
    GrpcChannel,
    build_grpc_metadata,
    choose_grace_s,
    decode_grpc_response,
    encode_triton_error,
    map_grpc_error,
    run_in_background,
)
from gateway.triton.inference import InferResponse, map_tritonclient_error

# The header `triton_grpc_error` would give stream errors a status, but tritonserver 2.51 crashes when it ends
# a stream that way. So errors are mapped by their message.


class GrpcInferStream:
    """The responses to one inference. Its owner must close it, which cancels the rest."""

    def __init__(
        self,
        channel: GrpcChannel,
        target: RequestTarget,
        arguments: dict[str, Any],
        headers: Headers,
    ) -> None:
        self._target = target
        self._channel = channel
        self._responses: Any = channel.acquire().stream_infer(
            iterate_single_request(arguments), headers=build_grpc_metadata(headers)
        )
        self._read_task: asyncio.Task[tuple[Any, Any]] | None = None
        self._is_open = True
        self._is_ended = False

    async def read_response(self, timeout_s: float) -> InferResponse | None:
        """Return the next response; None after the last. Raises the mapped error of a failure."""
        task = await self._wait_for_response(timeout_s)
        if task is None:
            raise DeadlinePassed(self._target.timeout_s)
        try:
            result, error = task.result()
        except grpc.RpcError as exc:
            limit = self._channel.max_answer_bytes
            raise map_grpc_error(exc.code().name, str(exc.details()), self._target, limit) from exc
        except InferenceServerException as exc:
            raise map_tritonclient_error(exc) from exc
        if error is not None:
            raise map_triton_error(400, encode_triton_error(str(error.message())), self._target)
        return None if self._is_ended else await decode_grpc_response(result)

    async def _wait_for_response(self, timeout_s: float) -> asyncio.Task[tuple[Any, Any]] | None:
        # Read in a separate task: gRPC cancels the whole call if a read is cancelled.
        task = self._read_task = self._read_task or asyncio.create_task(self._read_result())
        await asyncio.wait({task}, timeout=max(timeout_s, 0))
        if not task.done():
            return None
        self._read_task = None
        return task

    async def _read_result(self) -> tuple[Any, Any]:
        """Return a response or an error; neither at the end, since a task cannot raise StopAsyncIteration."""
        try:
            result: tuple[Any, Any] = await anext(self._responses)
        except StopAsyncIteration:
            self._is_ended = True
            return None, None
        return result

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            run_in_background(self._finish_or_cancel())

    async def _finish_or_cancel(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + choose_grace_s()
        try:
            with suppress(grpc.RpcError, InferenceServerException):
                while not self._is_ended and (
                    task := await self._wait_for_response(deadline - loop.time())
                ):
                    task.result()
        finally:
            if self._read_task is not None:
                self._responses.cancel()
                self._read_task.cancel()
            self._responses = None  # a call would keep the connection open after its channel
            self._channel.release(is_complete=self._is_ended)


async def iterate_single_request(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request
