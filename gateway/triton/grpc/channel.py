"""A replica's gRPC channels for inference, with their encoding, decoding and error mapping."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Coroutine
from random import random
from time import perf_counter
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import orjson
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult
from tritonclient.grpc.aio import InferenceServerClient

from gateway.errors import BadUpstream, DeadlinePassed, GatewayError, UpstreamResponseTooLarge
from gateway.http_client.client import MAX_RESPONSE_BYTES
from gateway.http_client.connection import Headers
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.sequence import SEQUENCE_KEYS
from gateway.triton.error_mapping import RequestTarget, map_triton_error
from gateway.triton.grpc.management import (
    HTTP_STATUS_BY_GRPC_CODE,
    GrpcTlsFiles,
    GrpcUnreachable,
    build_tls_arguments,
    channel_options,
)
from gateway.triton.inference import (
    DECODE_ERRORS,
    INT64_RANGE,
    MAX_INLINE_RESPONSE_BYTES,
    InferRequest,
    InferResponse,
    check_output_entry,
    decode_binary_data,
)

CHANNEL_IDLE_TIMEOUT_S: Final = 2.0
# How long an abandoned call may complete by itself before it is cancelled.
MIN_CANCEL_GRACE_S: Final = 0.1
MAX_CANCEL_GRACE_S: Final = 0.6
GRPC_UNAVAILABLE_S: Final = 30.0
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


class GrpcClient(Protocol):
    async def close(self) -> None: ...


ClientT = TypeVar("ClientT", bound=GrpcClient)


class IdleChannel(Generic[ClientT]):
    """A channel to one replica. It is closed when idle, because Triton's shutdown waits for open ones."""

    def __init__(
        self, address: str, tls: GrpcTlsFiles | None, max_answer_bytes: int = MAX_RESPONSE_BYTES
    ) -> None:
        self.address = address
        self.tls = tls
        self.max_answer_bytes = max_answer_bytes
        self._client: ClientT | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._has_abandoned_call = False  # one that was abandoned before it was complete
        self._unavailable_until = 0.0
        self.is_new = True  # without any response so far
        self.active_calls = 0

    @property
    def is_unavailable(self) -> bool:
        # gRPC did not respond recently, although the replica was healthy.
        return perf_counter() < self._unavailable_until

    def mark_unavailable(self) -> bool:
        """Avoid the channel for `GRPC_UNAVAILABLE_S`; return True if it was available before."""
        was_available = not self._unavailable_until
        self._unavailable_until = perf_counter() + GRPC_UNAVAILABLE_S
        return was_available

    def mark_available(self) -> None:
        self.is_new = False
        self._unavailable_until = 0.0

    def connect(self) -> ClientT:
        raise NotImplementedError

    def acquire(self) -> ClientT:
        """Return the client, connected on first use; every call needs a `release`."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._client is None:
            self._client = self.connect()
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
            asyncio.ensure_future(closing.close())  # noqa: RUF006 - the channel holds the task
            if self._has_abandoned_call:
                # The cancellation's traceback keeps the call in a cycle, and the call keeps the connection.
                self._has_abandoned_call = False
                gc.collect()


class GrpcChannel(IdleChannel[InferenceServerClient]):
    """A channel for tensors that the gateway encodes and decodes."""

    def connect(self) -> InferenceServerClient:
        options = channel_options(self.max_answer_bytes)
        return InferenceServerClient(
            self.address, channel_args=options, **build_tls_arguments(self.tls)
        )


def choose_grace_s() -> float:
    """Return how long to wait for a call to complete by itself before it is cancelled.

    tritonserver before 2.59 can crash if a call is cancelled at the moment it completes: 2.51 did after
    tens of thousands of 1 ms calls that were cancelled at random times. Short calls complete within this
    time; for longer ones, the random delay makes it hard to hit the moment on purpose.
    """
    return MIN_CANCEL_GRACE_S + random() * (MAX_CANCEL_GRACE_S - MIN_CANCEL_GRACE_S)  # noqa: S311 - no secret


BACKGROUND_TASKS: set[asyncio.Task[None]] = set()  # the event loop holds only weak references


def run_in_background(cleanup: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(cleanup)
    BACKGROUND_TASKS.add(task)
    task.add_done_callback(BACKGROUND_TASKS.discard)


async def decode_grpc_response(result: InferResult, size_bytes: int) -> InferResponse:
    """Return the response, decoded in a thread if it is large. Raises `BadUpstream`."""
    if size_bytes > MAX_INLINE_RESPONSE_BYTES:
        return await asyncio.to_thread(parse_grpc_response, result, size_bytes)
    return parse_grpc_response(result, size_bytes)


def build_grpc_arguments(request: InferRequest, remaining_s: float) -> dict[str, Any]:
    """Return the arguments of a call. Raises `InputMismatch`."""
    options, target = request.build_options(remaining_s), request.target
    arguments: dict[str, Any] = {
        "model_name": target.model,
        "model_version": target.version,
        "inputs": [
            InferInput(
                name, list(array.shape), request.signature.inputs[name].datatype.name
            ).set_data_from_numpy(array)
            for name, array in request.inputs.arrays.items()
        ],
        "outputs": [
            InferRequestedOutput(name, class_count=count)
            for name, count in options.class_counts.items()
        ]
        or None,
        "request_id": request.request_id,
        "timeout": options.timeout_us,
        "priority": options.priority,
        "parameters": options.custom or None,
    }
    step = target.sequence_step
    if step is not None:
        arguments |= zip(SEQUENCE_KEYS, step.values, strict=True)
        if isinstance(step.sequence_id, int) and step.sequence_id not in INT64_RANGE:
            # The field is signed, but Triton reads it as unsigned.
            arguments["sequence_id"] = step.sequence_id - (1 << 64)
    return arguments


def parse_grpc_response(result: InferResult, size_bytes: int) -> InferResponse:
    """Raises `BadUpstream`."""
    try:
        response = result.get_response()
        contents = zip(response.outputs, response.raw_output_contents, strict=True)
        arrays = {output.name: decode_grpc_output(output, data) for output, data in contents}
    except DECODE_ERRORS as exc:
        raise BadUpstream("the replica's inference response is invalid") from exc
    return InferResponse(arrays, str(response.model_version), size_bytes)


def decode_grpc_output(output: Any, data: bytes) -> np.ndarray:
    datatype = output.datatype
    check_output_entry(output.name, datatype)
    array = decode_binary_data(data, 0, len(data), DATATYPES[datatype].numpy_dtype)
    return array.reshape(tuple(output.shape))


def count_output_bytes(result: InferResult) -> int:
    return sum(map(len, result.get_response().raw_output_contents))


def map_grpc_error(
    code: str, details: str, target: RequestTarget, max_answer_bytes: int
) -> GatewayError:
    if code == "RESOURCE_EXHAUSTED" and TOO_LARGE_MESSAGE.match(details):
        return UpstreamResponseTooLarge(max_answer_bytes)
    if code == "DEADLINE_EXCEEDED":
        return DeadlinePassed(target.timeout_s)
    if code == "UNAVAILABLE" and NOT_SENT_MESSAGE.match(details):
        return GrpcUnreachable("no response from the replica's gRPC port", is_refused=False)
    if code == "UNAVAILABLE" and CUT_OFF_MESSAGE.match(details):
        return BadUpstream(
            "the replica closed its gRPC connection before its response was complete"
        )
    return map_triton_error(
        HTTP_STATUS_BY_GRPC_CODE.get(code, 400), encode_triton_error(details), target
    )


def encode_triton_error(message: str) -> bytes:
    return orjson.dumps({"error": message})


def build_grpc_metadata(headers: Headers) -> dict[str, str]:
    # gRPC rejects metadata other than printable ASCII, so such headers are omitted.
    texts = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
    return {name: value for name, value in texts if value.isascii() and value.isprintable()}
