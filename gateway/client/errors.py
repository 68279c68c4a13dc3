"""The error of the client, and the codes of failures that the gateway does not report itself."""

from __future__ import annotations

import re
from copy import copy
from typing import Any, Final

UNREACHABLE: Final = "UNREACHABLE"
TIMEOUT: Final = "TIMEOUT"
CONNECTION_LOST: Final = "CONNECTION_LOST"
INVALID_RESPONSE: Final = "INVALID_RESPONSE"
UNREADABLE: Final = "UNREADABLE"
MODEL_NOT_READY: Final = "MODEL_NOT_READY"

# The gateway's advice to users of its API, and the same for users of this client.
PYTHON_HINTS: Final = (
    (r"GET /v1/models lists", "models() lists"),
    (r"load it with POST /v2/repository/models/\S+/load", "load it with load()"),
    (r"set a longer timeout with X-Request-Timeout, in seconds", "pass a longer timeout_s"),
    (r"send Authorization: Bearer .*? or X-API-Key: KEY", "pass key=… or set TRITON_GATEWAY_KEY"),
    (r'send \{"parameters": \{"unload_dependents": true\}\}', "pass dependents=True"),
    (r"wait for it with GET /v1/jobs/(\w+)\?wait=\d+", r"wait_job('\1') waits for it"),
    (r'send a file as \{"b64": "BASE64"\}', "pass a file as a Path or bytes"),
    (r"stream them with POST .* ModelStreamInfer", "stream() yields them"),
    (r"\bGET (/[\w/]*\w)", r"request('GET', '\1')"),
)


class InvalidRequest(ValueError):
    """A request that the client does not send: its path, for instance, is not one of a gateway."""


class GatewayError(Exception):
    """A request that failed. Its text is the gateway's sentence, or says why there is no response.

    `code` is one of the gateway's (docs/reference/errors.md), or one of the client: `UNREACHABLE` (no
    connection), `TIMEOUT` (no response in time), `CONNECTION_LOST` (the request may have been executed),
    `INVALID_RESPONSE` (of something that is not a gateway) and `UNREADABLE` (an input file). `status` is the
    HTTP status, and None without a response. `retry_after_s` is the delay that the gateway asks for.
    `document` is the body of the response, which for loads and unloads contains a report for each replica.
    """

    def __init__(
        self,
        message: str,
        code: str = "",
        status: int | None = None,
        *,
        request_id: str = "",
        retry_after_s: float | None = None,
        document: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.request_id = request_id
        self.retry_after_s = retry_after_s
        self.document = document or {}


def add_hint(error: GatewayError, hint: str) -> GatewayError:
    hinted = copy(error)
    hinted.args = (f"{error}; {hint}",)
    return hinted


def translate_hints(message: str) -> str:
    for hint, python_hint in PYTHON_HINTS:
        message = re.sub(hint, python_hint, message)
    return message
