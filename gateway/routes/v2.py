"""`/v2/**`: Triton's own HTTP API, passed on untouched. Raw ASGI: this is the path that must cost little.

What passes, what is refused and which headers end here are tables. Success flows through byte for
byte, in both directions as it comes; only Triton's errors are corrected and scrubbed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from time import perf_counter
from typing import Any, NamedTuple

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from gateway.auth import admit, admit_to_all
from gateway.context import Notes
from gateway.errors import (
    BodyTooLarge,
    DoesNotFit,
    Forbidden,
    GatewayError,
    Malformed,
    NotFound,
    render,
)
from gateway.keys import Right
from gateway.limits import Gate
from gateway.metrics import CLIENT_LEFT
from gateway.routes.bodies import WINDOWS, bounded
from gateway.routes.services import Services
from gateway.sse import ScrubbedErrors
from gateway.tensors.sequence import Step, from_headers, from_parameters
from gateway.tensors.signature import Signature
from gateway.triton.complaints import Asked, scrubbed_event
from gateway.triton.http import Answer
from gateway.triton.infer import without_classes
from gateway.triton.shapes import Shapes
from gateway.triton.wire import Headers

log = logging.getLogger(__name__)

MODEL = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
USUAL_LENGTH = 256
GATHERED_BYTES = 64 * 1024
NO_NAMES = {"model": "", "version": ""}


@dataclass(frozen=True)
class Rule:
    """What happens to the paths that match: passed for who has the right, or refused."""

    path: re.Pattern[str]
    methods: frozenset[str]
    right: Right = Right.infer
    of_all: bool = False  # it concerns every model
    refusal: str = ""
    health: bool = False
    inference: bool = False  # counts against the limits
    tensors: bool = False  # its body says what shapes they have


def rule(path: str, methods: str, **more: Any) -> Rule:
    return Rule(re.compile(path), frozenset(methods.split()), **more)


SHARED_MEMORY = "shared memory cannot be used through the gateway; send the tensors in the body"
RULES = (
    rule("/v2/models/stats", "GET HEAD", of_all=True),  # and not a model called stats
    rule(f"{MODEL}/infer", "POST", inference=True, tensors=True),
    rule(f"{MODEL}/(generate|generate_stream)", "POST", inference=True),
    rule(f"{MODEL}/ready", "GET HEAD", health=True),
    rule(f"{MODEL}(/config|/stats)?", "GET HEAD"),
    rule("/v2/health/(live|ready)", "GET HEAD", health=True),
    rule("/v2", "GET HEAD"),
    rule("/v2/(system|cuda)sharedmemory(/.*)?", "GET HEAD POST", refusal=SHARED_MEMORY),
    rule("/v2/(logging|trace/setting)", "GET HEAD POST", right=Right.manage, of_all=True),
    rule(f"{MODEL}/trace/setting", "GET HEAD POST", right=Right.manage),
)

# RFC 9110, section 7.6.1; and what is the gateway's own business.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"upgrade".split()
)
NOT_SENT_ON = HOP_BY_HOP | frozenset(
    b"host expect authorization x-api-key x-request-timeout x-sequence-id x-sequence".split()
)
OF_A_SEQUENCE = (b"x-sequence-id", b"x-sequence")
OF_THE_BODY = frozenset((b"content-encoding", b"inference-header-content-length"))
NOTHING: Headers = []
NO_SEQUENCE: dict[bytes, str] = {}
NAMES_A_SEQUENCE = b'"sequence_id"'
# A `Connection` that names these would cut the body loose.
FRAMING = frozenset((b"content-length", b"transfer-encoding"))
NOT_RELAYED = HOP_BY_HOP | frozenset((b"transfer-encoding",))


def is_passed(raw_path: bytes) -> bool:
    """Under `/v2`, but not the repository, which is ours. Triton does not decode paths: neither do we."""
    if raw_path[:4] not in (b"/v2", b"/v2/"):
        return False
    return not raw_path.startswith(b"/v2/repository") and raw_path != b"/v2/models"


async def pass_through(services: Services, scope: Scope, receive: Receive, send: Send) -> int:
    """Answer a request from Triton; its status. Every failure is answered as well."""
    status = 0
    names = NO_NAMES
    notes: Notes = scope["notes"]
    try:
        rule, names = look_up(scope["raw_path"].decode("latin-1"), scope["method"])
        if rule.of_all:
            admit_to_all(scope, rule.right)
        else:
            admit(scope, rule.right, names["model"], names["version"])
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
        response = await render(Request(scope, receive), exc)
        notes.bytes_out = len(response.body)
        response.headers["x-request-id"] = scope["request_id"]
        await response(scope, receive, send)
        return response.status_code
    return status


async def asked(
    services: Services, scope: Scope, receive: Receive, rule: Rule, names: dict[str, str]
) -> Answer:
    """Triton's answer, a success; and for an inference its place, which is the caller's to give back."""
    notes: Notes = scope["notes"]
    headers, wishes = sent_on(scope["headers"])
    length, asked_s, encoding = wishes.length, wishes.timeout, wishes.encoding
    limit = services.settings.max_body_bytes
    if length is not None and length > limit:
        raise BodyTooLarge(limit)
    timeout_s = services.timeout_s(asked_s) if asked_s else services.usual_timeout_s
    notes.timeout_s = timeout_s
    message: Message = await receive()
    if length is not None and length <= GATHERED_BYTES and message.get("more_body", False):
        message = await gathered(message, receive)
    step = wishes.step
    if rule.tensors and step is None:
        step = step_in(message.get("body", b""), wishes.json_bytes)
    body = body_of(message, receive, headers, length, limit)
    if rule.inference or encoding in WINDOWS:
        room = limit if length is None or encoding in WINDOWS else length
        shapes = Shapes(room, wishes.json_bytes if rule.inference else 0, tensors=rule.tensors)
        body = await looked_at(body, shapes, encoding, limit)
        signature = partial(services.models.signature, names["model"], names["version"])
        body = await with_classes_checked(body, shapes, wishes, signature)
    if isinstance(body, bytes):
        notes.bytes_in = len(body)
    else:
        body = counted(body, notes)
    model = names["model"]
    if rule.right is Right.manage:
        headers = with_management_headers(headers, services.management_headers)
    if rule.inference and not services.gate.enters(model):
        timeout_s = await waited(services.gate, model, timeout_s, notes.key)
    whom = Asked(model, names["version"], timeout_s, rule.health, step)
    # Triton answers HEAD with a body, which would be read as the next answer.
    method = b"GET" if scope["method"] == "HEAD" else scope["method"].encode()
    try:
        return await services.pool.send(whom, method, target_of(scope), headers, body)
    except BaseException:
        if rule.inference:
            services.gate.leave(model)
        raise


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
            return row, NO_NAMES | match.groupdict("")
    raise NotFound("Triton's API has nothing at this path; GET /docs shows what there is")


usual = lru_cache(1024)(found)


class WrongMethod(GatewayError):
    status, code = 405, "METHOD_NOT_ALLOWED"

    def __init__(self, methods: frozenset[str]) -> None:
        allowed = ", ".join(sorted(methods))
        super().__init__(f"this path takes {allowed}", headers={"Allow": allowed})


def target_of(scope: Scope) -> bytes:
    """Path and query as the client wrote them."""
    path: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    return b"%b?%b" % (path, query) if query else path


class Wishes(NamedTuple):
    """What the headers say of a request."""

    timeout: str | None  # that the client asks for
    length: int | None  # of the body
    encoding: str = ""  # of the body
    json_bytes: int | None = (
        None  # of the body, before what is binary; None where all of it is JSON
    )
    step: Step | None = None  # of a sequence


def sent_on(headers: Headers) -> tuple[Headers, Wishes]:
    """The headers for Triton, and what they say."""
    kept: Headers = []
    named: list[bytes] = []
    timeout: str | None = None
    length: int | None = None
    described: Headers = NOTHING
    sequence: dict[bytes, str] = NO_SEQUENCE
    for header in headers:
        name = header[0]
        if name == b"content-length":
            length = int(header[1])
        elif name in NOT_SENT_ON:
            if name == b"connection":
                named += (token.strip().lower() for token in header[1].split(b","))
            elif name == b"x-request-timeout":
                timeout = header[1].decode("latin-1")
            elif name in OF_A_SEQUENCE:
                sequence = {**sequence, name: header[1].decode("latin-1")}
            continue
        elif name in OF_THE_BODY:
            described = [*described, header]
        kept.append(header)
    if named:
        dropped = set(named) - FRAMING
        kept = [header for header in kept if header[0] not in dropped]
    step = from_headers(*map(sequence.get, OF_A_SEQUENCE)) if sequence else None
    if not described:
        return kept, Wishes(timeout, length, step=step)
    return kept, Wishes(timeout, length, *described_by(described), step)


def with_management_headers(headers: Headers, added: Headers) -> Headers:
    """The headers with those that open Triton's management APIs; a client's own of that name are dropped."""
    names = {name for name, _ in added}
    return [*(header for header in headers if header[0] not in names), *added]


def described_by(headers: Headers) -> tuple[str, int | None]:
    """How the body is compressed, and how much of it is JSON. Raises `Malformed`."""
    found = dict(headers)
    if len(found) < len(headers):
        raise Malformed(f"the request has more than one {headers[-1][0].decode().title()}")
    encoding = found.get(b"content-encoding", b"").decode("latin-1").strip().lower()
    json_bytes = found.get(b"inference-header-content-length", b"")
    return encoding, int(json_bytes) if json_bytes.isdigit() else None


def step_in(body: bytes, json_bytes: int | None) -> Step | None:
    """The step of a sequence that the JSON of an inference names, where all of that has come. Whether it
    is a good one is Triton's to say."""
    if body.find(NAMES_A_SEQUENCE, 0, json_bytes) < 0:
        return None
    try:
        document = orjson.loads(memoryview(body)[:json_bytes])
        return from_parameters(document["parameters"])
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, DoesNotFit):
        return None


