"""Cordon, uncordon and drain of a replica."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request

from gateway.openapi.responses import build_responses
from gateway.openapi.schemas import COUNT_SCHEMA, TIMEOUT_PARAMETER
from gateway.repository.maintenance import DrainProgress
from gateway.routes.dependencies import ServicesForAdministration
from gateway.tensors.codecs import STRING_SCHEMA
from gateway.tensors.schema import build_object_schema

MAINTENANCE_SCHEMA: Final = build_object_schema(
    {
        "address": STRING_SCHEMA,
        "cordoned": {"type": "boolean", "description": "The replica gets no new requests."},
        "outstanding": COUNT_SCHEMA
        | {"description": "Requests of this gateway that are in progress."},
        "sequences": COUNT_SCHEMA
        | {"description": "Sequences of this gateway that have not ended."},
    }
)
CORDON_RESPONSES: Final = build_responses(
    MAINTENANCE_SCHEMA, "The replica and the work that it still has.", 404, 409
)
DRAIN_RESPONSES: Final = build_responses(
    MAINTENANCE_SCHEMA, "The replica is drained.", 404, 409, 504
)


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
