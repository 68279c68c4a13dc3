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

from gateway.auth import admit, admit_to_all
from gateway.context import Notes
from gateway.errors import (
    BodyTooLarge,
    DoesNotFit,
    Forbidden,
    GatewayError,
    NotFound,
    UnknownModel,
    UnknownModelToTrace,
    render,
)
from gateway.keys import Right
from gateway.limits import Gate
from gateway.metrics import CLIENT_LEFT
from gateway.names import normalized_version
from gateway.routes.bodies import WINDOWS
from gateway.routes.forwarding import Wishes, header_length_error, relayed_headers, sent_on
from gateway.routes.inspection import Body, body_of, gathered, in_large_pieces, plain, screened
from gateway.routes.services import Services
from gateway.sse import ScrubbedErrors
from gateway.tensors.payload import JSON
from gateway.tensors.sequence import Step, from_parameters
from gateway.triton.complaints import Asked, scrubbed_event
from gateway.triton.http import Answer
from gateway.triton.screening import GENERATE_KEYS, INFER_KEYS, JsonScreening, KeyLimits
from gateway.triton.wire import Headers

log = logging.getLogger(__name__)

MEMORY = "/v2/(?:system|cuda)sharedmemory"
REGION = "(?:/region/(?P<region>[^/]+))?"
MODEL = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
USUAL_LENGTH = 256
GATHERED_BYTES = 64 * 1024
NAMES_A_SEQUENCE = b'"sequence_id"'
MOST_STEP_BYTES = 128 * 1024  # of the JSON that is parsed to find it
OF_THE_FLEET = frozenset((b"/v2/models", b"/v2/health/ready"))
NO_NAMES = {"model": "", "version": "", "path": "", "route": ""}


@dataclass(frozen=True)
class Rule:
    """What happens to the paths that match: passed for who has the right, answered here, or refused."""

    path: re.Pattern[str]
    methods: frozenset[str]
    right: Right = Right.infer
    of_all: bool = False  # it concerns every model
    refusal: str = ""
    answer: bytes | None = None  # the gateway's own, in place of Triton's
    health: bool = False
    inference: bool = False  # counts against the limits
    tensors: bool = False  # its body says what shapes they have
    keys: KeyLimits = GENERATE_KEYS  # of its JSON
    unknown: type[UnknownModel] = UnknownModel  # the error for a model that is not found


def rule(path: str, methods: str, **more: Any) -> Rule:
    return Rule(re.compile(path), frozenset(methods.split()), **more)


SHARED_MEMORY = "shared memory cannot be used through the gateway; send the tensors in the body"
RULES = (
    rule("/v2/models/stats", "GET HEAD", of_all=True),  # and not a model called stats
    rule(f"{MODEL}/infer", "POST", inference=True, tensors=True, keys=INFER_KEYS),
    rule(f"{MODEL}/(generate|generate_stream)", "POST", inference=True),
    rule(f"{MODEL}/ready", "GET HEAD", health=True),
    rule(f"{MODEL}(/config|/stats)?", "GET HEAD"),
    rule("/v2/health/live", "GET HEAD", health=True),
    rule("/v2", "GET HEAD"),
    # Many clients look, and clean up, before they do anything else. Nothing is ever registered.
    rule(f"{MEMORY}{REGION}/status", "GET HEAD", answer=b"[]"),
    rule(f"{MEMORY}{REGION}/unregister", "POST", answer=b""),
    rule(f"{MEMORY}(/.*)?", "GET HEAD POST", refusal=SHARED_MEMORY),
    rule("/v2/(logging|trace/setting)", "GET HEAD POST", right=Right.manage, of_all=True),
    rule(
        f"{MODEL}/trace/setting",
        "GET HEAD POST",
        right=Right.manage,
        unknown=UnknownModelToTrace,
    ),
)


def is_passed(raw_path: bytes) -> bool:
    """Under `/v2`, but not what the gateway answers for the fleet. Triton does not decode paths: neither
    do we."""
    if raw_path[:4] not in (b"/v2", b"/v2/"):
        return False
    return not raw_path.startswith(b"/v2/repository") and raw_path not in OF_THE_FLEET


