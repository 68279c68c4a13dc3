"""The hot path: inferences over kept connections, with the gateway's own HTTP/1.1 client.

An exchange costs it some 40 µs; httpx's takes 2 ms, which is more than a small inference itself.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Final

import orjson

from gateway.client.api import CONNECT_TIMEOUT_S, model_path
from gateway.client.errors import ClientError, Unreachable
from gateway.client.target import Target
from gateway.errors import BadUpstream, DeadlinePassed
from gateway.triton.http import Reply, Upstream
from gateway.triton.wire import NotSent

LATER: Final = (429, 503)
NDJSON: Final = b"application/x-ndjson"
MAX_WAIT_S: Final = 60.0
FIRST_WAIT_S: Final = 0.25
# The gateway knows better than we do that the time is over.
GRACE_S: Final = 5.0


class NoAnswer(ClientError):
    """An exchange that began and gave no answer. The inference may have run."""


class Wire:
    """Inferences with one model. Inside a running loop."""

    def __init__(
        self,
        target: Target,
        model: str,
        version: str,
        *,
        timeout_s: float,
        retries: int,
        streams: bool = False,
    ) -> None:
        """`streams` of a model that answers any number of times; `timeout_s` is for all of them."""
        self._base = target.base
        self._timeout_s = timeout_s
        self._retries = retries
        self.retried = 0
        self._upstream = Upstream(
            target.host,
            target.port,
            tls=target.tls,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )
        self._path = f"{target.path}{model_path(model, version)}/infer".encode()
        headers = {**target.headers, "x-request-timeout": f"{timeout_s:g}"}
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        if streams:
            self._headers.append((b"accept", NDJSON))

    async def infer(self, content_type: str, body: bytes) -> Reply:
        """The answer; one that says «later» is asked for again, when it says.

        Raises `Unreachable` when no connection comes about, and `NoAnswer`.
        """
        headers = ((b"content-type", content_type.encode()), *self._headers)
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                reply = await self._ask(body, headers)
            except NotSent:
                if last:
                    raise Unreachable(f"no gateway can be reached at {self._base}") from None
                wait_s = min(FIRST_WAIT_S * 2**attempt, MAX_WAIT_S)
            else:
                if reply.status not in LATER or last:
                    return reply
                wait_s = retry_after_s(reply)
            self.retried += 1
            # Who was sent away together does not come back together.
            await asyncio.sleep(wait_s * random.uniform(1, 1.25))  # noqa: S311
        raise AssertionError("the last attempt has returned or raised")

    async def _ask(self, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Reply:
        try:
            return await self._upstream.ask(
                b"POST", self._path, body, headers, timeout_s=self._timeout_s + GRACE_S
            )
        except DeadlinePassed:
            raise NoAnswer(f"no answer within {self._timeout_s + GRACE_S:g} s") from None
        except BadUpstream:
            raise NoAnswer("the connection ended before the answer was complete") from None

    def close(self) -> None:
        self._upstream.close()


def retry_after_s(reply: Reply) -> float:
    """Seconds that the gateway wants us to wait (RFC 9110, section 10.2.3); a date counts as one."""
    told = reply.header(b"retry-after")
    return min(float(told), MAX_WAIT_S) if told.isdigit() else 1.0


def is_stream(reply: Reply) -> bool:
    return reply.status == 200 and reply.header(b"content-type").startswith(NDJSON)


def failure_of(reply: Reply) -> tuple[str, str] | None:
    """What an answer that is no success says, and its code. A stream that fails says it in its last line."""
    if reply.status == 200 and not is_stream(reply):
        return None
    try:
        told = orjson.loads(reply.body.rstrip(b"\n").rpartition(b"\n")[2])
    except orjson.JSONDecodeError:
        told = None
    if isinstance(told, dict) and isinstance(told.get("error"), str):
        return told["error"], str(told.get("code", ""))
    return None if reply.status == 200 else (f"status {reply.status}, without a word", "")
