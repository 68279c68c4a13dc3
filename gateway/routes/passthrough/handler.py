"""The handler of `/v2`: rule, rights, body, slot, Triton, response."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Final

from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from gateway.access.auth import authorize_all_models
from gateway.callers import RIGHT_TO_MANAGE
from gateway.capacity.admission import Slot
from gateway.capacity.body_chunks import coalesce_chunks
from gateway.errors import (
    BodyTooLarge,
    GatewayError,
    ModelNotReady,
    UnknownModel,
    UrlTooLong,
    serialize_error,
)
from gateway.fleet.transports import HttpCall
from gateway.http_client.client import UpstreamResponse
from gateway.http_client.response import Headers
from gateway.media_types import JSON, escape_line_separators
from gateway.repository.resolver import ModelTarget
from gateway.routes.passthrough.body import (
    MIN_CHUNK_BYTES,
    PassthroughBody,
    PreparedBody,
    begin_body,
    buffer_body,
    count_buffered_bytes,
    find_sequence_step,
    guard_body,
    inflate_body,
)
from gateway.routes.passthrough.headers import (
    RequestHeaders,
    filter_response_headers,
    header_length_error,
    prepare_infer_headers,
    prepare_request_headers,
)
from gateway.routes.passthrough.rules import (
    FixedResponse,
    Forwarding,
    MatchedRoute,
    Statistics,
    find_route,
    is_passthrough,
)
from gateway.routes.passthrough.sse import EventStreamScrubber
from gateway.services import Services
from gateway.telemetry.request_info import RequestInfo, RequestScope, read_head
from gateway.triton.error_mapping import sanitize_event
from gateway.triton.request_target import RequestTarget

log = logging.getLogger(__name__)

# Triton accepts 8189, to which the dispatcher may add a version. It closes the connection of a longer one.
MAX_TARGET_BYTES: Final = 8100
VERSION_HEADER: Final = b"x-model-version"  # says which version a label chose


class PassThroughRoute(BaseRoute):
    """Triton's API, whose paths have rules of their own."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        is_match = scope["type"] == "http" and is_passthrough(scope["raw_path"])
        return Match.FULL if is_match else Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request to Triton, and send the response."""
        services: Services = scope["services"]
        model = ""
        version = ""
        info: RequestInfo = scope["request_info"]
        try:
            route = read_head(scope, find_route)
            action = route.action
            info.route = route.template
            model = route.model
            version = route.version
            target = resolve_target(services, scope, route)
            version = target.version
            if isinstance(action, FixedResponse):
                await Response(action.body, media_type=JSON)(scope, receive, send)
                return
            if isinstance(action, Statistics):
                document = await answer_statistics(services, scope, target)
                await document(scope, receive, send)
                return
            with Slot(services.admission, model, info) as slot:
                response = await forward_request(
                    services, scope, receive, route=route, action=action, target=target, slot=slot
                )
                try:
                    start = build_start_message(response)
                    info.model = model
                    info.version = target.served_version
                    if target.choice is not None:
                        start["headers"].append((VERSION_HEADER, info.version.encode()))
                    if response.is_complete and not response.is_event_stream:
                        await send(start)
                        await send({"type": "http.response.body", "body": response.take_buffered()})
                    else:
                        async for message in relay_response(response, start, scope):
                            await send(message)
                finally:
                    response.close()
        except GatewayError:
            services.record_model(info, model, version)
            raise


def resolve_target(services: Services, scope: Scope, route: MatchedRoute) -> ModelTarget:
    rule = route.rule
    model = route.model
    request_scope: RequestScope = scope  # type: ignore[assignment]  # typing.cast costs a call
    if rule.for_all_models:
        authorize_all_models(request_scope, rule.right)
        return ModelTarget(model)
    resolver = services.resolver
    if not route.version and not rule.has_default_version:
        resolver.check_access(
            request_scope, rule.right, model, not_found_error=rule.not_found_error
        )
        return ModelTarget(model)
    return resolver.resolve(request_scope, rule.right, model, route.version, rule.not_found_error)


async def answer_statistics(services: Services, scope: Scope, target: ModelTarget) -> Response:
    """Return the sum over the fleet or, with `?replica=`, the statistics of one replica."""
    requested = read_head(scope, prepare_request_headers).requested_timeout
    timeout_s = services.resolve_timeout_s(requested)
    upstream = RequestTarget(target.model, target.version, timeout_s)
    replica = QueryParams(scope["query_string"]).get("replica")
    if replica is None:
        document = await services.statistics.read(upstream)
    else:
        document = await services.statistics.read_replica(replica, upstream)
    services.record_model(scope["request_info"], target.model, target.version)
    headers = {} if target.choice is None else {VERSION_HEADER.decode(): target.version}
    return Response(document, headers=headers, media_type=JSON)


async def forward_request(
    services: Services,
    scope: Scope,
    receive: Receive,
    *,
    route: MatchedRoute,
    action: Forwarding,
    target: ModelTarget,
    slot: Slot,
) -> UpstreamResponse:
    """Return Triton's successful response; an inference takes the slot, which the caller releases."""
    rule = route.rule
    model = route.model
    info: RequestInfo = scope["request_info"]
    has_tensors = action.json_rules.has_tensors
    prepare_headers = prepare_infer_headers if has_tensors else prepare_request_headers
    headers = read_head(scope, prepare_headers)
    requested = headers.requested_timeout
    timeout_s = services.resolve_timeout_s(requested) if requested else services.default_timeout_s
    info.timeout_s = timeout_s
    remaining_s = timeout_s
    if action.can_activate and not services.pool.find_candidates(model, target.version).serving:
        remaining_s = await services.dispatcher.wait_for_model(model, target.version, timeout_s)
    if headers.expects_continue and action.is_inference:
        await check_model_exists(services, target)
    prepared = await prepare_body(services, scope, receive, headers=headers, action=action)
    step = headers.step
    searches_sequence = has_tensors and step is None
    if searches_sequence:
        step = find_sequence_step(prepared.beginning, headers.json_bytes)
    if "POST" in rule.methods:
        prepared = await guard_body(
            prepared,
            action.json_rules,
            headers.json_bytes,
            load_signature=partial(services.signatures.get_signature, model, target.version),
            turn=services.large_body_turn,
            searches_sequence=searches_sequence,
        )
    if step is not None:
        target = target.with_sequence(step)
    forwarded = prepared.headers
    if rule.right is RIGHT_TO_MANAGE:
        forwarded = add_management_headers(forwarded, services.management_headers)
    if action.is_inference:
        remaining_s = await slot.acquire(remaining_s)
    upstream = RequestTarget(  # named arguments would cost 1.5 µs
        model,
        target.version,
        remaining_s,
        action.is_health_check,
        step,
        rule.not_found_error,
        action.can_activate,
        target.choice,
    )
    call = build_call(scope, route, upstream, forwarded, prepared.content)
    return await services.dispatcher.send(call, remaining_s)


