"""A replica's gRPC channel, with messages as bytes.

Cancelling a call cancels it in Triton, but not at the moment at which it completes (`choose_grace_s`).
Triton's HTTP API does not notice that a client has disconnected, and supports decoupled models only in
`generate_stream`.
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from random import random
from time import perf_counter
from typing import Any, Final, cast

import grpc
import orjson
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from gateway.errors import BadUpstream, DeadlinePassed, GatewayError, UpstreamResponseTooLarge
from gateway.http_client.client import MAX_RESPONSE_BYTES
from gateway.http_client.connection import RequestNotSent
from gateway.tasks import TaskSet
from gateway.telemetry.request_info import current_request_info
from gateway.triton.error_mapping import map_triton_error
from gateway.triton.request_target import RequestTarget

# The status that Triton's HTTP API returns for each code; all other codes are 400.
HTTP_STATUS_BY_GRPC_CODE: Final = {
    "INTERNAL": 500,
    "NOT_FOUND": 404,
    "UNAVAILABLE": 503,
    "UNIMPLEMENTED": 501,
}
NO_RESPONSE: Final = (
    "no response from the replica's gRPC port, which ?grpc=PORT in GATEWAY_TRITON_URLS sets"
)
# Prefixes of gRPC's own messages, because a model's messages may contain the same words.
NOT_SENT_MESSAGE: Final = re.compile(
    r"failed to connect|connections to all backends|errors resolving |dns resolution|"
    r"name resolution|empty address",
    re.I,
)
TOO_LARGE_MESSAGE: Final = re.compile(
    r"(?:stream removed \()?(?:client: )?(?:received|decompressed) message larger than max", re.I
)
CUT_OFF_MESSAGE: Final = re.compile(
    r"stream removed|socket closed|recvmsg|endpoint|connection (?:reset|closed)|broken pipe|goaway",
    re.I,
)
# The whole message of grpc.aio if a call has ended while its request was written. The reason is lost.
FAILED_WRITE: Final = "Internal error from Core"


class GrpcUnreachable(RequestNotSent):
    """The gRPC port does not respond."""


def map_grpc_error(
    code: str, details: str, target: RequestTarget, max_answer_bytes: int
) -> GatewayError:
    if code == "RESOURCE_EXHAUSTED" and TOO_LARGE_MESSAGE.match(details):
        return UpstreamResponseTooLarge(max_answer_bytes)
    if code == "DEADLINE_EXCEEDED":
        return DeadlinePassed(target.timeout_s)
    if code == "UNAVAILABLE" and NOT_SENT_MESSAGE.match(details):
        return GrpcUnreachable(NO_RESPONSE, is_refused=False)
    if details == FAILED_WRITE:
        return BadUpstream("the replica ended the gRPC call before the request was sent completely")
    if code == "UNAVAILABLE" and CUT_OFF_MESSAGE.match(details):
        return BadUpstream(
            "the replica closed its gRPC connection before its response was complete"
        )
    return map_triton_error(
        HTTP_STATUS_BY_GRPC_CODE.get(code, 400), encode_triton_error(details), target
    )


def encode_triton_error(message: str) -> bytes:
    return orjson.dumps({"error": message})


GRPC_SERVICE: Final = "/inference.GRPCInferenceService"
INFER_METHOD: Final = f"{GRPC_SERVICE}/ModelInfer"
METADATA_METHOD: Final = f"{GRPC_SERVICE}/ServerMetadata"
STREAM_METHOD: Final = f"{GRPC_SERVICE}/ModelStreamInfer"
VERSION: Final = re.compile(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})")
SAFE_CANCEL_VERSION: Final = (2, 59)
# A replica that is back must be usable at once; the probes keep requests away while it is down.
MAX_RECONNECT_DELAY_MS: Final = 500
# A parameter of every response of a model in a stream, and of no error that Triton finds before.
FINAL_RESPONSE: Final = "triton_final_response"
ERROR_MESSAGE_TAG: Final = b"\x0a"  # the first byte of a ModelStreamInferResponse with an error

GRPC_CONNECT_TIMEOUT_S: Final = 2.0
CHANNEL_IDLE_TIMEOUT_S: Final = 2.0
# How long an abandoned call may complete by itself before it is cancelled.
MIN_CANCEL_GRACE_S: Final = 0.1
MAX_CANCEL_GRACE_S: Final = 0.6
GRPC_UNAVAILABLE_S: Final = 30.0
# A stream whose reader is slow is read on until it has more than this.
MAX_UNREAD_BYTES: Final = 64 << 10

# Ends of abandoned calls and idle channels, and the reading of streams, which may outlive their owners.
CLEANUPS: Final = TaskSet()
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True)
class GrpcTlsFiles:
    """The CA file for `https://` replicas, and the gateway's client certificate and key."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


