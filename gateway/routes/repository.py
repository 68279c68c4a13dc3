"""`POST /v2/repository/…`: loading and unloading models. Administration: it decides what code runs."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.auth import require_admin
from gateway.errors import Forbidden, Malformed
from gateway.fleet.pool import repository_path
from gateway.routes.bodies import whole_body
from gateway.routes.services import Services, ServicesDep
from gateway.tensors.payload import JSON
from gateway.triton.complaints import Asked

router = APIRouter(tags=["management"])
MAX_BYTES = 1 << 20
LOAD_TIMEOUT_S = 300.0
# What a load's body may hold without being code that Triton would run.
HARMLESS = {"unload_dependents"}


@router.post("/v2/repository/index")
async def index(request: Request, services: ServicesDep) -> Response:
    """The repository index, as Triton gives it."""
    return await passed_on(request, services, "/v2/repository/index", Asked())


@router.post("/v2/repository/models/{model}/load")
async def load(request: Request, services: ServicesDep, model: str) -> Response:
    """Load a model, or load it again."""
    require_admin(request.scope)
    return await changed(request, services, model, "load")


@router.post("/v2/repository/models/{model}/unload")
async def unload(request: Request, services: ServicesDep, model: str) -> Response:
    """Unload a model; with `unload_dependents` what only it needs as well."""
    require_admin(request.scope)
    return await changed(request, services, model, "unload")


async def changed(request: Request, services: Services, model: str, action: str) -> Response:
    try:
        return await passed_on(request, services, repository_path(model, action), Asked(model))
    finally:
        services.fleet.forget(model)


async def passed_on(request: Request, services: Services, path: str, asked: Asked) -> Response:
    body = harmless(await whole_body(request, MAX_BYTES))
    answer = await services.fleet.ask(b"POST", path, body, asked=asked, timeout_s=LOAD_TIMEOUT_S)
    return Response(orjson.dumps(answer) if answer is not None else b"", media_type=JSON)


def harmless(body: bytes) -> bytes:
    """The body without what would be executed: a model's config and files are code.

    Written anew, because Triton reads the first of two equal keys and we read the last.
    """
    if not body.strip():
        return b""
    try:
        document: Any = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise Malformed(f"the body is not JSON: {exc}") from None
    if not isinstance(document, dict) or not isinstance(document.get("parameters", {}), dict):
        raise Malformed('the body must be an object, as in {"parameters": {}}')
    for name in document.get("parameters", {}):
        if name not in HARMLESS:
            raise Forbidden(f"a load may not bring {name!r}: uploading model code is switched off")
    return orjson.dumps({"parameters": document.get("parameters", {})})
