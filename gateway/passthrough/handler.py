"""The handler of `/v2`: rule, rights, body, slot, Triton, response."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from functools import partial
from time import perf_counter
from typing import Final

from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.access.auth import authorize_all_models
from gateway.callers import Right
from gateway.capacity.admission import Slot
from gateway.capacity.body_chunks import coalesce_chunks
from gateway.error_responses import render_error
from gateway.errors import (
    BodyTooLarge,
    GatewayError,
    InputMismatch,
    MalformedRequest,
    RefusedByModel,
    serialize_error,
)
from gateway.fleet.transports import HttpCall
from gateway.http_client.client import UpstreamResponse
from gateway.http_client.connection import Headers
from gateway.media_types import JSON
from gateway.passthrough.body import (
    MAX_SEQUENCE_JSON_BYTES,
    MIN_CHUNK_BYTES,
    PassthroughBody,
    buffer_body,
    build_passthrough_body,
    count_buffered_bytes,
    find_sequence_step,
    guard_body,
    inflate_body,
)
from gateway.passthrough.headers import (
    RequestHeaders,
    filter_response_headers,
    header_length_error,
    prepare_infer_headers,
    prepare_request_headers,
)
from gateway.passthrough.rules import (
    FixedResponse,
    Forwarding,
    MatchedRoute,
    Statistics,
    change_version_cached,
    find_route,
)
from gateway.passthrough.sse import EventStreamScrubber
from gateway.repository.resolver import NO_MODEL, ModelTarget
from gateway.services import Services
from gateway.telemetry.metrics import CLIENT_CLOSED_REQUEST
from gateway.telemetry.request_info import RequestInfo, read_head
from gateway.tensors.sequence import SequenceStep
from gateway.triton.error_mapping import sanitize_event
from gateway.triton.request_target import RequestTarget

log = logging.getLogger(__name__)

VERSION_HEADER: Final = b"x-model-version"  # of responses whose version a label decided


async def pass_through(services: Services, scope: Scope, receive: Receive, send: Send) -> int:
    """Forward a request to Triton and send the response, or an error. Returns the status."""
    status = 0
    target = NO_MODEL
    info: RequestInfo = scope["request_info"]
    try:
        route = read_head(scope, find_route)
        action = route.action
        info.route = route.template
        target = ModelTarget(route.model, route.version)
        target = resolve_target(services, scope, route)
        if isinstance(action, FixedResponse):
            fixed = Response(action.body, media_type=JSON)
            return await send_own_response(fixed, scope, receive, send)
        if isinstance(action, Statistics):
            document = await answer_statistics(services, scope, target)
            return await send_own_response(document, scope, receive, send)
        slot = Slot(services.admission, target.model, info.caller_name)
        response = await forward_request(services, scope, receive, route, action, target, slot)
        try:
            start = build_start_message(response, scope)
            info.model = target.model
            info.version = target.served_version
            if (choice := target.choice) is not None:
                start["headers"].append((VERSION_HEADER, info.version.encode()))
                send = choice.watch_response(send, info.request_id)
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
            slot.release()
    except ClientDisconnect:
        return CLIENT_CLOSED_REQUEST
    except Exception as exc:  # noqa: BLE001 - the border of the process: every request gets a response
        if status:
            # The response has started: the server closes the connection, so that clients see the error.
            log.warning("the response was aborted: %s", exc)
            return status
        services.record_model(info, target.model, target.version)
        error = await render_v2_error(Request(scope, receive), exc)
        return await send_own_response(error, scope, receive, send)
    return status


async def render_v2_error(request: Request, exc: Exception) -> Response:
    response = await render_error(request, exc)
    if isinstance(exc, GatewayError):
        response.status_code = find_status(exc)
    return response


def find_status(error: GatewayError) -> int:
    """Return the status of an error. Triton has 400 for whatever does not fit the model."""
    does_not_fit = isinstance(error, (InputMismatch, RefusedByModel))
    return MalformedRequest.status if does_not_fit else error.status


def resolve_target(services: Services, scope: Scope, route: MatchedRoute) -> ModelTarget:
    rule = route.rule
    model = route.model
    if rule.for_all_models:
        authorize_all_models(scope, rule.right)
        return ModelTarget(model)
    target = services.resolver.resolve(
        scope, rule.right, model, route.version, rule.not_found_error
    )
    return target if route.version or rule.has_default_version else ModelTarget(model)


async def answer_statistics(services: Services, scope: Scope, target: ModelTarget) -> Response:
    """Return the sum over the fleet or, with `?replica=`, what one replica says."""
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
    route: MatchedRoute,
    action: Forwarding,
    target: ModelTarget,
    slot: Slot,
) -> UpstreamResponse:
    """Return Triton's successful response. For an inference, the caller must release the slot."""
    rule = route.rule
    model = route.model
    info: RequestInfo = scope["request_info"]
    has_tensors = action.json_rules.has_tensors
    prepare_headers = prepare_infer_headers if has_tensors else prepare_request_headers
    headers = read_head(scope, prepare_headers)
    requested = headers.requested_timeout
    timeout_s = services.resolve_timeout_s(requested) if requested else services.default_timeout_s
    info.timeout_s = timeout_s
    if action.can_activate and services.pool.activator is not None:
        timeout_s = await services.activate_model(model, target.version, timeout_s)
    forwarded, body, step = await prepare_body(
        services, scope, receive, route, action, headers, target.version
    )
    if step is not None:
        target = target.with_sequence(step)
    if rule.right is Right.manage:
        forwarded = add_management_headers(forwarded, services.management_headers)
    if action.is_inference:
        timeout_s = await slot.acquire(timeout_s)
    upstream = RequestTarget(
        model,
        target.version,
        timeout_s,
        action.is_health_check,
        step,
        rule.not_found_error,
        action.can_activate,
        target.choice,
    )
    # Triton sends a body for HEAD, which would be read as the next response.
    method = b"GET" if scope["method"] == "HEAD" else scope["method"].encode()
    query: bytes = scope["query_string"]
    path = change_version_cached(route, target.version).path
    path = b"%b?%b" % (path, query) if query else path
    call = HttpCall(upstream, method, path, forwarded, body)
    if target.choice is not None and action.is_inference:
        call = target.choice.copy_http_call(call, has_tensors=has_tensors)
    try:
        return await services.dispatcher.send(call, timeout_s)
    except BaseException:
        slot.release()
        raise