def body_of(
    message: Message, receive: Receive, headers: Headers, length: int | None, limit: int
) -> bytes | AsyncIterator[bytes]:
    """The body whole when it came at once, else as it comes."""
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    first: bytes = message.get("body", b"")
    if message.get("more_body", False):
        return streamed(first, receive, limit)
    if length is not None and len(first) != length:
        raise Malformed(f"the body has {len(first)} bytes, and its Content-Length says {length}")
    if length is None:
        headers[:] = [header for header in headers if header[0] != b"transfer-encoding"]
        headers.append((b"content-length", b"%d" % len(first)))
    if len(first) > limit:
        raise BodyTooLarge(limit)
    return first


async def gathered(message: Message, receive: Receive) -> Message:
    """A small body whole: one that trickles is to hold neither a place nor a connection to Triton."""
    pieces: list[bytes] = []
    while message["type"] == "http.request":
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return {"type": "http.request", "body": b"".join(pieces)}
        message = await receive()
    raise ClientDisconnect


async def streamed(first: bytes, receive: Receive, limit: int) -> AsyncIterator[bytes]:
    length = len(first)
    yield first
    more = True
    while more:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        data: bytes = message.get("body", b"")
        length += len(data)
        if length > limit:
            raise BodyTooLarge(limit)
        more = message.get("more_body", False)
        yield data


