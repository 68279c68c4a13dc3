"""`POST /v2/repository/…`: the models of the whole fleet. Administration: it decides what code runs.

Paths and bodies are Triton's own (Model Repository Extension), so that its clients work unchanged.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.context import Notes
from gateway.errors import Forbidden, Malformed, NotFound
from gateway.fleet.index import READY, merged
from gateway.fleet.repository import merged_detail
from gateway.fleet.uploads import CONFIG, DEPENDENTS, check_parameters
from gateway.routes.bodies import ManagementError, answers, refusals, whole_body
from gateway.routes.services import (
    Services,
    ServicesForFleet,
    ServicesForLoad,
    ServicesForManagement,
    caller_of,
)
from gateway.tensors.payload import JSON
from gateway.words import quoted

router = APIRouter(tags=["management"])
MAX_BYTES = 1 << 20
ASYNC = "respond-async"  # RFC 7240, section 4.1

# What the API's description says.
TEXT = {"type": "string"}
OF_REPLICAS = {
    "type": "object",
    "description": "By the replica's address.",
    "additionalProperties": {
        "type": "object",
        "properties": {"state": TEXT, "reason": TEXT},
        "required": ["state"],
    },
}
ENTRY = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "version": TEXT,
        "state": TEXT,
        "reason": TEXT,
        "replicas": OF_REPLICAS,
    },
    "required": ["name"],
}
REPORTED = {"model": TEXT, "state": TEXT, "replicas": OF_REPLICAS}
REPORT = {
    "type": "object",
    "properties": REPORTED,
    "required": ["model", "state", "replicas"],
}
BEGUN = {
    "type": "object",
    "properties": {"id": TEXT, "model": TEXT, "operation": {"const": "running"}},
    "required": ["id", "model", "operation"],
}
OPERATION = {
    "type": "object",
    "properties": {
        "id": TEXT,
        "action": {"enum": ["load", "unload"]},
        **REPORTED,
        "operation": {"enum": ["running", "succeeded", "failed"]},
        "error": {"type": "string", "description": "Why it failed, in a sentence."},
        "code": TEXT,
    },
    "required": ["id", "action", "model", "state", "replicas", "operation"],
}
INDEX = refusals() | answers({"type": "array", "items": ENTRY}, "The index.")
OPERATIONS = refusals(404, texts={404: "There is no such operation."}) | answers(
    OPERATION, "How far it is."
)
MANAGED = (
    refusals(
        404,
        409,
        502,
        504,
        model=ManagementError,
        texts={
            422: "Triton cannot load the model.",
            502: "It is done on some replicas only; the gateway goes on trying.",
        },
    )
    | answers(REPORT, "It is done on every replica.")
    | answers(
        BEGUN,
        "It has begun: the request said `Prefer: respond-async`.",
        status=202,
        headers={
            "Location": {"required": True, "schema": TEXT},
            "Preference-Applied": {"required": True, "schema": {"const": ASYNC}},
        },
    )
)
MANAGED[202]["links"] = {
    "operation": {
        "operationId": "get_operation",
        "parameters": {"operation": "$response.body#/id"},
    }
}


def taken(properties: dict[str, Any], example: dict[str, Any]) -> dict[str, Any]:
    """A body of JSON that may be missing."""
    told = {"schema": {"type": "object", "properties": properties}, "example": example}
    return {"requestBody": {"required": False, "content": {JSON: told}}}


INDEX_BODY = taken(
    {
        "ready": {"type": "boolean", "description": "Only the versions that are ready."},
        "parameters": {"type": "object"},
    },
    {"ready": True},
)
CHANGE = {
    **taken(
        {
            "parameters": {
                "type": "object",
                "properties": {
                    DEPENDENTS: {
                        "type": "boolean",
                        "description": "Of an unload: what only this model needs as well.",
                    },
                    CONFIG: {
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
            "schema": TEXT,
            "example": ASYNC,
        }
    ],
}


@router.post(
    "/v2/repository/index",
    operation_id="repository_index",
    summary="The repository index of the fleet",
    responses=INDEX,
    openapi_extra=INDEX_BODY,
)
async def index(request: Request, services: ServicesForFleet, detail: str = "") -> Response:
    """The repository index of the fleet, in Triton's form: of each version the worst state.

    `?detail=replicas` adds each replica's own.
    """
    document = document_of(await read_body(request, services, MAX_BYTES))
    ready = document.get("ready", False)
    if not isinstance(ready, bool):
        raise Malformed('"ready" must be true or false')
    indexes = await services.repository.index()
    caller = caller_of(request)
    entries: list[Any] = [entry for entry in merged(indexes) if caller.sees(entry["name"])]
    if ready:
        entries = [entry for entry in entries if entry.get("state") == READY]
    if detail == "replicas":
        entries = [merged_detail(indexes, entry) for entry in entries]
    return Response(orjson.dumps(entries), media_type=JSON)


@router.post(
    "/v2/repository/models/{model}/load",
    operation_id="load_model",
    summary="Load a model on every replica",
    responses=MANAGED,
    openapi_extra=CHANGE,
)
async def load(request: Request, services: ServicesForLoad, model: str) -> Response:
    """Load a model, or load it again, on every replica."""
    return await changed(request, services, model, load=True)


@router.post(
    "/v2/repository/models/{model}/unload",
    operation_id="unload_model",
    summary="Unload a model from every replica",
    responses=MANAGED,
    openapi_extra=CHANGE,
)
async def unload(request: Request, services: ServicesForManagement, model: str) -> Response:
    """Unload a model from every replica; with `unload_dependents` what only it needs as well."""
    return await changed(request, services, model, load=False)


@router.get(
    "/v1/operations/{operation}",
    operation_id="get_operation",
    summary="How far a load or an unload is",
    responses=OPERATIONS,
)
async def operation(request: Request, services: ServicesForManagement, operation: str) -> Response:
    """How far a load or an unload is that was asked for with `Prefer: respond-async`."""
    document = await services.repository.operation(operation)
    if document is None or not caller_of(request).sees(document["model"]):
        raise NotFound("there is no such operation; it may be over for more than an hour")
    return Response(orjson.dumps(document), media_type=JSON)


async def changed(request: Request, services: Services, model: str, *, load: bool) -> Response:
    caller = caller_of(request)
    # A model's config and files are code, and code sees every model.
    uploads = load and services.settings.allow_model_upload and caller.sees_all
    limit = services.settings.max_body_bytes if uploads else MAX_BYTES
    document = document_of(await read_body(request, services, limit))
    parameters: dict[str, Any] = document.get("parameters", {})
    notes: Notes = request.scope["notes"]
    if services.pool.knows(model):
        notes.model = model
    if notes.managed is not None:
        notes.managed.parameters = tuple(parameters)
    check_parameters(parameters, uploads=uploads)
    if parameters.get(DEPENDENTS) and not caller.sees_all:
        raise Forbidden(
            f"{DEPENDENTS} may reach models that the key {quoted(caller.name)} does not see"
        )
    if ASYNC in request.headers.get("prefer", "").lower():
        begun = await services.repository.begin(model, load, parameters, caller.sees)
        if notes.managed is not None:
            notes.managed.operation = begun
        headers = {"Location": f"/v1/operations/{begun}", "Preference-Applied": ASYNC}
        body = orjson.dumps({"id": begun, "model": model, "operation": "running"})
        return Response(body, 202, headers, JSON)
    if load:
        report = await services.repository.load(model, parameters)
    else:
        dependents = bool(parameters.get(DEPENDENTS))
        report = await services.repository.unload(model, dependents, caller.sees)
    return Response(orjson.dumps(report.document()), media_type=JSON)


async def read_body(request: Request, services: Services, max_bytes: int) -> bytes:
    return await whole_body(request, max_bytes, services.charge_for(request.scope["notes"]))


def document_of(body: bytes) -> dict[str, Any]:
    """The body as an object; an empty one is none. Raises `Malformed`."""
    if not body.strip():
        return {}
    try:
        document: Any = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise Malformed(f"the body is not JSON: {exc}") from None
    if not isinstance(document, dict) or not isinstance(document.get("parameters", {}), dict):
        raise Malformed('the body must be an object, as in {"parameters": {}}')
    return document
