"""`/livez`: this process lives. `/readyz`: requests can be served. Neither asks anybody."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.errors import Unavailable
from gateway.keys import Right
from gateway.routes.dependencies import ServicesForAnyCaller, ServicesForInference, get_caller
from gateway.routes.request_body import (
    REQUEST_ID_HEADER,
    RETRY_AFTER_HEADER,
    build_error_responses,
    build_success_response,
)
from gateway.tensors import schema
from gateway.tensors.payload import JSON

router = APIRouter(tags=["health"])

LIVENESS_SCHEMA = {
    "type": "object",
    "properties": {"live": {"const": True}},
    "required": ["live"],
}
READINESS_SCHEMA = {
    "type": "object",
    "properties": {
        "ready": {"type": "boolean"},
        "draining": {"type": "boolean", "description": "The gateway is about to end."},
        "replicas": {
            "type": "object",
            "additionalProperties": {"type": "string"},
            "description": "Each replica's state, by address.",
        },
        "missing": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "additionalProperties": {"type": "string"},
            },
            "description": "The required models that cannot be served, and why on each replica.",
        },
        "pending": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "additionalProperties": {"type": "string"},
            },
            "description": "Models that were declared while the gateway ran and have not been ready "
            "yet: they do not make it unready.",
        },
    },
    "required": ["ready"],
}
LIVENESS_RESPONSES = build_error_responses() | build_success_response(
    LIVENESS_SCHEMA, "This process lives."
)
READINESS_RESPONSES = (
    build_error_responses()
    | build_success_response(READINESS_SCHEMA, "Requests can be served.")
    | {
        503: {
            "description": "Requests cannot be served now.",
            "headers": REQUEST_ID_HEADER | RETRY_AFTER_HEADER,
            "content": {JSON: {"schema": {"anyOf": [READINESS_SCHEMA, schema.ERROR_SCHEMA]}}},
        }
    }
)
TEXT_PLAIN = "text/plain"
V2_READY_RESPONSES = build_error_responses() | {
    200: {
        "description": "Requests can be served.",
        "headers": REQUEST_ID_HEADER,
        "content": {TEXT_PLAIN: {"schema": {"type": "string", "maxLength": 0}}},
    }
}


class NotReady(Unavailable):
    code = "NOT_READY"

    def __init__(self) -> None:
        super().__init__("the fleet is not ready; GET /readyz says what is missing")


@router.get("/livez", operation_id="livez", summary="Does it live?", responses=LIVENESS_RESPONSES)
async def livez() -> dict[str, Any]:
    """Never asks Triton: a gateway is not restarted because a Triton is."""
    return {"live": True}


@router.get(
    "/readyz", operation_id="readyz", summary="Can it serve?", responses=READINESS_RESPONSES
)
async def readyz(request: Request, services: ServicesForAnyCaller) -> Response:
    """200 when a replica is alive and every required model can be served; else 503, and what is missing.

    Required is what was declared when the gateway started, and what was declared and ready since.
    Addresses and models are for who may see the fleet; whether it is ready, for everybody.
    """
    found = services.repository.check_readiness(is_draining=request.state.drain.is_draining)
    caller = get_caller(request)
    document: dict[str, Any] = {"ready": found.is_ready}
    if Right.fleet in caller.rights:
        document = dict(found.document)
    for key in document.keys() & {"missing", "pending"}:
        document[key] = {model: at for model, at in document[key].items() if caller.can_see(model)}
    headers = {} if found.is_ready else {"Retry-After": "1"}
    return Response(orjson.dumps(document), 200 if found.is_ready else 503, headers, JSON)


@router.get(
    "/v2/health/ready",
    operation_id="server_ready",
    summary="Can the fleet serve? As Triton answers it",
    responses=V2_READY_RESPONSES,
)
async def v2_ready(request: Request, services: ServicesForInference) -> Response:
    """200 without a body as from Triton, or 503: the same as `/readyz`, and not what one replica says.

    A Triton with strict readiness answers 400 during every load and after one that failed.
    """
    if not services.repository.check_readiness(
        is_draining=request.state.drain.is_draining
    ).is_ready:
        raise NotReady
    return Response(headers={"Content-Type": TEXT_PLAIN})  # as Triton
