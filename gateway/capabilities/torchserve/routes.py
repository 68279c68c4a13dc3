"""TorchServe's inference and management API (`GATEWAY_DIALECTS=torchserve`)."""

from __future__ import annotations

from functools import partial
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, cast
from urllib.parse import urlsplit

import orjson
from fastapi import APIRouter, Query, Request, Response

from gateway.access.auth import PathRules
from gateway.callers import Right
from gateway.capabilities.torchserve.forms import (
    choose_class_count,
    encode_prediction,
    parse_prediction_body,
    recognize_body_type,
)
from gateway.errors import (
    Conflict,
    GatewayError,
    MalformedRequest,
    UnknownModel,
    UnknownModelToLoad,
)
from gateway.fleet.index import Index, list_versions, version_sort_key
from gateway.inference import pipeline
from gateway.inference.decode import decode, decode_json
from gateway.media_types import JSON, TEXT
from gateway.messages import join_names, quote_text
from gateway.routes.dependencies import (
    ServicesForAnyCaller,
    ServicesForFleet,
    ServicesForInference,
    ServicesForManagement,
    get_caller,
    record_label,
)
from gateway.routes.model_openapi import INFER_BODY_CONTENT
from gateway.routes.models import list_models
from gateway.routes.openapi import (
    BINARY_SCHEMA,
    COUNT_SCHEMA,
    ERROR_DESCRIPTIONS,
    REQUEST_HEADER_PARAMETERS,
    RETRY_AFTER_HEADER,
    STRING_SCHEMA,
    Schema,
    build_error_responses,
    build_json_content,
    build_list_schema,
    build_object_schema,
    build_response,
    build_responses,
)
from gateway.telemetry.request_info import RequestScope
from gateway.tensors.codecs import JSON_CODEC, parse_body_type
from gateway.tensors.payload import PayloadOptions

TORCHSERVE_ERROR_SCHEMA: Final = build_object_schema(
    {"code": {"type": "integer"}, "type": STRING_SCHEMA, "message": STRING_SCHEMA},
    description="An error in the shape of TorchServe's API.",
)
TORCHSERVE_ERROR_REFERENCE: Final[Schema] = {"$ref": "#/components/schemas/TorchServeError"}
STATUS_SCHEMA: Final = build_object_schema({"status": STRING_SCHEMA}, title="TorchServeStatus")
LISTED_MODEL_SCHEMA: Final = build_object_schema(
    {"modelName": STRING_SCHEMA, "modelUrl": STRING_SCHEMA}, title="TorchServeListedModel"
)
REGISTERED_MODEL_SCHEMA: Final = build_object_schema(
    {
        **dict.fromkeys(("modelName", "modelVersion", "modelUrl", "runtime"), STRING_SCHEMA),
        "minWorkers": COUNT_SCHEMA,
        "maxWorkers": COUNT_SCHEMA,
        "workers": build_list_schema(
            build_object_schema({"id": STRING_SCHEMA, "status": STRING_SCHEMA}),
            "The replicas that have the version, and its state there.",
        ),
    },
    title="TorchServeModel",
)
build_torchserve_responses = partial(build_responses, error_schema=TORCHSERVE_ERROR_REFERENCE)
PING_RESPONSES: Final = build_torchserve_responses(STATUS_SCHEMA, "The fleet is ready.") | {
    503: build_response(
        "The fleet is not ready.",
        build_json_content({"anyOf": [STATUS_SCHEMA, TORCHSERVE_ERROR_REFERENCE]}),
        RETRY_AFTER_HEADER,
    )
}
PREDICTION_OPENAPI: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": INFER_BODY_CONTENT
        | build_json_content({"description": "A value, or an object of values by input name."}),
    },
    "parameters": REQUEST_HEADER_PARAMETERS,
}
PREDICTION_RESPONSES: Final = build_torchserve_responses(
    {"description": "The value of the only output, or an object with the values of all outputs."},
    "The output.",
    *ERROR_DESCRIPTIONS,
)
PREDICTION_RESPONSES[200]["content"] |= {
    TEXT: {"schema": STRING_SCHEMA},
    "*/*": {"schema": BINARY_SCHEMA},
}
REGISTERED_LIST_RESPONSES: Final = build_torchserve_responses(
    build_object_schema(
        {
            "models": {"type": "array", "items": LISTED_MODEL_SCHEMA},
            "nextPageToken": STRING_SCHEMA,
        },
        optional=("nextPageToken",),
    ),
    "The models.",
)
REGISTERED_MODEL_RESPONSES: Final = build_torchserve_responses(
    {"type": "array", "items": REGISTERED_MODEL_SCHEMA}, "One entry for each version.", 404
)
STATUS_RESPONSES: Final = build_torchserve_responses(
    STATUS_SCHEMA, "It is done.", 404, 409, 422, 502, 504
)
SCALING_RESPONSES: Final = build_error_responses(
    *(404, 501),
    schema=TORCHSERVE_ERROR_REFERENCE,
    descriptions={501: "The model's config decides on the number of instances."},
)