class ByteClient:
    """A connection to one gRPC server, for messages as bytes."""

    def __init__(self, address: str, tls: GrpcTlsFiles | None, max_answer_bytes: int) -> None:
        options = [
            ("grpc.max_send_message_length", -1),  # requests have their own limits
            ("grpc.max_receive_message_length", max_answer_bytes),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_DELAY_MS),
        ]
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options)
        else:
            self._channel = grpc.aio.secure_channel(address, create_credentials(tls), options)
        self._unary_calls: dict[str, Any] = {}
        self._stream_call = self._channel.stream_stream(STREAM_METHOD)

    def start_call(
        self, method: str, message: bytes, timeout_s: float, metadata: Metadata
    ) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
        call = self._unary_calls.get(method)
        if call is None:
            call = self._unary_calls[method] = self._channel.unary_unary(method)
        return cast(
            "grpc.aio.UnaryUnaryCall[bytes, bytes]",
            call(message, timeout=timeout_s, metadata=metadata),
        )

    async def probe(self, method: str) -> bytes:
        """Call a method that answers at once, unlike a model.

        Raises `GrpcUnreachable` if the port accepts data without responding, or `AioRpcError`.
        """
        try:
            return cast(bytes, await self.start_call(method, b"", GRPC_CONNECT_TIMEOUT_S, ()))
        except grpc.aio.AioRpcError as exc:
            if exc.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            raise GrpcUnreachable(NO_RESPONSE, is_refused=False) from None

    def start_stream(self, metadata: Metadata) -> grpc.aio.StreamStreamCall[bytes, bytes]:
        return self._stream_call(metadata=metadata)

    async def close(self) -> None:
        await self._channel.close()


def create_credentials(tls: GrpcTlsFiles) -> grpc.ChannelCredentials:
    files = (tls.ca_file, tls.key_file, tls.cert_file)
    contents = [None if file is None else file.read_bytes() for file in files]
    if tls.key_file is None:
        contents[1] = contents[2]  # the key is in the certificate's file
    return cast("grpc.ChannelCredentials", grpc.ssl_channel_credentials(*contents))


class GrpcByteChannel:
    """A channel to one replica, for messages as bytes.

    It is closed when idle, because Triton's shutdown waits for open ones.
    """

    # Whether cancelling at any time is safe; if not, `choose_grace_s` avoids a crash.
    can_cancel_at_once = False

    def __init__(
        self, address: str, tls: GrpcTlsFiles | None, max_answer_bytes: int = MAX_RESPONSE_BYTES
    ) -> None:
        self.address = address
        self.tls = tls
        self.max_answer_bytes = max_answer_bytes
        self._client: ByteClient | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._has_abandoned_call = False  # one that was abandoned before it was complete
        self._unavailable_until = 0.0
        self.is_new = True  # no response has arrived so far
        self.active_calls = 0

    @property
    def is_unavailable(self) -> bool:
        # gRPC did not respond recently, although the replica was healthy.
        return perf_counter() < self._unavailable_until

    @property
    def has_failed(self) -> bool:
        # gRPC did not respond when it was last needed.
        return self._unavailable_until > 0

    def mark_unavailable(self) -> bool:
        """Avoid the channel for `GRPC_UNAVAILABLE_S`; return True if it was available before."""
        was_available = not self._unavailable_until
        self._unavailable_until = perf_counter() + GRPC_UNAVAILABLE_S
        return was_available

    def mark_available(self) -> None:
        self.is_new = False
        self._unavailable_until = 0.0

    def acquire(self) -> ByteClient:
        """Return the client, connected on first use; every call needs a `release`."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._client is None:
            self._client = ByteClient(self.address, self.tls, self.max_answer_bytes)
            self.is_new = True
        self.active_calls += 1
        return self._client

    def release(self, *, is_complete: bool) -> None:
        self.active_calls -= 1
        self._has_abandoned_call = self._has_abandoned_call or not is_complete
        if not self.active_calls:
            self._idle_timer = asyncio.get_running_loop().call_later(
                CHANNEL_IDLE_TIMEOUT_S, self.drop_idle
            )

    def drop_idle(self) -> None:
        if self._client is not None and not self.active_calls:
            closing, self._client = self._client, None
            CLEANUPS.start(closing.close())
            if self._has_abandoned_call:
                # The cancellation's traceback keeps the call in a cycle, and the call keeps the connection.
                self._has_abandoned_call = False
                gc.collect()

    async def check_server(self, client: ByteClient) -> None:
        """Read Triton's version on a new connection. Raises `GrpcUnreachable`."""
        try:
            version = parse_server_version(await client.probe(METADATA_METHOD))
            self.can_cancel_at_once = version >= SAFE_CANCEL_VERSION
        except grpc.aio.AioRpcError as exc:
            if exc.code() is grpc.StatusCode.UNAVAILABLE:
                raise map_rpc_error(exc, RequestTarget(), self) from exc
            self.can_cancel_at_once = False  # the method is restricted
        self.mark_available()

    def choose_cancel_delay_s(self) -> float:
        return 0.0 if self.can_cancel_at_once else choose_grace_s()


