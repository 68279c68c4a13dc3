"""The list of replicas; cordon, uncordon and drain of a replica."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request

from gateway.callers import Caller
from gateway.fleet.health import HealthState
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.repository.maintenance import DrainProgress
from gateway.routes.dependencies import ServicesForAdministration, ServicesForFleet, get_caller
from gateway.routes.openapi import (
    COUNT_SCHEMA,
    STRING_SCHEMA,
    TIMEOUT_PARAMETER,
    build_list_schema,
    build_map_schema,
    build_object_schema,
    build_responses,
)

REPLICA_SCHEMA = build_object_schema(
    {
        "address": STRING_SCHEMA,
        "state": {"enum": [state.name for state in HealthState]},
        "outstanding": COUNT_SCHEMA | {"description": "Requests in progress."},
        "models": build_map_schema(
            STRING_SCHEMA, "State of each model, by name. Empty if the replica is DOWN."
        ),
        "cordoned": {"type": "boolean", "description": "The replica gets no new requests."},
        "ejected_for_s": {"type": "number", "description": "Seconds until the ejection ends."},
        "failing_models": build_list_schema(
            STRING_SCHEMA,
            "Models whose requests fail on this replica and not on the others; it gets few of them.",
        ),
        "reason": STRING_SCHEMA,
        "silent_for_s": {
            "type": "number",
            "description": "Seconds since the last answer to a probe, of a replica that answers none.",
        },
    },
    optional=("cordoned", "ejected_for_s", "failing_models", "reason", "silent_for_s"),
    title="Replica",
)
REPLICA_LIST_RESPONSES = build_responses(
    build_object_schema(
        {"replicas": {"type": "array", "items": REPLICA_SCHEMA}}, title="ReplicaList"
    ),
    "The replicas.",
)
MAINTENANCE_SCHEMA: Final = build_object_schema(
    {
        "address": STRING_SCHEMA,
        "cordoned": {"type": "boolean", "description": "The replica gets no new requests."},
        "outstanding": COUNT_SCHEMA
        | {"description": "Requests of this gateway that are in progress."},
        "sequences": COUNT_SCHEMA
        | {"description": "Sequences of this gateway that have not ended."},
    },
    title="Maintenance",
)
CORDON_RESPONSES: Final = build_responses(
    MAINTENANCE_SCHEMA, "The replica and the work that it still has.", 404, 409
)
DRAIN_RESPONSES: Final = build_responses(
    MAINTENANCE_SCHEMA, "The replica is drained.", 404, 409, 504
)


router = APIRouter()
route_change = partial(router.post, tags=["management"])


@router.get(
    "/v1/replicas",
    operation_id="list_replicas",
    summary="List replicas",
    tags=["models"],
    responses=REPLICA_LIST_RESPONSES,
)
async def list_replicas(request: Request, services: ServicesForFleet) -> dict[str, Any]:
    """Return the replicas with their state, load and models."""
    pool = services.pool
    caller = get_caller(request)
    replicas = pool.replicas.values()
    return {"replicas": [build_replica_description(pool, each, caller) for each in replicas]}


def build_replica_description(
    pool: ReplicaPool, replica: Replica, caller: Caller
) -> dict[str, Any]:
    state = pool.replica_state(replica)
    index = pool.known_index(replica)
    description: dict[str, Any] = {
        "address": str(replica.address),
        "state": state.name,
        "outstanding": replica.outstanding,
        "models": {
            name: index.model_state(name).state
            for name in sorted(index.models)
            if caller.can_see(name)
        },
    }
    if replica.name in pool.cordoned:
        description["cordoned"] = True
    if state is HealthState.EJECTED:
        description["ejected_for_s"] = round(pool.ejected_for_s(replica), 1)
    if state in (HealthState.SLOW, HealthState.DOWN) and replica.answered_at:
        description["silent_for_s"] = round(pool.silent_for_s(replica), 1)
    failing = filter(caller.can_see, pool.failures.list_models(replica.name))
    if failing_models := list(failing):
        description["failing_models"] = failing_models
    if reason := "; ".join(
        filter(None, (pool.explain_state(replica), describe_missing_streams(replica)))
    ):
        description["reason"] = reason
    return description


def describe_missing_streams(replica: Replica) -> str:
    """Return why the replica's streams fail; empty if they do not."""
    if not replica.byte_channel.has_failed:
        return ""
    return f"streams: no (gRPC port {replica.address.grpc_port} is unreachable; set ?grpc=PORT)"


@route_change(
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


@route_change(
    "/v1/replicas/{address}/uncordon",
    operation_id="uncordon_replica",
    summary="Send requests to a replica again",
    responses=CORDON_RESPONSES,
)
async def uncordon_replica(services: ServicesForAdministration, address: str) -> dict[str, Any]:
    """End a cordon; the replica need not have one."""
    progress = await services.maintenance.uncordon(address)
    return build_maintenance_document(address, progress, is_cordoned=False)


@route_change(
    "/v1/replicas/{address}/drain",
    operation_id="drain_replica",
    summary="Cordon a replica and wait for its requests",
    responses=DRAIN_RESPONSES,
    openapi_extra={"parameters": [TIMEOUT_PARAMETER]},
)
async def drain_replica(
    request: Request, services: ServicesForAdministration, address: str
) -> dict[str, Any]:
    """Return when this gateway has no request or sequence on the replica. 504 if that takes too long.

    Other gateways that share the state send nothing new to it any more. The replica stays cordoned in both
    cases.
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
