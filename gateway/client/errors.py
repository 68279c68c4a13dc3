"""The error of the client, and the codes of failures that the gateway does not report itself."""

from __future__ import annotations

from typing import Any, Final

UNREACHABLE: Final = "UNREACHABLE"
TIMEOUT: Final = "TIMEOUT"
CONNECTION_LOST: Final = "CONNECTION_LOST"
INVALID_RESPONSE: Final = "INVALID_RESPONSE"
UNREADABLE: Final = "UNREADABLE"


class InvalidRequest(ValueError):
    """A request that the client does not send: its path, for instance, is not one of a gateway."""


class GatewayError(Exception):
    """A request that failed. Its text is the gateway's sentence, or says why there is no response.

    `code` is one of the gateway's (docs/reference/errors.md), or one of the client: `UNREACHABLE` (no
    connection), `TIMEOUT` (no response in time), `CONNECTION_LOST` (the request may have been executed),
    `INVALID_RESPONSE` (of something that is not a gateway) and `UNREADABLE` (an input file). `status` is the
    HTTP status, and 0 without a response. `retry_after_s` is the delay that the gateway asks for. `document`
    is the body of the response, which for loads and unloads contains a report for each replica.
    """

    def __init__(
        self,
        message: str,
        code: str = "",
        status: int = 0,
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
