"""A streamed inference over gRPC. Closing the stream cancels the inference in Triton.

Triton's HTTP API supports decoupled models only in `generate_stream`, and does not notice that a client
has disconnected.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from tritonclient.utils import InferenceServerException

from gateway.errors import DeadlinePassed
from gateway.http_client.connection import Headers
from gateway.triton.error_mapping import RequestTarget, map_triton_error
from gateway.triton.grpc.channel import (
    GrpcChannel,
    build_grpc_metadata,
    choose_grace_s,
    count_output_bytes,
    decode_grpc_response,
    encode_triton_error,
    map_grpc_error,
    run_in_background,
)
from gateway.triton.inference import (
    MAX_INLINE_RESPONSE_BYTES,
    InferResponse,
    map_tritonclient_error,
)

MAX_READ_AHEAD: Final = 8  # results that wait to be taken

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
        # Each is a response and its size, or an error.
        self._results: deque[tuple[Any, int, Any]] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._may_read = asyncio.Event()
        self._is_open = True
        self._loop = asyncio.get_running_loop()
        # Read in a separate task: gRPC cancels the whole call if a read is cancelled.
        self._reader = self._loop.create_task(self._read_results())
        self._reader.add_done_callback(self._wake)

    async def read_response(self, timeout_s: float) -> InferResponse | None:
        """Return the next response; None after the last. Raises the mapped error of a failure."""
        if not self._results:
            await self._wait_for_result(timeout_s)
        if not self._results:
            if not self._reader.done():
                raise DeadlinePassed(self._target.timeout_s)
            self._raise_failure()
            return None
        result, size_bytes, error = self._results.popleft()
        if error is not None:
            raise map_triton_error(400, encode_triton_error(str(error.message())), self._target)
        return await decode_grpc_response(result, size_bytes)

    async def _wait_for_result(self, timeout_s: float) -> None:
        """Return when there is a result, at the end of the stream, or after the timeout."""
        self._may_read.set()
        if self._reader.done():
            return
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(max(timeout_s, 0), self._wake)
        try:
            await self._waiter
        finally:
            self._waiter = None
            timer.cancel()

    def _wake(self, _: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _raise_failure(self) -> None:
        try:
            self._reader.result()
        except grpc.RpcError as exc:
            limit = self._channel.max_answer_bytes
            raise map_grpc_error(exc.code().name, str(exc.details()), self._target, limit) from exc
        except InferenceServerException as exc:
            raise map_tritonclient_error(exc) from exc

    async def _read_results(self) -> None:
        """Read ahead a few small results, but nothing while a large one is in memory."""
        async for result, error in self._responses:
            if not self._is_open:
                continue
            size_bytes = 0 if result is None else count_output_bytes(result)
            self._results.append((result, size_bytes, error))
            self._wake()
            if size_bytes > MAX_INLINE_RESPONSE_BYTES or len(self._results) >= MAX_READ_AHEAD:
                self._may_read.clear()
                await self._may_read.wait()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._results.clear()
            self._may_read.set()
            run_in_background(self._finish_or_cancel())

    async def _finish_or_cancel(self) -> None:
        reader = self._reader
        try:
            await asyncio.wait({reader}, timeout=choose_grace_s())
        finally:
            if not reader.done():
                self._responses.cancel()
                reader.cancel()
            self._responses = None  # a call would keep the connection open after its channel
            is_complete = reader.done() and not reader.cancelled() and reader.exception() is None
            self._channel.release(is_complete=is_complete)


async def iterate_single_request(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request