router = APIRouter(tags=["TorchServe"])
put_prediction, post_prediction = (
    partial(route, responses=PREDICTION_RESPONSES, openapi_extra=PREDICTION_OPENAPI)
    for route in (router.put, router.post)
)
route_model = partial(router.get, responses=REGISTERED_MODEL_RESPONSES)
route_scaling = partial(router.put, responses=SCALING_RESPONSES)
PING: Final = frozenset(("/ping",))
PREDICTIONS: Final = "/predictions/"
PATH_RULES: Final = PathRules(public=PING, probes=PING, output_prefixes=(PREDICTIONS,))
DEFAULT_LABEL: Final = "default"  # the name that the audit log has
ERROR_TYPES: Final = {
    400: "BadRequestException",
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    409: "ConflictStatusException",
    503: "ServiceUnavailableException",
}
MODEL_NOT_FOUND_TYPE: Final = "ModelNotFoundException"
REQUEST_ERROR_TYPE: Final = "BadRequestException"
SERVER_ERROR_TYPE: Final = "InternalServerException"
ALL_VERSIONS: Final = "all"
ARCHIVE_SUFFIX: Final = ".mar"
MAX_LISTED: Final = 100
# Parameters of a registration that a model's config decides instead.
CONFIG_FIELDS: Final = {
    "batch_size": "dynamic_batching",
    "max_batch_delay": "dynamic_batching",
    "initial_workers": "instance_group",
}


class ScalingNotSupported(GatewayError):
    status = 501
    code = "SCALING_NOT_SUPPORTED"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the workers of model {quote_text(model)} cannot be scaled by a request: Triton runs as many "
            "instances as instance_group in the model's config.pbtxt says, on every replica; change it there "
            "and load the model again, or add replicas"
        )


def serialize_torchserve_error(message: str, code: str, status: int) -> bytes:
    default = SERVER_ERROR_TYPE if status >= 500 else REQUEST_ERROR_TYPE
    kind = MODEL_NOT_FOUND_TYPE if code == UnknownModel.code else ERROR_TYPES.get(status, default)
    return orjson.dumps({"code": status, "type": kind, "message": message})


ERROR_SERIALIZERS: Final = dict.fromkeys(
    (*PING, "/models", "/models/", PREDICTIONS), serialize_torchserve_error
)


@router.get("/ping", operation_id="ping", summary="Readiness", responses=PING_RESPONSES)
async def ping(request: Request, services: ServicesForAnyCaller) -> Response:
    """Return 200 if the fleet is ready, else 503. The status is that of `/readyz`."""
    readiness = services.repository.readiness.evaluate(is_draining=request.state.drain.is_draining)
    status, headers = ("Healthy", {}) if readiness.is_ready else ("Unhealthy", {"Retry-After": "1"})
    body = orjson.dumps({"status": status})
    return Response(body, 200 if readiness.is_ready else 503, headers, JSON)


