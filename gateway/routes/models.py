"""The lists of models and replicas, and the description of each model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request

from gateway.callers import Caller, Right
from gateway.fleet.health import HealthState
from gateway.fleet.index import (
    UNAVAILABLE,
    Index,
    VersionState,
    build_version_status,
    find_best_state,
    find_states,
    list_versions,
    merge_indexes,
)
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.openapi.models import (
    MODEL_LIST_RESPONSES,
    MODEL_RESPONSES,
    OPENAPI_RESPONSES,
    READY_MODELS_RESPONSES,
    REPLICA_LIST_RESPONSES,
    build_model_openapi,
)
from gateway.repository.reconciler import ModelProblems
from gateway.routes.dependencies import ServicesForFleet, ServicesForInference, get_caller
from gateway.services import Services
from gateway.telemetry.request_info import RequestInfo
from gateway.tensors import examples
from gateway.tensors.signature import Signature, TensorSpec

router = APIRouter(tags=["models"])
route_model = partial(router.get, responses=MODEL_RESPONSES)
ON_DEMAND: Final = "ON_DEMAND"
IMAGE_FIELDS: Final = ("mode", "layout", "height", "width")


@router.get(
    "/v1/models", operation_id="list_models", summary="List models", responses=MODEL_LIST_RESPONSES
)
async def list_models(request: Request, services: ServicesForInference) -> dict[str, Any]:
    """Return every model that the caller may access, with its versions, state and desired state.

    Details of replicas require the right to see the fleet.
    """
    repository, caller = services.repository, get_caller(request)
    problems = (
        await repository.reconciler.collect_problems()
        if Right.fleet in caller.rights
        else ModelProblems()
    )
    declared, desired = repository.state.declared_models, repository.state.desired_models
    activator, indexes = services.pool.activator, services.pool.list_usable_indexes()
    expected_names = {*declared, *desired}
    models = group_model_versions(merge_indexes(indexes), expected_names, caller)
    ready_models: set[str] = set().union(*(index.ready_models for index in indexes.values()))
    for name, model in models.items():
        model["ready"] = name in ready_models
        is_on_demand = activator is not None and activator.is_on_demand(name)
        states = {at: index.model_state(name) for at, index in indexes.items()}
        if is_on_demand:
            model.update(describe_on_demand_model(name, indexes, states.values()))
        if name in declared:
            model["declared"] = True
        if name in desired:
            model["wished"] = "loaded" if desired[name].is_loaded else "unloaded"
        model.update(services.resolver.policy.describe(name))
        if Right.fleet in caller.rights:
            model["replicas"] = {
                at: ON_DEMAND if is_on_demand and state.state == UNAVAILABLE else state.state
                for at, state in states.items()
            }
            if behind := repository.outdated_replicas(name):
                model["behind"] = behind
            if name in problems.load_errors:
                model["last_error"] = problems.load_errors[name]
            if name in problems.conflicts:
                model["conflicts"] = problems.conflicts[name]
    return {
        "models": list(models.values()),
        "object": "list",
        "data": list(map(build_openai_entry, models)),
    }


def build_openai_entry(name: str) -> dict[str, Any]:
    # OpenAI's clients require a time; Triton does not know when a model was made.
    return {"id": name, "object": "model", "created": 0, "owned_by": "triton"}


def describe_on_demand_model(
    model: str, indexes: Mapping[str, Index], states: Iterable[VersionState]
) -> dict[str, Any]:
    """Return what differs from other models: the best state of each version, not the worst."""
    versions = [
        {"version": number, **describe_best_state(find_states(indexes, model, number).values())}
        for number in list_versions(indexes.values(), model)
    ]
    return {"on_demand": True, **describe_best_state(states), "versions": versions}


def describe_best_state(states: Iterable[VersionState]) -> dict[str, str]:
    state = find_best_state(states).state
    return {"state": ON_DEMAND if state == UNAVAILABLE else state}


def group_model_versions(
    entries: Iterable[dict[str, str]], expected_names: Iterable[str], caller: Caller
) -> dict[str, dict[str, Any]]:
    """Return the models that the caller may access, by name, including expected ones that no replica has."""
    models: dict[str, dict[str, Any]] = {
        name: {"name": name, "versions": []} for name in expected_names
    }
    for entry in entries:
        name = entry.pop("name")
        model = models.setdefault(name, {"name": name, "versions": []})
        if Right.fleet not in caller.rights:
            entry.pop("reason", None)  # it contains replicas' addresses
        if entry:
            model["versions"].append(entry)
    return {name: models[name] for name in sorted(models) if caller.can_see(name)}


@router.get(
    "/v1/replicas",
    operation_id="list_replicas",
    summary="List replicas",
    responses=REPLICA_LIST_RESPONSES,
)
async def list_replicas(request: Request, services: ServicesForFleet) -> dict[str, Any]:
    """Return the replicas with their state, load and models."""
    pool, caller = services.pool, get_caller(request)
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
        "slowness": round(replica.latency.ratio, 2),
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
    failing = filter(caller.can_see, pool.outliers.list_models(replica.name))
    if failing_models := list(failing):
        description["failing_models"] = failing_models
    if replica.reason:
        description["reason"] = replica.reason
    return description


@router.get(
    "/v2/models",
    operation_id="list_ready_models",
    summary="List ready models, in KServe's format",
    responses=READY_MODELS_RESPONSES,
)
async def list_ready_models(
    request: Request, services: ServicesForInference
) -> dict[str, list[str]]:
    """Return the names of the ready models. KServe defines this path; Triton does not have it."""
    models = (await list_models(request, services))["models"]
    return {"models": [model["name"] for model in models if model["ready"]]}


@route_model("/v1/models/{model}", operation_id="describe_model", summary="Describe a model")
@route_model(
    "/v1/models/{model}/versions/{version}",
    operation_id="describe_model_version",
    summary="Describe a version of a model",
)
async def describe_model(
    request: Request, services: ServicesForInference, model: str, version: str = ""
) -> dict[str, Any]:
    """Return the model's inputs and outputs, with example requests.

    KServe's clients read `name` and `ready`, TensorFlow Serving's `model_version_status`, OpenAI's `id`.
    """
    signature = await get_signature(request, services, model, version)
    info: RequestInfo = request.scope["request_info"]
    info.model, info.version = signature.model, signature.version
    base_url = str(request.base_url).rstrip("/")
    return {
        **build_model_description(
            signature, is_ready=services.pool.is_ready(signature.model, signature.version)
        ),
        **build_openai_entry(signature.model),
        "model_version_status": build_version_status(
            entry
            for entry in merge_indexes(services.pool.list_usable_indexes(), [signature.model])
            if signature.version in ("", entry.get("version", ""))
        ),
        "curl": examples.format_curl_example(signature, base_url),
        "python": examples.format_python_example(signature, base_url),
    }


@router.get(
    "/v1/models/{model}/openapi.json",
    operation_id="model_openapi",
    summary="OpenAPI description of a model",
    responses=OPENAPI_RESPONSES,
)
@router.get(
    "/v1/models/{model}/versions/{version}/openapi.json",
    operation_id="model_version_openapi",
    summary="OpenAPI description of a version of a model",
    responses=OPENAPI_RESPONSES,
)
async def get_model_openapi(
    request: Request, services: ServicesForInference, model: str, version: str = ""
) -> dict[str, Any]:
    """Return an OpenAPI document with the model's own inputs and outputs."""
    signature = await get_signature(request, services, model, version)
    return build_model_openapi(signature, requires_key=services.access.requires_key)


