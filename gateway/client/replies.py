"""Responses of the gateway, and the errors and documents that they are."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from gateway.client.errors import INVALID_RESPONSE, GatewayError, translate_hints

T = TypeVar("T")

# Of a response, or of a line of a stream. The outputs of the largest inference fit, as text.
MAX_RESPONSE_BYTES: Final = 1 << 30
# The delay of a `Retry-After` that is a date.
DEFAULT_RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True)
class Reply:
    """A response of any status. The names of the headers are in lower case."""

    url: str
    status: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def content_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class ResponseBuffer:
    """The bytes of a response in memory, up to a limit."""

    def __init__(self, url: str, max_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._url = url
        self._max_bytes = max_bytes
        self._file = io.BytesIO()

    def add(self, data: bytes) -> None:
        """Append bytes. Raises `GatewayError` above the limit."""
        if self._file.tell() + len(data) > self._max_bytes:
            message = f"the response of {self._url} is larger than {self._max_bytes} bytes"
            raise GatewayError(message, INVALID_RESPONSE)
        self._file.write(data)

    def take(self) -> bytes:
        """Return the bytes, and forget them."""
        content = self._file.getvalue()
        self._file = io.BytesIO()
        return content


class LineBuffer(ResponseBuffer):
    """A response that is taken line by line."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete. Raises `GatewayError` for one that is too long."""
        first, *more = data.split(b"\n")
        self.add(first)
        if not more:
            return []
        lines = [self.take(), *more[:-1]]
        self.add(more[-1])
        return lines


def make_error(reply: Reply) -> GatewayError:
    """Return the error that a response, or a line of its stream, is."""
    document = parse_json_object(reply.content) or {}
    message = document.get("error")
    if not isinstance(message, str):
        message = (
            f"the server at {reply.url} returned HTTP status {reply.status} without an error message; check "
            "that the URL is the gateway's"
        )
    return GatewayError(
        translate_hints(message),
        str(document.get("code", "")),
        reply.status,
        request_id=str(document.get("request_id", reply.headers.get("x-request-id", ""))),
        retry_after_s=parse_retry_after(reply.headers.get("retry-after")),
        document=document,
    )


def make_wrong_server_error(url: str, reason: str) -> GatewayError:
    return GatewayError(f"the server at {url} is not a gateway: {reason}", INVALID_RESPONSE)


def parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of `Retry-After` (RFC 9110, section 10.2.3); None without the header."""
    if value is None:
        return None
    return float(value) if value.isascii() and value.isdigit() else DEFAULT_RETRY_AFTER_S


def parse_json_object(content: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


class ResponseDocument(dict[str, Any]):
    """The JSON object of a response. A missing field means that the server is not a gateway."""

    def __init__(self, url: str, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self._url = url

    def __missing__(self, field: str) -> NoReturn:
        raise GatewayError(
            f"the response of {self._url} has no field {field!r}; check that the URL is the gateway's",
            INVALID_RESPONSE,
        )

    def parse(self, parse: Callable[[Mapping[str, Any]], T]) -> T:
        """Return what the fields describe. Raises `GatewayError` if they have another shape."""
        try:
            return parse(self)
        except (LookupError, TypeError, ValueError, AttributeError) as exc:
            reason = f"its response has another shape ({exc!r})"
            raise make_wrong_server_error(self._url, reason) from None


def decode_object(reply: Reply) -> ResponseDocument:
    """Return the JSON object of a response. Raises `GatewayError` if it is anything else."""
    document = parse_json_object(reply.content)
    if document is None:
        raise make_wrong_server_error(reply.url, "its response is not a JSON object")
    return ResponseDocument(reply.url, document)
