"""The route `/metrics`."""

from __future__ import annotations

from typing import Final

from gateway.openapi.responses import build_error_responses, build_response
from gateway.openapi.schemas import STRING_CONTENT
from gateway.tensors.codecs import STRING_SCHEMA

METRICS_RESPONSES: Final = build_error_responses() | {
    200: build_response(
        "The page, in the format that `Accept` selects.",
        {"text/plain": STRING_CONTENT, "application/openmetrics-text": STRING_CONTENT},
        {"Vary": {"required": True, "schema": STRING_SCHEMA}},
    )
}
