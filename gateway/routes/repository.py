"""`POST /v2/repository/…`: the models of the whole fleet. Administration: it decides what code runs.

Paths and bodies are Triton's own (Model Repository Extension), so that its clients work unchanged.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.errors import Forbidden, MalformedRequest, NotFound
from gateway.fleet.index import READY, merge_indexes
from gateway.fleet.repository import build_index_entry
from gateway.fleet.uploads import CONFIG_PARAMETER, UNLOAD_DEPENDENTS, check_load_parameters
from gateway.messages import quote_text
from gateway.request_info import RequestInfo
from gateway.routes.dependencies import (
    Services,
    ServicesForFleet,
    ServicesForLoad,
    ServicesForManagement,
    get_caller,
)
from gateway.routes.request_body import (
    ManagementError,
    build_error_responses,
    build_success_response,
    read_request_body,
)
from gateway.tensors.payload import JSON

router = APIRouter(tags=["management"])
MAX_MANAGEMENT_BODY_BYTES = 1 << 20
RESPOND_ASYNC = "respond-async"  # RFC 7240, section 4.1

# What the API's description says.
STRING_SCHEMA = {"type": "string"}
REPLICA_STATES_SCHEMA = {
    "type": "object",
    "description": "By the replica's address.",
    "additionalProperties": {
        "type": "object",
        "properties": {"state": STRING_SCHEMA, "reason": STRING_SCHEMA},
        "required": ["state"],
    },
}
INDEX_ENTRY_SCHEMA = {
    "type": "object",
    "properties": {
        "name": STRING_SCHEMA,
        "version": STRING_SCHEMA,
        "state": STRING_SCHEMA,
        "reason": STRING_SCHEMA,
        "replicas": REPLICA_STATES_SCHEMA,
    },
    "required": ["name"],
}
REPORT_PROPERTIES = {
    "model": STRING_SCHEMA,
    "state": STRING_SCHEMA,
    "replicas": REPLICA_STATES_SCHEMA,
}
REPORT_SCHEMA = {
    "type": "object",
    "properties": REPORT_PROPERTIES,
    "required": ["model", "state", "replicas"],
}
ACCEPTED_SCHEMA = {
    "type": "object",
    "properties": {"id": STRING_SCHEMA, "model": STRING_SCHEMA, "operation": {"const": "running"}},
    "required": ["id", "model", "operation"],
}
OPERATION_SCHEMA = {
    "type": "object",
    "properties": {
        "id": STRING_SCHEMA,
        "action": {"enum": ["load", "unload"]},
        **REPORT_PROPERTIES,
        "operation": {"enum": ["running", "succeeded", "failed"]},
        "error": {"type": "string", "description": "Why it failed, in a sentence."},
        "code": STRING_SCHEMA,
    },
    "required": ["id", "action", "model", "state", "replicas", "operation"],
}
INDEX_RESPONSES = build_error_responses() | build_success_response(
    {"type": "array", "items": INDEX_ENTRY_SCHEMA}, "The index."
)
OPERATION_RESPONSES = build_error_responses(
    404, descriptions={404: "There is no such operation."}
) | build_success_response(OPERATION_SCHEMA, "How far it is.")
MANAGEMENT_RESPONSES = (
    build_error_responses(
        404,
        409,
        502,
        504,
        model=ManagementError,
        descriptions={
            422: "Triton cannot load the model.",
            502: "It is done on some replicas only; the gateway goes on trying.",
        },
    )
    | build_success_response(REPORT_SCHEMA, "It is done on every replica.")
    | build_success_response(
        ACCEPTED_SCHEMA,
        "It has begun: the request said `Prefer: respond-async`.",
        status=202,
        headers={
            "Location": {"required": True, "schema": STRING_SCHEMA},
            "Preference-Applied": {"required": True, "schema": {"const": RESPOND_ASYNC}},
        },
    )
)
MANAGEMENT_RESPONSES[202]["links"] = {
    "operation": {
        "operationId": "get_operation",
        "parameters": {"operation": "$response.body#/id"},
    }
}


def build_optional_body(properties: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    """A body of JSON that may be missing."""
    told = {"schema": {"type": "object", "properties": properties}, "example": example}
    return {"requestBody": {"required": False, "content": {JSON: told}}}


INDEX_OPENAPI = build_optional_body(
    {
        "ready": {"type": "boolean", "description": "Only the versions that are ready."},
        "parameters": {"type": "object"},
    },
    {"ready": True},
)
MANAGEMENT_OPENAPI = {
    **build_optional_body(
        {
            "parameters": {
                "type": "object",
                "properties": {
                    UNLOAD_DEPENDENTS: {
                        "type": "boolean",
                        "description": "Of an unload: what only this model needs as well.",
                    },
                    CONFIG_PARAMETER: {
                        "description": "Of a load, where uploading is allowed: the model's configuration."
                    },
                },
                "additionalProperties": {
                    "type": "string",
                    "description": "`file:PATH` of a load, where uploading is allowed: a file in base64.",
                },
            }
        },
        {"parameters": {}},
    ),
    "parameters": [
        {
            "name": "Prefer",
            "in": "header",
            "required": False,
            "description": "`respond-async`: answer 202 at once, and the operation to look at.",
            "schema": STRING_SCHEMA,
            "example": RESPOND_ASYNC,
        }
    ],
}


@router.post(
    "/v2/repository/index",
    operation_id="repository_index",
    summary="The repository index of the fleet",
    responses=INDEX_RESPONSES,
    openapi_extra=INDEX_OPENAPI,
)
async def get_repository_index(
    request: Request, services: ServicesForFleet, detail: str = ""
) -> Response:
    """The repository index of the fleet, in Triton's form: of each version the worst state.

    `?detail=replicas` adds each replica's own.
    """
    document = parse_management_body(
        await read_management_body(request, services, MAX_MANAGEMENT_BODY_BYTES)
    )
    ready = document.get("ready", False)
    if not isinstance(ready, bool):
        raise MalformedRequest('"ready" must be true or false')
    indexes = await services.repository.read_indexes()
    caller = get_caller(request)
    entries: list[Any] = [
        entry for entry in merge_indexes(indexes) if caller.can_see(entry["name"])
    ]
    if ready:
        entries = [entry for entry in entries if entry.get("state") == READY]
    if detail == "replicas":
        entries = [build_index_entry(indexes, entry) for entry in entries]
    return Response(orjson.dumps(entries), media_type=JSON)


@router.post(
    "/v2/repository/models/{model}/load",
    operation_id="load_model",
    summary="Load a model on every replica",
    responses=MANAGEMENT_RESPONSES,
    openapi_extra=MANAGEMENT_OPENAPI,
)
async def load_model_on_replicas(
    request: Request, services: ServicesForLoad, model: str
) -> Response:
    """Load a model, or load it again, on every replica."""
    return await change_model(request, services, model, load=True)


@router.post(
    "/v2/repository/models/{model}/unload",
    operation_id="unload_model",
    summary="Unload a model from every replica",
    responses=MANAGEMENT_RESPONSES,
    openapi_extra=MANAGEMENT_OPENAPI,
)
async def unload_model_from_replicas(
    request: Request, services: ServicesForManagement, model: str
) -> Response:
    """Unload a model from every replica; with `unload_dependents` what only it needs as well."""
    return await change_model(request, services, model, load=False)


@router.get(
    "/v1/operations/{operation}",
    operation_id="get_operation",
    summary="How far a load or an unload is",
    responses=OPERATION_RESPONSES,
)
async def get_operation(
    request: Request, services: ServicesForManagement, operation: str
) -> Response:
    """How far a load or an unload is that was asked for with `Prefer: respond-async`."""
    document = await services.repository.get_operation(operation)
    if document is None or not get_caller(request).can_see(document["model"]):
        raise NotFound("there is no such operation; it may be over for more than an hour")
    return Response(orjson.dumps(document), media_type=JSON)


async def change_model(request: Request, services: Services, model: str, *, load: bool) -> Response:
    caller = get_caller(request)
    # A model's config and files are code, and code sees every model.
    uploads = load and services.settings.allow_model_upload and caller.can_see_all
    limit = services.settings.max_body_bytes if uploads else MAX_MANAGEMENT_BODY_BYTES
    document = parse_management_body(await read_management_body(request, services, limit))
    parameters: dict[str, Any] = document.get("parameters", {})
    notes: RequestInfo = request.scope["request_info"]
    if services.pool.has_model(model):
        notes.model = model
    if notes.management_call is not None:
        notes.management_call.parameters = tuple(parameters)
    check_load_parameters(parameters, can_upload=uploads)
    if parameters.get(UNLOAD_DEPENDENTS) and not caller.can_see_all:
        raise Forbidden(
            f"{UNLOAD_DEPENDENTS} may reach models that the key {quote_text(caller.name)} does not see"
        )
    if RESPOND_ASYNC in request.headers.get("prefer", "").lower():
        begun = await services.repository.start_operation(model, load, parameters, caller.can_see)
        if notes.management_call is not None:
            notes.management_call.operation = begun
        headers = {"Location": f"/v1/operations/{begun}", "Preference-Applied": RESPOND_ASYNC}
        body = orjson.dumps({"id": begun, "model": model, "operation": "running"})
        return Response(body, 202, headers, JSON)
    if load:
        report = await services.repository.load(model, parameters)
    else:
        dependents = bool(parameters.get(UNLOAD_DEPENDENTS))
        report = await services.repository.unload(model, dependents, caller.can_see)
    return Response(orjson.dumps(report.to_dict()), media_type=JSON)


async def read_management_body(request: Request, services: Services, max_bytes: int) -> bytes:
    return await read_request_body(
        request, max_bytes, services.get_charge(request.scope["request_info"])
    )


def parse_management_body(body: bytes) -> dict[str, Any]:
    """The body as an object; an empty one is none. Raises `Malformed`."""
    if not body.strip():
        return {}
    try:
        document: Any = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise MalformedRequest(f"the body is not JSON: {exc}") from None
    if not isinstance(document, dict) or not isinstance(document.get("parameters", {}), dict):
        raise MalformedRequest('the body must be an object, as in {"parameters": {}}')
    return document
