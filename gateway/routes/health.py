"""`/livez`: this process lives. `/readyz`: requests can be served."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter, Response

from gateway.errors import GatewayError
from gateway.fleet.pool import Replica
from gateway.routes.services import ServicesDep
from gateway.tensors.payload import JSON

router = APIRouter(tags=["health"])
PROBE_TIMEOUT_S = 1.0


@router.get("/livez")
async def livez() -> dict[str, Any]:
    """Never asks Triton: a gateway is not restarted because a Triton is."""
    return {"live": True}


@router.get("/readyz")
async def readyz(services: ServicesDep) -> Response:
    """200 when a replica is ready, else 503; the body says which is not, and why."""
    replicas = services.fleet.replicas
    states = await asyncio.gather(*map(state_of, replicas))
    ready = "ready" in states
    body = {
        "ready": ready,
        "replicas": {
            str(replica.address): state for replica, state in zip(replicas, states, strict=True)
        },
    }
    headers = {} if ready else {"Retry-After": "1"}
    return Response(orjson.dumps(body), 200 if ready else 503, headers, JSON)


async def state_of(replica: Replica) -> str:
    """Asked on a fresh connection: a Triton that is stopping answers on old ones as if well."""
    try:
        reply = await replica.http.ask(
            b"GET", b"/v2/health/live", timeout_s=PROBE_TIMEOUT_S, fresh=True
        )
    except GatewayError as exc:
        return exc.detail
    return "ready" if reply.status == 200 else f"Triton answers {reply.status}"