async def counted(body: AsyncIterator[bytes], notes: Notes) -> AsyncIterator[bytes]:
    async for data in body:
        notes.bytes_in += len(data)
        yield data


async def looked_at(
    body: bytes | AsyncIterator[bytes], shapes: Shapes, encoding: str, limit: int
) -> bytes | AsyncIterator[bytes]:
    """The same, looked at before Triton believes its shapes, or inflates it without a limit."""
    if encoding not in WINDOWS:
        if isinstance(body, bytes):
            shapes.feed(body)
            return body
        return looked_through(body, shapes)
    if not isinstance(body, bytes):
        return bounded(body, WINDOWS[encoding], limit, shapes.feed)
    async for _ in bounded(whole(body), WINDOWS[encoding], limit, shapes.feed):
        pass
    return body


async def looked_through(body: AsyncIterator[bytes], shapes: Shapes) -> AsyncIterator[bytes]:
    async for data in body:
        shapes.feed(data)
        yield data


async def with_classes_checked(
    body: bytes | AsyncIterator[bytes],
    shapes: Shapes,
    wishes: Wishes,
    signature: Callable[[], Awaitable[Signature]],
) -> bytes | AsyncIterator[bytes]:
    if not isinstance(body, bytes):
        return classes_checked(body, shapes, signature)
    if shapes.asks_for_classes:
        document = b"" if wishes.encoding in WINDOWS else body[: wishes.json_bytes]
        check_classes(await signature(), outputs_with_classes(document))
    return body


async def classes_checked(
    body: AsyncIterator[bytes], shapes: Shapes, signature: Callable[[], Awaitable[Signature]]
) -> AsyncIterator[bytes]:
    """Of which outputs is not known before the end: none of them may be one that has no classes."""
    checked = False
    async for data in body:
        if shapes.asks_for_classes and not checked:
            checked = True
            check_classes(await signature(), None)
        yield data


def check_classes(model: Signature, named: list[str] | None) -> None:
    """Of any output, where it cannot be said of which. Raises `DoesNotFit`."""
    names = list(model.outputs) if named is None else named
    if names:
        without_classes(model, names)


def outputs_with_classes(body: bytes) -> list[str] | None:
    """The outputs of which the JSON of an inference wants classes; None where it can be read in two ways."""
    try:
        outputs = json.loads(body, object_pairs_hook=unambiguous)["outputs"]
        return [each["name"] for each in outputs if "classification" in each.get("parameters", {})]
    except KeyError:
        return []  # it names no outputs
    except (ValueError, RecursionError, TypeError, AttributeError):
        return None


def unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


async def whole(body: bytes) -> AsyncIterator[bytes]:
    yield body


def start_of(answer: Answer, scope: Scope) -> Message:
    """The answer's head, without what concerns the replica's connection only."""
    kept = [header for header in answer.headers if header[0] not in NOT_RELAYED]
    if len(kept) < len(answer.headers):
        named = {
            token.strip().lower()
            for name, value in answer.headers
            if name == b"connection"
            for token in value.split(b",")
        }
        kept = [header for header in kept if header[0] not in named - FRAMING]
    kept.append((b"x-request-id", scope["request_id"].encode()))
    return {"type": "http.response.start", "status": answer.status, "headers": kept}


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
