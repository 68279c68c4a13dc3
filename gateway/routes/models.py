"""The lists of models and replicas, and the description of each model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request

from gateway.callers import Caller, Right
from gateway.fleet.health import HealthState
from gateway.fleet.index import merge_indexes
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.openapi.models import (
    OPENAPI_RESPONSES,
    READY_MODELS_RESPONSES,
    REPLICA_LIST_RESPONSES,
    build_list_responses,
    build_model_openapi,
    build_model_responses,
)
from gateway.repository.reconciler import ModelProblems
from gateway.routes.dependencies import ServicesForFleet, ServicesForInference, get_caller
from gateway.services import ModelDescriber, Services
from gateway.telemetry.request_info import RequestInfo
from gateway.tensors import examples
from gateway.tensors.signature import Signature, TensorSpec

IMAGE_FIELDS: Final = ("mode", "layout", "height", "width")


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
    indexes = services.pool.list_usable_indexes()
    expected_names = {*declared, *desired}
    models = group_model_versions(merge_indexes(indexes), expected_names, caller)
    ready_models: set[str] = set().union(*(index.ready_models for index in indexes.values()))
    for name, model in models.items():
        model["ready"] = name in ready_models
        if name in declared:
            model["declared"] = True
        if name in desired:
            model["wished"] = "loaded" if desired[name].is_loaded else "unloaded"
        if Right.fleet in caller.rights:
            model["replicas"] = {at: index.model_state(name).state for at, index in indexes.items()}
            if behind := repository.outdated_replicas(name):
                model["behind"] = behind
            if name in problems.load_errors:
                model["last_error"] = problems.load_errors[name]
            if name in problems.conflicts:
                model["conflicts"] = problems.conflicts[name]
        for describer in services.describers:
            describer.complete_listed_model(services, model, indexes)
    document: dict[str, Any] = {"models": list(models.values())}
    for describer in services.describers:
        document |= describer.describe_list(models)
    return document


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


async def list_ready_models(
    request: Request, services: ServicesForInference
) -> dict[str, list[str]]:
    """Return the names of the ready models. KServe defines this path; Triton does not have it."""
    models = (await list_models(request, services))["models"]
    return {"models": [model["name"] for model in models if model["ready"]]}


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
    description = {
        **build_model_description(
            signature, is_ready=services.pool.is_ready(signature.model, signature.version)
        ),
        "curl": examples.format_curl_example(signature, base_url),
        "python": examples.format_python_example(signature, base_url),
    }
    for describer in services.describers:
        description |= describer.describe_model(services, signature)
    return description


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


def create_router(describers: Sequence[ModelDescriber]) -> APIRouter:
    """Return the routes of models, whose responses have the fields of the describers as well."""
    router = APIRouter(tags=["models"])
    router.get(
        "/v1/models",
        operation_id="list_models",
        summary="List models",
        responses=build_list_responses(describers),
    )(list_models)
    router.get(
        "/v1/replicas",
        operation_id="list_replicas",
        summary="List replicas",
        responses=REPLICA_LIST_RESPONSES,
    )(list_replicas)
    router.get(
        "/v2/models",
        operation_id="list_ready_models",
        summary="List ready models, in KServe's format",
        responses=READY_MODELS_RESPONSES,
    )(list_ready_models)
    route_description = partial(router.get, responses=build_model_responses(describers))
    route_description(
        "/v1/models/{model}", operation_id="describe_model", summary="Describe a model"
    )(describe_model)
    route_description(
        "/v1/models/{model}/versions/{version}",
        operation_id="describe_model_version",
        summary="Describe a version of a model",
    )(describe_model)
    route_openapi = partial(router.get, responses=OPENAPI_RESPONSES)
    route_openapi(
        "/v1/models/{model}/openapi.json",
        operation_id="model_openapi",
        summary="OpenAPI description of a model",
    )(get_model_openapi)
    route_openapi(
        "/v1/models/{model}/versions/{version}/openapi.json",
        operation_id="model_version_openapi",
        summary="OpenAPI description of a version of a model",
    )(get_model_openapi)
    return router