@put_prediction(
    "/predictions/{model}", operation_id="put_prediction", summary="Inference with a model"
)
@post_prediction(
    "/predictions/{model}", operation_id="create_prediction", summary="Inference with a model"
)
@put_prediction(
    "/predictions/{model}/{model_version}",
    operation_id="put_version_prediction",
    summary="Inference with a version of a model",
)
@post_prediction(
    "/predictions/{model}/{model_version}",
    operation_id="create_version_prediction",
    summary="Inference with a version of a model",
)
async def create_prediction(
    request: Request, services: ServicesForInference, model: str, model_version: str = ""
) -> Response:
    """Run inference on a file, a form or JSON, and return the output's value.

    The type of a body that has none is recognized by its first bytes.
    """
    opened = await pipeline.open_request(request, services, model, to_version_number(model_version))
    signature = opened.signature
    body = opened.body
    received = await pipeline.receive_body(opened, recognize_body_type)
    is_json = parse_body_type(body.content_type).codec is JSON_CODEC
    with await pipeline.admit(opened) as slot:
        if is_json and isinstance(received, bytes):
            options = PayloadOptions()
            (inputs,) = await decode_json(opened, received, parse_prediction_body)
        else:
            decoded = await decode(opened, received)
            options = decoded.options
            inputs = decoded.inputs
        del received  # its memory is free while the model runs
        count = choose_class_count(signature)
        if count and not signature.default_class_counts:
            parameters = {"classification": count, **options.parameters}
            options = options._replace(parameters=parameters)
        infer_request = pipeline.build_request(opened, options, inputs)
        result = await pipeline.run_inference(opened, slot, infer_request)
        return await pipeline.render_results(opened, [result], partial(encode_prediction, result))


@router.get(
    "/models",
    operation_id="list_registered_models",
    summary="List the models that can be used",
    responses=REGISTERED_LIST_RESPONSES,
)
async def list_registered_models(
    request: Request,
    services: ServicesForFleet,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = MAX_LISTED,
    next_page_token: Annotated[int, Query(ge=0)] = 0,
) -> dict[str, Any]:
    """Return the models that are ready, or that their first request loads."""
    models = (await list_models(request, services))["models"]
    names = [each["name"] for each in models if each["ready"] or "on_demand" in each]
    end = next_page_token + limit
    more = {"nextPageToken": str(end)} if end < len(names) else {}
    page = names[next_page_token:end]
    return {**more, "models": [{"modelName": name, "modelUrl": name} for name in page]}


@route_model(
    "/models/{model}", operation_id="describe_registered_model", summary="Describe a model"
)
@route_model(
    "/models/{model}/{model_version}",
    operation_id="describe_registered_version",
    summary="Describe a version of a model, or all of them",
)
async def describe_registered_model(
    services: ServicesForFleet, model: str, model_version: str = ""
) -> list[dict[str, Any]]:
    """Return the default version, another one, or `all`; each replica is a worker."""
    indexes = services.pool.list_serving_indexes()
    numbers = list_versions(indexes.values(), model)[::-1]
    if model_version != ALL_VERSIONS:
        defaults = services.resolver.policy.find_default_versions(model) or numbers
        wanted = to_version_number(model_version) or next(iter(defaults), "")
        numbers = [number for number in numbers if number == wanted]
    if not numbers:
        raise UnknownModel(model, model_version.replace(ALL_VERSIONS, ""))
    return [describe_version(indexes, model, number) for number in numbers]


def describe_version(indexes: dict[str, Index], model: str, number: str) -> dict[str, Any]:
    states = {at: index.models.get(model, {}).get(number) for at, index in indexes.items()}
    workers = [
        {"id": at, "status": state.state} for at, state in states.items() if state is not None
    ]
    return {
        "modelName": model,
        "modelVersion": number,
        "modelUrl": model,
        "runtime": "triton",
        "minWorkers": len(workers),
        "maxWorkers": len(workers),
        "workers": workers,
    }


