"""Requests over httpx, whose errors become `GatewayError`. Importing httpx takes longer than all the rest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing, contextmanager
from typing import Any, Final

import anyio
import httpx

from gateway import __version__
from gateway.client.bodies import Body, Form
from gateway.client.calls import ApiRequest
from gateway.client.connection import GatewayAccess
from gateway.client.errors import (
    CONNECTION_LOST,
    INVALID_RESPONSE,
    TIMEOUT,
    UNREACHABLE,
    GatewayError,
)
from gateway.client.replies import Reply, make_reply_error
from gateway.client.retries import CONNECT_TIMEOUT_S, Attempts
from gateway.client.uploads import StreamedBody
from gateway.media_types import JSON

MAX_IDLE_CONNECTIONS: Final = 100
FILE_NAME: Final = "file"
# No error of a gateway is longer.
MAX_ERROR_BYTES: Final = 1 << 20
USER_AGENT: Final = f"triton-gateway-client/{__version__}"


def create_http_options(access: GatewayAccess, proxy: str | None) -> dict[str, Any]:
    """Return the options of httpx's clients. Neither the environment nor `.netrc` changes the requests."""
    return {
        "base_url": access.address.base_url,
        "headers": {"user-agent": USER_AGENT, **access.create_headers()},
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
        raise ValueError(f"the request is invalid: {exc}") from None
    except httpx.DecodingError as exc:
        raise GatewayError(
            f"the response of {base_url} is damaged: {exc}", INVALID_RESPONSE
        ) from None
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


def build_attempt(
    http: httpx.Client | httpx.AsyncClient,
    request: ApiRequest,
    attempts: Attempts,
    upload_options: dict[str, Any],
) -> httpx.Request:
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
    return http.build_request(
        request.method,
        request.path,
        params=request.query or None,
        headers=headers,
        timeout=timeout,
        **options,
    )


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


class OpenReply:
    """A successful response whose body is not read yet. `head` is the response without its body."""

    def __init__(self, response: httpx.Response, head: Reply, base_url: str) -> None:
        self._response = response
        self._base_url = base_url
        self.head = head

    def iter_bytes(self) -> Iterator[bytes]:
        with translate_errors(self._base_url):
            yield from self._response.iter_bytes()

    def close(self) -> None:
        """Close the connection if the body is not read to its end."""
        self._response.close()


class Transport:
    """Sends requests, each once."""

    def __init__(self, access: GatewayAccess, proxy: str | None) -> None:
        self._base_url = access.address.base_url
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
            content = []
            for data in reply.iter_bytes():
                content.append(data)
                attempts.check_deadline()
        return reply.head.with_content(b"".join(content), attempts.elapsed_s)


class AsyncOpenReply:
    """Like `OpenReply`."""

    def __init__(self, response: httpx.Response, head: Reply, base_url: str) -> None:
        self._response = response
        self._base_url = base_url
        self.head = head

    async def iter_bytes(self) -> AsyncIterator[bytes]:
        with translate_errors(self._base_url):
            async for data in self._response.aiter_bytes():
                yield data

    async def aclose(self) -> None:
        await self._response.aclose()


class AsyncTransport:
    """Like `Transport`."""

    def __init__(self, access: GatewayAccess, proxy: str | None) -> None:
        self._base_url = access.address.base_url
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
                    content = [data async for data in reply.iter_bytes()]
        except TimeoutError:
            raise attempts.create_timeout_error() from None
        return reply.head.with_content(b"".join(content), attempts.elapsed_s)
