"""Requests over httpx, whose errors become `GatewayError`. Importing httpx takes longer than all the rest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing, contextmanager
from typing import Any, Final

import anyio
import httpx

from gateway import __version__
from gateway.client.bodies import Body, Form
from gateway.client.calls import DOT_SEGMENTS, ApiRequest
from gateway.client.connection import GatewayAccess
from gateway.client.errors import (
    CONNECTION_LOST,
    TIMEOUT,
    UNREACHABLE,
    GatewayError,
    InvalidRequest,
)
from gateway.client.replies import (
    MAX_RESPONSE_BYTES,
    Reply,
    ResponseBuffer,
    make_invalid_response_error,
    make_reply_error,
)
from gateway.client.retries import CONNECT_TIMEOUT_S, Attempts
from gateway.client.uploads import StreamedBody
from gateway.media_types import JSON

MAX_IDLE_CONNECTIONS: Final = 100
FILE_NAME: Final = "file"
# No error of a gateway is longer.
MAX_ERROR_BYTES: Final = 1 << 20
USER_AGENT: Final = f"triton-gateway-client/{__version__}"
# A compressed response could become any amount of memory. The gateway compresses only its metrics.
IDENTITY: Final = "identity"


def create_http_options(access: GatewayAccess, proxy: str | None) -> dict[str, Any]:
    """Return the options of httpx's clients. Neither the environment nor `.netrc` changes the requests."""
    return {
        "base_url": access.address.base_url,
        "headers": {
            "user-agent": USER_AGENT,
            "accept-encoding": IDENTITY,
            **access.create_headers(),
        },
        "verify": access.create_ssl_context() or False,  # False skips loading the CA certificates
        "limits": httpx.Limits(
            max_connections=None, max_keepalive_connections=MAX_IDLE_CONNECTIONS
        ),
        "trust_env": False,
        "proxy": proxy,
    }


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
            return cause.strerror
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
    http: httpx.Client | httpx.AsyncClient,
    request: ApiRequest,
    attempts: Attempts,
    upload_options: dict[str, Any],
) -> httpx.Request:
    check_path(request.path)
    timeout = httpx.Timeout(
        attempts.response_timeout_s, connect=min(CONNECT_TIMEOUT_S, attempts.remaining_s)
    )
    headers = dict(request.headers)
    if request.has_deadline:
        headers["x-request-timeout"] = f"{attempts.remaining_s:.3f}"
    options = upload_options
    if isinstance(request.body, Form):
        options = {"files": [build_form_part(each.name, each.body) for each in request.body.fields]}
    elif isinstance(request.body, Body):
        options = {"content": request.body.content}
        headers["content-type"] = request.body.content_type
    headers |= options.pop("headers", {})
    try:
        return http.build_request(
            request.method,
            request.path,
            params=request.query or None,
            headers=headers,
            timeout=timeout,
            **options,
        )
    except (httpx.InvalidURL, UnicodeError) as exc:
        raise InvalidRequest(f"the request is invalid: {exc}") from None


def build_form_part(name: str, body: Body) -> tuple[str, tuple[str | None, bytes, str]]:
    """Return a part for httpx. A file has a name, so that the gateway accepts any type of it."""
    file_name = None if body.content_type == JSON else FILE_NAME
    return name, (file_name, body.content, body.content_type)


def make_reply(response: httpx.Response, content: bytes, attempts: Attempts) -> Reply:
    return Reply(
        str(response.url),
        response.status_code,
        response.headers,
        content,
        elapsed_s=attempts.elapsed_s,
    )


def check_encoding(head: Reply) -> None:
    if head.headers.get("content-encoding", IDENTITY) != IDENTITY:
        raise make_invalid_response_error(
            head, "its response is compressed, which was not asked for"
        )