async def check_model_exists(services: Services, target: ModelTarget) -> None:
    """Raise the error of a model that cannot run, instead of asking the client for the body in vain."""
    if services.pool.is_listed(target.model, target.version):
        return
    try:
        await services.signatures.get_signature(target.model, target.version)
    except (UnknownModel, ModelNotReady):
        raise
    except GatewayError:  # Triton decides
        return


def build_call(
    scope: Scope,
    route: MatchedRoute,
    upstream: RequestTarget,
    headers: Headers,
    content: PassthroughBody,
) -> HttpCall:
    method = scope["method"].encode()
    query: bytes = scope["query_string"]
    path = route.path_for_version(upstream.version)
    if query:
        path = b"%b?%b" % (path, query)
    if len(path) > MAX_TARGET_BYTES:
        raise UrlTooLong(MAX_TARGET_BYTES)
    return HttpCall(upstream, method, path, headers, content)


async def prepare_body(
    services: Services,
    scope: Scope,
    receive: Receive,
    *,
    headers: RequestHeaders,
    action: Forwarding,
) -> PreparedBody:
    """Receive the body, or its beginning. Compressed bodies are inflated, small chunks joined."""
    limit = services.settings.max_body_bytes
    info: RequestInfo = scope["request_info"]
    if headers.content_length is not None and headers.content_length > limit:
        raise BodyTooLarge(limit)
    started_at = perf_counter()
    message = await receive()
    if message.get("more_body", False):
        message = await buffer_body(message, receive, count_buffered_bytes(headers, action))
        info.add_phase("receive", perf_counter() - started_at)
    prepared = begin_body(message, receive, headers, limit, info)
    if headers.content_encoding:
        charge = services.get_charge(info)
        prepared = await inflate_body(
            prepared, headers.content_encoding, limit=limit, charge=charge
        )
    if not isinstance(prepared.content, bytes):
        chunks = coalesce_chunks(prepared.content, MIN_CHUNK_BYTES)
        prepared = replace(prepared, content=chunks)
    json_bytes = headers.json_bytes
    if json_bytes is not None and json_bytes > prepared.max_bytes:
        reason = f"the body has at most {prepared.max_bytes} bytes"
        raise header_length_error(str(json_bytes), reason)
    return prepared


def add_management_headers(headers: Headers, management_headers: Headers) -> Headers:
    names = {name for name, _ in management_headers}
    return [*(header for header in headers if header[0] not in names), *management_headers]


def build_start_message(response: UpstreamResponse) -> Message:
    error = response.first_error
    headers = filter_response_headers(response.headers)
    status = response.status if error is None else error.triton_status or error.status
    return {"type": "http.response.start", "status": status, "headers": headers}


async def relay_response(
    response: UpstreamResponse, start: Message, scope: Scope
) -> AsyncIterator[Message]:
    """Yield the response as it arrives. The timeout applies to each chunk.

    The head is sent with the first chunk, so that a failure before it can still be an error response.
    """
    info: RequestInfo = scope["request_info"]
    events = None
    if response.is_event_stream:
        events = EventStreamScrubber(sanitize_event)
        first = b""
        if (error := response.first_error) is not None:
            info.error_code = error.code
            start["headers"] += encode_headers(error.headers or {})
            document = serialize_error(error.detail, error.code, scope["request_id"])
            first = b"data: %b\n\n" % escape_line_separators(document)
        yield start
        # Even an empty body sends the head immediately.
        yield {"type": "http.response.body", "body": first, "more_body": True}
    is_started = events is not None
    last = False
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
        yield {"type": "http.response.body", "body": chunk, "more_body": not last}


def encode_headers(headers: Mapping[str, str]) -> Headers:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]
