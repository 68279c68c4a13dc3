"""Triton's errors become ours: the table by its rows, and what must not leave."""

from __future__ import annotations

from collections.abc import Callable

import orjson
import pytest

from gateway.triton.error_mapping import map_triton_error, sanitize_event, sanitize_message
from gateway.triton.request_target import RequestTarget
from tests.support.linearity import assert_linear

STACK = "\n\nAt:\n  /srv/models/x/1/model.py(12): execute\n"


@pytest.mark.parametrize(
    ("status", "text", "expected", "code"),
    [
        (400, "Request for unknown model: 'm' is not found", 404, "MODEL_NOT_FOUND"),
        (
            503,
            "Request for unknown model: 'm' version 9 is not at ready state",
            404,
            "MODEL_NOT_FOUND",
        ),
        (400, "Request for unknown model: 'm' has no available versions", 503, "MODEL_NOT_READY"),
        (
            400,
            "inference request for sequence 7 to model 'm' must specify the START flag",
            409,
            "SEQUENCE_NOT_RUNNING",
        ),
        (400, "Model 'm' is not ready", 503, "MODEL_NOT_READY"),
        (400, "requested model 'm' is not available", 404, "MODEL_NOT_FOUND"),
        (
            400,
            "[request id: 7] Request for unknown model: 'm' is not found",
            404,
            "MODEL_NOT_FOUND",
        ),
        (500, "parameter key 'a' was not found in the JSON", 400, "MALFORMED_REQUEST"),
        # What a model says of the world, or of another model that it calls, is not about itself.
        (500, "the camera is not ready", 500, "MODEL_FAULT"),
        (503, "the camera is not ready", 503, "UNAVAILABLE"),
        (400, "the driver is unloaded", 422, "REFUSED_BY_MODEL"),
        (500, "unknown model of a car", 500, "MODEL_FAULT"),
        (500, "Request for unknown model: 'other' is not found", 500, "MODEL_FAULT"),
        (500, "Model 'other' is not ready.", 500, "MODEL_FAULT"),
        (400, "Model 'other' is not ready.", 422, "REFUSED_BY_MODEL"),
        (
            500,
            "Failed to process the request(s) for model 'm_0_0', message: RuntimeError: 'm' is not ready",
            500,
            "MODEL_FAULT",
        ),
        (
            400,
            "in ensemble 'm', Request for unknown model: 'part' version 1 is not at ready state",
            503,
            "UNAVAILABLE",
        ),
        (400, "failed to read the version (details: stol)", 404, "MODEL_NOT_FOUND"),
        (500, "failed to get request params", 400, "MALFORMED_REQUEST"),
        (
            500,
            "Unable to set 'classification': attempt to access JSON non-unsigned-integer as unsigned",
            400,
            "MALFORMED_REQUEST",
        ),
        (503, "Exceeds maximum queue size", 429, "OVERLOADED"),
        (503, "Request timeout expired", 504, "DEADLINE_PASSED"),
        (
            500,
            "failed to parse the request JSON buffer: Invalid value. at 0",
            400,
            "MALFORMED_REQUEST",
        ),
        (
            503,
            "explicit model load / unload is not allowed if polling is enabled",
            409,
            "MODEL_CONTROL_MODE",
        ),
        (400, "doesn't support models with decoupled transaction policy", 422, "REFUSED_BY_MODEL"),
        (
            400,
            "unexpected shape for input 'X' for model 'm'. Expected [2], got [3]",
            422,
            "DOES_NOT_FIT_MODEL",
        ),
        (400, "CUDA error: an illegal memory access", 500, "MODEL_FAULT"),
        (500, "boom" + STACK, 500, "MODEL_FAULT"),
        (501, "unsupported", 422, "REFUSED_BY_MODEL"),
        (400, "anything else", 422, "REFUSED_BY_MODEL"),
        (503, "anything else", 503, "UNAVAILABLE"),
        (418, "a teapot", 502, "BAD_UPSTREAM"),
    ],
)
def test_error_of_triton_is_mapped_by_status_and_words(
    status: int, text: str, expected: int, code: str
) -> None:
    error = map_triton_error(status, orjson.dumps({"error": text}), RequestTarget("m", "", 1.0))
    assert (error.status, error.code) == (expected, code)
    assert "model.py" not in error.detail


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b'{"error": 5}', b"<html>", b'{"error": ""}']
)
def test_response_without_an_error_message_is_explained(body: bytes) -> None:
    for status in (400, 404, 500, 503):
        assert map_triton_error(status, body, RequestTarget("m")).detail


@pytest.mark.fault("exceptions provoked in a model")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("in ensemble 'e', no ink found", "no ink found"),
        ("[request id: 5] batch-size must be <= 8", "batch-size must be <= 8"),
        ("Failed to process the request(s) for model 'x_0', message: ValueError: bad" + STACK, "bad"),
        ("cannot read /srv/secret/weights.bin", "cannot read weights.bin"),
        ("pointer 0x7f00deadbeef", "pointer"),
        ("region triton_python_backend_shm_region_1a-2b is gone", "region is gone"),
        ("load failed for model 'x': version 1 is at UNAVAILABLE state: Internal: "
         "TritonModelException: no file" + STACK + ";\n", "no file"),
        ("failed to load 'x', version 1 is at UNAVAILABLE state: Internal: no file" + STACK, "no file"),
        ("a ratio of 3/4 stays", "a ratio of 3/4 stays"),
        ("cannot read s3://bucket/secret/1 (403)", "cannot read (403)"),
        ("GET http://10.0.0.7:81/a?b=c: refused", "GET refused"),
        ("ipv4:10.0.0.7:8001: Failed to connect", "Failed to connect"),
    ],
)  # fmt: skip
def test_paths_addresses_and_stacks_are_removed_from_messages(text: str, expected: str) -> None:
    assert sanitize_message(text) == expected


@pytest.mark.parametrize(
    "part", ["\n", "\n ", "model ", "input ", "At:\n", "/a", "in ensemble '", "0x", "a://", "ipv4:"]
)
def test_cost_of_a_message_is_linear(part: str) -> None:
    """Triton's errors quote input names and ids: each pattern must be linear, or what it reads short."""

    def reading(size: int) -> Callable[[], None]:
        text = part * (size // len(part))

        def read_all() -> None:
            for status in (400, 500):
                map_triton_error(status, orjson.dumps({"error": text}), RequestTarget("m"))
            sanitize_message(text)

        return read_all

    assert_linear(reading, 125_000)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            "Failed to process the request(s) for model 'm', message: ValueError: boom",
            "MODEL_FAULT",
        ),
        (
            "unexpected shape for input 'X' for model 'm'. Expected [2], got [3]",
            "DOES_NOT_FIT_MODEL",
        ),
        ("anything else", "REFUSED_BY_MODEL"),
    ],
)
def test_error_in_a_stream_has_a_code(text: str, code: str) -> None:
    event = orjson.loads(sanitize_event(b"data: " + orjson.dumps({"error": text}) + b"\n\n"))
    assert event["code"] == code
    assert text.endswith(event["error"])
