"""Model management over gRPC. It acts on the whole fleet, as over HTTP."""

from __future__ import annotations

import base64
from typing import Any, Final

from tritonclient.grpc import service_pb2

from gateway.callers import Right
from gateway.capabilities.grpc_api.call import IncomingCall
from gateway.capabilities.grpc_api.models import EMPTY_MESSAGE, decode, read_small_request
from gateway.errors import UnknownModel, UnknownModelToLoad
from gateway.fleet.index import READY, merge_indexes

INDEX_FIELDS: Final = ("name", "version", "state", "reason")


async def serve_index(call: IncomingCall) -> bytes:
    request, *_ = await read_small_request(call, service_pb2.RepositoryIndexRequest)
    call.authorize(Right.fleet)
    indexes = await call.services.repository.read_indexes()
    caller = call.info.caller
    response = service_pb2.RepositoryIndexResponse()
    for entry in merge_indexes(indexes):
        if caller.can_see(entry["name"]) and (not request.ready or entry.get("state") == READY):
            response.models.add(**{name: entry.get(name, "") for name in INDEX_FIELDS})
    return bytes(response.SerializeToString())


async def serve_load(call: IncomingCall) -> bytes:
    # The caller is checked before a message is decoded that may contain files.
    call.authorize(Right.manage)
    message = await call.read_message(call.find_timeout_s())
    request = decode(service_pb2.RepositoryModelLoadRequest, message)
    can_upload = call.services.accepts_code(call.info.caller)
    model, parameters = prepare_change(call, request, UnknownModelToLoad, can_upload=can_upload)
    await call.services.repository.load(model, parameters, call.info.caller.can_see)
    return EMPTY_MESSAGE


async def serve_unload(call: IncomingCall) -> bytes:
    request, *_ = await read_small_request(call, service_pb2.RepositoryModelUnloadRequest)
    model, parameters = prepare_change(call, request, UnknownModel, can_upload=False)
    await call.services.repository.unload(model, parameters, call.info.caller.can_see)
    return EMPTY_MESSAGE


def prepare_change(
    call: IncomingCall, request: Any, not_found_error: type[UnknownModel], *, can_upload: bool
) -> tuple[str, dict[str, Any]]:
    model = call.resolve(Right.manage, request.model_name, not_found_error=not_found_error).model
    parameters = {name: read_value(value) for name, value in request.parameters.items()}
    call.services.accept_load_parameters(call.info, model, parameters, can_upload=can_upload)
    return model, parameters


def read_value(parameter: Any) -> Any:
    """Return the value of a `ModelRepositoryParameter` as in the JSON API: bytes are in base64."""
    choice = parameter.WhichOneof("parameter_choice")
    value = None if choice is None else getattr(parameter, choice)
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
