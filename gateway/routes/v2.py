"""Pass-through of Triton's own HTTP API (`/v2/**`), in plain ASGI for speed.

Tables define the paths that are forwarded or rejected and the headers that are removed. Successful
responses are streamed byte for byte; only Triton's errors are rewritten.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import lru_cache, partial
from time import perf_counter
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.admission import AdmissionQueue
from gateway.auth import authorize, authorize_all_models
from gateway.errors import (
    BodyTooLarge,
    Forbidden,
    GatewayError,
    InputMismatch,
    NotFound,
    UnknownModel,
    UnknownModelToTrace,
    render_error,
)
from gateway.http_client.client import UpstreamResponse
from gateway.http_client.connection import Headers
from gateway.inflate import ZLIB_WBITS
from gateway.keys import Right
from gateway.media_types import JSON
from gateway.metrics import CLIENT_CLOSED_REQUEST
from gateway.names import normalize_version
from gateway.request_info import RequestInfo
from gateway.routes.body_guard import (
    PassthroughBody,
    buffer_small_body,
    build_passthrough_body,
    coalesce_chunks,
    guard_body,
    inflate_body,
)
from gateway.routes.dependencies import Services
from gateway.routes.proxy_headers import (
    ParsedHeaders,
    filter_response_headers,
    header_length_error,
    prepare_request_headers,
)
from gateway.sse import EventStreamScrubber
from gateway.tensors.sequence import SequenceStep, parse_sequence_parameters
from gateway.triton.error_mapping import RequestTarget, sanitize_event
from gateway.triton.json_guard import GENERATE_KEY_LIMITS, INFER_KEY_LIMITS, JsonGuard, KeyLimits

log = logging.getLogger(__name__)

SHARED_MEMORY_PATTERN = "/v2/(?:system|cuda)sharedmemory"
REGION_PATTERN = "(?:/region/(?P<region>[^/]+))?"
MODEL_PATTERN = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
MAX_CACHED_PATH_LENGTH = 256
MAX_SMALL_BODY_BYTES = 64 * 1024
SEQUENCE_ID_KEY = b'"sequence_id"'
MAX_SEQUENCE_JSON_BYTES = 128 * 1024  # larger JSON is not searched for a sequence
FLEET_PATHS = frozenset((b"/v2/models", b"/v2/health/ready"))
EMPTY_PATH_PARAMS = {"model": "", "version": "", "path": "", "route": ""}


@dataclass(frozen=True)
class RouteRule:
    """The handling of matching paths: forwarded with the required right, answered here, or rejected."""

    pattern: re.Pattern[str]
    methods: frozenset[str]
    right: Right = Right.infer
    for_all_models: bool = False
    refusal_message: str = ""
    fixed_body: bytes | None = None  # returned without a request to Triton
    is_health: bool = False
    is_inference: bool = False  # requires a slot
    has_tensors: bool = False  # the body describes tensors
    key_limits: KeyLimits = GENERATE_KEY_LIMITS  # limits of the JSON's keys
    not_found_error: type[UnknownModel] = UnknownModel


def make_route_rule(path: str, methods: str, **options: Any) -> RouteRule:
    return RouteRule(re.compile(path), frozenset(methods.split()), **options)


SHARED_MEMORY_REFUSAL = (
    "shared memory cannot be used through the gateway; send the tensors in the body"
)
ROUTE_RULES = (
    make_route_rule(
        "/v2/models/stats", "GET HEAD", for_all_models=True
    ),  # precedes the rule for a model named stats
    make_route_rule(
        f"{MODEL_PATTERN}/infer",
        "POST",
        is_inference=True,
        has_tensors=True,
        key_limits=INFER_KEY_LIMITS,
    ),
    make_route_rule(f"{MODEL_PATTERN}/(generate|generate_stream)", "POST", is_inference=True),
    make_route_rule(f"{MODEL_PATTERN}/ready", "GET HEAD", is_health=True),
    make_route_rule(f"{MODEL_PATTERN}(/config|/stats)?", "GET HEAD"),
    make_route_rule("/v2/health/live", "GET HEAD", is_health=True),
    make_route_rule("/v2", "GET HEAD"),
    # Many clients call these first to clean up. No region is ever registered.
    make_route_rule(
        f"{SHARED_MEMORY_PATTERN}{REGION_PATTERN}/status", "GET HEAD", fixed_body=b"[]"
    ),
    make_route_rule(f"{SHARED_MEMORY_PATTERN}{REGION_PATTERN}/unregister", "POST", fixed_body=b""),
    make_route_rule(
        f"{SHARED_MEMORY_PATTERN}(/.*)?", "GET HEAD POST", refusal_message=SHARED_MEMORY_REFUSAL
    ),
    make_route_rule(
        "/v2/(logging|trace/setting)", "GET HEAD POST", right=Right.manage, for_all_models=True
    ),
    make_route_rule(
        f"{MODEL_PATTERN}/trace/setting",
        "GET HEAD POST",
        right=Right.manage,
        not_found_error=UnknownModelToTrace,
    ),
)


def is_passthrough(raw_path: bytes) -> bool:
    """Return whether the path is forwarded to Triton instead of being answered for the fleet.

    Like Triton, the gateway does not decode percent-encoded paths.
    """
    if raw_path[:4] not in (b"/v2", b"/v2/"):
        return False
    return not raw_path.startswith(b"/v2/repository") and raw_path not in FLEET_PATHS


async def pass_through(services: Services, scope: Scope, receive: Receive, send: Send) -> int:
    """Forward a request to Triton and send the response, or an error. Returns the status."""
    status = 0
    names = EMPTY_PATH_PARAMS
    info: RequestInfo = scope["request_info"]
    try:
        rule, names = find_route_rule(scope["raw_path"].decode("latin-1"), scope["method"])
        info.route = names["route"]
        if rule.for_all_models:
            authorize_all_models(scope, rule.right)
        else:
            authorize(scope, rule.right, names["model"], names["version"], rule.not_found_error)
        if rule.fixed_body is not None:
            return await send_own_response(
                Response(rule.fixed_body, media_type=JSON), scope, receive, send
            )
        response = await forward_request(services, scope, receive, rule, names)
        try:
            info.model, info.version = names["model"], names["version"]
            start = build_start_message(response, scope)
            if response.is_complete and not response.is_event_stream and scope["method"] != "HEAD":
                status = response.status
                await send(start)
                body = response.take_buffered()
                info.bytes_out = len(body)
                await send({"type": "http.response.body", "body": body})
            else:
                async for message in relay_response(response, start, scope):
                    status = response.status
                    await send(message)
        finally:
            response.close()
            if rule.is_inference:
                services.admission.release(names["model"])
    except ClientDisconnect:
        return CLIENT_CLOSED_REQUEST
    except Exception as exc:  # noqa: BLE001 - the border of the process: every request gets a response
        if status:
            # The response has started: the server closes the connection, so that clients see the error.
            log.warning("the response was aborted: %s", exc)
            return status
        if services.pool.has_model(names["model"], names["version"]):
            info.model, info.version = names["model"], names["version"]
        return await send_own_response(
            await render_error(Request(scope, receive), exc), scope, receive, send
        )
    return status


async def send_own_response(response: Response, scope: Scope, receive: Receive, send: Send) -> int:
    info: RequestInfo = scope["request_info"]
    info.bytes_out = len(response.body)
    response.headers["x-request-id"] = scope["request_id"]
    response.headers["x-content-type-options"] = "nosniff"
    await response(scope, receive, send)
    return response.status_code


async def forward_request(
    services: Services, scope: Scope, receive: Receive, rule: RouteRule, path_params: dict[str, str]
) -> UpstreamResponse:
    """Return Triton's successful response. For an inference, the caller must release the slot."""
    info: RequestInfo = scope["request_info"]
    headers, parsed = prepare_request_headers(scope["headers"])
    requested = parsed.requested_timeout
    timeout_s = services.resolve_timeout_s(requested) if requested else services.default_timeout_s
    info.timeout_s = timeout_s
    body, step = await prepare_body(services, scope, receive, rule, path_params, headers, parsed)
    model = path_params["model"]
    if rule.right is Right.manage:
        headers = add_management_headers(headers, services.management_headers)
    if rule.is_inference and not services.admission.try_acquire(model):
        timeout_s = await wait_for_admission(services.admission, model, timeout_s, info.key)
    target = RequestTarget(
        model, path_params["version"], timeout_s, rule.is_health, step, rule.not_found_error
    )
    # Triton sends a body for HEAD, which would be read as the next response.
    method = b"GET" if scope["method"] == "HEAD" else scope["method"].encode()
    try:
        return await services.pool.send(
            target, method, build_request_target(scope, path_params), headers, body
        )
    except BaseException:
        if rule.is_inference:
            services.admission.release(model)
        raise


