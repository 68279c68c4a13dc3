"""`/v2/**`: Triton's own HTTP API, passed on untouched. Raw ASGI: this is the path that must cost little.

What passes, what is refused and which headers end here are tables. Success flows through byte for
byte, in both directions as it comes; only Triton's errors are corrected and scrubbed.
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
from gateway.keys import Right
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
from gateway.routes.request_body import ZLIB_WBITS
from gateway.sse import EventStreamScrubber
from gateway.tensors.payload import JSON
from gateway.tensors.sequence import SequenceStep, parse_sequence_parameters
from gateway.triton.error_mapping import RequestTarget, sanitize_event
from gateway.triton.http.client import UpstreamResponse
from gateway.triton.http.connection import Headers
from gateway.triton.json_guard import GENERATE_KEY_LIMITS, INFER_KEY_LIMITS, JsonGuard, KeyLimits

log = logging.getLogger(__name__)

SHARED_MEMORY_PATTERN = "/v2/(?:system|cuda)sharedmemory"
REGION_PATTERN = "(?:/region/(?P<region>[^/]+))?"
MODEL_PATTERN = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
MAX_CACHED_PATH_LENGTH = 256
MAX_SMALL_BODY_BYTES = 64 * 1024
SEQUENCE_ID_KEY = b'"sequence_id"'
MAX_SEQUENCE_JSON_BYTES = 128 * 1024  # of the JSON that is parsed to find it
FLEET_PATHS = frozenset((b"/v2/models", b"/v2/health/ready"))
EMPTY_PATH_PARAMS = {"model": "", "version": "", "path": "", "route": ""}


@dataclass(frozen=True)
class RouteRule:
    """What happens to the paths that match: passed for who has the right, answered here, or refused."""

    pattern: re.Pattern[str]
    methods: frozenset[str]
    right: Right = Right.infer
    for_all_models: bool = False  # it concerns every model
    refusal_message: str = ""
    fixed_body: bytes | None = None  # the gateway's own, in place of Triton's
    is_health: bool = False
    is_inference: bool = False  # counts against the limits
    has_tensors: bool = False  # its body says what shapes they have
    key_limits: KeyLimits = GENERATE_KEY_LIMITS  # of its JSON
    not_found_error: type[UnknownModel] = UnknownModel  # the error for a model that is not found


def make_route_rule(path: str, methods: str, **options: Any) -> RouteRule:
    return RouteRule(re.compile(path), frozenset(methods.split()), **options)


SHARED_MEMORY_REFUSAL = (
    "shared memory cannot be used through the gateway; send the tensors in the body"
)
ROUTE_RULES = (
    make_route_rule(
        "/v2/models/stats", "GET HEAD", for_all_models=True
    ),  # and not a model called stats
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
    # Many clients look, and clean up, before they do anything else. Nothing is ever registered.
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
    """Under `/v2`, but not what the gateway answers for the fleet. Triton does not decode paths: neither
    do we."""
    if raw_path[:4] not in (b"/v2", b"/v2/"):
        return False
    return not raw_path.startswith(b"/v2/repository") and raw_path not in FLEET_PATHS


async def pass_through(services: Services, scope: Scope, receive: Receive, send: Send) -> int:
    """Answer a request from Triton; its status. Every failure is answered as well."""
    status = 0
    names = EMPTY_PATH_PARAMS
    notes: RequestInfo = scope["request_info"]
    try:
        rule, names = find_route_rule(scope["raw_path"].decode("latin-1"), scope["method"])
        notes.route = names["route"]
        if rule.for_all_models:
            authorize_all_models(scope, rule.right)
        else:
            authorize(scope, rule.right, names["model"], names["version"], rule.not_found_error)
        if rule.fixed_body is not None:
            return await send_own_response(
                Response(rule.fixed_body, media_type=JSON), scope, receive, send
            )
        answer = await forward_request(services, scope, receive, rule, names)
        try:
            notes.model, notes.version = names["model"], names["version"]
            start = build_start_message(answer, scope)
            if answer.is_complete and not answer.is_event_stream and scope["method"] != "HEAD":
                status = answer.status
                await send(start)
                rest = answer.take_buffered()
                notes.bytes_out = len(rest)
                await send({"type": "http.response.body", "body": rest})
            else:
                async for message in relay_response(answer, start, scope):
                    status = answer.status
                    await send(message)
        finally:
            answer.close()
            if rule.is_inference:
                services.admission.release(names["model"])
    except ClientDisconnect:
        return CLIENT_CLOSED_REQUEST
    except Exception as exc:  # noqa: BLE001 - the border of the process: everything is answered
        if status:
            # An answer that is cut off must look like one: the server closes the connection.
            log.warning("an answer was cut off: %s", exc)
            return status
        if services.pool.has_model(names["model"], names["version"]):
            notes.model, notes.version = names["model"], names["version"]
        return await send_own_response(
            await render_error(Request(scope, receive), exc), scope, receive, send
        )
    return status


async def send_own_response(response: Response, scope: Scope, receive: Receive, send: Send) -> int:
    """Send an answer that is not Triton's, and return its status."""
    notes: RequestInfo = scope["request_info"]
    notes.bytes_out = len(response.body)
    response.headers["x-request-id"] = scope["request_id"]
    response.headers["x-content-type-options"] = "nosniff"
    await response(scope, receive, send)
    return response.status_code


