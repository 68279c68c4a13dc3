"""`POST /v2/repository/…`: the models of the whole fleet. Administration: it decides what code runs.

Paths and bodies are Triton's own (Model Repository Extension), so that its clients work unchanged.
"""

from __future__ import annotations

import re
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.errors import Forbidden, Malformed, NotFound, quoted
from gateway.fleet.index import READY, merged
from gateway.fleet.repository import merged_detail
from gateway.routes.bodies import whole_body
from gateway.routes.services import Services, ServicesForFleet, ServicesForManagement, caller_of
from gateway.tensors.payload import JSON

router = APIRouter(tags=["management"])
MAX_BYTES = 1 << 20
# What a load's body may hold without being code that Triton would run.
DEPENDENTS = "unload_dependents"
# And what is.
CONFIG = "config"
FILE = re.compile(r"file:(?!\.\.?(?:/|$))[^/\x00]+(?:/(?!\.\.?(?:/|$))[^/\x00]+)*")
ASYNC = "respond-async"  # RFC 7240, section 4.1


@router.post("/v2/repository/index")
async def index(request: Request, services: ServicesForFleet, detail: str = "") -> Response:
    """The repository index of the fleet, in Triton's form: of each version the worst state.

    `?detail=replicas` adds each replica's own.
    """
    document = document_of(await whole_body(request, MAX_BYTES))
    indexes = await services.repository.index()
    caller = caller_of(request)
    entries: list[Any] = [entry for entry in merged(indexes) if caller.sees(entry["name"])]
    if document.get("ready") is True:
        entries = [entry for entry in entries if entry.get("state") == READY]
    if detail == "replicas":
        entries = [merged_detail(indexes, entry) for entry in entries]
    return Response(orjson.dumps(entries), media_type=JSON)


@router.post("/v2/repository/models/{model}/load")
async def load(request: Request, services: ServicesForManagement, model: str) -> Response:
    """Load a model, or load it again, on every replica."""
    return await changed(request, services, model, load=True)


@router.post("/v2/repository/models/{model}/unload")
async def unload(request: Request, services: ServicesForManagement, model: str) -> Response:
    """Unload a model from every replica; with `unload_dependents` what only it needs as well."""
    return await changed(request, services, model, load=False)


@router.get("/v1/operations/{operation}")
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
    document = document_of(await whole_body(request, limit))
    parameters = allowed(document.get("parameters", {}), uploads)
    if parameters.get(DEPENDENTS) and not caller.sees_all:
        raise Forbidden(
            f"{DEPENDENTS} may reach models that the key {quoted(caller.name)} does not see"
        )
    if ASYNC in request.headers.get("prefer", "").lower():
        begun = await services.repository.begin(model, load, parameters, caller.sees)
        headers = {"Location": f"/v1/operations/{begun}", "Preference-Applied": ASYNC}
        body = orjson.dumps({"id": begun, "model": model, "operation": "running"})
        return Response(body, 202, headers, JSON)
    if load:
        report = await services.repository.load(model, parameters)
    else:
        dependents = bool(parameters.get(DEPENDENTS))
        report = await services.repository.unload(model, dependents, caller.sees)
    return Response(orjson.dumps(report.document()), media_type=JSON)


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


def allowed(parameters: dict[str, Any], uploads: bool) -> dict[str, Any]:
    """The parameters of a load or an unload. Raises `Forbidden` for what would be executed."""
    for name in parameters:
        if name == DEPENDENTS:
            continue
        if not uploads:
            raise Forbidden(
                f"a load may not bring {quoted(name)}, which is code that Triton runs: uploading is switched "
                "off unless GATEWAY_ALLOW_MODEL_UPLOAD is true and the caller administrates all models"
            )
        if name != CONFIG and not FILE.fullmatch(name):
            raise Malformed(
                f"a load may bring config and file:PATH within the model, not {quoted(name)}"
            )
    return parameters
