"""TensorFlow Serving's API: `:predict`, and the signature of a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from gateway.capabilities.tf_serving.bodies import (
    KNOWN_PREDICT_KEYS,
    build_model_metadata,
    encode_results,
    parse_predict_body,
)
from gateway.fleet.index import build_version_status, merge_indexes
from gateway.inference import pipeline
from gateway.inference.decode import decode_json
from gateway.routes.dependencies import InferenceRoute, ServicesForInference
from gateway.routes.infer import INFER_HEADER_PARAMETERS, VERSION_HEADERS
from gateway.routes.models import MODEL_ERRORS, VERSION_STATUS_SCHEMA, get_signature
from gateway.routes.openapi import (
    ARRAY_SCHEMA,
    ERROR_DESCRIPTIONS,
    Schema,
    build_json_body,
    build_list_schema,
    build_object_schema,
    build_responses,
)
from gateway.services import ModelDescriber, Services
from gateway.tensors.payload import PayloadOptions
from gateway.tensors.signature import Signature

PREDICT_REQUEST_SCHEMA: Final[Schema] = {
    "title": "PredictRequest",
    "type": "object",
    "description": "Rows (instances) or columns (inputs): values, or objects of values by input name.",
    "properties": {
        **{key: {} for key in KNOWN_PREDICT_KEYS},
        "instances": ARRAY_SCHEMA | {"minItems": 1},
    },
    "oneOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
    "additionalProperties": False,
}
PREDICT_RESPONSE_SCHEMA: Final[Schema] = {
    "oneOf": [
        build_object_schema({"predictions": ARRAY_SCHEMA}, additionalProperties=False),
        build_object_schema({"outputs": {}}, additionalProperties=False),
    ]
}
STATUS_FIELDS: Final = {
    "model_version_status": build_list_schema(
        VERSION_STATUS_SCHEMA, "TensorFlow Serving's status of each version."
    )
}


class StatusDescriber(ModelDescriber):
    """Adds the status of each version."""

    model_fields = STATUS_FIELDS

    def describe_model(self, services: Services, signature: Signature) -> Mapping[str, Any]:
        entries = merge_indexes(services.pool.list_serving_indexes(), [signature.model])
        return {
            "model_version_status": build_version_status(
                entry for entry in entries if signature.version in ("", entry.get("version", ""))
            )
        }


inference_router = APIRouter(tags=["inference"], route_class=InferenceRoute)
router = APIRouter(tags=["models"])
route_predict = partial(
    inference_router.post,
    responses=build_responses(
        PREDICT_RESPONSE_SCHEMA,
        "One prediction per row, or the outputs as columns.",
        *ERROR_DESCRIPTIONS,
        headers=VERSION_HEADERS,
    ),
    openapi_extra=build_json_body(PREDICT_REQUEST_SCHEMA) | {"parameters": INFER_HEADER_PARAMETERS},
)
route_metadata = partial(
    router.get,
    responses=build_responses(
        build_object_schema({"model_spec": {"type": "object"}, "metadata": {"type": "object"}}),
        "The signature, in TensorFlow Serving's format.",
        *MODEL_ERRORS,
    ),
)


@route_predict("/v1/models/{model}:predict", operation_id="predict")
# A label is accepted in place of a version as well.
@route_predict("/v1/models/{model}/labels/{version}:predict", operation_id="predict_label")
@route_predict("/v1/models/{model}/versions/{version}:predict", operation_id="predict_version")
async def predict(request: Request, model: str, version: str = "") -> Response:
    """Return `predictions` for `instances` (rows), or `outputs` for `inputs` (columns)."""
    opened = await pipeline.open_request(request, request.scope["services"], model, version)
    body = await pipeline.receive_bytes(opened)
    with await pipeline.admit(opened) as slot:
        inputs = await decode_json(opened, body, parse_predict_body)
        del body  # its memory is free while the model runs
        results = await pipeline.run_inferences(opened, slot, PayloadOptions(), inputs)
        return await pipeline.render_results(opened, results, partial(encode_results, results))


@route_metadata("/v1/models/{model}/metadata", operation_id="model_metadata")
@route_metadata(
    "/v1/models/{model}/versions/{version}/metadata", operation_id="model_version_metadata"
)
async def get_model_metadata(
    request: Request, services: ServicesForInference, model: str, version: str = ""
) -> dict[str, Any]:
    """Return the inputs and outputs with TensorFlow's names of datatypes."""
    return build_model_metadata(await get_signature(request, services, model, version))