def choose_grace_s() -> float:
    """Return how long to wait for a call to complete by itself before it is cancelled.

    tritonserver before 2.59 can crash if a call is cancelled at the moment it completes: 2.51 did after
    tens of thousands of 1 ms calls that were cancelled at random times. Short calls complete within this
    time; for longer ones, the random delay makes it hard to hit the moment on purpose.
    """
    return MIN_CANCEL_GRACE_S + random() * (MAX_CANCEL_GRACE_S - MIN_CANCEL_GRACE_S)  # noqa: S311 - no secret


def parse_server_version(server_metadata: bytes) -> tuple[int, ...]:
    """Return the version of a ServerMetadataResponse, such as (2, 51, 0); empty if it is unknown."""
    try:
        version = service_pb2.ServerMetadataResponse.FromString(server_metadata).version
    except DecodeError:
        return ()
    match = VERSION.match(version)
    return tuple(map(int, match.groups())) if match else ()


class ByteStream:
    """The responses to one request of a stream, as bytes. Its owner must close it, which cancels the rest.

    One task reads all responses: gRPC cancels the whole call if a read is cancelled.
    """

    def __init__(
        self,
        channel: GrpcByteChannel,
        target: RequestTarget,
        call: grpc.aio.StreamStreamCall[bytes, bytes],
    ) -> None:
        self.target = target
        self.first_error: GatewayError | None = None  # the model's error in the first message
        self._channel = channel
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._messages: deque[bytes] = deque()
        self._unread_bytes = 0
        self._room = asyncio.Event()
        self._unread_error: GatewayError | None = None
        self._has_failed = False
        self._is_open = True
        self._has_ended = False
        self._waiter: asyncio.Future[None] | None = None
        self._reading = CLEANUPS.start(self._read_messages())

    @classmethod
    async def open(
        cls,
        channel: GrpcByteChannel,
        target: RequestTarget,
        message: bytes,
        metadata: Metadata,
        timeout_s: float,
    ) -> ByteStream:
        """Send the request on a new stream; return it when its first message can be read.

        Raises `GrpcUnreachable`, or an error that Triton found before the model has run.
        """
        client = channel.acquire()
        try:
            if channel.is_new:
                await channel.check_server(client)
            stream = cls(channel, target, client.start_stream(metadata))
        except BaseException:
            channel.release(is_complete=True)
            raise
        try:
            await stream._send_request(message)
            first = await stream._peek_message(timeout_s)
            if first is not None:
                stream.first_error = map_stream_error(first, target)
                if stream.first_error is not None and not is_model_response(first):
                    raise stream.first_error
        except BaseException:
            stream.close()
            # The traceback of an error has this frame: a cycle, with the request.
            stream.first_error = None
            raise
        return stream

    async def _send_request(self, message: bytes) -> None:
        try:
            await self._call.write(message)
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
            pass  # the call has ended, and the next read raises its status

    async def _read_messages(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if not self._is_open:
                    del message
                    continue
                self._messages.append(message)
                self._unread_bytes += len(message)
                del message  # it can be large, and taken long before the next one is read
                self._wake_reader()
                if self._unread_bytes > MAX_UNREAD_BYTES:
                    self._room.clear()
                    await self._room.wait()
        except grpc.aio.AioRpcError as exc:
            self._unread_error = map_rpc_error(exc, self.target, self._channel)
            # Its traceback has this frame: a cycle, with the last message.
            self._unread_error.__cause__ = exc.with_traceback(None)
            self._has_failed = True
        except asyncio.CancelledError:
            # The call was cancelled. The task would keep the error, whose traceback has this frame: a cycle.
            self._has_failed = True
        self._has_ended = True
        self._wake_reader()

    async def read_message(self, timeout_s: float) -> bytes | None:
        """Return the next response, which can be an error of the model; None after the last or `close`."""
        message = await self._peek_message(timeout_s)
        if message is not None:
            self._messages.popleft()
            self._unread_bytes -= len(message)
            if self._unread_bytes <= MAX_UNREAD_BYTES:
                self._room.set()
        return message

    async def _peek_message(self, timeout_s: float) -> bytes | None:
        if not self._messages and not self._has_ended:
            await self._wait_for_message(timeout_s)
        if self._messages:
            return self._messages[0]
        if self._unread_error is not None:
            try:
                raise self._unread_error
            finally:
                self._unread_error = (
                    None  # its traceback has this frame: a cycle, with what waits for it
                )
        if self._is_open and not self._has_ended:
            raise DeadlinePassed(self.target.timeout_s)
        return None

    async def _wait_for_message(self, timeout_s: float) -> None:
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(max(timeout_s, 0), self._wake_reader)
        try:
            await self._waiter
        finally:
            timer.cancel()

    def _wake_reader(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Cancel the rest. A reader that waits gets None."""
        if not self._is_open:
            return
        self._is_open = False
        self._messages.clear()
        self._room.set()
        self._wake_reader()
        if self._has_ended:
            self._channel.release(is_complete=True)
        else:
            keep_charge_until(CLEANUPS.start(self._finish_or_cancel()))

    async def _finish_or_cancel(self) -> None:
        try:
            await asyncio.wait({self._reading}, timeout=self._channel.choose_cancel_delay_s())
        finally:
            is_complete = self._has_ended and not self._has_failed
            # This ends the read as well. A read that was cancelled itself would leak a message that arrives
            # (https://github.com/grpc/grpc/issues/43360).
            self._call.cancel()
            self._channel.release(is_complete=is_complete)


def map_rpc_error(
    exc: grpc.aio.AioRpcError, target: RequestTarget, channel: GrpcByteChannel
) -> GatewayError:
    return map_grpc_error(exc.code().name, str(exc.details()), target, channel.max_answer_bytes)


def map_stream_error(message: bytes, target: RequestTarget) -> GatewayError | None:
    """Return the error in a ModelStreamInferResponse; None if it has a response.

    The header `triton_grpc_error` would give stream errors a status, but tritonserver 2.51 crashes when it
    ends a stream that way. So errors are mapped by their message. Raises `BadUpstream` for invalid messages.
    """
    if not message.startswith(ERROR_MESSAGE_TAG):
        return None
    try:
        response = service_pb2.ModelStreamInferResponse.FromString(message)
    except DecodeError as exc:
        raise BadUpstream("the replica's inference response is invalid") from exc
    return map_triton_error(400, encode_triton_error(response.error_message), target)


def is_model_response(message: bytes) -> bool:
    """Return whether the model, and not Triton before it, made a ModelStreamInferResponse."""
    response = service_pb2.ModelStreamInferResponse.FromString(message)
    return FINAL_RESPONSE in response.infer_response.parameters


async def send_bytes(
    channel: GrpcByteChannel,
    target: RequestTarget,
    method: str,
    message: bytes,
    metadata: Metadata,
) -> bytes:
    """Return Triton's response; cancelling this coroutine cancels the call.

    Raises `GrpcUnreachable` if it cannot have been sent, `DeadlinePassed` after `target.timeout_s`, and
    the mapped error of Triton.
    """
    client = channel.acquire()
    call: grpc.aio.UnaryUnaryCall[bytes, bytes] | None = None
    try:
        if channel.is_new:
            await channel.check_server(client)
        # The deadline is enforced here: gRPC would cancel the call in Triton without the grace period.
        call = client.start_call(
            method, message, target.timeout_s + 2 * MAX_CANCEL_GRACE_S, metadata
        )
        await wait_for_status(call, target.timeout_s)
        if not call.done():
            raise DeadlinePassed(target.timeout_s)
        return cast(bytes, await call)
    except grpc.aio.AioRpcError as exc:
        raise map_rpc_error(exc, target, channel) from exc
    finally:
        if call is None:
            channel.release(is_complete=False)
        elif call.done():
            channel.release(is_complete=not call.cancelled())
        else:
            keep_charge_until(CLEANUPS.start(finish_or_cancel(call, channel)))


async def wait_for_status(call: grpc.aio.Call, timeout_s: float) -> None:
    """Return when the call is complete, or after the timeout. A cancellation does not cancel the call."""
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[None] = loop.create_future()

    def finish(_: object = None) -> None:
        if not finished.done():
            finished.set_result(None)

    call.add_done_callback(finish)
    timer = loop.call_later(max(timeout_s, 0), finish)
    try:
        await finished
    finally:
        timer.cancel()


def keep_charge_until(end: asyncio.Task[None]) -> None:
    """Keep the memory of the current request charged until the end of its call, which has its message."""
    info = current_request_info.get()
    if info is not None:
        info.keep_charge_until(end)


async def finish_or_cancel(call: grpc.aio.Call, channel: GrpcByteChannel) -> None:
    try:
        await wait_for_status(call, channel.choose_cancel_delay_s())
    finally:
        is_complete = call.done()
        call.cancel()
        channel.release(is_complete=is_complete)
