"""An inference over gRPC, whose answers come one by one; who leaves it cancels it in Triton.

Triton's HTTP has no way for a model that answers several times but `generate_stream`, and does not
notice that a client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
from tritonclient.utils import InferenceServerException

from gateway.errors import DeadlinePassed
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
from gateway.triton.http.connection import Headers
from gateway.triton.inference import InferResponse, map_tritonclient_error

# The header `triton_grpc_error` would give errors in a stream their status, and tritonserver 2.51 dies of
# ending one that way: the words have to do.


class GrpcInferStream:
    """The answers to one inference. Whoever has one closes it, which cancels what is left of it."""

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
        """The outputs by name, and the version; None after the last. Raises what the failure means."""
        arrived = await self._wait_for_response(timeout_s)
        if arrived is None:
            raise DeadlinePassed(self._target.timeout_s)
        try:
            result, error = arrived.result()
        except grpc.RpcError as exc:
            limit = self._channel.max_answer_bytes
            raise map_grpc_error(exc.code().name, str(exc.details()), self._target, limit) from exc
        except InferenceServerException as exc:
            raise map_tritonclient_error(exc) from exc
        if error is not None:
            raise map_triton_error(400, encode_triton_error(str(error.message())), self._target)
        return None if self._is_ended else await decode_grpc_response(result)

    async def _wait_for_response(self, timeout_s: float) -> asyncio.Task[tuple[Any, Any]] | None:
        """What came in time. Read in a task of its own: gRPC takes a read that is cancelled for the
        wish to cancel the whole call."""
        reading = self._read_task = self._read_task or asyncio.create_task(self._read_result())
        await asyncio.wait({reading}, timeout=max(timeout_s, 0))
        if not reading.done():
            return None
        self._read_task = None
        return reading

    async def _read_result(self) -> tuple[Any, Any]:
        """A response or an error; neither at the end, which a task cannot raise."""
        try:
            found: tuple[Any, Any] = await anext(self._responses)
        except StopAsyncIteration:
            self._is_ended = True
            return None, None
        return found

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            run_in_background(self._finish_or_cancel())

    async def _finish_or_cancel(self) -> None:
        """Cancel it, unless it ends by itself soon."""
        loop = asyncio.get_running_loop()
        due = loop.time() + choose_grace_s()
        try:
            with suppress(grpc.RpcError, InferenceServerException):
                while not self._is_ended and (
                    arrived := await self._wait_for_response(due - loop.time())
                ):
                    arrived.result()
        finally:
            if self._read_task is not None:
                self._responses.cancel()
                self._read_task.cancel()
            self._responses = None  # while there is a call, the connection outlives its channel
            self._channel.release(is_complete=self._is_ended)


async def iterate_single_request(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request
