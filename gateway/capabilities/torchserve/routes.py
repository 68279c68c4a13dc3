"""TorchServe's inference and management API (`GATEWAY_DIALECTS=torchserve`)."""

from __future__ import annotations

from functools import partial
from pathlib import PurePosixPath
from typing import Any, Final, cast

import orjson
from fastapi import APIRouter, Request, Response

from gateway.access.auth import PathRules
from gateway.callers import Right
from gateway.capabilities.capability import Attachment
from gateway.capabilities.torchserve.forms import (
    choose_class_count,
    encode_prediction,
    parse_prediction_body,
    recognize_body_type,
)
from gateway.errors import Conflict, MalformedRequest, UnknownModel, UnknownModelToLoad
from gateway.fleet.index import Index, list_versions, version_sort_key
from gateway.inference import pipeline
from gateway.inference.decode import decode, decode_json
from gateway.media_types import TEXT
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
    BINARY_CONTENT,
    ERROR_DESCRIPTIONS,
    REQUEST_HEADER_PARAMETERS,
    REQUEST_ID_HEADER,
    RETRY_AFTER_HEADER,
    STRING_CONTENT,
    STRING_SCHEMA,
    build_error_responses,
    build_json_content,
    build_object_schema,
    build_response,
)
from gateway.telemetry.request_info import RequestScope
from gateway.tensors.codecs import JSON_CODEC, parse_body_type
from gateway.tensors.payload import PayloadOptions

ERROR_TYPES: Final = {
    400: "BadRequestException",
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    409: "ConflictStatusException",
    503: "ServiceUnavailableException",
}


# Errors.


def serialize_torchserve_error(message: str, code: str, status: int) -> bytes:
    default = "InternalServerException" if status >= 500 else ERROR_TYPES[400]
    kind = ERROR_TYPES.get(status, default)
    if code == UnknownModel.code:
        kind = "ModelNotFoundException"
    return orjson.dumps({"code": status, "type": kind, "message": message})


ERROR_SCHEMA: Final = build_object_schema(
    {"code": {"type": "integer"}, "type": STRING_SCHEMA, "message": STRING_SCHEMA},
    description="An error in the shape of TorchServe's API.",
)
RESPONSES: Final = build_error_responses(
    *ERROR_DESCRIPTIONS, schema={"$ref": "#/components/schemas/TorchServeError"}
) | {200: {"headers": REQUEST_ID_HEADER}}
NOT_READY: Final = build_response(
    "The fleet is not ready.", build_json_content({"type": "object"}), RETRY_AFTER_HEADER
)
router = APIRouter(tags=["TorchServe"], responses=RESPONSES)


# Inference.


@router.get("/ping", operation_id="ping", responses={503: NOT_READY})
async def ping(
    request: Request, response: Response, services: ServicesForAnyCaller
) -> dict[str, str]:
    """Return 200 if the fleet is ready, else 503. The status is that of `/readyz`."""
    readiness = services.repository.readiness.evaluate(is_draining=request.state.drain.is_draining)
    if readiness.is_ready:
        return {"status": "Healthy"}
    response.status_code = 503
    response.headers["Retry-After"] = "1"
    return {"status": "Unhealthy"}


async def create_prediction(
    request: Request, services: ServicesForInference, model: str, model_version: str = ""
) -> Response:
    """Run inference on a file, a form or JSON, and return the output's value.

    The type of a body that has none is recognized by its first bytes.
    """
    opened = await pipeline.open_request(request, services, model, to_version_number(model_version))
    received = await pipeline.receive_body(opened, recognize_body_type)
    is_json = parse_body_type(opened.body.content_type).codec is JSON_CODEC
    with await pipeline.admit(opened) as slot:
        if is_json and isinstance(received, bytes):
            options = PayloadOptions()
            (inputs,) = await decode_json(opened, received, parse_prediction_body)
        else:
            decoded = await decode(opened, received)
            options = decoded.options
            inputs = decoded.inputs
        del received  # its memory is free while the model runs
        count = choose_class_count(opened.signature)
        if count and not opened.signature.default_class_counts:
            options = options._replace(parameters={"classification": count, **options.parameters})
        infer_request = pipeline.build_request(opened, options, inputs)
        result = await pipeline.run_inference(opened, slot, infer_request)
        return await pipeline.render_results(opened, [result], partial(encode_prediction, result))


# Management.


async def list_registered_models(
    request: Request, services: ServicesForFleet
) -> dict[str, list[dict[str, str]]]:
    """Return all models that are ready, or that their first request loads."""
    models = (await list_models(request, services))["models"]
    names = [each["name"] for each in models if each["ready"] or "on_demand" in each]
    return {"models": [{"modelName": name, "modelUrl": name} for name in names]}


