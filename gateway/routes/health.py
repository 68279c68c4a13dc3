"""Health endpoints: `/livez`, `/readyz` and `/v2/health/ready`. None of them sends a request to Triton."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.callers import Right
from gateway.errors import Unavailable
from gateway.media_types import JSON
from gateway.routes.dependencies import ServicesForAnyCaller, ServicesForInference, get_caller
from gateway.routes.openapi import (
    ERROR_REFERENCE,
    RETRY_AFTER_HEADER,
    STRING_SCHEMA,
    build_error_responses,
    build_json_content,
    build_map_schema,
    build_object_schema,
    build_response,
    build_responses,
)

REASONS_SCHEMA = {"type": "object", "additionalProperties": STRING_SCHEMA}
LIVENESS_SCHEMA = build_object_schema({"live": {"const": True}})
READINESS_SCHEMA = build_object_schema(
    {
        "ready": {"type": "boolean"},
        "draining": {"type": "boolean", "description": "The gateway is shutting down."},
        "asleep": {
            "const": True,
            "description": "No replica is up; requests wait for one (GATEWAY_HOLD_S).",
        },
        "replicas": build_map_schema(STRING_SCHEMA, "State of each replica, by address."),
        "missing": build_map_schema(
            REASONS_SCHEMA,
            "Declared models that are not ready on the quorum, with the reason on each replica. A gateway "
            "that was ready stays so while it can serve others, unless one has `required: always`.",
        ),
    },
    optional=("draining", "asleep", "replicas", "missing"),
)
LIVENESS_RESPONSES = build_responses(LIVENESS_SCHEMA, "The gateway process is running.")
READINESS_RESPONSES = build_responses(READINESS_SCHEMA, "The gateway is ready.") | {
    503: build_response(
        "The gateway is not ready.",
        build_json_content({"anyOf": [READINESS_SCHEMA, ERROR_REFERENCE]}),
        RETRY_AFTER_HEADER,
    )
}
EMPTY_CONTENT = {"text/plain": {"schema": {"type": "string", "maxLength": 0}}}
V2_READY_RESPONSES = build_error_responses() | {
    200: build_response("The fleet is ready.", EMPTY_CONTENT)
}


router = APIRouter(tags=["health"])


class NotReady(Unavailable):
    code = "NOT_READY"
    message = "the fleet is not ready; for the reason, see GET /readyz"


@router.get("/livez", operation_id="livez", summary="Liveness", responses=LIVENESS_RESPONSES)
async def livez() -> dict[str, Any]:
    """Return 200 while the process runs, whatever the state of Triton: restarting would not help."""
    return {"live": True}


@router.get("/readyz", operation_id="readyz", summary="Readiness", responses=READINESS_RESPONSES)
async def readyz(request: Request, services: ServicesForAnyCaller) -> Response:
    """Return 200 if requests can be served, else 503; with the declared models that are missing.

    A gateway becomes ready when each declared model is ready on the quorum. It stays ready until it drains,
    no replica is usable, none of these models can be served, or one with `required: always` cannot.
    Callers without the right to see the fleet get only `ready` and `asleep`.
    """
    readiness = services.repository.readiness.evaluate(is_draining=request.state.drain.is_draining)
    caller = get_caller(request)
    public = ("ready", "asleep")
    document = {name: readiness.document[name] for name in public if name in readiness.document}
    if Right.fleet in caller.rights:
        document = dict(readiness.document)
    if "missing" in document:
        models = document["missing"].items()
        document["missing"] = {name: reasons for name, reasons in models if caller.can_see(name)}
    headers = {} if readiness.is_ready else {"Retry-After": "1"}
    return Response(orjson.dumps(document), 200 if readiness.is_ready else 503, headers, JSON)


@router.get(
    "/v2/health/ready",
    operation_id="server_ready",
    summary="Readiness of the fleet, in Triton's format",
    responses=V2_READY_RESPONSES,
)
async def v2_ready(request: Request, services: ServicesForInference) -> Response:
    """Return 200 without a body, as Triton does, or 503. The status is that of `/readyz`.

    No replica's own readiness is returned: with strict readiness, Triton returns 400 during every load and
    after a failed one.
    """
    readiness = services.repository.readiness.evaluate(is_draining=request.state.drain.is_draining)
    if not readiness.is_ready:
        raise NotReady
    return Response(headers={"Content-Type": "text/plain"})  # as Triton does
