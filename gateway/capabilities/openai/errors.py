"""Errors in the shape of OpenAI's API, which its clients read."""

from __future__ import annotations

from typing import Final

import orjson

ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
REQUEST_ERROR: Final = "invalid_request_error"
SERVER_ERROR: Final = "server_error"


def serialize_openai_error(message: str, code: str, status: int) -> bytes:
    kind = ERROR_TYPES.get(status, SERVER_ERROR if status >= 500 else REQUEST_ERROR)
    error = {"message": message, "type": kind, "param": None, "code": code}
    return orjson.dumps({"error": error})


ERROR_SERIALIZERS: Final = dict.fromkeys(
    ("/v1/embeddings", "/v1/completions", "/v1/chat/completions"), serialize_openai_error
)
