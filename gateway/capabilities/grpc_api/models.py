"""The methods that describe the server or a model, and those for Triton's settings. Most are forwarded."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import orjson
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from gateway.callers import Right
from gateway.capabilities.grpc_api.call import IncomingCall, check_size
from gateway.capabilities.grpc_api.infer_request import change_version
from gateway.capabilities.grpc_api.wire import invalid_message
from gateway.errors import Forbidden, ModelNotReady, UnknownModel, UnknownModelToTrace
from gateway.fleet.transports import GrpcBytesCall
from gateway.repository.resolver import NO_MODEL, ModelTarget
from gateway.routes.passthrough.rules import NO_SHARED_MEMORY
from gateway.triton.request_target import RequestTarget

EMPTY_MESSAGE: Final = b""
# A ModelReadyResponse in which `ready` has its default, false.
NOT_READY: Final = EMPTY_MESSAGE
MAX_SMALL_MESSAGE_BYTES: Final = 64 << 10


async def forward(
    call: IncomingCall, message: bytes, upstream: RequestTarget, *, is_management: bool = False
) -> bytes:
    path: str = call.scope["path"]
    request = GrpcBytesCall(upstream, path, message, call.select_metadata(), is_management)
    try:
        return await call.services.dispatcher.send(request, upstream.timeout_s)
    finally:
        call.services.record_model(call.info, upstream.model, upstream.version)


async def serve_server(call: IncomingCall, *, is_health_check: bool) -> bytes:
    """Forward ServerLive and ServerMetadata to any replica."""
    message, timeout_s = await read_small_message(call)
    call.authorize(Right.infer)
    upstream = RequestTarget(timeout_s=timeout_s, is_health_check=is_health_check)
    return await forward(call, message, upstream)


async def serve_model(call: IncomingCall) -> bytes:
    """Forward ModelMetadata and ModelConfig to a replica on which the model is ready.

    They wait for a model that is loaded on demand, as over HTTP.
    """
    request, message, timeout_s = await read_small_request(call, service_pb2.ModelMetadataRequest)
    target, message = select_version(call, message, request)
    upstream = RequestTarget(target.model, target.version, timeout_s, can_activate=True)
    return await forward(call, message, upstream)


async def serve_model_ready(call: IncomingCall) -> bytes:
    """Forward ModelReady. A model that is not ready, or not known, is no error, as for Triton."""
    request, message, timeout_s = await read_small_request(call, service_pb2.ModelReadyRequest)
    try:
        target, message = select_version(call, message, request)
        return await forward(call, message, RequestTarget(target.model, target.version, timeout_s))
    except (ModelNotReady, UnknownModel):
        return NOT_READY


def select_version(call: IncomingCall, message: bytes, request: Any) -> tuple[ModelTarget, bytes]:
    target = call.resolve(Right.infer, request.name, request.version)
    return target, change_version(message, request.version, target.version)


async def serve_statistics(call: IncomingCall) -> bytes:
    """Return the sum over the fleet. Statistics of all models require access to all models."""
    request, _, timeout_s = await read_small_request(call, service_pb2.ModelStatisticsRequest)
    target = NO_MODEL
    if not request.name:
        call.authorize_all_models(Right.infer)
    elif request.version:
        target = call.resolve(Right.infer, request.name, request.version)
    else:  # the statistics of all versions, whatever the label `default` means
        call.check_access(Right.infer, request.name)
        target = ModelTarget(request.name)
    upstream = RequestTarget(target.model, target.version, timeout_s)
    statistics = await call.services.statistics.read(upstream)
    call.services.record_model(call.info, target.model, target.version)
    return await asyncio.to_thread(encode_statistics, statistics)


def encode_statistics(document: bytes) -> bytes:
    response = service_pb2.ModelStatisticsResponse()
    ParseDict(orjson.loads(document), response, ignore_unknown_fields=True)
    message: bytes = response.SerializeToString()
    return message


async def serve_trace_setting(call: IncomingCall) -> bytes:
    request, message, timeout_s = await read_small_request(call, service_pb2.TraceSettingRequest)
    target = NO_MODEL
    if request.model_name:
        target = call.resolve(Right.manage, request.model_name, not_found_error=UnknownModelToTrace)
    else:
        call.authorize_all_models(Right.manage)
    upstream = RequestTarget(
        target.model, target.version, timeout_s, not_found_error=UnknownModelToTrace
    )
    return await forward(call, message, upstream, is_management=True)


async def serve_log_settings(call: IncomingCall) -> bytes:
    message, timeout_s = await read_small_message(call)
    call.authorize_all_models(Right.manage)
    return await forward(call, message, RequestTarget(timeout_s=timeout_s), is_management=True)


async def serve_no_regions(call: IncomingCall) -> bytes:
    """Answer the status and removal of shared memory regions, which many clients call first to clean up."""
    call.authorize(Right.infer)
    return EMPTY_MESSAGE


async def refuse_shared_memory(call: IncomingCall) -> bytes:
    call.authorize(Right.infer)
    raise Forbidden(NO_SHARED_MEMORY.message)


async def read_small_message(call: IncomingCall) -> tuple[bytes, float]:
    """Return a message without tensors or files, and the timeout. Raises `MalformedRequest`."""
    timeout_s = call.find_timeout_s()
    message = await call.read_message(timeout_s)
    check_size(message, MAX_SMALL_MESSAGE_BYTES)
    return message, timeout_s


async def read_small_request(call: IncomingCall, message_type: Any) -> tuple[Any, bytes, float]:
    """Return a request without tensors or files, its message, and the timeout of the call."""
    message, timeout_s = await read_small_message(call)
    return decode(message_type, message), message, timeout_s


def decode(message_type: Any, message: bytes) -> Any:
    """Return the decoded message. Raises `MalformedRequest`."""
    try:
        return message_type.FromString(message)
    except DecodeError:
        raise invalid_message() from None
