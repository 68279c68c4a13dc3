"""The handler of `ModelStreamInfer`: many requests on one stream, each sent to a replica of its own.

Like Triton's, the responses of models with one response per request come in the order of the requests, and
those of decoupled models as they arrive. The steps of a sequence run one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast
from weakref import WeakValueDictionary

import grpc
from tritonclient.grpc import service_pb2

from gateway.callers import RIGHT_TO_INFER
from gateway.capabilities.grpc_api.call import COPIES, IncomingCall, ResponseNotRead, ShuttingDown
from gateway.capabilities.grpc_api.infer_request import (
    InferHead,
    change_version,
    read_infer_request,
)
from gateway.capabilities.grpc_api.inference import build_upstream_target, check_classification
from gateway.capabilities.grpc_api.receive import start_operation
from gateway.capacity.admission import Slot
from gateway.errors import GatewayError, Unauthenticated
from gateway.fleet.transports import GrpcStreamCall
from gateway.memory import MemoryBudgetExceeded
from gateway.repository.resolver import NO_MODEL, ModelTarget
from gateway.tasks import TaskSet, cancel_tasks
from gateway.telemetry.request_info import measure_upstream_time
from gateway.triton.grpc.byte_channel import (
    FINAL_RESPONSE,
    STREAM_METHOD,
    ByteStream,
    map_stream_error,
)

# A stream with this many requests in progress is not read.
MAX_STREAM_REQUESTS: Final = 64
# While requests use more of the memory budget, a stream has one request at a time.
MAX_USED_RATIO: Final = 0.5
# After a request that was refused for memory, the next one is read when there is room, or at last then.
MAX_MEMORY_WAIT_S: Final = 30.0

# What is known of a message that cannot be read.
NO_HEAD: Final = InferHead("", "", "", None, ())


class Turn:
    """The place of a request in an order: after another one, or at once. Whoever takes it must end it."""

    def __init__(self, previous: Turn | None = None) -> None:
        self._previous = previous
        self._end = asyncio.Event()

    @property
    def is_waiting(self) -> bool:
        return self._previous is not None and not self._previous._end.is_set()

    async def wait(self) -> None:
        """Wait until the turn before this one has ended."""
        if self._previous is not None:
            await self._previous._end.wait()
            self._previous = None

    def end(self) -> None:
        self._end.set()


NO_ORDER: Final = Turn()


class TurnOrder:
    """Gives turns, which come one after the other for each key."""

    def __init__(self) -> None:
        # The last turn of each key, for as long as a request has it or waits for it.
        self._last: WeakValueDictionary[Hashable, Turn] = WeakValueDictionary()

    def take(self, key: Hashable = None) -> Turn:
        turn = Turn(self._last.get(key))
        self._last[key] = turn
        return turn


@dataclass(frozen=True)
class StreamRequest:
    """A request of a stream, without its message: that is large, and the request lasts longer."""

    call: IncomingCall
    head: InferHead
    target: ModelTarget
    step: Turn  # among the steps of its sequence
    response: Turn  # among the responses of models with one response per request


@dataclass(frozen=True)
class RejectedRequest(StreamRequest):
    """A request that is not sent; its head and target are what was known when it was refused."""

    error: GatewayError


class InferStream:
    """The requests and responses of one stream.

    `run` starts the task that reads the requests, which starts a task for each; `run` ends all of them. The
    task of a request releases its slot of the model. `_finish` gives back what else a request has, also if
    its task is cancelled before it begins. The handler that opened the stream ends the stream's call.
    """

    def __init__(self, opening: IncomingCall, start_request: Callable[[], IncomingCall]) -> None:
        self._services = opening.services
        self._context = opening.context
        self._start_request = start_request
        self._stopping = opening.environment.stopping
        self._window = asyncio.Semaphore(MAX_STREAM_REQUESTS)
        self._write_lock = asyncio.Lock()
        self._request_tasks = TaskSet()
        self._metadata = opening.select_metadata()
        self._responses = TurnOrder()
        self._steps = TurnOrder()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve the stream until the client ends it. Raises the error with which the stream ends."""
        requests = asyncio.ensure_future(self._read_requests())
        try:
            await asyncio.wait({requests, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            requests.result()
        finally:
            self._failure.cancel()
            await cancel_tasks([requests, *self._request_tasks])

    async def _read_requests(self) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            failure = None
            while (message := await self._read_message(stopping)) is not grpc.aio.EOF:
                charged_bytes = COPIES * len(message)
                failure = await self._accept(cast(bytes, message))
                del message  # it can be large, and the next one may come much later
                if isinstance(failure, Unauthenticated):
                    break
                if isinstance(failure, MemoryBudgetExceeded):
                    await self._wait_for_memory(charged_bytes, stopping)
            if self._request_tasks:
                await asyncio.wait(self._request_tasks)
            if isinstance(failure, Unauthenticated):
                raise failure
            if self._stopping.is_set():
                raise ShuttingDown
        finally:
            await cancel_tasks([stopping])

    async def _read_message(self, stopping: asyncio.Task[Any]) -> Any:
        """Return the next message; EOF at the end of the stream, and when the gateway stops."""
        await self._window.acquire()  # released when the request has ended
        while self._request_tasks and self._services.memory.used_ratio > MAX_USED_RATIO:
            await asyncio.wait(self._request_tasks, return_when=asyncio.FIRST_COMPLETED)
        reading = start_operation(self._context.read())
        try:
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else grpc.aio.EOF
        finally:
            del reading  # its exception's traceback has this frame: a cycle

    async def _wait_for_memory(self, needed_bytes: int, stopping: asyncio.Task[Any]) -> None:
        """Wait after a refusal: the next request would be received in full as well, only to be refused."""
        memory = self._services.memory
        end = asyncio.get_running_loop().time() + MAX_MEMORY_WAIT_S
        while not stopping.done() and asyncio.get_running_loop().time() < end:
            await asyncio.wait([stopping], timeout=MemoryBudgetExceeded.retry_after_s)
            if memory.has_room(needed_bytes):
                return

    async def _accept(self, message: bytes) -> GatewayError | None:
        """Start a request in the order in which it came; return why it is refused.

        `Unauthenticated`, of a revoked key or an expired token, is to end the stream.
        """
        call = self._start_request()
        try:
            request = await self._check(call, message)
        except Unauthenticated as exc:
            call.end()
            return exc.with_traceback(None)
        except BaseException:
            call.end()
            raise
        if isinstance(request, RejectedRequest):
            error = request.error
            task = self._request_tasks.start(self._reject(request))
        else:
            error = None
            message = change_version(message, request.head.version, request.target.version)
            task = self._request_tasks.start(self._answer(request, message))
        task.add_done_callback(partial(self._finish, request))
        return error

    async def _check(self, call: IncomingCall, message: bytes) -> StreamRequest:
        """Return a request that can be sent, or a `RejectedRequest`, with its turns."""
        head = NO_HEAD
        target = NO_MODEL
        step = NO_ORDER
        try:
            await call.identify_caller()
            call.count_message(message, min_charged_bytes=0)
            call.record_request(message)
            head = read_infer_request(message)
            target = call.resolve(RIGHT_TO_INFER, head.model, head.version).with_sequence(head.step)
            if head.step is not None:
                step = self._steps.take((target.model, head.step.sequence_id))
            is_decoupled = await self._check_model(call, head, target)
        except Unauthenticated as exc:
            call.fail(exc)
            raise
        except GatewayError as exc:
            # Its traceback would keep the message for as long as the request.
            error = exc.with_traceback(None)
            return RejectedRequest(call, head, target, step, self._responses.take(), error)
        response = NO_ORDER if is_decoupled else self._responses.take()
        return StreamRequest(call, head, target, step, response)

    async def _check_model(self, call: IncomingCall, head: InferHead, target: ModelTarget) -> bool:
        """Check that the model can serve a request; return whether it is decoupled."""
        model = target.model
        version = target.version
        signatures = self._services.signatures
        signature = await signatures.get_signature(model, version, call.find_timeout_s())
        if head.class_outputs:
            await check_classification(self._services, target, head)
        return signature.is_decoupled

    def _finish(self, request: StreamRequest, task: asyncio.Task[None]) -> None:
        """Give back what a request has when its task has ended; an unexpected failure ends the stream."""
        request.step.end()
        request.response.end()
        target = request.target
        self._services.record_model(request.call.info, target.model, target.served_version)
        request.call.end()
        self._window.release()
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        if not self._failure.done():
            if isinstance(failure, GatewayError):
                # Its frames have this stream, and the messages: a cycle.
                failure = failure.with_traceback(None)
            self._failure.set_exception(failure)

    async def _reject(self, request: RejectedRequest) -> None:
        # The next step begins when this one is done, and may not overtake those before.
        await request.step.wait()
        await self._write_error(request, request.error)

    async def _answer(self, request: StreamRequest, message: bytes) -> None:
        """Send a request to Triton and relay its responses; errors become messages of the stream."""
        call = request.call
        try:
            await request.step.wait()
            with Slot(self._services.admission, request.target.model, call.info) as slot:
                timeout_s = await slot.acquire(call.find_timeout_s())
                stream = await self._send(request, message, timeout_s)
                del message
                with closing(stream):
                    await self._relay(request, stream, timeout_s, slot)
        except ResponseNotRead:
            raise
        except GatewayError as exc:
            # The frames of its traceback have the message.
            await self._write_error(request, exc.with_traceback(None))

    async def _send(self, request: StreamRequest, message: bytes, timeout_s: float) -> ByteStream:
        upstream = build_upstream_target(request.call, request.target, request.head)
        stream_call = GrpcStreamCall(upstream, STREAM_METHOD, message, self._metadata)
        return await self._services.dispatcher.send(stream_call, timeout_s)

    async def _relay(
        self, request: StreamRequest, stream: ByteStream, timeout_s: float, slot: Slot
    ) -> None:
        call = request.call
        message = await stream.read_message(timeout_s)
        if message is not None and request.response.is_waiting:
            # The model has answered, and is not to wait for that of another request.
            slot.release()
        error = stream.first_error
        while message is not None:
            if error is not None:
                message = set_error_text(message, call.fail(error).detail)
            call.charge_response(message)
            await self._write(request, message)
            call.record_response(message, is_last=False)
            if error is None:
                call.succeed(message)
            with measure_upstream_time():
                message = await stream.read_message(call.info.timeout_s)
            error = None if message is None else map_stream_error(message, stream.target)
        call.record_response(b"")
        if not call.info.bytes_out:
            call.succeed(b"")  # a decoupled model may send no response

    async def _write_error(self, request: StreamRequest, exc: GatewayError) -> None:
        status = request.call.fail(exc)
        message: Any = service_pb2.ModelStreamInferResponse(error_message=status.detail)
        response = message.infer_response
        head = request.head
        response.id = head.request_id
        response.model_name = head.model
        response.model_version = request.target.served_version or head.version
        response.parameters[FINAL_RESPONSE].bool_param = True
        await self._write(request, message.SerializeToString())

    async def _write(self, request: StreamRequest, response: bytes) -> None:
        """Write a response. Raises `ResponseNotRead` if the client does not read."""
        await request.response.wait()
        async with self._write_lock:
            await request.call.write(response)


def set_error_text(message: bytes, text: str) -> bytes:
    response: Any = service_pb2.ModelStreamInferResponse.FromString(message)
    response.error_message = text
    return bytes(response.SerializeToString())
