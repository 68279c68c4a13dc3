"""`GET /metrics`: the gateway's own page and every replica's, as one."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.errors import GatewayError
from gateway.exposition import merge
from gateway.fleet.replica import Replica
from gateway.routes.services import Services, ServicesDep

router = APIRouter(tags=["metrics"])
SCRAPE_TIMEOUT_S = 2.0


@router.get("/metrics")
async def metrics(services: ServicesDep) -> Response:
    """A replica that does not answer costs its own samples, never the page."""
    found = await asyncio.gather(
        *(page_of(services, replica) for replica in services.pool.replicas.values())
    )
    pages = {str(replica.address): page for replica, page in found if page}
    return Response(merge(services.metrics.page(), pages), media_type=CONTENT_TYPE_LATEST)


async def page_of(services: Services, replica: Replica) -> tuple[Replica, str]:
    try:
        reply = await replica.metrics.ask(b"GET", b"/metrics", timeout_s=SCRAPE_TIMEOUT_S)
    except GatewayError:
        reply = None
    if reply is None or reply.status != 200:
        services.metrics.scrape_failures.labels(str(replica.address)).inc()
        return replica, ""
    return replica, reply.body.decode(errors="replace")