async def prepare_body(
    services: Services,
    scope: Scope,
    receive: Receive,
    rule: RouteRule,
    path_params: dict[str, str],
    headers: Headers,
    parsed: ParsedHeaders,
) -> tuple[PassthroughBody, SequenceStep | None]:
    """Return the body for Triton and its sequence step, and adjust the framing in `headers`."""
    length, encoding, step = parsed.content_length, parsed.content_encoding, parsed.step
    limit = services.settings.max_body_bytes
    if length is not None and length > limit:
        raise BodyTooLarge(limit)
    message: Message = await receive()
    if length is not None and length <= MAX_SMALL_BODY_BYTES and message.get("more_body", False):
        message = await buffer_small_body(message, receive)
    first: bytes = b"" if encoding in ZLIB_WBITS else message.get("body", b"")
    body = build_passthrough_body(message, receive, headers, length, limit, scope["request_info"])
    if encoding in ZLIB_WBITS:
        length = None
        body = await inflate_body(body, encoding, limit, headers)
    elif encoding:
        headers[:] = [header for header in headers if header[0] != b"content-encoding"]
    if isinstance(body, bytes):
        first, length = body, len(body)
    else:
        body = coalesce_chunks(body)
        length = limit if length is None else length
    json_bytes = parsed.json_bytes
    if json_bytes is not None and json_bytes > length:
        raise header_length_error(str(json_bytes), f"the body has at most {length} bytes")
    if not rule.has_tensors:
        json_bytes = None  # Triton parses the whole body as JSON
    elif step is None:
        step = find_sequence_step(first, json_bytes)
    if "POST" in rule.methods:
        guard = JsonGuard(
            length, json_bytes, has_tensors=rule.has_tensors, key_limits=rule.key_limits
        )
        signature = partial(
            services.models.get_signature, path_params["model"], path_params["version"]
        )
        body = await guard_body(body, guard, signature)
    return body, step