async def pass_through(services: Services, scope: Scope, receive: Receive, send: Send) -> int:
    """Answer a request from Triton; its status. Every failure is answered as well."""
    status = 0
    names = NO_NAMES
    notes: Notes = scope["notes"]
    try:
        rule, names = look_up(scope["raw_path"].decode("latin-1"), scope["method"])
        notes.route = names["route"]
        if rule.of_all:
            admit_to_all(scope, rule.right)
        else:
            admit(scope, rule.right, names["model"], names["version"], rule.unknown)
        if rule.answer is not None:
            return await send_own(Response(rule.answer, media_type=JSON), scope, receive, send)
        answer = await asked(services, scope, receive, rule, names)
        try:
            notes.model, notes.version = names["model"], names["version"]
            start = start_of(answer, scope)
            if answer.complete and not answer.is_event_stream and scope["method"] != "HEAD":
                status = answer.status
                await send(start)
                rest = answer.rest()
                notes.bytes_out = len(rest)
                await send({"type": "http.response.body", "body": rest})
            else:
                async for message in relayed(answer, start, scope):
                    status = answer.status
                    await send(message)
        finally:
            answer.close()
            if rule.inference:
                services.gate.leave(names["model"])
    except ClientDisconnect:
        return CLIENT_LEFT
    except Exception as exc:  # noqa: BLE001 - the border of the process: everything is answered
        if status:
            # An answer that is cut off must look like one: the server closes the connection.
            log.warning("an answer was cut off: %s", exc)
            return status
        if services.pool.knows(names["model"], names["version"]):
            notes.model, notes.version = names["model"], names["version"]
        return await send_own(await render(Request(scope, receive), exc), scope, receive, send)
    return status


async def send_own(response: Response, scope: Scope, receive: Receive, send: Send) -> int:
    """Send an answer that is not Triton's, and return its status."""
    notes: Notes = scope["notes"]
    notes.bytes_out = len(response.body)
    response.headers["x-request-id"] = scope["request_id"]
    response.headers["x-content-type-options"] = "nosniff"
    await response(scope, receive, send)
    return response.status_code


async def asked(
    services: Services, scope: Scope, receive: Receive, rule: Rule, names: dict[str, str]
) -> Answer:
    """Triton's answer, a success; and for an inference its place, which is the caller's to give back."""
    notes: Notes = scope["notes"]
    headers, wishes = sent_on(scope["headers"])
    asked_s = wishes.timeout
    timeout_s = services.timeout_s(asked_s) if asked_s else services.usual_timeout_s
    notes.timeout_s = timeout_s
    body, step = await body_and_step(services, scope, receive, rule, names, headers, wishes)
    model = names["model"]
    if rule.right is Right.manage:
        headers = with_management_headers(headers, services.management_headers)
    if rule.inference and not services.gate.enters(model):
        timeout_s = await waited(services.gate, model, timeout_s, notes.key)
    whom = Asked(model, names["version"], timeout_s, rule.health, step, rule.unknown)
    # Triton answers HEAD with a body, which would be read as the next answer.
    method = b"GET" if scope["method"] == "HEAD" else scope["method"].encode()
    try:
        return await services.pool.send(whom, method, target_of(scope, names), headers, body)
    except BaseException:
        if rule.inference:
            services.gate.leave(model)
        raise


async def body_and_step(
    services: Services,
    scope: Scope,
    receive: Receive,
    rule: Rule,
    names: dict[str, str],
    headers: Headers,
    wishes: Wishes,
) -> tuple[Body, Step | None]:
    """The body for Triton, with `headers` that frame it, and the step of a sequence that it is."""
    length, encoding, step = wishes.length, wishes.encoding, wishes.step
    limit = services.settings.max_body_bytes
    if length is not None and length > limit:
        raise BodyTooLarge(limit)
    message: Message = await receive()
    if length is not None and length <= GATHERED_BYTES and message.get("more_body", False):
        message = await gathered(message, receive)
    first: bytes = b"" if encoding in WINDOWS else message.get("body", b"")
    body = body_of(message, receive, headers, length, limit, scope["notes"])
    if encoding in WINDOWS:
        length = None
        body = await plain(body, encoding, limit, headers)
    elif encoding:
        headers[:] = [header for header in headers if header[0] != b"content-encoding"]
    if isinstance(body, bytes):
        first, length = body, len(body)
    else:
        body = in_large_pieces(body)
        length = limit if length is None else length
    json_bytes = wishes.json_bytes
    if json_bytes is not None and json_bytes > length:
        raise header_length_error(str(json_bytes), f"the body has {length} bytes at most")
    if not rule.tensors:
        json_bytes = None  # Triton takes all of it for JSON
    elif step is None:
        step = step_in(first, json_bytes)
    if "POST" in rule.methods:
        screening = JsonScreening(length, json_bytes, tensors=rule.tensors, keys=rule.keys)
        signature = partial(services.models.signature, names["model"], names["version"])
        body = await screened(body, screening, signature)
    return body, step


