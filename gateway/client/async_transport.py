"""Requests over httpx, for asyncio. `transport.py` is generated from this module: `make client`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, Final

import httpx  # this takes longer than all the rest of the client
from anyio import fail_after

from gateway import __version__
from gateway.client.bodies import Body, Form
from gateway.client.calls import DOT_SEGMENTS, ApiRequest
from gateway.client.connection import ClientOptions
from gateway.client.errors import (
    CONNECTION_LOST,
    TIMEOUT,
    UNREACHABLE,
    GatewayError,
    InvalidRequest,
)
from gateway.client.many import iterate
from gateway.client.replies import (
    MAX_RESPONSE_BYTES,
    LineBuffer,
    Reply,
    ResponseBuffer,
    make_error,
    make_wrong_server_error,
)
from gateway.client.retries import CONNECT_TIMEOUT_S, Attempts
from gateway.media_types import NDJSON

MAX_IDLE_CONNECTIONS: Final = 100
# No error of a gateway is longer.
MAX_ERROR_BYTES: Final = 1 << 20
USER_AGENT: Final = f"triton-gateway-client/{__version__}"
# A compressed response could become any amount of memory. The gateway compresses only its metrics.
IDENTITY: Final = "identity"


class AsyncTransport:
    """Sends requests, each once. Neither the environment nor `.netrc` changes them."""

    def __init__(self, options: ClientOptions, max_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._base_url = options.url
        self._max_bytes = max_bytes
        self._options: dict[str, Any] = {
            "base_url": options.url,
            "headers": {
                "user-agent": USER_AGENT,
                "accept-encoding": IDENTITY,
                **options.create_headers(),
            },
            "verify": options.create_ssl_context()
            or False,  # False skips loading the CA certificates
            "limits": httpx.Limits(
                max_connections=None, max_keepalive_connections=MAX_IDLE_CONNECTIONS
            ),
            "trust_env": False,
            "proxy": options.proxy,
        }
        self._connect()

    def _connect(self) -> None:
        self._http = httpx.AsyncClient(**self._options)
        self._process = os.getpid()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def open(self, request: ApiRequest, attempts: Attempts) -> httpx.Response:
        """Return a successful response when its head has arrived. Raises `GatewayError` for any other."""
        # A child process must not use the connections of its parent.
        if self._process != os.getpid():
            self._connect()
        attempt = build_attempt(self._http, request, attempts)
        with translate_errors(self._base_url):
            response = await self._http.send(attempt, stream=True)
        if response.is_success:
            return response
        async with aclosing(response):
            content = b""
            async for data in self.read_pieces(response):
                attempts.check_deadline()
                content += data
                if len(content) > MAX_ERROR_BYTES:
                    break
        raise make_error(make_reply(response, content))

    async def read(self, request: ApiRequest, attempts: Attempts) -> Reply:
        """Return a complete and successful response. Raises `GatewayError` for any other."""
        try:
            with fail_after(attempts.response_timeout_s):
                return await self._read(request, attempts)
        except TimeoutError:
            raise attempts.create_timeout_error() from None

    async def _read(self, request: ApiRequest, attempts: Attempts) -> Reply:
        async with aclosing(await self.open(request, attempts)) as response:
            content = ResponseBuffer(str(response.url), self._max_bytes)
            async for data in self.read_pieces(response):
                attempts.check_deadline()
                content.add(data)
        return make_reply(response, content.take())

    async def read_pieces(self, response: httpx.Response) -> AsyncIterator[bytes]:
        if response.headers.get("content-encoding", IDENTITY) != IDENTITY:
            reason = "its response is compressed, which was not asked for"
            raise make_wrong_server_error(str(response.url), reason)
        with translate_errors(self._base_url):
            async for data in response.aiter_raw():
                yield data

    async def read_lines(self, response: httpx.Response) -> AsyncIterator[Reply]:
        """Yield each line of a stream as a response. Raises `GatewayError` if it is not one."""
        head = make_reply(response, b"")
        if head.content_type != NDJSON:
            raise make_wrong_server_error(head.url, "its response is not a stream")
        lines = LineBuffer(head.url)
        async for data in self.read_pieces(response):
            for line in lines.feed(data):
                yield replace(head, content=line)
        if line := lines.take():
            yield replace(head, content=line)


@contextmanager
def translate_errors(base_url: str) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectTimeout:
        raise make_unreachable_error(base_url, "connection timed out") from None
    except httpx.TimeoutException:
        message = f"the gateway at {base_url} did not respond in time"
        raise GatewayError(message, TIMEOUT) from None
    except (httpx.ConnectError, httpx.ProxyError, UnicodeError) as exc:
        raise make_unreachable_error(base_url, describe_os_error(exc)) from None
    except httpx.LocalProtocolError as exc:
        raise InvalidRequest(f"the request is invalid: {exc}") from None
    except httpx.TransportError as exc:
        message = f"the connection to {base_url} was closed before the response was complete"
        raise GatewayError(message, CONNECTION_LOST) from exc


def describe_os_error(error: BaseException) -> str:
    """Return the operating system's reason for a failed connection, or the error's own text."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            # asyncio writes its own texts for the numbers of the operating system.
            errno = cause.errno or 0
            return os.strerror(errno) if errno > 0 else cause.strerror
        (cause, *_) = getattr(cause, "exceptions", (cause.__cause__ or cause.__context__,))
    return str(error) or type(error).__name__


def make_unreachable_error(base_url: str, reason: str) -> GatewayError:
    return GatewayError(f"cannot reach the gateway at {base_url}: {reason}", UNREACHABLE)


def check_path(path: str) -> None:
    """Check that a request stays below the gateway's URL. Raises `InvalidRequest`.

    To another server, it would take the key along.
    """
    segments = path.partition("?")[0].split("/")
    if (
        not path.startswith("/")
        or path.startswith("//")
        or not set(DOT_SEGMENTS).isdisjoint(segments)
    ):
        raise InvalidRequest(f"{path!r} is not a path of the gateway, such as /v1/models")


def build_attempt(
    http: httpx.AsyncClient, request: ApiRequest, attempts: Attempts
) -> httpx.Request:
    """Return the next attempt of a request."""
    check_path(request.path)
    connect_s = min(CONNECT_TIMEOUT_S, attempts.remaining_s)
    headers = dict(request.headers)
    if request.has_deadline:
        headers["x-request-timeout"] = f"{attempts.remaining_s:.3f}"
    options: dict[str, Any] = {}
    body = request.body
    if isinstance(body, Form):
        options["files"] = body.parts
    elif isinstance(body, Body):
        options["content"] = body.content
        headers["content-type"] = body.content_type
    elif body is not None:
        options["content"] = iterate(body.pieces)
        headers |= body.headers
    try:
        return http.build_request(
            request.method,
            request.path,
            params=request.query or None,
            headers=headers,
            timeout=httpx.Timeout(attempts.response_timeout_s, connect=connect_s),
            **options,
        )
    except (httpx.InvalidURL, UnicodeError) as exc:
        raise InvalidRequest(f"the request is invalid: {exc}") from None


def make_reply(response: httpx.Response, content: bytes) -> Reply:
    return Reply(str(response.url), response.status_code, response.headers, content)
