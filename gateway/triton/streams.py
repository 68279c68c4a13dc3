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
from gateway.triton.channel import Channel, decode, grace_s, keep, metadata, told, translated
from gateway.triton.complaints import Asked, complaint
from gateway.triton.infer import Answer, misfit
from gateway.triton.wire import Headers

# The header `triton_grpc_error` would give errors in a stream their status, and tritonserver 2.51 dies of
# ending one that way: the words have to do.


class Stream:
    """The answers to one inference. Whoever has one closes it, which cancels what is left of it."""

    def __init__(
        self, channel: Channel, asked: Asked, arguments: dict[str, Any], headers: Headers
    ) -> None:
        self._asked = asked
        self._channel = channel
        self._responses: Any = channel.take().stream_infer(
            only(arguments), headers=metadata(headers)
        )
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
            limit = self._channel.max_answer_bytes
            raise translated(exc.code().name, str(exc.details()), self._asked, limit) from exc
        except InferenceServerException as exc:
            raise misfit(exc) from exc
        if error is not None:
            raise complaint(400, told(str(error.message())), self._asked)
        return None if self._ended else await decode(result)

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
            keep(self._leave())

    async def _leave(self) -> None:
        """Cancel it, unless it ends by itself soon."""
        loop = asyncio.get_running_loop()
        due = loop.time() + grace_s()
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