async def waited(gate: Gate, model: str, timeout_s: float, caller: str) -> float:
    """Wait for a place; what is left of the time then."""
    began = perf_counter()
    await gate.enter(model, timeout_s, caller)
    return timeout_s - (perf_counter() - began)


def look_up(path: str, method: str) -> tuple[Rule, dict[str, str]]:
    """As below; the usual paths are looked up once."""
    return (usual if len(path) <= USUAL_LENGTH else found)(path, method)


def found(path: str, method: str) -> tuple[Rule, dict[str, str]]:
    """The rule for this path and method, with model and version. Raises `NotFound`, `Forbidden` or 405."""
    for row in RULES:
        if match := row.path.fullmatch(path):
            if row.refusal:
                raise Forbidden(row.refusal)
            if method not in row.methods:
                raise WrongMethod(row.methods)
            return row, names_in(match)
    raise NotFound("Triton's API has nothing at this path; GET /docs shows what there is")


def names_in(match: re.Match[str]) -> dict[str, str]:
    """Return model and version as they stand in the path, the path with the version as Triton writes it, and
    the route: the path with placeholders for model and version.

    Raises `UnknownModel`.
    """
    names = NO_NAMES | match.groupdict("") | {"route": route_template(match)}
    if not names["version"]:
        return names
    version = normalized_version(names["version"])
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


usual = lru_cache(1024)(found)


class WrongMethod(GatewayError):
    status, code = 405, "METHOD_NOT_ALLOWED"

    def __init__(self, methods: frozenset[str]) -> None:
        allowed = ", ".join(sorted(methods))
        super().__init__(f"this path takes {allowed}", headers={"Allow": allowed})


def target_of(scope: Scope, names: dict[str, str]) -> bytes:
    """Path and query as the client wrote them, but for a version that can be written in several ways."""
    path: bytes = names["path"].encode("latin-1") or scope["raw_path"]
    query: bytes = scope["query_string"]
    return b"%b?%b" % (path, query) if query else path


def with_management_headers(headers: Headers, added: Headers) -> Headers:
    """The headers with those that open Triton's management APIs; a client's own of that name are dropped."""
    names = {name for name, _ in added}
    return [*(header for header in headers if header[0] not in names), *added]


def step_in(body: bytes, json_bytes: int | None) -> Step | None:
    """The step of a sequence that the JSON of an inference names, where all of that has come. Whether it
    is a good one is Triton's to say."""
    document = memoryview(body)[:json_bytes]
    if body.find(NAMES_A_SEQUENCE, 0, json_bytes) < 0 or len(document) > MOST_STEP_BYTES:
        return None
    try:
        document = orjson.loads(document)
        return from_parameters(document["parameters"])
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, DoesNotFit):
        return None


def start_of(answer: Answer, scope: Scope) -> Message:
    headers = [*relayed_headers(answer.headers), (b"x-request-id", scope["request_id"].encode())]
    return {"type": "http.response.start", "status": answer.status, "headers": headers}


async def relayed(answer: Answer, start: Message, scope: Scope) -> AsyncIterator[Message]:
    """The answer as it comes; each piece may take as long as its beginning might have.

    The head goes with the first piece: an answer that never has one is none.
    """
    if scope["method"] == "HEAD":
        yield start
        yield {"type": "http.response.body"}
        return
    events = None
    if answer.is_event_stream:
        events = ScrubbedErrors(scrubbed_event)
        yield start
        yield {"type": "http.response.body", "more_body": True}  # the head goes ahead
    begun = events is not None
    last = False
    notes: Notes = scope["notes"]
    while not last:
        answer.allow(notes.timeout_s)
        began = perf_counter()
        chunk = await answer.next_chunk()
        notes.upstream_s += perf_counter() - began
        last = answer.complete
        if events is not None:
            chunk = events.feed(chunk) + (events.end() if last else b"")
        if not begun:
            begun = True
            yield start
        notes.bytes_out += len(chunk)
        yield {"type": "http.response.body", "body": chunk, "more_body": not last}
