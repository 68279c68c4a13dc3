"""The handler of `ModelStreamInfer`: many requests on one stream, each sent to a replica of its own.

Like Triton's, the responses of models with one response per request come in the order of the requests, and
those of decoupled models as they arrive. The steps of a sequence run one after another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import grpc
from tritonclient.grpc import service_pb2

from gateway.callers import Right
from gateway.capabilities.grpc_api.call import (
    COPIES,
    GRPC_ROUTE,
    IncomingCall,
    ResponseNotRead,
    ShuttingDown,
)
from gateway.capabilities.grpc_api.infer_request import (
    InferHead,
    change_version,
    read_infer_request,
)
from gateway.capabilities.grpc_api.inference import build_upstream_target, check_classification
from gateway.capabilities.grpc_api.receive import StreamReader
from gateway.capacity.admission import Slot
from gateway.errors import GatewayError, Unauthenticated
from gateway.fleet.sequences import SequenceKey
from gateway.fleet.transports import GrpcStreamCall
from gateway.memory import MemoryBudgetExceeded
from gateway.repository.resolver import NO_MODEL, ModelTarget
from gateway.tasks import cancel_tasks
from gateway.telemetry.request_info import current_request_info
from gateway.triton.grpc.byte_channel import FINAL_RESPONSE, STREAM_METHOD, map_stream_error

# A stream with this many requests in progress is not read.
MAX_STREAM_REQUESTS: Final = 64
# After a request that was refused for memory, the next one is read when there is room, or at last then.
MAX_MEMORY_WAIT_S: Final = 30.0

NO_HEAD: Final = InferHead("", "", "", None, ())


@dataclass
class StreamRequest:
    """One request of a stream, and what it waits for."""

    call: IncomingCall
    message: bytes
    is_done: asyncio.Event  # ends the wait of the next step, and of the next response
    head: InferHead = NO_HEAD
    target: ModelTarget = NO_MODEL
    failure: GatewayError | None = None  # found before it was sent
    sequence: SequenceKey | None = None
    previous_step: asyncio.Event | None = (
        None  # set when the step of its sequence before it is done
    )
    previous_response: asyncio.Event | None = None  # set when the response before it is written

    @property
    def waits_for_order(self) -> bool:
        return self.previous_response is not None and not self.previous_response.is_set()


class InferStream:
    """The requests and responses of one stream."""

    def __init__(self, opening: IncomingCall, start_request: Callable[[], IncomingCall]) -> None:
        self._services = opening.services
        self._start_request = start_request
        self._stopping = opening.environment.stopping
        self._max_requests = opening.environment.max_requests
        self._window = asyncio.Semaphore(MAX_STREAM_REQUESTS)
        self._write_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        slots = opening.environment.receive_slots
        self._metadata = opening.select_metadata()
        self._reader = StreamReader(
            opening.context, slots, opening.slot_owner, self._tasks, self._fail
        )
        self._last_response: asyncio.Event | None = None
        self._last_steps: dict[SequenceKey, asyncio.Event] = {}
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
            await cancel_tasks([requests, *self._tasks])

    async def _read_requests(self) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            while (message := await self._read_message(stopping)) is not grpc.aio.EOF:
                charged_bytes = COPIES * len(message)
                failure = await self._accept(cast(bytes, message))
                del message  # it can be large, and the next one may come much later
                if isinstance(failure, MemoryBudgetExceeded):
                    await self._wait_for_memory(charged_bytes, stopping)
            if self._tasks:
                await asyncio.wait(self._tasks)
            if self._stopping.is_set():
                raise ShuttingDown
        finally:
            await cancel_tasks([stopping])

    async def _read_message(self, stopping: asyncio.Task[Any]) -> Any:
        """Return the next message; EOF at the end of the stream, and when the gateway stops."""
        await self._window.acquire()  # released when the request has ended
        while self._tasks and self._has_one_request_at_a_time():
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        reading = asyncio.create_task(self._reader.read())
        try:
            await asyncio.wait((reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else grpc.aio.EOF
        finally:
            if not reading.done():
                await cancel_tasks([reading])

    async def _wait_for_memory(self, needed_bytes: int, stopping: asyncio.Task[Any]) -> None:
        """Wait after a refusal: the next request would be received in full as well, only to be refused."""
        memory = self._services.memory
        end = asyncio.get_running_loop().time() + MAX_MEMORY_WAIT_S
        while not stopping.done() and asyncio.get_running_loop().time() < end:
            await asyncio.wait([stopping], timeout=MemoryBudgetExceeded.retry_after_s)
            if memory.has_room(needed_bytes):
                return

    def _has_one_request_at_a_time(self) -> bool:
        in_flight = self._services.metrics.in_flight[GRPC_ROUTE]
        return in_flight >= self._max_requests or self._services.memory.is_half_used

    async def _accept(self, message: bytes) -> GatewayError | None:
        """Start a request in the order in which it came; return why it is refused.

        Raises `Unauthenticated` for a revoked key.
        """
        call = self._start_request()
        request = StreamRequest(call, message, asyncio.Event())
        is_ordered = True
        try:
            await call.identify_caller()
            call.count_message(message, min_charged_bytes=0)
            is_ordered = await self._prepare(request)
        except GatewayError as exc:
            if isinstance(exc, Unauthenticated):
                call.fail(exc)
                call.end()
                raise
            # Its traceback would keep the message for as long as the request.
            request.failure = exc.with_traceback(None)
            request.message = b""
        except BaseException:
            call.end()
            raise
        if is_ordered:
            request.previous_response = self._last_response
            self._last_response = request.is_done
        task = asyncio.create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(partial(self._finish, request))
        return request.failure

    async def _prepare(self, request: StreamRequest) -> bool:
        """Check a request; return whether its response comes in the order of the requests."""
        request.head = head = read_infer_request(request.message)
        target = request.call.resolve(Right.infer, head.model, head.version)
        request.target = target = target.with_sequence(head.step)
        request.message = change_version(request.message, head.version, target.version)
        if head.step is not None:
            request.sequence = key = (target.model, head.step.sequence_id)
            request.previous_step = self._last_steps.get(key)
            self._last_steps[key] = request.is_done
        model = target.model
        version = target.version
        await self._services.activate_model(model, version, request.call.find_timeout_s())
        signatures = self._services.signatures
        signature = signatures.find_signature(model, version)
        signature = signature or await signatures.get_signature(model, version)
        await check_classification(self._services, target, head)
        return not signature.is_decoupled

    def _finish(self, request: StreamRequest, task: asyncio.Task[None]) -> None:
        request.is_done.set()
        if self._last_response is request.is_done:
            self._last_response = None
        if request.sequence and self._last_steps.get(request.sequence) is request.is_done:
            del self._last_steps[request.sequence]
        target = request.target
        self._services.record_model(request.call.info, target.model, target.served_version)
        request.call.end()
        self._tasks.discard(task)
        self._window.release()
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._fail(failure)

    def _fail(self, failure: BaseException) -> None:
        """End the stream."""
        if not self._failure.done():
            if isinstance(failure, MemoryBudgetExceeded):
                self._services.metrics.shed.labels("memory").inc()
            if isinstance(failure, GatewayError):
                # Its frames have this stream, and the messages: a cycle.
                failure = failure.with_traceback(None)
            self._failure.set_exception(failure)

    async def _answer(self, request: StreamRequest) -> None:
        """Send the request to Triton and relay its responses; errors become messages of the stream."""
        call = request.call
        target = request.target
        current_request_info.set(call.info)
        try:
            # Also before an error: the next step may begin when this one is done.
            if request.previous_step is not None:
                await request.previous_step.wait()
            if request.failure is not None:
                raise request.failure
            with Slot(self._services.admission, target.model, call.info.caller_name) as slot:
                timeout_s = await slot.acquire(call.find_timeout_s())
                await self._relay(request, timeout_s, slot)
        except ResponseNotRead:
            raise
        except GatewayError as exc:
            await self._write_error(request, exc)

    async def _relay(self, request: StreamRequest, timeout_s: float, slot: Slot) -> None:
        call = request.call
        upstream = build_upstream_target(call, request.target, request.head)
        stream_call = GrpcStreamCall(upstream, STREAM_METHOD, request.message, self._metadata)
        stream = await self._services.dispatcher.send(stream_call, timeout_s)
        request.message = b""
        del stream_call  # it has the message, which can be large
        try:
            message = await stream.read_message(timeout_s)
            if message is not None and request.waits_for_order:
                # The model has answered, and is not to wait for that of another request.
                slot.release()
            error = stream.first_error
            while message is not None:
                if error is not None:
                    message = set_error_text(message, call.fail(error).detail)
                call.charge_response(message)
                await self._write(request, message)
                if error is None:
                    call.succeed(message)
                message = await stream.read_message(call.info.timeout_s)
                error = None if message is None else map_stream_error(message, stream.target)
            if not call.info.bytes_out:
                call.succeed(b"")  # a decoupled model may send no response
        finally:
            stream.close()

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
        if request.previous_response is not None:
            await request.previous_response.wait()
            request.previous_response = None
        async with self._write_lock:
            await request.call.write(response)


def set_error_text(message: bytes, text: str) -> bytes:
    response: Any = service_pb2.ModelStreamInferResponse.FromString(message)
    response.error_message = text
    return bytes(response.SerializeToString())