async def get_signature(
    request: Request, services: Services, model: str, version: str
) -> Signature:
    """Return the signature of a model. One that is loaded on demand is loaded if it never was before."""
    target = services.resolver.resolve(request.scope, Right.infer, model, version)
    activator = services.pool.activator
    if activator is not None and not services.pool.is_usable(target.model):
        remembered = services.signatures.find_remembered_signature(target.model, target.version)
        if remembered is not None and activator.can_activate(target.model):
            return remembered
        await activator.activate(target.model, services.default_timeout_s)
    return await services.signatures.get_signature(target.model, target.version)


def build_model_description(signature: Signature, *, is_ready: bool) -> dict[str, Any]:
    return {
        "name": signature.model,
        "ready": is_ready,
        "versions": list(signature.versions),
        "platform": signature.platform,
        "max_batch_size": signature.max_batch_size,
        "decoupled": signature.is_decoupled,
        "inputs": [build_tensor_description(tensor) for tensor in signature.inputs.values()],
        "outputs": [build_tensor_description(tensor) for tensor in signature.outputs.values()],
    }


def build_tensor_description(tensor: TensorSpec) -> dict[str, Any]:
    description: dict[str, Any] = {
        "name": tensor.name,
        "datatype": tensor.datatype.name,
        "shape": list(tensor.shape),
    }
    image = tensor.image_spec
    optional = {
        "optional": tensor.is_optional,
        "content_type": tensor.content_type,
        "image": image and {name: getattr(image, name) for name in IMAGE_FIELDS},
        "labels": tensor.has_class_labels,
        "example": tensor.example,
    }
    return description | {name: value for name, value in optional.items() if value}
