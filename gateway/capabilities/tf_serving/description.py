"""The routes of TensorFlow Serving's API, and its field in the description of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.fleet.index import build_version_status, merge_indexes
from gateway.openapi.infer import INFER_HEADER_PARAMETERS, LABEL_HEADER
from gateway.openapi.models import MODEL_ERRORS, VERSION_STATUS_SCHEMA
from gateway.openapi.responses import ERROR_DESCRIPTIONS, build_responses
from gateway.openapi.schemas import build_json_body, build_list_schema
from gateway.services import ModelDescriber, Services
from gateway.tensors.schema import Schema, build_object_schema
from gateway.tensors.signature import Signature

PREDICT_REQUEST_SCHEMA: Final[Schema] = {
    "type": "object",
    "properties": {
        "instances": {
            "type": "array",
            "minItems": 1,
            "description": "Rows: a value each, or an object of values by input name.",
        },
        "inputs": {"description": "Columns: a value, or an object of values by input name."},
        "signature_name": {},
        "parameters": {},
        "id": {},
    },
    "oneOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
    "additionalProperties": False,
}
PREDICT_OPENAPI: Final = build_json_body(PREDICT_REQUEST_SCHEMA) | {
    "parameters": INFER_HEADER_PARAMETERS
}
PREDICT_RESPONSE_SCHEMA: Final[Schema] = {
    "oneOf": [
        build_object_schema({"predictions": {"type": "array"}}, additionalProperties=False),
        build_object_schema({"outputs": {}}, additionalProperties=False),
    ]
}
PREDICT_RESPONSES: Final = build_responses(
    PREDICT_RESPONSE_SCHEMA,
    "One prediction per row, or the outputs as columns.",
    *ERROR_DESCRIPTIONS,
    headers=LABEL_HEADER,
)
METADATA_SCHEMA: Final = build_object_schema(
    {"model_spec": {"type": "object"}, "metadata": {"type": "object"}}
)
METADATA_RESPONSES: Final = build_responses(
    METADATA_SCHEMA, "The signature, in TensorFlow Serving's format.", *MODEL_ERRORS
)
STATUS_FIELDS: Final[Schema] = {
    "model_version_status": build_list_schema(
        VERSION_STATUS_SCHEMA, "TensorFlow Serving's status of each version."
    )
}


class StatusDescriber(ModelDescriber):
    """Adds the status of each version."""

    model_fields = STATUS_FIELDS

    def describe_model(self, services: Services, signature: Signature) -> Mapping[str, Any]:
        entries = merge_indexes(services.pool.list_usable_indexes(), [signature.model])
        return {
            "model_version_status": build_version_status(
                entry for entry in entries if signature.version in ("", entry.get("version", ""))
            )
        }
