"""`GET /v1/models`: what there is, and what each model takes and gives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request

from gateway.context import Notes
from gateway.fleet.health import State
from gateway.fleet.index import merged
from gateway.fleet.pool import NoReplica, Pool
from gateway.fleet.replica import Replica
from gateway.keys import Caller, Right
from gateway.routes.bodies import answers, refusals
from gateway.routes.services import ServicesForFleet, ServicesForInference, caller_of
from gateway.tensors import examples, schema
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.signature import Signature, Tensor

router = APIRouter(tags=["models"])

TEXT = {"type": "string"}
VERSION = {
    "type": "object",
    "properties": {"version": TEXT, "state": TEXT, "reason": TEXT},
    "required": ["version", "state"],
}
LISTED_MODEL = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "versions": {"type": "array", "items": VERSION},
        "ready": {"type": "boolean", "description": "At least one replica can serve it."},
        "declared": {"const": True, "description": "It stands in the models file."},
        "wished": {"enum": ["loaded", "unloaded"], "description": "What the API asked of it."},
        "replicas": {
            "type": "object",
            "additionalProperties": TEXT,
            "description": "Its state on each replica, by address; for who may see the fleet.",
        },
        "behind": {
            "type": "array",
            "items": TEXT,
            "description": "The replicas that have not confirmed its last load; for who may see the fleet.",
        },
        "last_error": {"type": "string", "description": "Why its last load failed, and where."},
    },
    "required": ["name", "versions", "ready"],
}
REPLICA = {
    "type": "object",
    "properties": {
        "address": TEXT,
        "state": {"enum": [state.name for state in State]},
        "outstanding": {"type": "integer", "minimum": 0, "description": "Requests it works on."},
        "slowness": {
            "type": "number",
            "description": "How many times as slowly as the others it answers.",
        },
        "models": {
            "type": "object",
            "additionalProperties": TEXT,
            "description": "The state of each model, by name; of a replica that is DOWN nothing is known.",
        },
        "ejected_for_s": {"type": "number", "description": "Seconds that it is left alone yet."},
        "reason": TEXT,
    },
    "required": ["address", "state", "outstanding", "slowness", "models"],
}
TENSOR = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "datatype": {"enum": list(DATATYPES)},
        "shape": {
            "type": "array",
            "items": {"type": "integer", "minimum": -1},
            "description": "Without the batch dimension; -1 is any size.",
        },
        "optional": {"const": True},
        "content_type": TEXT,
        "image": {
            "type": "object",
            "properties": {
                "mode": TEXT,
                "layout": TEXT,
                "height": {"type": ["integer", "null"]},
                "width": {"type": ["integer", "null"]},
            },
            "required": ["mode", "layout", "height", "width"],
        },
        "labels": {"const": True, "description": "It has names for its classes."},
    },
    "required": ["name", "datatype", "shape"],
}
DESCRIBED = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "ready": {"type": "boolean", "description": "At least one replica can serve it."},
        "versions": {"type": "array", "items": TEXT},
        "platform": TEXT,
        "max_batch_size": {"type": "integer", "minimum": 0},
        "decoupled": {"type": "boolean", "description": "It may answer any number of times."},
        "inputs": {"type": "array", "items": TENSOR},
        "outputs": {"type": "array", "items": TENSOR},
        "curl": {"type": "string", "description": "A request to paste into a shell."},
        "python": {"type": "string", "description": "The same in Python."},
    },
    "required": [
        "name", "ready", "versions", "platform", "max_batch_size", "decoupled", "inputs", "outputs",
        "curl", "python",
    ],
}  # fmt: skip
DOCUMENT = {
    "type": "object",
    "properties": {
        "openapi": {"type": "string", "pattern": "^3\\.1\\."},
        "info": {"type": "object"},
        "paths": {"type": "object"},
    },
    "required": ["openapi", "info", "paths"],
}


def list_of(name: str, items: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {name: {"type": "array", "items": items}},
        "required": [name],
    }


ONE_MODEL = refusals(404, 502, 504)
LIST = refusals() | answers(list_of("models", LISTED_MODEL), "The models that the caller sees.")
NAMES = refusals() | answers(list_of("models", TEXT), "The names of the models that are ready.")
FLEET = refusals() | answers(list_of("replicas", REPLICA), "The replicas.")
DESCRIPTION = ONE_MODEL | answers(DESCRIBED, "What the model takes and gives.")
OPENAPI = ONE_MODEL | answers(DOCUMENT, "An OpenAPI 3.1 document.")


@router.get("/v1/models", operation_id="list_models", summary="The models", responses=LIST)
async def models(request: Request, services: ServicesForInference) -> dict[str, Any]:
    """Every model that the caller sees: its versions, its state on each replica, and why it is there.

    The replicas' addresses are for who may see the fleet.
    """
    pool, repository, caller = services.pool, services.repository, caller_of(request)
    indexes = {
        str(replica.address): replica.index
        for replica in pool.replicas.values()
        if pool.state(replica) <= State.EJECTED
    }
    if not indexes:
        raise NoReplica
    wanted = {*repository.declared, *repository.wishes}
    shown = versions_of(merged(indexes), wanted, caller)
    for name, model in shown.items():
        model["ready"] = any(index.ready(name) for index in indexes.values())
        if name in repository.declared:
            model["declared"] = True
        if name in repository.wishes:
            model["wished"] = "loaded" if repository.wishes[name].loaded else "unloaded"
        if Right.fleet in caller.rights:
            model["replicas"] = {at: index.state(name).state for at, index in indexes.items()}
            if behind := repository.behind(name):
                model["behind"] = behind
            if name in repository.errors:
                model["last_error"] = repository.errors[name]
    return {"models": list(shown.values())}


def versions_of(
    entries: Iterable[dict[str, str]], wanted: Iterable[str], caller: Caller
) -> dict[str, dict[str, Any]]:
    """Of each model that the caller sees; those that are wanted are there though no replica has them. The
    reason of a state names replicas."""
    found: dict[str, dict[str, Any]] = {name: {"name": name, "versions": []} for name in wanted}
    for entry in entries:
        name = entry.pop("name")
        model = found.setdefault(name, {"name": name, "versions": []})
        if Right.fleet not in caller.rights:
            entry.pop("reason", None)
        if entry:
            model["versions"].append(entry)
    return {name: found[name] for name in sorted(found) if caller.sees(name)}


@router.get("/v1/replicas", operation_id="list_replicas", summary="The replicas", responses=FLEET)
async def replicas(request: Request, services: ServicesForFleet) -> dict[str, Any]:
    """Every Triton of the fleet, and how it is."""
    pool, caller = services.pool, caller_of(request)
    return {
        "replicas": [replica_described(pool, replica, caller) for replica in pool.replicas.values()]
    }


def replica_described(pool: Pool, replica: Replica, caller: Caller) -> dict[str, Any]:
    state = pool.state(replica)
    index = pool.known_index(replica)
    told: dict[str, Any] = {
        "address": str(replica.address),
        "state": state.name,
        "outstanding": replica.outstanding,
        "slowness": round(replica.pace.slowness, 2),
        "models": {
            name: index.state(name).state for name in sorted(index.models) if caller.sees(name)
        },
    }
    if state is State.EJECTED:
        told["ejected_for_s"] = round(pool.ejected_for_s(replica), 1)
    if replica.reason:
        told["reason"] = replica.reason
    return told


@router.get(
    "/v2/models",
    operation_id="list_ready_models",
    summary="The models that are ready, as KServe lists them",
    responses=NAMES,
)
async def v2_models(request: Request, services: ServicesForInference) -> dict[str, list[str]]:
    """The models that are ready, as KServe lists them; Triton itself has no such path."""
    listed = (await models(request, services))["models"]
    return {"models": [model["name"] for model in listed if model["ready"]]}


@router.get(
    "/v1/models/{model}",
    operation_id="describe_model",
    summary="What a model takes and gives",
    responses=DESCRIPTION,
)
@router.get(
    "/v1/models/{model}/versions/{version}",
    operation_id="describe_model_version",
    summary="What a version of a model takes and gives",
    responses=DESCRIPTION,
)
async def model(
    request: Request, services: ServicesForInference, model: str, version: str = ""
) -> dict[str, Any]:
    """What a model takes and gives, and a request to paste that works."""
    signature = await services.models.signature(model, version)
    notes: Notes = request.scope["notes"]
    notes.model, notes.version = signature.model, signature.version
    base_url = str(request.base_url).rstrip("/")
    return {
        **described(signature, ready=services.pool.is_ready(signature.model, signature.version)),
        "curl": examples.curl(signature, base_url),
        "python": examples.python(signature, base_url),
    }


@router.get(
    "/v1/models/{model}/openapi.json",
    operation_id="model_openapi",
    summary="The API description of one model",
    responses=OPENAPI,
)
@router.get(
    "/v1/models/{model}/versions/{version}/openapi.json",
    operation_id="model_version_openapi",
    summary="The API description of one version of a model",
    responses=OPENAPI,
)
async def openapi(services: ServicesForInference, model: str, version: str = "") -> dict[str, Any]:
    """The API description of this one model, with its own inputs and outputs."""
    signature = await services.models.signature(model, version)
    return schema.openapi(signature, keyed=services.access.keyed)


def described(signature: Signature, *, ready: bool) -> dict[str, Any]:
    return {
        "name": signature.model,
        "ready": ready,
        "versions": list(signature.versions),
        "platform": signature.platform,
        "max_batch_size": signature.max_batch_size,
        "decoupled": signature.decoupled,
        "inputs": [tensor_described(tensor) for tensor in signature.inputs.values()],
        "outputs": [tensor_described(tensor) for tensor in signature.outputs.values()],
    }


def tensor_described(tensor: Tensor) -> dict[str, Any]:
    """The shape is the model's own, without the batch dimension."""
    told: dict[str, Any] = {
        "name": tensor.name,
        "datatype": tensor.datatype.name,
        "shape": list(tensor.shape),
    }
    if tensor.optional:
        told["optional"] = True
    if tensor.content_type:
        told["content_type"] = tensor.content_type
    if tensor.image is not None:
        image = tensor.image
        told["image"] = {
            "mode": image.mode,
            "layout": image.layout.value,
            "height": image.height,
            "width": image.width,
        }
    if tensor.labels:
        told["labels"] = True
    return told
