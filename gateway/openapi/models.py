"""The routes of models and replicas."""

from __future__ import annotations

from typing import Final

from gateway.fleet.health import HealthState
from gateway.openapi.responses import build_responses
from gateway.openapi.schemas import COUNT_SCHEMA, build_list_schema, build_map_schema
from gateway.tensors.codecs import STRING_SCHEMA
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.schema import build_object_schema
from gateway.tensors.tf_serving import VERSION_STATES

VERSION_SCHEMA = build_object_schema(
    {"version": STRING_SCHEMA, "state": STRING_SCHEMA, "reason": STRING_SCHEMA},
    optional=("reason",),
)
READY_SCHEMA = {"type": "boolean", "description": "At least one replica can serve it."}
LISTED_MODEL_SCHEMA = {
    "type": "object",
    "properties": {
        "name": STRING_SCHEMA,
        "versions": {"type": "array", "items": VERSION_SCHEMA},
        "ready": READY_SCHEMA,
        "on_demand": {"const": True, "description": "The model is loaded when it is requested."},
        "state": {
            "type": "string",
            "description": "Best state of an on-demand model on any replica; ON_DEMAND while it is not "
            "loaded.",
        },
        "declared": {"const": True, "description": "The models file contains the model."},
        "wished": {
            "enum": ["loaded", "unloaded"],
            "description": "Desired state set through the API.",
        },
        "labels": build_map_schema(
            {"type": "object"}, "Version labels: the version, or the versions with their shares."
        ),
        "replicas": build_map_schema(
            STRING_SCHEMA,
            "State on each replica, by address (only with the right to see the fleet).",
        ),
        "behind": build_list_schema(
            STRING_SCHEMA, "Replicas without the last load (only with the right to see the fleet)."
        ),
        "last_error": STRING_SCHEMA
        | {"description": "Reason and replica of the last failed load."},
        "conflicts": build_list_schema(
            STRING_SCHEMA,
            "Replicas on which something else loads or unloads the model against the desired state.",
        ),
    },
    "required": ["name", "versions", "ready"],
}
REPLICA_SCHEMA = build_object_schema(
    {
        "address": STRING_SCHEMA,
        "state": {"enum": [state.name for state in HealthState]},
        "outstanding": COUNT_SCHEMA | {"description": "Requests in progress."},
        "slowness": {"type": "number", "description": "Latency relative to the other replicas."},
        "models": build_map_schema(
            STRING_SCHEMA, "State of each model, by name. Empty if the replica is DOWN."
        ),
        "cordoned": {"const": True, "description": "The replica gets no new requests."},
        "ejected_for_s": {"type": "number", "description": "Seconds until the ejection ends."},
        "failing_models": build_list_schema(
            STRING_SCHEMA,
            "Models whose requests fail on this replica and not on the others; it gets few of them.",
        ),
        "reason": STRING_SCHEMA,
    },
    optional=("cordoned", "ejected_for_s", "failing_models", "reason"),
)
IMAGE_SCHEMA = build_object_schema(
    {
        "mode": STRING_SCHEMA,
        "layout": STRING_SCHEMA,
        "height": {"type": ["integer", "null"]},
        "width": {"type": ["integer", "null"]},
    }
)
TENSOR_SCHEMA = build_object_schema(
    {
        "name": STRING_SCHEMA,
        "datatype": {"enum": list(DATATYPES)},
        "shape": build_list_schema(
            {"type": "integer", "minimum": -1},
            "Shape without the batch dimension. -1 means any size.",
        ),
        "optional": {"const": True},
        "content_type": STRING_SCHEMA,
        "image": IMAGE_SCHEMA,
        "labels": {"const": True, "description": "`classification` returns labels of this output."},
        "example": {
            "type": "string",
            "description": "A sample value: a text, JSON, or a file as a data: URI.",
        },
    },
    optional=("optional", "content_type", "image", "labels", "example"),
)
OPENAI_MODEL_PROPERTIES: Final = {
    "id": STRING_SCHEMA,
    "object": {"const": "model"},
    "created": {"const": 0},
    "owned_by": STRING_SCHEMA,
}
VERSION_STATUS_SCHEMA = build_object_schema(
    {
        "version": STRING_SCHEMA,
        "state": {"enum": [*VERSION_STATES.values(), "UNKNOWN"]},
        "status": build_object_schema(
            {"error_code": STRING_SCHEMA, "error_message": STRING_SCHEMA}
        ),
    }
)
METADATA_SCHEMA = build_object_schema(
    {"model_spec": {"type": "object"}, "metadata": {"type": "object"}}
)
MODEL_SCHEMA = build_object_schema(
    OPENAI_MODEL_PROPERTIES
    | {
        "model_version_status": build_list_schema(
            VERSION_STATUS_SCHEMA, "TensorFlow Serving's status of each version."
        ),
        "name": STRING_SCHEMA,
        "ready": READY_SCHEMA,
        "versions": {"type": "array", "items": STRING_SCHEMA},
        "platform": STRING_SCHEMA,
        "max_batch_size": COUNT_SCHEMA,
        "decoupled": {
            "type": "boolean",
            "description": "A request may have any number of responses.",
        },
        "inputs": {"type": "array", "items": TENSOR_SCHEMA},
        "outputs": {"type": "array", "items": TENSOR_SCHEMA},
        "curl": {"type": "string", "description": "Example request with curl."},
        "python": {"type": "string", "description": "Example request in Python."},
    }
)
OPENAPI_SCHEMA = build_object_schema(
    {
        "openapi": {"type": "string", "pattern": "^3\\.1\\."},
        "info": {"type": "object"},
        "paths": {"type": "object"},
    }
)


MODEL_ERRORS: Final = (404, 502, 504)
MODEL_LIST_RESPONSES = build_responses(
    build_object_schema(
        {
            "models": {"type": "array", "items": LISTED_MODEL_SCHEMA},
            "object": {"const": "list"},
            "data": build_list_schema(
                build_object_schema(OPENAI_MODEL_PROPERTIES), "The same models, in OpenAI's format."
            ),
        }
    ),
    "The models that the caller may access.",
)
METADATA_RESPONSES = build_responses(
    METADATA_SCHEMA, "The signature, in TensorFlow Serving's format.", *MODEL_ERRORS
)
READY_MODELS_RESPONSES = build_responses(
    build_object_schema({"models": {"type": "array", "items": STRING_SCHEMA}}),
    "The names of the ready models.",
)
REPLICA_LIST_RESPONSES = build_responses(
    build_object_schema({"replicas": {"type": "array", "items": REPLICA_SCHEMA}}), "The replicas."
)
MODEL_RESPONSES = build_responses(MODEL_SCHEMA, "The model's inputs and outputs.", *MODEL_ERRORS)
OPENAPI_RESPONSES = build_responses(OPENAPI_SCHEMA, "An OpenAPI 3.1 document.", *MODEL_ERRORS)
