"""`/v2/**`: Triton's own HTTP API, passed on untouched. Raw ASGI: this is the path that must cost little.

What passes, what is refused and which headers end here are tables. Success flows through byte for
byte, in both directions as it comes; only Triton's errors are corrected and scrubbed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from gateway.auth import require_admin
from gateway.errors import (
    BodyTooLarge,
    Forbidden,
    GatewayError,
    NotFound,
    Unavailable,
    render,
)
from gateway.routes.services import Services
from gateway.triton.complaints import Asked, complaint
from gateway.triton.http import Answer, Headers

log = logging.getLogger(__name__)

MODEL = r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
OWN_PATHS = ("/v2/repository",)
MAX_ERROR_BYTES = 1 << 20


@dataclass(frozen=True)
class Rule:
    """What happens to the paths that match: passed, passed for an admin, or refused."""

    path: re.Pattern[str]
    methods: frozenset[str]
    admin: bool = False
    refusal: str = ""
    health: bool = False


def rule(
    path: str, methods: str, *, admin: bool = False, refusal: str = "", health: bool = False
) -> Rule:
    return Rule(re.compile(path), frozenset(methods.split()), admin, refusal, health)


SHARED_MEMORY = "shared memory cannot be used through the gateway; send the tensors in the body"
RULES = (
    rule(f"{MODEL}/(infer|generate|generate_stream)", "POST"),
    rule(f"{MODEL}/ready", "GET HEAD", health=True),
    rule(f"{MODEL}(/config|/stats)?", "GET HEAD"),
    rule("/v2/models/stats", "GET HEAD"),
    rule("/v2/health/(live|ready)", "GET HEAD", health=True),
    rule("/v2/?", "GET HEAD"),
    rule("/v2/(system|cuda)sharedmemory(/.*)?", "GET HEAD POST", refusal=SHARED_MEMORY),
    rule(f"(/v2/logging|/v2/trace/setting|{MODEL}/trace/setting)", "GET HEAD POST", admin=True),
)

# RFC 9110, section 7.6.1; and what is the gateway's own business.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-connection proxy-authenticate proxy-authorization te trailer "
    b"upgrade".split()
)
NOT_SENT_ON = HOP_BY_HOP | frozenset(
    b"host expect authorization x-api-key x-request-timeout".split()
)
NOT_RELAYED = HOP_BY_HOP | frozenset((b"transfer-encoding",))


class PassThrough:
    """Answers `/v2` itself, ahead of the framework; the rest, the repository included, is the app's."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not is_passed(scope["path"]):
            await self._app(scope, receive, send)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await pass_through(self._app.state.services, scope, receive, noted)
        except ClientDisconnect:
            return
        except Exception as exc:  # noqa: BLE001 - the border of the process: everything is answered
            if started:
                # An answer that is cut off must look like one: uvicorn closes the connection.
                log.warning("an answer was cut off: %s", exc)
                return
            request = Request(scope, receive)
            await (await render(request, exc))(scope, receive, send)


def is_passed(path: str) -> bool:
    return path.startswith("/v2") and not path.startswith(OWN_PATHS) and path[3:4] in ("", "/")


async def pass_through(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    allowed, names = look_up(scope)
    if allowed.admin:
        require_admin(scope)
    scope["route_name"] = "/v2"
    headers, asked_s, length = sent_on(scope["headers"])
    limit = services.settings.max_body_bytes
    if length is not None and length > limit:
        raise BodyTooLarge(limit)
    timeout_s = services.timeout_s(asked_s)
    body = await body_of(receive, headers, length, limit)
    answer = await services.fleet.choose().http.send(
        # Triton answers HEAD with a body, which would be read as the next answer.
        b"GET" if scope["method"] == "HEAD" else scope["method"].encode(),
        target_of(scope),
        headers,
        body,
        timeout_s=timeout_s,
    )
    try:
        if answer.status >= 400:
            asked = Asked(names.get("model") or "", names.get("version") or "", timeout_s)
            raise await corrected(answer, asked, health=allowed.health)
        await relay(answer, send, head_only=scope["method"] == "HEAD")
    finally:
        answer.close()


def look_up(scope: Scope) -> tuple[Rule, dict[str, str | None]]:
    """The rule for this path and method. Raises `NotFound`, `Forbidden` or 405."""
    path = scope["path"]
    for row in RULES:
        if match := row.path.fullmatch(path):
            if row.refusal:
                raise Forbidden(row.refusal)
            if scope["method"] not in row.methods:
                raise WrongMethod(row.methods)
            return row, match.groupdict()
    raise NotFound("Triton's API has nothing at this path; GET /docs shows what there is")


class WrongMethod(GatewayError):
    status, code = 405, "METHOD_NOT_ALLOWED"

    def __init__(self, methods: frozenset[str]) -> None:
        allowed = ", ".join(sorted(methods))
        super().__init__(f"this path takes {allowed}", headers={"Allow": allowed})


def target_of(scope: Scope) -> bytes:
    """Path and query as the client wrote them."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return b"%b?%b" % (path, query) if query else path


def sent_on(headers: Headers) -> tuple[Headers, str | None, int | None]:
    """The headers for Triton; the time the client asks for; and the body's length."""
    named: set[bytes] = set()
    timeout: str | None = None
    length: int | None = None
    for name, value in headers:
        if name == b"content-length":
            length = int(value)
        elif name == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
        elif name == b"x-request-timeout":
            timeout = value.decode("latin-1")
    dropped = NOT_SENT_ON | (named - {b"content-length", b"transfer-encoding"})
    return [(name, value) for name, value in headers if name not in dropped], timeout, length


async def body_of(
    receive: Receive, headers: Headers, length: int | None, limit: int
) -> bytes | AsyncIterator[bytes]:
    """The body whole when it came at once, else as it comes."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    first: bytes = message.get("body", b"")
    if message.get("more_body", False):
        return streamed(first, receive, limit)
    if length is None:
        headers[:] = [header for header in headers if header[0] != b"transfer-encoding"]
        headers.append((b"content-length", b"%d" % len(first)))
    if len(first) > limit:
        raise BodyTooLarge(limit)
    return first


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


async def corrected(answer: Answer, asked: Asked, *, health: bool) -> GatewayError:
    """Triton's complaint as an error of ours."""
    if health:
        return Unavailable(
            "not ready" if not asked.model else f"model '{asked.model}' is not ready"
        )
    body = bytearray()
    while len(body) < MAX_ERROR_BYTES and (chunk := await answer.next_chunk()):
        body += chunk
    return complaint(answer.status, bytes(body), asked)


async def relay(answer: Answer, send: Send, *, head_only: bool) -> None:
    """The answer, as it comes."""
    headers = [(name, value) for name, value in answer.headers if name not in NOT_RELAYED]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    if head_only:
        await send({"type": "http.response.body", "body": b""})
        return
    while True:
        chunk = await answer.next_chunk()
        last = answer.complete
        await send({"type": "http.response.body", "body": chunk, "more_body": not last})
        if last:
            return
