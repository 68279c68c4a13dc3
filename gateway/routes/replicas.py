"""Cordon, uncordon and drain of a replica."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.openapi.replicas import CORDON_RESPONSES, DRAIN_RESPONSES
from gateway.openapi.schemas import TIMEOUT_PARAMETER
from gateway.repository.maintenance import DrainProgress
from gateway.routes.dependencies import ServicesForAdministration

router = APIRouter(tags=["management"])


@router.post(
    "/v1/replicas/{address}/cordon",
    operation_id="cordon_replica",
    summary="Send no new requests to a replica",
    responses=CORDON_RESPONSES,
)
async def cordon_replica(services: ServicesForAdministration, address: str) -> dict[str, Any]:
    """Running requests and sequences go on. Models are still loaded and unloaded on the replica.

    The cordon applies to every gateway that shares the state, and ends with `uncordon`, or when the replica
    is no longer part of the fleet.
    """
    progress = await services.maintenance.cordon(address)
    return build_maintenance_document(address, progress, is_cordoned=True)


@router.post(
    "/v1/replicas/{address}/uncordon",
    operation_id="uncordon_replica",
    summary="Send requests to a replica again",
    responses=CORDON_RESPONSES,
)
async def uncordon_replica(services: ServicesForAdministration, address: str) -> dict[str, Any]:
    """End a cordon; the replica need not have one."""
    progress = await services.maintenance.uncordon(address)
    return build_maintenance_document(address, progress, is_cordoned=False)


@router.post(
    "/v1/replicas/{address}/drain",
    operation_id="drain_replica",
    summary="Cordon a replica and wait for its requests",
    responses=DRAIN_RESPONSES,
    openapi_extra={"parameters": [TIMEOUT_PARAMETER]},
)
async def drain_replica(
    request: Request, services: ServicesForAdministration, address: str
) -> dict[str, Any]:
    """Return when no gateway has a request or a sequence on the replica. 504 if that takes too long.

    The replica stays cordoned in both cases.
    """
    timeout_s = services.resolve_timeout_s(request.headers.get("x-request-timeout"))
    progress = await services.maintenance.drain(address, timeout_s)
    return build_maintenance_document(address, progress, is_cordoned=True)


def build_maintenance_document(
    address: str, progress: DrainProgress, *, is_cordoned: bool
) -> dict[str, Any]:
    return {
        "address": address,
        "cordoned": is_cordoned,
        "outstanding": progress.outstanding,
        "sequences": progress.sequences,
    }