class OpenReply:
    """A successful response whose body is not read yet. `head` is the response without its body."""

    def __init__(self, response: httpx.Response, head: Reply, base_url: str) -> None:
        self._response = response
        self._base_url = base_url
        self.head = head

    def iter_bytes(self) -> Iterator[bytes]:
        check_encoding(self.head)
        with translate_errors(self._base_url):
            yield from self._response.iter_raw()

    def close(self) -> None:
        """Close the connection if the body is not read to its end."""
        self._response.close()


class Transport:
    """Sends requests, each once."""

    def __init__(
        self, access: GatewayAccess, proxy: str | None, max_bytes: int = MAX_RESPONSE_BYTES
    ) -> None:
        self._base_url = access.address.base_url
        self._max_bytes = max_bytes
        self._http = httpx.Client(**create_http_options(access, proxy))

    def close(self) -> None:
        self._http.close()

    def open(self, request: ApiRequest, attempts: Attempts) -> OpenReply:
        """Return a successful response when its head has arrived. Raises `GatewayError` for any other."""
        body = request.body
        upload = body.create_options() if isinstance(body, StreamedBody) else {}
        sent = build_attempt(self._http, request, attempts, upload)
        with translate_errors(self._base_url):
            response = self._http.send(sent, stream=True)
        reply = OpenReply(response, make_reply(response, b"", attempts), self._base_url)
        if response.is_success:
            return reply
        with closing(reply):
            content = b""
            for data in reply.iter_bytes():
                attempts.check_deadline()
                content += data
                if len(content) > MAX_ERROR_BYTES:
                    break
        raise make_reply_error(reply.head.with_content(content, attempts.elapsed_s))

    def read(self, request: ApiRequest, attempts: Attempts) -> Reply:
        """Return a complete and successful response. Raises `GatewayError` for any other."""
        with closing(self.open(request, attempts)) as reply:
            content = ResponseBuffer(reply.head.url, self._max_bytes)
            for data in reply.iter_bytes():
                content.add(data)
                attempts.check_deadline()
        return reply.head.with_content(content.take(), attempts.elapsed_s)


class AsyncOpenReply:
    """Like `OpenReply`."""

    def __init__(self, response: httpx.Response, head: Reply, base_url: str) -> None:
        self._response = response
        self._base_url = base_url
        self.head = head

    async def iter_bytes(self) -> AsyncIterator[bytes]:
        check_encoding(self.head)
        with translate_errors(self._base_url):
            async for data in self._response.aiter_raw():
                yield data

    async def aclose(self) -> None:
        await self._response.aclose()


class AsyncTransport:
    """Like `Transport`."""

    def __init__(
        self, access: GatewayAccess, proxy: str | None, max_bytes: int = MAX_RESPONSE_BYTES
    ) -> None:
        self._base_url = access.address.base_url
        self._max_bytes = max_bytes
        self._http = httpx.AsyncClient(**create_http_options(access, proxy))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def open(self, request: ApiRequest, attempts: Attempts) -> AsyncOpenReply:
        body = request.body
        upload = body.create_async_options() if isinstance(body, StreamedBody) else {}
        sent = build_attempt(self._http, request, attempts, upload)
        with translate_errors(self._base_url):
            response = await self._http.send(sent, stream=True)
        reply = AsyncOpenReply(response, make_reply(response, b"", attempts), self._base_url)
        if response.is_success:
            return reply
        async with aclosing(reply):
            content = b""
            async for data in reply.iter_bytes():
                attempts.check_deadline()
                content += data
                if len(content) > MAX_ERROR_BYTES:
                    break
        raise make_reply_error(reply.head.with_content(content, attempts.elapsed_s))

    async def read(self, request: ApiRequest, attempts: Attempts) -> Reply:
        try:
            with anyio.fail_after(attempts.response_timeout_s):
                async with aclosing(await self.open(request, attempts)) as reply:
                    content = ResponseBuffer(reply.head.url, self._max_bytes)
                    async for data in reply.iter_bytes():
                        content.add(data)
        except TimeoutError:
            raise attempts.create_timeout_error() from None
        return reply.head.with_content(content.take(), attempts.elapsed_s)