async def wait_for_admission(
    admission: AdmissionQueue, model: str, timeout_s: float, caller: str
) -> float:
    """Wait for a slot, and return the remaining time in seconds."""
    started = perf_counter()
    await admission.acquire(model, timeout_s, caller)
    return timeout_s - (perf_counter() - started)


def find_route_rule(path: str, method: str) -> tuple[RouteRule, dict[str, str]]:
    return (match_route_rule_cached if len(path) <= MAX_CACHED_PATH_LENGTH else match_route_rule)(
        path, method
    )


def match_route_rule(path: str, method: str) -> tuple[RouteRule, dict[str, str]]:
    """Return the rule and the path's parameters. Raises `NotFound`, `Forbidden` or `MethodNotAllowed`."""
    for rule in ROUTE_RULES:
        if match := rule.pattern.fullmatch(path):
            if rule.refusal_message:
                raise Forbidden(rule.refusal_message)
            if method not in rule.methods:
                raise MethodNotAllowed(rule.methods)
            return rule, parse_path_params(match)
    raise NotFound("path not found in Triton's API; for the available paths, see GET /docs")


def parse_path_params(match: re.Match[str]) -> dict[str, str]:
    """Return the model, the normalized version, the path with that version if it differs, and the route.

    Raises `UnknownModel`.
    """
    names = EMPTY_PATH_PARAMS | match.groupdict("") | {"route": route_template(match)}
    if not names["version"]:
        return names
    version = normalize_version(names["version"])
    if version is None:
        raise UnknownModel(names["model"], names["version"])
    if version != names["version"]:
        start, end = match.span("version")
        names["path"] = f"{match.string[:start]}{version}{match.string[end:]}"
    return names | {"version": version}


