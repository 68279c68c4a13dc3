"""CloudEvents 1.0 of a request and its answer, with the types of KServe's logger."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import orjson

from gateway.errors import CURL_DEFAULT_TYPE
from gateway.http_client.connection import Headers
from gateway.media_types import EVENT_STREAM, NDJSON

REQUEST_TYPE: Final = "org.kubeflow.serving.inference.request"
RESPONSE_TYPE: Final = "org.kubeflow.serving.inference.response"
CONTENT_TYPE: Final = "datacontenttype"
CONTENT_TYPE_HEADER: Final = b"content-type"
JSON_LENGTH: Final = "jsonlength"
# Headers that an event contains, by the names of its attributes.
KEPT_HEADERS: Final = {
    CONTENT_TYPE_HEADER: CONTENT_TYPE,
    b"content-encoding": "contentencoding",
    b"inference-header-content-length": JSON_LENGTH,
    b"accept": "accept",
}
# With these, the data is more than JSON.
ENCODINGS: Final = ("contentencoding", JSON_LENGTH)
# Parts of the JSON of /v1 and TorchServe that have values by the names of tensors.
NAMED_PARTS: Final = ("inputs", "outputs", "instances", "predictions")
# Triton reads every body as JSON.
JSON_PATHS: Final = "/v2/"
ERROR_STATUS: Final = 400
REDACTED: Final = {"redacted": "true"}
MAX_HEADER_BYTES: Final = 256
# The attributes of an event hold about this much memory.
EVENT_BYTES: Final = 4096
# More data is hashed in a thread.
MAX_INLINE_BYTES: Final = 64 << 10
# Characters that a header has as they are (HTTP protocol binding, section 3.1.3.2).
UNQUOTED: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


@dataclass(frozen=True)
class SampleEvent:
    """A CloudEvent. If its data is left out, the attribute `datalength` says how long that was."""

    attributes: Mapping[str, str | int]
    data: bytes

    @property
    def size_bytes(self) -> int:
        return EVENT_BYTES + len(self.data)

    def without_data(self) -> SampleEvent:
        """Return the event without its data and the hash, from which a short value could be guessed."""
        kept = {name: value for name, value in self.attributes.items() if name != "datasha256"}
        return SampleEvent({"datalength": len(self.data), **kept, **REDACTED}, b"")


def select_headers(headers: Headers) -> Iterator[tuple[str, str]]:
    for name, value in headers:
        if name in KEPT_HEADERS and len(value) <= MAX_HEADER_BYTES:
            yield KEPT_HEADERS[name], value.decode("latin-1")


def encode_event_headers(event: SampleEvent) -> Headers:
    """Return the headers of an event in binary mode."""
    return [
        (CONTENT_TYPE_HEADER, str(value).encode("latin-1"))
        if name == CONTENT_TYPE
        else (f"ce-{name}".encode(), quote(str(value), safe=UNQUOTED).encode())
        for name, value in event.attributes.items()
    ]


def encode_line(event: SampleEvent) -> bytes:
    document: dict[str, Any] = dict(event.attributes)
    if event.data:
        try:
            is_json = "json" in str(document.get(CONTENT_TYPE, "json")).lower()
            document["data"] = orjson.loads(event.data) if is_json else event.data.decode()
        except ValueError:  # the data is no UTF-8, or has something else behind the JSON
            document["data_base64"] = base64.b64encode(event.data).decode()
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def can_have_error(event: SampleEvent) -> bool:
    """Return whether the request failed, or its answer is a stream, whose errors have no status."""
    content_type = str(event.attributes.get(CONTENT_TYPE, ""))
    is_stream = content_type.startswith((EVENT_STREAM, NDJSON))
    return is_stream or int(event.attributes["statuscode"]) >= ERROR_STATUS


def redact(event: SampleEvent, names: frozenset[str]) -> SampleEvent:
    """Return an event without the values of these tensors.

    The data is left out if it is not JSON in which each of them is found by its name.
    """
    if event.attributes.keys().isdisjoint(ENCODINGS):
        try:
            document = orjson.loads(event.data)
        except ValueError:
            return event.without_data()
        if remove_values(list_named_parts(event, document), names) == names:
            return SampleEvent({**event.attributes, **REDACTED}, orjson.dumps(document))
    return event.without_data()


def list_named_parts(event: SampleEvent, document: Any) -> list[Any]:
    """Return the parts that have values by name. Other JSON can be the value of one tensor."""
    if str(event.attributes.get("path", "")).startswith(JSON_PATHS):
        return [document]
    content_type = str(event.attributes.get(CONTENT_TYPE, "")).lower()
    is_json = "json" in content_type or content_type.startswith(CURL_DEFAULT_TYPE)
    if not is_json or not isinstance(document, dict):
        return []
    return [document.get(part) for part in NAMED_PARTS]


def remove_values(remaining: list[Any], names: frozenset[str]) -> set[str]:
    """Replace the values of these tensors by null, and return the names that were found."""
    found: set[str] = set()
    while remaining:
        value = remaining.pop()
        if isinstance(value, list):
            remaining += value
        elif isinstance(value, dict):
            name = value.get("name")
            keys = names & value.keys()
            value |= dict.fromkeys(keys)
            if isinstance(name, str) and name in names:  # a tensor of Triton's API
                value["data"] = None
                keys |= {name}
            found |= keys
            remaining += value.values()
    return found
