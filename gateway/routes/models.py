"""The list of models, and the description of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Final, cast

from fastapi import APIRouter, Query, Request

from gateway.callers import Caller, Right
from gateway.fleet.index import TF_SERVING_STATES, merge_indexes
from gateway.routes import examples
from gateway.routes.dependencies import ServicesForInference, get_caller
from gateway.routes.model_openapi import build_model_openapi
from gateway.routes.openapi import (
    COUNT_SCHEMA,
    STRING_SCHEMA,
    OpenApiResponses,
    Schema,
    build_list_schema,
    build_map_schema,
    build_object_schema,
    build_responses,
)
from gateway.services import ModelDescriber, Services
from gateway.telemetry.request_info import RequestInfo, RequestScope
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.signature import Signature, TensorSpec

VERSION_SCHEMA = build_object_schema(
    {"version": STRING_SCHEMA, "state": STRING_SCHEMA, "reason": STRING_SCHEMA},
    optional=("reason",),
    title="ModelVersion",
)
READY_SCHEMA = {"type": "boolean", "description": "At least one replica can serve it."}
# From the model's config, for people. In the list, they are known once the model was described or used.
PRESENTATION_FIELDS: Final = {
    "title": STRING_SCHEMA,
    "description": STRING_SCHEMA,
    "hidden": {"type": "boolean", "description": "Lists for people leave the model out."},
    "steps": build_list_schema(STRING_SCHEMA, "The models of an ensemble."),
}
LISTED_MODEL_FIELDS: Final = {
    **PRESENTATION_FIELDS,
    "name": STRING_SCHEMA,
    "versions": {"type": "array", "items": VERSION_SCHEMA},
    "ready": READY_SCHEMA,
    "declared": {"type": "boolean", "description": "The models file contains the model."},
    "wished": {"enum": ["loaded", "unloaded"], "description": "Desired state set through the API."},
    "replicas": build_map_schema(
        STRING_SCHEMA,
        "State on each replica, by address (only with the right to see the fleet).",
    ),
    "behind": build_list_schema(
        STRING_SCHEMA, "Replicas without the last load (only with the right to see the fleet)."
    ),
    "last_error": STRING_SCHEMA | {"description": "Reason and replica of the last failed load."},
}
REQUIRED_FIELDS: Final = {"name", "versions", "ready"}
IMAGE_SCHEMA = build_object_schema(
    {
        "mode": STRING_SCHEMA,
        "layout": STRING_SCHEMA,
        "height": {"type": ["integer", "null"]},
        "width": {"type": ["integer", "null"]},
    },
    title="ImageInput",
)
TENSOR_SCHEMA = build_object_schema(
    {
        "name": STRING_SCHEMA,
        "datatype": {"enum": list(DATATYPES)},
        "shape": build_list_schema(
            {"type": "integer", "minimum": -1},
            "Shape without the batch dimension. -1 means any size.",
        ),
        "optional": {"type": "boolean"},
        "content_type": STRING_SCHEMA,
        "image": IMAGE_SCHEMA,
        "labels": {
            "type": "boolean",
            "description": "`classification` returns labels of this output.",
        },
        "example": {
            "type": "string",
            "description": "The first of the examples.",
        },
        "examples": build_list_schema(
            STRING_SCHEMA, "Sample values: texts, JSON, or files as data: URIs."
        ),
    },
    optional=("optional", "content_type", "image", "labels", "example", "examples"),
    title="Tensor",
)
VERSION_STATUS_SCHEMA = build_object_schema(
    {
        "version": STRING_SCHEMA,
        "state": {"enum": [*TF_SERVING_STATES.values(), "UNKNOWN"]},
        "status": build_object_schema(
            {"error_code": STRING_SCHEMA, "error_message": STRING_SCHEMA}
        ),
    },
    title="VersionStatus",
)
MODEL_FIELDS: Final = {
    "name": STRING_SCHEMA,
    "ready": READY_SCHEMA,
    "versions": {"type": "array", "items": STRING_SCHEMA},
    "platform": STRING_SCHEMA,
    "max_batch_size": COUNT_SCHEMA,
    "decoupled": {"type": "boolean", "description": "A request may have any number of responses."},
    "inputs": {"type": "array", "items": TENSOR_SCHEMA},
    "outputs": {"type": "array", "items": TENSOR_SCHEMA},
    **PRESENTATION_FIELDS,
    "example_run": {
        "type": "boolean",
        "description": "The web page does not run the first example.",
    },
    "curl": {"type": "string", "description": "Example request with curl."},
    "python": {"type": "string", "description": "Example request in Python."},
}
OPENAPI_SCHEMA = build_object_schema(
    {
        "openapi": {"type": "string", "pattern": "^3\\.1\\."},
        "info": {"type": "object"},
        "paths": {"type": "object"},
    }
)


MODEL_ERRORS: Final = (404, 502, 504)
READY_MODELS_RESPONSES = build_responses(
    build_object_schema({"models": {"type": "array", "items": STRING_SCHEMA}}),
    "The names of the ready models.",
)
OPENAPI_RESPONSES = build_responses(OPENAPI_SCHEMA, "An OpenAPI 3.1 document.", *MODEL_ERRORS)


router = APIRouter(tags=["models"])
IMAGE_FIELDS: Final = ("mode", "layout", "height", "width")


def create_router(describers: Sequence[ModelDescriber]) -> APIRouter:
    """Return the routes whose responses have the fields of the describers as well."""
    described = APIRouter(tags=["models"])
    described.get(
        "/v1/models",
        operation_id="list_models",
        summary="List models",
        responses=build_list_responses(describers),
    )(list_models)
    route_model = partial(described.get, responses=build_model_responses(describers))
    route_model("/v1/models/{model}", operation_id="describe_model", summary="Describe a model")(
        describe_model
    )
    route_model(
        "/v1/models/{model}/versions/{version}",
        operation_id="describe_model_version",
        summary="Describe a version of a model",
    )(describe_model)
    return described


def build_list_responses(describers: Iterable[ModelDescriber]) -> OpenApiResponses:
    fields: Schema = {}
    model_fields: Schema = dict(LISTED_MODEL_FIELDS)
    for describer in describers:
        fields |= describer.list_fields
        model_fields |= describer.listed_model_fields
    model = build_object_schema(
        model_fields, model_fields.keys() - REQUIRED_FIELDS, title="ListedModel"
    )
    document = {"models": {"type": "array", "items": model}, **fields}
    return build_responses(
        build_object_schema(document, title="ModelList"), "The models that the caller may access."
    )


def build_model_responses(describers: Iterable[ModelDescriber]) -> OpenApiResponses:
    fields: Schema = {}
    for describer in describers:
        fields |= describer.model_fields
    optional = (*PRESENTATION_FIELDS, "example_run")
    schema = build_object_schema(fields | MODEL_FIELDS, optional, title="Model")
    return build_responses(schema, "The model's inputs and outputs.", *MODEL_ERRORS)


async def list_models(
    request: Request,
    services: ServicesForInference,
    describe: Annotated[
        bool, Query(description="Read the configs of ready models that were not described yet.")
    ] = False,
    limit: Annotated[
        int | None, Query(ge=1, description="Number of models of a page. Default: all.")
    ] = None,
    after: Annotated[str, Query(description="The last name of the page before.")] = "",
) -> dict[str, Any]:
    """Return the models that the caller may access by name, with their versions, state and desired state.

    Details of replicas require the right to see the fleet.
    """
    repository = services.repository
    caller = get_caller(request)
    load_errors: dict[str, str] = {}
    if Right.fleet in caller.rights:
        load_errors = repository.state.list_load_errors()
    declared = repository.state.declared_models
    desired = repository.state.desired_models
    indexes = services.pool.list_serving_indexes()
    expected_names = {*declared, *desired}
    grouped = group_model_versions(merge_indexes(indexes), expected_names, caller)
    names = [name for name in grouped if name > after][:limit]
    models = {name: grouped[name] for name in names}
    ready_models: set[str] = set().union(*(index.ready_models for index in indexes.values()))
    await add_presentations(services, models, caller, ready_models if describe else ())
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
            if name in load_errors:
                model["last_error"] = load_errors[name]
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


async def describe_model(
    request: Request, services: ServicesForInference, model: str, version: str = ""
) -> dict[str, Any]:
    """Return the model's inputs and outputs, with example requests.

    KServe's clients read `name` and `ready`, TensorFlow Serving's `model_version_status`, OpenAI's `id`.
    """
    signature = await get_signature(request, services, model, version)
    info: RequestInfo = request.scope["request_info"]
    info.model = signature.model
    info.version = signature.version
    base_url = find_base_url(request)
    description = {
        **build_model_description(
            signature, is_ready=services.pool.is_loaded(signature.model, signature.version)
        ),
        **describe_presentation(signature, get_caller(request)),
        "curl": examples.format_curl_example(signature, base_url),
        "python": examples.format_python_example(signature, base_url),
    }
    if signature.has_flag("gateway.example_run", "false"):
        description["example_run"] = False
    for describer in services.describers:
        description |= describer.describe_model(services, signature)
    return description


def find_base_url(request: Request) -> str:
    """Return the address of the gateway as its client sees it, for examples.

    A proxy that ends TLS says so. Otherwise an example would send the body and the key in clear text.
    """
    is_secure = request.headers.get("x-forwarded-proto") == "https"
    scheme = "https" if is_secure else request.url.scheme
    return f"{scheme}://{request.url.netloc}"


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
    scope = cast(RequestScope, request.scope)
    target = services.resolver.resolve(scope, Right.infer, model, version)
    signatures = services.signatures
    if services.pool.is_awaited(target.model):
        remembered = signatures.find_remembered_signature(target.model, target.version)
        if remembered is not None:
            return remembered
    return await signatures.get_signature(target.model, target.version, services.default_timeout_s)


async def add_presentations(
    services: Services, models: dict[str, dict[str, Any]], caller: Caller, ready: Iterable[str]
) -> None:
    """Add the `PRESENTATION_FIELDS` that are known; those of the ready models are read before."""
    await services.signatures.read_unknown_signatures(models.keys() & ready)
    for name, model in models.items():
        if signature := services.signatures.find_remembered_signature(name, ""):
            model.update(describe_presentation(signature, caller))


def describe_presentation(signature: Signature, caller: Caller) -> dict[str, Any]:
    fields = {
        "title": signature.title,
        "description": signature.description,
        "hidden": signature.has_flag("gateway.hidden"),
        "steps": sorted(filter(caller.can_see, signature.steps)),
    }
    return {name: value for name, value in fields.items() if value}


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
        "example": tensor.examples[0] if tensor.examples else "",
        "examples": list(tensor.examples),
    }
    return description | {name: value for name, value in optional.items() if value}
