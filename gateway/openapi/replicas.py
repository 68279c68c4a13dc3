"""The routes of cordon and drain."""

from __future__ import annotations

from typing import Final

from gateway.openapi.responses import build_responses
from gateway.openapi.schemas import COUNT_SCHEMA
from gateway.tensors.codecs import STRING_SCHEMA
from gateway.tensors.schema import build_object_schema

MAINTENANCE_SCHEMA: Final = build_object_schema(
    {
        "address": STRING_SCHEMA,
        "cordoned": {"type": "boolean", "description": "The replica gets no new requests."},
        "outstanding": COUNT_SCHEMA
        | {"description": "Requests of this gateway that are in progress."},
        "sequences": COUNT_SCHEMA
        | {"description": "Sequences of this gateway that have not ended."},
    }
)
CORDON_RESPONSES: Final = build_responses(
    MAINTENANCE_SCHEMA, "The replica and the work that it still has.", 404, 409
)
DRAIN_RESPONSES: Final = build_responses(
    MAINTENANCE_SCHEMA, "The replica is drained.", 404, 409, 504
)
