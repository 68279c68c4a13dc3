"""The methods that ask for the server or for a model, and settings of Triton. Most are forwarded."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from gateway.errors import Forbidden, MalformedRequest, UnknownModelToTrace
from gateway.fleet.grpc_calls import GrpcBytesCall
from gateway.fleet.resolver import ModelTarget
from gateway.grpc_server.call import IncomingCall
from gateway.grpc_server.inference import set_model_labels
from gateway.grpc_server.wire import encode_field, invalid_message
from gateway.keys import Right
from gateway.passthrough.rules import NO_SHARED_MEMORY
from gateway.triton.error_mapping import RequestTarget

VERSION_FIELD: Final = 2  # of all requests that name a model
EMPTY_MESSAGE: Final = b""
MAX_SMALL_MESSAGE_BYTES: Final = 64 << 10


async def forward(
    call: IncomingCall,
    message: bytes,
    target: ModelTarget,
    timeout_s: float,
    *,
    is_health_check: bool = False,
    is_management: bool = False,
    not_found_error: Any = None,
) -> bytes:
    """Return a replica's response to a call that is no inference."""
    upstream = RequestTarget(*target, timeout_s, is_health_check)
    if not_found_error is not None:
        upstream = upstream._replace(not_found_error=not_found_error)
    path: str = call.scope["path"]
    request = GrpcBytesCall(upstream, path, message, call.select_metadata(), is_management)
    try:
        return await call.services.dispatcher.send(request, timeout_s)
    finally:
        set_model_labels(call, target)


NO_MODEL: Final = ModelTarget("")


async def serve_server_live(call: IncomingCall) -> bytes:
    message, timeout_s = await read_small_message(call)
    call.authorize(Right.infer)
    return await forward(call, message, NO_MODEL, timeout_s, is_health_check=True)


async def serve_server_metadata(call: IncomingCall) -> bytes:
    message, timeout_s = await read_small_message(call)
    call.authorize(Right.infer)
    return await forward(call, message, NO_MODEL, timeout_s)


async def serve_model(call: IncomingCall) -> bytes:
    """Forward ModelMetadata, ModelConfig and ModelReady to a replica on which the model is ready."""
    message, timeout_s = await read_small_message(call)
    request = decode(service_pb2.ModelMetadataRequest, message)
    return await forward_for_model(call, message, request, timeout_s)


async def forward_for_model(
    call: IncomingCall, message: bytes, request: Any, timeout_s: float
) -> bytes:
    """Return the response of a replica for the model and version that the request means."""
    target = call.resolve(Right.infer, request.name, request.version)
    if target.version != request.version:
        message += encode_field(VERSION_FIELD, target.version.encode())
    return await forward(call, message, target, timeout_s)


async def serve_statistics(call: IncomingCall) -> bytes:
    """Forward ModelStatistics. Those of all models require access to all models."""
    message, timeout_s = await read_small_message(call)
    request = decode(service_pb2.ModelStatisticsRequest, message)
    if not request.name:
        call.authorize_all_models(Right.infer)
        return await forward(call, message, NO_MODEL, timeout_s)
    return await forward_for_model(call, message, request, timeout_s)


async def serve_trace_setting(call: IncomingCall) -> bytes:
    message, timeout_s = await read_small_message(call)
    request = decode(service_pb2.TraceSettingRequest, message)
    target = NO_MODEL
    if request.model_name:
        target = call.resolve(Right.manage, request.model_name, not_found_error=UnknownModelToTrace)
    else:
        call.authorize_all_models(Right.manage)
    return await forward(
        call,
        message,
        target,
        timeout_s,
        is_management=True,
        not_found_error=UnknownModelToTrace,
    )


async def serve_log_settings(call: IncomingCall) -> bytes:
    message, timeout_s = await read_small_message(call)
    call.authorize_all_models(Right.manage)
    return await forward(call, message, NO_MODEL, timeout_s, is_management=True)


async def serve_no_regions(call: IncomingCall) -> bytes:
    """Answer the status and the removal of shared memory regions, of which there are none.

    Many clients call these first to clean up.
    """
    call.authorize(Right.infer)
    return EMPTY_MESSAGE


async def refuse_shared_memory(call: IncomingCall) -> bytes:
    call.authorize(Right.infer)
    raise Forbidden(NO_SHARED_MEMORY.message)


async def read_small_message(call: IncomingCall) -> tuple[bytes, float]:
    """Return a message without tensors or files, and the timeout of the call.

    Raises `MalformedRequest` for a large one, which would be decoded on the event loop.
    """
    timeout_s = call.find_timeout_s()
    message = await call.read_message(timeout_s)
    if len(message) > MAX_SMALL_MESSAGE_BYTES:
        raise MalformedRequest(
            f"the message has {len(message)} bytes; this method accepts at most {MAX_SMALL_MESSAGE_BYTES}"
        )
    return message, timeout_s


def decode(message_type: Any, message: bytes) -> Any:
    """Return the decoded message. Raises `MalformedRequest`."""
    try:
        return message_type.FromString(message)
    except DecodeError:
        raise invalid_message() from None