@router.post(
    "/models",
    operation_id="register_model",
    summary="Load a model of the repository",
    responses=STATUS_RESPONSES,
)
async def register_model(
    request: Request,
    services: ServicesForManagement,
    url: Annotated[str, Query(description="Name of the model; .mar is ignored.")] = "",
    model_name: Annotated[
        str, Query(description="Name of the model, instead of that in url.")
    ] = "",
) -> Response:
    """Load a model on every replica. Its files must be in the repository of the Tritons."""
    if urlsplit(url).scheme:
        raise MalformedRequest(
            f"the gateway does not download {quote_text(url)}; convert the model, upload it with PUT "
            "/v1/models/NAME, and register it with url=NAME"
        )
    name = model_name or PurePosixPath(url).name.removesuffix(ARCHIVE_SUFFIX)
    if not name:
        raise MalformedRequest("the parameter url or model_name is required: the name of a model")
    target = services.resolver.resolve(
        cast(RequestScope, request.scope), Right.manage, name, not_found_error=UnknownModelToLoad
    )
    services.record_model(request.scope["request_info"], target.model)
    report = await services.repository.load(target.model, {})
    ignored = [parameter for parameter in CONFIG_FIELDS if parameter in request.query_params]
    fields = join_names(dict.fromkeys(CONFIG_FIELDS[parameter] for parameter in ignored))
    hint = (
        f"; instead of {join_names(ignored)}, set {fields} in its config.pbtxt" if ignored else ""
    )
    count = report.replica_count
    replicas = "1 replica" if count == 1 else f"{count} replicas"
    return build_status(f'Model "{name}" registered on {replicas}{hint}')


@router.delete(
    "/models/{model}",
    operation_id="unregister_model",
    summary="Unload a model",
    responses=STATUS_RESPONSES,
)
@router.delete(
    "/models/{model}/{model_version}",
    operation_id="unregister_version",
    summary="Unload the only version of a model",
    responses=STATUS_RESPONSES,
)
async def unregister_model(
    request: Request, services: ServicesForManagement, model: str, model_version: str = ""
) -> Response:
    """Unload a model from every replica; its files stay. Triton unloads all versions at the same time."""
    if model_version:
        check_only_version(services.pool.list_serving_indexes(), model, model_version)
    services.record_model(request.scope["request_info"], model)
    await services.repository.unload(model, {}, get_caller(request).can_see)
    return build_status(f'Model "{model}" unregistered')


def check_only_version(indexes: dict[str, Index], model: str, version: str) -> None:
    """Check that only this version is ready. Raises `UnknownModel`, or `Conflict` for several versions."""
    ready = {number for index in indexes.values() for number in index.ready_versions(model)}
    if to_version_number(version) not in ready:
        raise UnknownModel(model, version)
    if len(ready) > 1:
        numbers = join_names(sorted(ready, key=version_sort_key))
        raise Conflict(
            f"versions {numbers} of model {quote_text(model)} are loaded, and Triton unloads them "
            "together: remove the files of the version with DELETE /v1/models/NAME/versions/VERSION, or "
            "exclude it with version_policy in config.pbtxt"
        )


@router.put(
    "/models/{model}/{model_version}/set-default",
    operation_id="set_default_version",
    summary="Set the default version of a model",
    responses=STATUS_RESPONSES,
)
async def set_default_version(
    request: Request, services: ServicesForManagement, model: str, model_version: str
) -> Response:
    """Let the label `default` mean the version, which must be ready."""
    number = to_version_number(model_version)
    record_label(request, services, model, DEFAULT_LABEL)
    await services.resolver.policy.set_default_version(model, number)
    return build_status(f'Default version updated for model "{model}" to "{number}"')


@route_scaling(
    "/models/{model}", operation_id="scale_model", summary="Not supported: the workers of a model"
)
@route_scaling(
    "/models/{model}/{model_version}",
    operation_id="scale_model_version",
    summary="Not supported: the workers of a version of a model",
)
async def scale_model(
    services: ServicesForManagement, model: str, model_version: str = ""
) -> Response:
    """Return 501, and what decides on the number of instances."""
    raise ScalingNotSupported(model)


def to_version_number(version: str) -> str:
    """Return Triton's version for TorchServe's, such as 2 for 2.0."""
    return version.removesuffix(".0") or version


def build_status(status: str) -> Response:
    return Response(orjson.dumps({"status": status}), media_type=JSON)
