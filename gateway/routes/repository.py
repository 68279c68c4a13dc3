"""`POST /v2/repository/…`: the models of the whole fleet. Administration: it decides what code runs.

Paths and bodies are Triton's own (Model Repository Extension), so that its clients work unchanged.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.auth import require_admin
from gateway.errors import Forbidden, Malformed, NotFound
from gateway.fleet.index import READY, merged
from gateway.fleet.repository import Report, merged_detail
from gateway.routes.bodies import whole_body
from gateway.routes.services import Services, ServicesDep
from gateway.tensors.payload import JSON

router = APIRouter(tags=["management"])
MAX_BYTES = 1 << 20
# What a load's body may hold without being code that Triton would run.
HARMLESS = {"unload_dependents"}
ASYNC = "respond-async"  # RFC 7240, section 4.1


@router.post("/v2/repository/index")
async def index(request: Request, services: ServicesDep, detail: str = "") -> Response:
    """The repository index of the fleet, in Triton's form: of each version the worst state.

    `?detail=replicas` adds each replica's own.
    """
    document = document_of(await whole_body(request, MAX_BYTES))
    indexes = await services.repository.index()
    entries: list[Any] = list(merged(indexes))
    if document.get("ready") is True:
        entries = [entry for entry in entries if entry.get("state") == READY]
    if detail == "replicas":
        entries = [merged_detail(indexes, entry) for entry in entries]
    return Response(orjson.dumps(entries), media_type=JSON)


@router.post("/v2/repository/models/{model}/load")
async def load(request: Request, services: ServicesDep, model: str) -> Response:
    """Load a model, or load it again, on every replica."""
    return await changed(request, services, model, load=True)


@router.post("/v2/repository/models/{model}/unload")
async def unload(request: Request, services: ServicesDep, model: str) -> Response:
    """Unload a model from every replica; with `unload_dependents` what only it needs as well."""
    return await changed(request, services, model, load=False)


@router.get("/v1/operations/{operation}")
async def operation(request: Request, services: ServicesDep, operation: str) -> Response:
    """How far a load or an unload is that was asked for with `Prefer: respond-async`."""
    require_admin(request.scope)
    document = await services.repository.operation(operation)
    if document is None:
        raise NotFound("there is no such operation; it may be over for more than an hour")
    return Response(orjson.dumps(document), media_type=JSON)


async def changed(request: Request, services: Services, model: str, *, load: bool) -> Response:
    require_admin(request.scope)
    parameters = harmless(document_of(await whole_body(request, MAX_BYTES)))
    if ASYNC in request.headers.get("prefer", "").lower():
        begun = await services.repository.begin(model, load, parameters)
        headers = {"Location": f"/v1/operations/{begun}", "Preference-Applied": ASYNC}
        body = orjson.dumps({"id": begun, "model": model, "operation": "running"})
        return Response(body, 202, headers, JSON)
    return Response(
        orjson.dumps((await done(services, model, parameters, load)).document()), media_type=JSON
    )


async def done(services: Services, model: str, parameters: dict[str, Any], load: bool) -> Report:
    if load:
        return await services.repository.load(model, parameters)
    dependents = parameters.get("unload_dependents", False)
    return await services.repository.unload(model, bool(dependents))


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


def harmless(document: dict[str, Any]) -> dict[str, Any]:
    """The parameters, none of which would be executed: a model's config and files are code."""
    parameters: dict[str, Any] = document.get("parameters", {})
    for name in parameters:
        if name not in HARMLESS:
            raise Forbidden(f"a load may not bring {name!r}: uploading model code is switched off")
    return parameters