def route_template(match: re.Match[str]) -> str:
    """Return the path with placeholders: `{model}`, `{version}` and `{region}`.

    The rules fix the rest of the path, so that the number of routes is bounded: they are label values.
    """
    route = match.string
    present = [name for name, value in match.groupdict().items() if value is not None]
    for name in sorted(present, key=match.start, reverse=True):  # keeps the spans valid
        start, end = match.span(name)
        route = f"{route[:start]}{{{name}}}{route[end:]}"
    return route


match_route_rule_cached = lru_cache(1024)(match_route_rule)


class MethodNotAllowed(GatewayError):
    status, code = 405, "METHOD_NOT_ALLOWED"

    def __init__(self, methods: frozenset[str]) -> None:
        allowed = ", ".join(sorted(methods))
        super().__init__(f"this path supports only {allowed}", headers={"Allow": allowed})


def build_request_target(scope: Scope, path_params: dict[str, str]) -> bytes:
    path: bytes = path_params["path"].encode("latin-1") or scope["raw_path"]
    query: bytes = scope["query_string"]
    return b"%b?%b" % (path, query) if query else path


def add_management_headers(headers: Headers, management_headers: Headers) -> Headers:
    names = {name for name, _ in management_headers}
    return [*(header for header in headers if header[0] not in names), *management_headers]


def find_sequence_step(body: bytes, json_bytes: int | None) -> SequenceStep | None:
    """Return the sequence step in the JSON of an inference, or None if it is absent or incomplete.

    Triton reports invalid steps.
    """
    document = memoryview(body)[:json_bytes]
    if body.find(SEQUENCE_ID_KEY, 0, json_bytes) < 0 or len(document) > MAX_SEQUENCE_JSON_BYTES:
        return None
    try:
        document = orjson.loads(document)
        return parse_sequence_parameters(document["parameters"])
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, InputMismatch):
        return None


def build_start_message(response: UpstreamResponse, scope: Scope) -> Message:
    headers = [
        *filter_response_headers(response.headers),
        (b"x-request-id", scope["request_id"].encode()),
    ]
    return {"type": "http.response.start", "status": response.status, "headers": headers}


async def relay_response(
    response: UpstreamResponse, start: Message, scope: Scope
) -> AsyncIterator[Message]:
    """Yield the response as it arrives. The timeout applies to each chunk.

    The head is sent with the first chunk, so that a failure before it can still be an error response.
    """
    if scope["method"] == "HEAD":
        yield start
        yield {"type": "http.response.body"}
        return
    events = None
    if response.is_event_stream:
        events = EventStreamScrubber(sanitize_event)
        yield start
        yield {"type": "http.response.body", "more_body": True}  # sends the head immediately
    is_started = events is not None
    last = False
    info: RequestInfo = scope["request_info"]
    while not last:
        response.set_timeout(info.timeout_s)
        started = perf_counter()
        chunk = await response.next_chunk()
        info.upstream_s += perf_counter() - started
        last = response.is_complete
        if events is not None:
            chunk = events.feed(chunk) + (events.end() if last else b"")
        if not is_started:
            is_started = True
            yield start
        info.bytes_out += len(chunk)
        yield {"type": "http.response.body", "body": chunk, "more_body": not last}