async def prepare_body(
    services: Services,
    scope: Scope,
    receive: Receive,
    route: MatchedRoute,
    action: Forwarding,
    headers: RequestHeaders,
    version: str,
) -> tuple[Headers, PassthroughBody, SequenceStep | None]:
    """Return the headers for Triton with the framing of the body, the body, and its sequence step."""
    length = headers.content_length
    forwarded = headers.forwarded.copy()
    limit = services.settings.max_body_bytes
    if length is not None and length > limit:
        raise BodyTooLarge(limit)
    message: Message = await receive()
    if message.get("more_body", False):
        message = await buffer_body(message, receive, count_buffered_bytes(headers, action))
    first: bytes = message.get("body", b"")
    body = build_passthrough_body(message, receive, forwarded, length, limit, scope["request_info"])
    if headers.content_encoding:
        first = b""
        length = None
        charge = services.get_charge(scope["request_info"])
        body = await inflate_body(body, headers.content_encoding, limit, forwarded, charge)
    if isinstance(body, bytes):
        first = body
        length = len(body)
    else:
        body = coalesce_chunks(body, MIN_CHUNK_BYTES)
        length = limit if length is None else length
    json_bytes = headers.json_bytes
    step = headers.step
    if json_bytes is not None and json_bytes > length:
        raise header_length_error(str(json_bytes), f"the body has at most {length} bytes")
    refuses_sequence = False
    if action.json_rules.has_tensors and step is None:
        step = find_sequence_step(first, json_bytes)
        searched_bytes = min(len(first), MAX_SEQUENCE_JSON_BYTES)
        refuses_sequence = (length if json_bytes is None else json_bytes) > searched_bytes
    if "POST" in route.rule.methods:
        signature = partial(services.signatures.get_signature, route.model, version)
        body = await guard_body(
            body,
            action.json_rules,
            length,
            json_bytes,
            signature,
            services.large_body_turn,
            refuses_sequence=refuses_sequence,
        )
    return forwarded, body, step


def add_management_headers(headers: Headers, management_headers: Headers) -> Headers:
    names = {name for name, _ in management_headers}
    return [*(header for header in headers if header[0] not in names), *management_headers]


def build_start_message(response: UpstreamResponse, scope: Scope) -> Message:
    if response.first_error is not None:
        response.status = find_status(response.first_error)
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
    info: RequestInfo = scope["request_info"]
    events = None
    if response.is_event_stream:
        events = EventStreamScrubber(sanitize_event)
        first = b""
        if (error := response.first_error) is not None:
            start["headers"] += encode_headers(error.headers or {})
            first = b"data: %b\n\n" % serialize_error(error.detail, error.code, scope["request_id"])
        yield start
        info.bytes_out += len(first)
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
        info.bytes_out += len(chunk)
        yield {"type": "http.response.body", "body": chunk, "more_body": not last}


def encode_headers(headers: Mapping[str, str]) -> Headers:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


async def send_own_response(response: Response, scope: Scope, receive: Receive, send: Send) -> int:
    info: RequestInfo = scope["request_info"]
    info.bytes_out = len(response.body)
    response.headers["x-request-id"] = scope["request_id"]
    response.headers["x-content-type-options"] = "nosniff"
    await response(scope, receive, send)
    return response.status_code
