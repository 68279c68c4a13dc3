"""TensorFlow Serving's API: `:predict`, and the signature of a model."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from gateway.capabilities.tf_serving.bodies import (
    build_model_metadata,
    encode_results,
    parse_predict_body,
)
from gateway.capabilities.tf_serving.description import (
    METADATA_RESPONSES,
    PREDICT_OPENAPI,
    PREDICT_RESPONSES,
)
from gateway.inference import pipeline
from gateway.routes.dependencies import ServicesForInference
from gateway.routes.models import get_signature

inference_router = APIRouter(tags=["inference"])
router = APIRouter(tags=["models"])
route_predict = partial(
    inference_router.post, responses=PREDICT_RESPONSES, openapi_extra=PREDICT_OPENAPI
)
route_metadata = partial(router.get, responses=METADATA_RESPONSES)


@route_predict(
    "/v1/models/{model}:predict",
    operation_id="predict",
    summary="Inference with a model, in KServe's V1 format",
)
# A label is accepted in place of a version as well.
@route_predict(
    "/v1/models/{model}/labels/{version}:predict",
    operation_id="predict_label",
    summary="Inference with a label of a model, in TensorFlow Serving's format",
)
@route_predict(
    "/v1/models/{model}/versions/{version}:predict",
    operation_id="predict_version",
    summary="Inference with a version of a model, in KServe's V1 format",
)
async def predict(
    request: Request, services: ServicesForInference, model: str, version: str = ""
) -> Response:
    """Return `predictions` for `instances` (rows), or `outputs` for `inputs` (columns)."""
    opened = await pipeline.open_request(request, services, model, version)
    body = await pipeline.receive_bytes(opened)
    with await pipeline.admit(opened) as slot:
        inputs = await opened.converter.convert_json(body, parse_predict_body)
        del body  # not kept while the model runs
        results = await pipeline.run_inferences(opened, slot, pipeline.NO_PAYLOAD, inputs)
        return await pipeline.render_results(opened, results, partial(encode_results, results))


@route_metadata(
    "/v1/models/{model}/metadata",
    operation_id="model_metadata",
    summary="Signature of a model, in TensorFlow Serving's format",
)
@route_metadata(
    "/v1/models/{model}/versions/{version}/metadata",
    operation_id="model_version_metadata",
    summary="Signature of a version of a model, in TensorFlow Serving's format",
)
async def get_model_metadata(
    request: Request, services: ServicesForInference, model: str, version: str = ""
) -> dict[str, Any]:
    """Return the inputs and outputs with TensorFlow's names of datatypes."""
    return build_model_metadata(await get_signature(request, services, model, version))
