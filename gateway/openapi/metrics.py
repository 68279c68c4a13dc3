"""The route `/metrics`."""

from __future__ import annotations

from typing import Final

from gateway.openapi.responses import REQUEST_ID_HEADER, build_error_responses
from gateway.openapi.schemas import STRING_CONTENT
from gateway.tensors.codecs import STRING_SCHEMA

METRICS_RESPONSES: Final = build_error_responses() | {
    200: {
        "description": "The page, in the format that `Accept` selects.",
        "headers": REQUEST_ID_HEADER | {"Vary": {"required": True, "schema": STRING_SCHEMA}},
        "content": {"text/plain": STRING_CONTENT, "application/openmetrics-text": STRING_CONTENT},
    }
}
