"""The events of a request: CloudEvents 1.0, with the types of KServe's logger."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from gateway.http_client.response import Headers
from gateway.messages import format_utc_time, quote_path_segment
from gateway.telemetry.recording import RecordedBody, Recording
from gateway.telemetry.request_info import RequestInfo, RequestScope
from gateway.telemetry.tracing import TRACEPARENT, create_request_id

REQUEST_TYPE: Final = "org.kubeflow.serving.inference.request"
RESPONSE_TYPE: Final = "org.kubeflow.serving.inference.response"
CONTENT_TYPE: Final = "datacontenttype"
# Headers that an event contains, by the names of its attributes.
KEPT_HEADERS: Final = {
    b"content-type": CONTENT_TYPE,
    b"content-encoding": "contentencoding",
    b"inference-header-content-length": "jsonlength",
    b"accept": "accept",
}
MAX_HEADER_BYTES: Final = 256
# Characters that a header has as they are (HTTP protocol binding, section 3.1.3.2).
UNQUOTED: Final = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
Attributes = Mapping[str, object]


@dataclass(frozen=True)
class SampleEvent:
    """A CloudEvent, whose data is what the body still holds."""

    attributes: Attributes
    body: RecordedBody


def build_events(
    scope: RequestScope,
    recording: Recording,
    status: int,
    *,
    hides_request: bool,
    hides_response: bool,
) -> list[SampleEvent]:
    """Return the events of a request and its response: one ID, as KServe's, and two sources."""
    info = scope["request_info"]
    source = f"/models/{quote_path_segment(info.model)}"
    common = {
        "specversion": "1.0",
        "id": create_request_id(),
        "inferenceservicename": info.model,
        "model": info.model,
        "modelversion": info.version,
        "statuscode": status,
        "requestid": info.request_id,
        "caller": info.caller_name,
        # A token can contain half of a pair of surrogates, which no event can.
        "callersubject": info.subject.encode(errors="replace").decode(),
        "traceparent": find_traceparent(scope, info),
        "path": scope["raw_path"].decode("latin-1"),
    }
    events = []
    for kind, address, time_s, body, is_hidden in (
        (REQUEST_TYPE, source, recording.started_at, recording.request, hides_request),
        (RESPONSE_TYPE, f"{source}#response", time.time(), recording.response, hides_response),
    ):
        own = {"type": kind, "source": address, "time": format_utc_time(time_s, "microseconds")}
        own |= describe_body(body, is_grpc=scope["scheme"] == "grpc", is_hidden=is_hidden)
        attributes = {name: value for name, value in (common | own).items() if value != ""}
        events.append(SampleEvent(attributes, body))
    return events


def describe_body(body: RecordedBody, *, is_grpc: bool, is_hidden: bool) -> dict[str, str]:
    """Return the attributes of a body, and release one that is not sent."""
    attributes = {CONTENT_TYPE: "application/x-protobuf"}
    if not is_grpc:
        attributes = {
            KEPT_HEADERS[name]: value.decode("latin-1")
            for name, value in body.headers
            if name in KEPT_HEADERS and len(value) <= MAX_HEADER_BYTES
        }
    if not body.is_complete:
        attributes["incomplete"] = "true"
    if is_hidden:
        attributes["redacted"] = "true"
    if is_hidden or body.is_too_large or not body.is_complete:
        attributes["datalength"] = str(body.size_bytes)
        body.release()
    return attributes


def find_traceparent(scope: RequestScope, info: RequestInfo) -> str:
    """Return the trace context of the request, or the client's (W3C Trace Context)."""
    if info.trace is not None:
        return info.trace.traceparent
    sent = (value for name, value in scope["headers"] if name == TRACEPARENT)
    return next(sent, b"")[:MAX_HEADER_BYTES].decode("latin-1")


def encode_event_headers(attributes: Attributes) -> Headers:
    """Return the headers of an event in binary mode."""
    return [
        (b"content-type", str(value).encode("latin-1"))
        if name == CONTENT_TYPE
        else (f"ce-{name}".encode(), quote(str(value), safe=UNQUOTED).encode())
        for name, value in attributes.items()
    ]
