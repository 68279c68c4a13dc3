"""The hot path: inferences over kept connections, with the gateway's own HTTP/1.1 client.

An exchange costs it some 40 µs; httpx's takes 2 ms, which is more than a small inference itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final

import orjson

from gateway.client.api import API_CONNECT_TIMEOUT_S, model_api_path
from gateway.client.errors import ClientError, GatewayUnreachable
from gateway.client.target import Target
from gateway.errors import BadUpstream, DeadlinePassed
from gateway.triton.http.client import CompleteResponse, HttpClient
from gateway.triton.http.connection import RequestNotSent

RETRY_STATUSES: Final = (429, 503)
NDJSON_STREAM_TYPE: Final = b"application/x-ndjson"
MAX_RETRY_WAIT_S: Final = 60.0
INITIAL_RETRY_WAIT_S: Final = 0.25
# The gateway knows better than we do that the time is over.
RESPONSE_GRACE_S: Final = 5.0


class NoResponse(ClientError):
    """An exchange that began and gave no answer. The inference may have run."""


class InferClient:
    """Inferences with one model. Inside a running loop."""

    def __init__(
        self,
        target: Target,
        model: str,
        version: str,
        *,
        timeout_s: float,
        retries: int,
        is_decoupled: bool = False,
    ) -> None:
        """`streams` of a model that answers any number of times; `timeout_s` is for all of them."""
        self._base_url = target.base_url
        self._timeout_s = timeout_s
        self._retries = retries
        self.retry_count = 0
        self._http_client = HttpClient(
            target.host,
            target.port,
            tls=target.ssl_context,
            connect_timeout_s=API_CONNECT_TIMEOUT_S,
        )
        self._path = f"{target.path_prefix}{model_api_path(model, version)}/infer".encode()
        headers = {**target.headers, "x-request-timeout": f"{timeout_s:g}"}
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        if is_decoupled:
            self._headers.append((b"accept", NDJSON_STREAM_TYPE))

    async def infer(self, content_type: str, body: bytes) -> CompleteResponse:
        """The answer; one that says «later» is asked for again, when it says.

        Raises `Unreachable` when no connection comes about, and `NoAnswer`.
        """
        headers = ((b"content-type", content_type.encode()), *self._headers)
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                reply = await self._post(body, headers)
            except RequestNotSent:
                if last:
                    raise GatewayUnreachable(
                        f"no gateway can be reached at {self._base_url}"
                    ) from None
                wait_s = min(INITIAL_RETRY_WAIT_S * 2**attempt, MAX_RETRY_WAIT_S)
            else:
                if reply.status not in RETRY_STATUSES or last:
                    return reply
                wait_s = retry_after_s(reply)
            self.retry_count += 1
            # Who was sent away together does not come back together.
            await asyncio.sleep(wait_s * random.uniform(1, 1.25))  # noqa: S311
        raise AssertionError("the last attempt has returned or raised")

    async def _post(self, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> CompleteResponse:
        try:
            return await self._http_client.request(
                b"POST", self._path, body, headers, timeout_s=self._timeout_s + RESPONSE_GRACE_S
            )
        except DeadlinePassed:
            raise NoResponse(f"no answer within {self._timeout_s + RESPONSE_GRACE_S:g} s") from None
        except BadUpstream:
            raise NoResponse("the connection ended before the answer was complete") from None

    def close(self) -> None:
        self._http_client.close()


def retry_after_s(reply: CompleteResponse) -> float:
    """Seconds that the gateway wants us to wait (RFC 9110, section 10.2.3); a date counts as one."""
    told = reply.header(b"retry-after")
    return min(float(told), MAX_RETRY_WAIT_S) if told.isdigit() else 1.0


def is_ndjson_stream(reply: CompleteResponse) -> bool:
    return reply.status == 200 and reply.header(b"content-type").startswith(NDJSON_STREAM_TYPE)


def extract_failure(reply: CompleteResponse) -> tuple[str, str] | None:
    """What an answer that is no success says, and its code. A stream that fails says it in its last line."""
    if reply.status == 200 and not is_ndjson_stream(reply):
        return None
    try:
        told = orjson.loads(reply.body.rstrip(b"\n").rpartition(b"\n")[2])
    except orjson.JSONDecodeError:
        told = None
    if isinstance(told, dict) and isinstance(told.get("error"), str):
        return told["error"], str(told.get("code", ""))
    return None if reply.status == 200 else (f"status {reply.status}, without a word", "")
