"""`/livez`: this process lives. `/readyz`: requests can be served. Neither asks anybody."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.fleet.plan import Seen, readiness
from gateway.keys import Right
from gateway.routes.bodies import REQUEST_ID, RETRY_AFTER, answers, refusals
from gateway.routes.services import ServicesForAll, caller_of
from gateway.tensors import schema
from gateway.tensors.payload import JSON

router = APIRouter(tags=["health"])

LIVE = {
    "type": "object",
    "properties": {"live": {"const": True}},
    "required": ["live"],
}
READINESS = {
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
            "description": "The declared models that cannot be served, and why on each replica.",
        },
    },
    "required": ["ready"],
}
ALIVE = refusals() | answers(LIVE, "This process lives.")
READY = (
    refusals()
    | answers(READINESS, "Requests can be served.")
    | {
        503: {
            "description": "Requests cannot be served now.",
            "headers": REQUEST_ID | RETRY_AFTER,
            "content": {JSON: {"schema": {"anyOf": [READINESS, schema.ERROR]}}},
        }
    }
)


@router.get("/livez", operation_id="livez", summary="Does it live?", responses=ALIVE)
async def livez() -> dict[str, Any]:
    """Never asks Triton: a gateway is not restarted because a Triton is."""
    return {"live": True}


@router.get("/readyz", operation_id="readyz", summary="Can it serve?", responses=READY)
async def readyz(request: Request, services: ServicesForAll) -> Response:
    """200 when a replica lives and every declared model can be served; else 503, and what is missing.

    Addresses and models are for who may see the fleet; whether it is ready, for everybody.
    """
    pool = services.pool
    seen = [
        Seen(str(replica.address), pool.state(replica), replica.index, replica.reason)
        for replica in pool.replicas.values()
    ]
    found = readiness(
        seen,
        services.repository.declared,
        services.settings.ready_quorum,
        draining=request.state.drain.began,
    )
    caller = caller_of(request)
    document: dict[str, Any] = {"ready": found.ready}
    if Right.fleet in caller.rights:
        document = dict(found.document)
    if "missing" in document and not caller.sees_all:
        document["missing"] = {
            model: where for model, where in document["missing"].items() if caller.sees(model)
        }
    headers = {} if found.ready else {"Retry-After": "1"}
    return Response(orjson.dumps(document), 200 if found.ready else 503, headers, JSON)
