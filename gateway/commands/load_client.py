"""The load generator of `bench`: the same inference again and again, at little cost.

A request of the gateway's own HTTP/1.1 client costs about 40 µs; one of httpx costs 2 ms, more than a small
inference.
"""

from __future__ import annotations

from typing import Final

from gateway.client import Body
from gateway.client.calls import build_model_path
from gateway.client.replies import parse_json_object
from gateway.client.retries import CONNECT_TIMEOUT_S
from gateway.commands.errors import GatewayUnreachable, translate_hints
from gateway.commands.target import Target
from gateway.errors import BadUpstream, DeadlinePassed
from gateway.http_client.client import CompleteResponse, HttpClient
from gateway.http_client.connection import RequestNotSent
from gateway.media_types import NDJSON

NDJSON_BYTES: Final = NDJSON.encode()
# The gateway enforces the timeout; the client waits longer, to receive its response.
RESPONSE_GRACE_S: Final = 5.0


class LoadClient:
    """Sends one inference repeatedly over keep-alive connections. Requires a running event loop."""

    def __init__(
        self,
        target: Target,
        model: str,
        version: str,
        body: Body,
        *,
        timeout_s: float,  # one limit for all responses of a stream
        is_decoupled: bool = False,
    ) -> None:
        address = target.access.address
        self._base_url = address.base_url
        self._body = body.content
        self._limit_s = timeout_s + RESPONSE_GRACE_S
        self._http_client = HttpClient(
            address.host,
            address.port,
            tls=target.ssl_context,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )
        self._path = f"{address.path_prefix}{build_model_path(model, version)}/infer".encode()
        headers = {
            "content-type": body.content_type,
            **target.access.create_headers(),
            "x-request-timeout": f"{timeout_s:g}",
        }
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        if is_decoupled:
            self._headers.append((b"accept", NDJSON_BYTES))

    async def infer(self) -> str:
        """Return the reason of a failure; empty for a successful response.

        Raises `GatewayUnreachable` if no connection can be established.
        """
        try:
            reply = await self._http_client.request(
                b"POST",
                self._path,
                headers=self._headers,
                body=self._body,
                timeout_s=self._limit_s,
            )
        except RequestNotSent:
            raise GatewayUnreachable(f"cannot reach the gateway at {self._base_url}") from None
        except DeadlinePassed:
            return f"no response within {self._limit_s:g} s"
        except BadUpstream:
            return "the connection was closed before the response was complete"
        return find_failure(reply)

    def close(self) -> None:
        self._http_client.close()


def find_failure(reply: CompleteResponse) -> str:
    """Return the error of a response, which a stream reports in its last line; empty without one."""
    is_stream = reply.header(b"content-type").startswith(NDJSON_BYTES)
    if reply.status == 200 and not is_stream:
        return ""
    message = (parse_json_object(reply.body.rstrip(b"\n").rpartition(b"\n")[2]) or {}).get("error")
    if isinstance(message, str):
        return translate_hints(message)
    return "" if reply.status == 200 else f"HTTP status {reply.status} without an error message"