async def forward_request(
    services: Services, scope: Scope, receive: Receive, rule: RouteRule, path_params: dict[str, str]
) -> UpstreamResponse:
    """Triton's answer, a success; and for an inference its place, which is the caller's to give back."""
    notes: RequestInfo = scope["request_info"]
    headers, wishes = prepare_request_headers(scope["headers"])
    asked_s = wishes.requested_timeout
    timeout_s = services.resolve_timeout_s(asked_s) if asked_s else services.default_timeout_s
    notes.timeout_s = timeout_s
    body, step = await prepare_body(services, scope, receive, rule, path_params, headers, wishes)
    model = path_params["model"]
    if rule.right is Right.manage:
        headers = add_management_headers(headers, services.management_headers)
    if rule.is_inference and not services.admission.try_acquire(model):
        timeout_s = await wait_for_admission(services.admission, model, timeout_s, notes.key)
    whom = RequestTarget(
        model, path_params["version"], timeout_s, rule.is_health, step, rule.not_found_error
    )
    # Triton answers HEAD with a body, which would be read as the next answer.
    method = b"GET" if scope["method"] == "HEAD" else scope["method"].encode()
    try:
        return await services.pool.send(
            whom, method, build_request_target(scope, path_params), headers, body
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
    """The body for Triton, with `headers` that frame it, and the step of a sequence that it is."""
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
        raise header_length_error(str(json_bytes), f"the body has {length} bytes at most")
    if not rule.has_tensors:
        json_bytes = None  # Triton takes all of it for JSON
    elif step is None:
        step = find_sequence_step(first, json_bytes)
    if "POST" in rule.methods:
        screening = JsonGuard(
            length, json_bytes, has_tensors=rule.has_tensors, key_limits=rule.key_limits
        )
        signature = partial(
            services.models.get_signature, path_params["model"], path_params["version"]
        )
        body = await guard_body(body, screening, signature)
    return body, step


async def wait_for_admission(
    admission: AdmissionQueue, model: str, timeout_s: float, caller: str
) -> float:
    """Wait for a place; what is left of the time then."""
    began = perf_counter()
    await admission.acquire(model, timeout_s, caller)
    return timeout_s - (perf_counter() - began)


def find_route_rule(path: str, method: str) -> tuple[RouteRule, dict[str, str]]:
    """As below; the usual paths are looked up once."""
    return (match_route_rule_cached if len(path) <= MAX_CACHED_PATH_LENGTH else match_route_rule)(
        path, method
    )


def match_route_rule(path: str, method: str) -> tuple[RouteRule, dict[str, str]]:
    """The rule for this path and method, with model and version. Raises `NotFound`, `Forbidden` or 405."""
    for row in ROUTE_RULES:
        if match := row.pattern.fullmatch(path):
            if row.refusal_message:
                raise Forbidden(row.refusal_message)
            if method not in row.methods:
                raise MethodNotAllowed(row.methods)
            return row, parse_path_params(match)
    raise NotFound("Triton's API has nothing at this path; GET /docs shows what there is")


def parse_path_params(match: re.Match[str]) -> dict[str, str]:
    """Return model and version as they stand in the path, the path with the version as Triton writes it, and
    the route: the path with placeholders for model and version.

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
    """Return the path with `{model}`, `{version}` or `{region}` for what the client chose. The rest of a
    path that a rule lets through is fixed by the rule, so that there are few of these: they become label
    values."""
    route = match.string
    chosen = [name for name, value in match.groupdict().items() if value is not None]
    for name in sorted(chosen, key=match.start, reverse=True):  # so that the spans stay valid
        start, end = match.span(name)
        route = f"{route[:start]}{{{name}}}{route[end:]}"
    return route


match_route_rule_cached = lru_cache(1024)(match_route_rule)


class MethodNotAllowed(GatewayError):
    status, code = 405, "METHOD_NOT_ALLOWED"

    def __init__(self, methods: frozenset[str]) -> None:
        allowed = ", ".join(sorted(methods))
        super().__init__(f"this path takes {allowed}", headers={"Allow": allowed})


def build_request_target(scope: Scope, path_params: dict[str, str]) -> bytes:
    """Path and query as the client wrote them, but for a version that can be written in several ways."""
    path: bytes = path_params["path"].encode("latin-1") or scope["raw_path"]
    query: bytes = scope["query_string"]
    return b"%b?%b" % (path, query) if query else path


def add_management_headers(headers: Headers, management_headers: Headers) -> Headers:
    """The headers with those that open Triton's management APIs; a client's own of that name are dropped."""
    names = {name for name, _ in management_headers}
    return [*(header for header in headers if header[0] not in names), *management_headers]


def find_sequence_step(body: bytes, json_bytes: int | None) -> SequenceStep | None:
    """The step of a sequence that the JSON of an inference names, where all of that has come. Whether it
    is a good one is Triton's to say."""
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
    """The answer as it comes; each piece may take as long as its beginning might have.

    The head goes with the first piece: an answer that never has one is none.
    """
    if scope["method"] == "HEAD":
        yield start
        yield {"type": "http.response.body"}
        return
    events = None
    if response.is_event_stream:
        events = EventStreamScrubber(sanitize_event)
        yield start
        yield {"type": "http.response.body", "more_body": True}  # the head goes ahead
    begun = events is not None
    last = False
    notes: RequestInfo = scope["request_info"]
    while not last:
        response.set_timeout(notes.timeout_s)
        began = perf_counter()
        chunk = await response.next_chunk()
        notes.upstream_s += perf_counter() - began
        last = response.is_complete
        if events is not None:
            chunk = events.feed(chunk) + (events.end() if last else b"")
        if not begun:
            begun = True
            yield start
        notes.bytes_out += len(chunk)
        yield {"type": "http.response.body", "body": chunk, "more_body": not last}
