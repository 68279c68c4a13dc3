"""Request ids, and OpenTelemetry traces if an endpoint is configured.

Without an endpoint no OpenTelemetry code is imported, and `RequestInfo.trace` is None.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from gateway.errors import GatewayError
from gateway.messages import CommandError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

VALID_REQUEST_ID: Final = re.compile(rb"[\w.:/+=@-]{1,128}", re.ASCII)
TRACEPARENT: Final = b"traceparent"
TRACESTATE: Final = b"tracestate"
TRACE_CONTEXT_HEADERS: Final = (TRACEPARENT, TRACESTATE)  # W3C Trace Context, sections 3.2 and 3.3
SERVER_ERROR_STATUS: Final = 500
CLIENT_ERROR_STATUS: Final = 400  # an error of a client span, but not of a server span
TRACE_FLUSH_TIMEOUT_S: Final = 2.0
TraceHeaders = list[tuple[bytes, bytes]]
# Triton refuses requests with a long one. Section 3.3.1.5 asks for 512 bytes at least.
MAX_TRACE_CONTEXT_BYTES: Final = 4096


def find_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        if name == b"x-request-id" and VALID_REQUEST_ID.fullmatch(value):
            return value.decode()
    return ""


def select_trace_context(headers: Sequence[tuple[bytes, bytes]]) -> TraceHeaders:
    """Return the trace context of a request; nothing if it is too long."""
    selected = [pair for pair in headers if pair[0] in TRACE_CONTEXT_HEADERS]
    size_bytes = sum(len(value) for _, value in selected)
    return selected if size_bytes <= MAX_TRACE_CONTEXT_BYTES else []


def create_request_id() -> str:
    return random.getrandbits(128).to_bytes(16, "big").hex()


class BadTracing(CommandError):
    """Tracing is configured, but OpenTelemetry is not installed."""


class Tracer:
    """Starts a trace for every request, and sends the spans to an OTLP endpoint over HTTP."""

    def __init__(self, endpoint: str, *, service: str, version: str) -> None:
        try:
            from opentelemetry import trace as api  # noqa: PLC0415 - an optional dependency
            from opentelemetry.exporter.otlp.proto.http import trace_exporter  # noqa: PLC0415 - as above
            from opentelemetry.sdk import resources, trace  # noqa: PLC0415 - as above
            from opentelemetry.sdk.trace import export  # noqa: PLC0415 - as above
            from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415 - as above
        except ImportError:
            raise BadTracing(
                "GATEWAY_OTLP_ENDPOINT requires OpenTelemetry: pip install 'triton-gateway[otel]'"
            ) from None
        attributes = {"service.name": service, "service.version": version}
        resource = resources.Resource.create(attributes)
        self._provider = trace.TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = trace_exporter.OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._api = api
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._tracer = self._provider.get_tracer("triton-gateway", version)

    def start_trace(self, method: str, headers: Sequence[tuple[bytes, bytes]]) -> Trace:
        """Start the server span, as a child of the caller's span if it sent one (W3C Trace Context)."""
        carrier = {
            name.decode(): value.decode("latin-1")
            for name, value in headers
            if name in TRACE_CONTEXT_HEADERS
        }
        parent = self._propagator.extract(carrier)
        span = self._tracer.start_span(method, parent, kind=self._api.SpanKind.SERVER)
        return Trace(self._api, self._tracer, span)

    def close(self) -> None:
        """Send the remaining spans; wait at most `TRACE_FLUSH_TIMEOUT_S`."""
        # A thread, because OpenTelemetry's own timeouts do not apply while it waits for the endpoint.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(TRACE_FLUSH_TIMEOUT_S)


class Trace:
    """The spans of one request: the server span, and a child for each step."""

    def __init__(self, api: ModuleType, tracer: Any, span: Span) -> None:
        self._api = api
        self._tracer = tracer
        self._server_span = span

    @property
    def trace_id(self) -> str:
        return f"{self._server_span.get_span_context().trace_id:032x}"

    @property
    def span_id(self) -> str:
        return f"{self._server_span.get_span_context().span_id:016x}"

    @property
    def traceparent(self) -> str:
        """Return the header that makes this trace the parent (W3C Trace Context)."""
        return f"00-{self.trace_id}-{self.span_id}-01"

    @contextmanager
    def start_span(
        self, name: str, *, client: bool = False, **attributes: str | int
    ) -> Iterator[ChildSpan]:
        """Start a child span that records the error of its block; `__` in an attribute's name is a dot."""
        kind = self._api.SpanKind.CLIENT if client else self._api.SpanKind.INTERNAL
        context = self._api.set_span_in_context(self._server_span)
        dotted = {key.replace("__", "."): value for key, value in attributes.items()}
        span = self._tracer.start_span(name, context, kind=kind, attributes=dotted)
        try:
            yield ChildSpan(self._api, span)
        except BaseException as exc:
            error_type = exc.code if isinstance(exc, GatewayError) else type(exc).__qualname__
            span.set_attribute("error.type", error_type)
            span.set_status(self._api.StatusCode.ERROR, error_type)
            raise
        finally:
            span.end()

    def end(self, name: str, status: int, attributes: dict[str, str | int]) -> None:
        self._server_span.update_name(name)
        self._server_span.set_attribute("http.response.status_code", status)
        self._server_span.set_attributes(
            {key: value for key, value in attributes.items() if value != ""}
        )
        if status >= SERVER_ERROR_STATUS:
            self._server_span.set_attribute("error.type", str(status))
            self._server_span.set_status(self._api.StatusCode.ERROR)
        self._server_span.end()


class ChildSpan:
    """A span that is not ended yet."""

    def __init__(self, api: ModuleType, span: Span) -> None:
        self._api = api
        self._span = span

    def set_attribute(self, name: str, value: str | int) -> None:
        self._span.set_attribute(name, value)

    def set_response_status(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= CLIENT_ERROR_STATUS:
            self._span.set_attribute("error.type", str(status))
            self._span.set_status(self._api.StatusCode.ERROR)

    def inject_context(self, headers: Sequence[tuple[bytes, bytes]]) -> TraceHeaders:
        """Return the headers with this span as the parent instead of the caller's."""
        context = self._span.get_span_context()
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        others = [header for header in headers if header[0] != TRACEPARENT]
        return [*others, (TRACEPARENT, parent.encode())]
