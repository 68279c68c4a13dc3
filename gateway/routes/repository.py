"""Model management for the whole fleet: the repository index, loads, unloads and their operations.

Paths and bodies are those of Triton's Model Repository Extension, so that its clients work unchanged.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final

import orjson
from fastapi import APIRouter, Request, Response

from gateway.errors import MalformedRequest, NotFound
from gateway.fleet.index import READY, build_index_entry, merge_indexes
from gateway.inference.body import RequestBody
from gateway.media_types import JSON
from gateway.repository.load_parameters import CONFIG_PARAMETER, UNLOAD_DEPENDENTS
from gateway.repository.state.content import CAPABILITY_TABLES
from gateway.repository.state.transfer import EXPORT_FORMAT, export_state, format_export
from gateway.routes.dependencies import (
    ServicesForAdministration,
    ServicesForFleet,
    ServicesForLoad,
    ServicesForManagement,
    get_caller,
)
from gateway.routes.openapi import (
    ERROR_PROPERTIES,
    STRING_SCHEMA,
    Schema,
    build_header_parameter,
    build_json_body,
    build_json_content,
    build_list_schema,
    build_map_schema,
    build_object_schema,
    build_response,
    build_responses,
)
from gateway.services import Services
from gateway.telemetry.request_info import RequestInfo

RESPOND_ASYNC = "respond-async"  # RFC 7240, section 4.1

REPLICA_STATES_SCHEMA = build_map_schema(
    build_object_schema({"state": STRING_SCHEMA, "reason": STRING_SCHEMA}, optional=("reason",)),
    "State of each replica, by address.",
)
INDEX_ENTRY_SCHEMA = build_object_schema(
    {
        **dict.fromkeys(("name", "version", "state", "reason"), STRING_SCHEMA),
        "replicas": REPLICA_STATES_SCHEMA,
    },
    optional=("version", "state", "reason", "replicas"),
    title="IndexEntry",
)
NAMED_STATE = {"model": STRING_SCHEMA, "state": STRING_SCHEMA}
CONCERNED_MODELS = {
    "forgotten_unloads": build_list_schema(
        STRING_SCHEMA,
        "Steps of the loaded model that stay loaded now, though they had been unloaded.",
    ),
    "unloaded_dependents": build_list_schema(
        STRING_SCHEMA, "Models that were unloaded first, because the unloaded one is their step."
    ),
}
REPORT_PROPERTIES = {
    **NAMED_STATE,
    "replicas": REPLICA_STATES_SCHEMA,
    **CONCERNED_MODELS,
}
REPORT_SCHEMA = build_object_schema(
    REPORT_PROPERTIES, optional=CONCERNED_MODELS, title="LoadReport"
)
MANAGEMENT_ERROR_SCHEMA = build_object_schema(
    {**ERROR_PROPERTIES, **REPORT_PROPERTIES},
    optional=REPORT_PROPERTIES,
    description="The body of an error of a load or unload, with the result on each replica.",
)
ACCEPTED_SCHEMA = build_object_schema(
    {"id": STRING_SCHEMA, "model": STRING_SCHEMA, "operation": {"const": "running"}},
    title="AcceptedOperation",
)
OPERATION_SCHEMA = build_object_schema(
    {
        "id": STRING_SCHEMA,
        "action": {"enum": ["load", "unload"]},
        **REPORT_PROPERTIES,
        "operation": {"enum": ["running", "succeeded", "failed", "lost"]},
        "updated_at": {
            "type": "integer",
            "description": "Time of the record, in seconds since 1970.",
        },
        "error": {"type": "string", "description": "Reason of the failure, in one sentence."},
        "code": STRING_SCHEMA,
    },
    optional=("error", "code", *CONCERNED_MODELS),
    title="OperationStatus",
)
INDEX_RESPONSES = build_responses({"type": "array", "items": INDEX_ENTRY_SCHEMA}, "The index.")
OPERATION_RESPONSES = build_responses(
    OPERATION_SCHEMA,
    "The operation's status.",
    404,
    error_descriptions={404: "The operation was not found."},
)
TABLE_SCHEMA = build_map_schema({"type": "object"}, "By the name of the model.")
STATE_SCHEMA = build_object_schema(
    {
        "format": {"const": EXPORT_FORMAT},
        **dict.fromkeys(("models", *CAPABILITY_TABLES), TABLE_SCHEMA),
        "cordons": build_list_schema(STRING_SCHEMA, "Addresses of cordoned replicas."),
    },
    title="State",
)
STATE_RESPONSES = build_responses(STATE_SCHEMA, "The desired state.")
MANAGEMENT_RESPONSES = build_responses(
    REPORT_SCHEMA,
    "The action succeeded on every replica.",
    *(404, 409, 502, 504),
    error_schema={"$ref": "#/components/schemas/ManagementError"},
    error_descriptions={
        422: "Triton cannot load the model.",
        502: "The action succeeded on some replicas only. The gateway retries on the others.",
    },
)
MANAGEMENT_RESPONSES[202] = build_response(
    "The operation was started, because the request has `Prefer: respond-async`.",
    build_json_content(ACCEPTED_SCHEMA),
    {
        "Location": {"required": True, "schema": STRING_SCHEMA},
        "Preference-Applied": {"required": True, "schema": {"const": RESPOND_ASYNC}},
    },
)
OPERATION_LINK = {
    "operationId": "get_operation",
    "parameters": {"operation": "$response.body#/id"},
}
MANAGEMENT_RESPONSES[202]["links"] = {"operation": OPERATION_LINK}


def build_optional_body(properties: Schema, example: Schema) -> Schema:
    schema = {"type": "object", "properties": properties}
    return build_json_body(schema, example=example, required=False)


INDEX_OPENAPI = build_optional_body(
    {
        "ready": {"type": "boolean", "description": "Return only versions that are ready."},
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
                        "description": "For unload: also unload the models that only this model needs.",
                    },
                    CONFIG_PARAMETER: {
                        "description": "For load, if uploads are allowed: the model's configuration."
                    },
                },
                "additionalProperties": {
                    "type": "string",
                    "description": "For load, if uploads are allowed: `file:PATH` with the file in base64.",
                },
            }
        },
        {"parameters": {}},
    ),
    "parameters": [
        build_header_parameter(
            "Prefer",
            "`respond-async`: return 202 immediately, with an operation to poll.",
            STRING_SCHEMA,
        )
        | {"example": RESPOND_ASYNC}
    ],
}


router = APIRouter(tags=["management"])
route_change = partial(
    router.post, responses=MANAGEMENT_RESPONSES, openapi_extra=MANAGEMENT_OPENAPI
)
MAX_MANAGEMENT_BODY_BYTES: Final = 64 << 10
MAX_LOAD_BODY_BYTES: Final = 1 << 20  # the parameters; files have another limit


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
    """Return the fleet's repository index in Triton's format, with the worst state of each version.

    `?detail=replicas` adds the state on each replica.
    """
    document = await read_management_body(request, services)
    ready = document.get("ready", False)
    if not isinstance(ready, bool):
        raise MalformedRequest('"ready" must be true or false')
    indexes = await services.repository.read_indexes()
    caller = get_caller(request)
    entries: list[Any] = [
        entry
        for entry in merge_indexes(indexes)
        if caller.can_see(entry["name"]) and (not ready or entry.get("state") == READY)
    ]
    if detail == "replicas":
        entries = [build_index_entry(indexes, entry) for entry in entries]
    return Response(orjson.dumps(entries), media_type=JSON)


@route_change(
    "/v2/repository/models/{model}/load",
    operation_id="load_model",
    summary="Load a model on every replica",
)
async def load_model_on_replicas(
    request: Request, services: ServicesForLoad, model: str
) -> Response:
    """Load or reload a model on every replica."""
    return await change_model(request, services, model, load=True)


@route_change(
    "/v2/repository/models/{model}/unload",
    operation_id="unload_model",
    summary="Unload a model from every replica",
)
async def unload_model_from_replicas(
    request: Request, services: ServicesForManagement, model: str
) -> Response:
    """Unload a model from every replica.

    `unload_dependents` also unloads the models that need it, and the steps that Triton loaded for it alone.
    """
    return await change_model(request, services, model, load=False)


@router.get(
    "/v1/operations/{operation}",
    operation_id="get_operation",
    summary="Status of a load or unload",
    responses=OPERATION_RESPONSES,
)
async def get_operation(
    request: Request, services: ServicesForManagement, operation: str
) -> Response:
    """Return the status of an operation that was started with `Prefer: respond-async`."""
    document = await services.repository.operations.read(operation)
    model = None if document is None else document.get("model")
    if not isinstance(model, str) or not get_caller(request).can_see(model):
        raise NotFound("operation not found; operations are kept for one hour after they end")
    return Response(orjson.dumps(document), media_type=JSON)


@router.get(
    "/v1/state",
    operation_id="export_state",
    summary="Export the desired state",
    responses=STATE_RESPONSES,
)
async def get_state(services: ServicesForAdministration) -> Response:
    """Return what the API changed, as `triton-gateway state import` reads it.

    It contains whatever was uploaded in load requests.
    """
    exported = await export_state(services.repository.state.store)
    return Response(format_export(exported), media_type=JSON)


async def change_model(request: Request, services: Services, model: str, *, load: bool) -> Response:
    caller = get_caller(request)
    can_upload = load and services.accepts_code(caller)
    limit = services.settings.max_body_bytes if can_upload else MAX_LOAD_BODY_BYTES
    document = await read_management_body(request, services, limit)
    parameters: dict[str, Any] = document.get("parameters", {})
    info: RequestInfo = request.scope["request_info"]
    services.accept_load_parameters(info, model, parameters, can_upload=can_upload)
    if RESPOND_ASYNC in request.headers.get("prefer", "").lower():
        operation_id = await services.repository.start_operation(
            model, load, parameters, caller.can_see
        )
        if info.management_call is not None:
            info.management_call.operation = operation_id
        location = f"/v1/operations/{operation_id}"
        headers = {"Location": location, "Preference-Applied": RESPOND_ASYNC}
        body = orjson.dumps({"id": operation_id, "model": model, "operation": "running"})
        return Response(body, 202, headers, JSON)
    if load:
        report = await services.repository.load(model, parameters, caller.can_see)
    else:
        report = await services.repository.unload(model, parameters, caller.can_see)
    return Response(orjson.dumps(report.to_dict()), media_type=JSON)


async def read_management_body(
    request: Request, services: Services, max_bytes: int = MAX_MANAGEMENT_BODY_BYTES
) -> dict[str, Any]:
    """Return the body's JSON object, which is empty for an empty body. Raises `MalformedRequest`."""
    charge = services.get_charge(request.scope["request_info"])
    body = await RequestBody(request.scope, request.receive).read(max_bytes, charge)
    if not body.strip():
        return {}
    try:
        document: Any = (
            orjson.loads(body)
            if len(body) <= MAX_MANAGEMENT_BODY_BYTES
            else await asyncio.to_thread(orjson.loads, body)
        )
    except orjson.JSONDecodeError as exc:
        raise MalformedRequest(f"the body is not JSON: {exc}") from None
    if not isinstance(document, dict) or not isinstance(document.get("parameters", {}), dict):
        raise MalformedRequest('the body must be a JSON object, such as {"parameters": {}}')
    return document