async def describe_registered_model(
    services: ServicesForFleet, model: str, model_version: str = ""
) -> list[dict[str, Any]]:
    """Return the default version, another one, or `all`; each replica is a worker."""
    indexes = services.pool.list_serving_indexes()
    numbers = list_versions(indexes.values(), model)[::-1]
    if model_version != "all":
        defaults = services.resolver.policy.find_default_versions(model) or numbers
        wanted = to_version_number(model_version) or next(iter(defaults), "")
        numbers = [number for number in numbers if number == wanted]
    if not numbers:
        raise UnknownModel(model, model_version.replace("all", ""))
    return [describe_version(indexes, model, number) for number in numbers]


def describe_version(indexes: dict[str, Index], model: str, number: str) -> dict[str, Any]:
    workers = [
        {"id": at, "status": versions[number].state}
        for at, index in indexes.items()
        if number in (versions := index.models.get(model, {}))
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


async def register_model(
    request: Request, services: ServicesForManagement, url: str = "", model_name: str = ""
) -> dict[str, str]:
    """Load the model that `model_name` or the file of `url` names on every replica.

    Nothing is downloaded: its files must be in the repository of the Tritons.
    """
    name = model_name or PurePosixPath(url).name.removesuffix(".mar")
    if not name:
        raise MalformedRequest("the parameter url or model_name is required: the name of a model")
    target = services.resolver.resolve(
        cast(RequestScope, request.scope), Right.manage, name, not_found_error=UnknownModelToLoad
    )
    services.record_model(request.scope["request_info"], target.model)
    await services.repository.load(target.model, {})
    return {"status": f'Model "{name}" registered'}


async def unregister_model(
    request: Request, services: ServicesForManagement, model: str, model_version: str = ""
) -> dict[str, str]:
    """Unload a model from every replica; its files stay. Triton unloads all versions at the same time."""
    if model_version:
        check_only_version(services.pool.list_serving_indexes(), model, model_version)
    services.record_model(request.scope["request_info"], model)
    await services.repository.unload(model, {}, get_caller(request).can_see)
    return {"status": f'Model "{model}" unregistered'}


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


async def set_default_version(
    request: Request, services: ServicesForManagement, model: str, model_version: str
) -> dict[str, str]:
    """Let the label `default` mean the version, which must be ready."""
    number = to_version_number(model_version)
    record_label(request, services, model, "default")
    await services.resolver.policy.set_default_version(model, number)
    return {"status": f'Default version updated for model "{model}" to "{number}"'}


def to_version_number(version: str) -> str:
    """Return Triton's version for TorchServe's, such as 2 for 2.0."""
    return version.removesuffix(".0") or version


# The routes.

VERSION: Final = "/{model}/{model_version}"
ROUTES: Final = (
    ("PUT", "/predictions/{model}", "put_prediction", create_prediction),
    ("POST", "/predictions/{model}", "create_prediction", create_prediction),
    ("PUT", f"/predictions{VERSION}", "put_version_prediction", create_prediction),
    ("POST", f"/predictions{VERSION}", "create_version_prediction", create_prediction),
    ("GET", "/models", "list_registered_models", list_registered_models),
    ("POST", "/models", "register_model", register_model),
    ("GET", "/models/{model}", "describe_registered_model", describe_registered_model),
    ("GET", f"/models{VERSION}", "describe_registered_version", describe_registered_model),
    ("DELETE", "/models/{model}", "unregister_model", unregister_model),
    ("DELETE", f"/models{VERSION}", "unregister_version", unregister_model),
    ("PUT", f"/models{VERSION}/set-default", "set_default_version", set_default_version),
)
PREDICTION: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": INFER_BODY_CONTENT
        | build_json_content({"description": "A value, or an object of values by input name."}),
    },
    "parameters": REQUEST_HEADER_PARAMETERS,
    "responses": {"200": {"content": {TEXT: STRING_CONTENT, "*/*": BINARY_CONTENT}}},
}
for method, path, operation_id, handler in ROUTES:
    router.add_api_route(
        path,
        handler,
        methods=[method],
        operation_id=operation_id,
        openapi_extra=PREDICTION if handler is create_prediction else None,
    )

PING: Final = frozenset(("/ping",))
ATTACHMENT: Final = Attachment(
    (router,),
    {"TorchServeError": ERROR_SCHEMA},
    error_serializers=dict.fromkeys(
        (*PING, "/models", "/models/", "/predictions/"), serialize_torchserve_error
    ),
    paths=PathRules(public=PING, probes=PING, output_prefixes=("/predictions/",)),
)
