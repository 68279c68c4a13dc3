"""The load of `make test-cluster`, and its questions to single gateways.

Runs in a pod of the gateway's image, from a ConfigMap: it needs Python, httpx and grpcio, nothing of this
project. `load.py send FILE` sends the requests that a JSON file describes until it is stopped, each kind at
a steady rate, whatever became of the requests before. It writes JSON: a line a second that counts the
responses, and one for each failed or slow request and each refused connection.
`load.py ask` sends the requests on its standard input, once, and writes their responses.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import time
from collections import Counter
from typing import Any, Protocol

import grpc
import httpx

CONNECT_TIMEOUT_S = 3.0  # TCP sends a lost packet again after a second
CONNECT_PAUSE_S = 0.2
CONNECT_DEADLINE_S = 10.0  # of all attempts of a request
READ_TIMEOUT_S = 30.0
COUNT_INTERVAL_S = 1.0
MOST_IN_PROGRESS = 1000  # of a kind
END_OF_STREAM = "event: end"
INFER_METHOD = "/inference.GRPCInferenceService/ModelInfer"
UNCONNECTED = "failed to connect"
MOST_REASON_CHARACTERS = 300


def write_line(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


class Refused(Exception):
    """No connection: nothing was sent."""


class Connection(Protocol):
    """A connection for one request at a time. `connected`: when it was opened last."""

    connected: float

    async def send(self) -> str:
        """Return why the request failed; empty if it did not. Raises `Refused`."""

    async def close(self) -> None: ...


class HttpConnection:
    def __init__(self, settings: dict[str, Any], request: dict[str, Any]) -> None:
        self.connected = 0.0
        self._path: str = request["path"]
        self._is_stream: bool = request.get("is_stream", False)
        self._content = read_content(request)
        accept = {"Accept": "text/event-stream"} if self._is_stream else {}
        content_type = request.get("content_type", "application/json")
        self._client = httpx.AsyncClient(
            base_url=settings["url"],
            headers={"Content-Type": content_type, **accept, **settings["headers"]},
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(
                max_connections=1,
                max_keepalive_connections=1 if request.get("keeps_connection", True) else 0,
            ),
            verify=False,
        )

    async def send(self) -> str:
        try:
            response = await self._client.post(
                self._path, content=self._content, extensions={"trace": self._trace}
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
            raise Refused(repr(exc)) from None
        except httpx.HTTPError as exc:
            return repr(exc)
        if response.status_code != 200:
            return f"{response.status_code} {response.text[:MOST_REASON_CHARACTERS]}"
        if self._is_stream and END_OF_STREAM not in response.text:
            return f"the stream ended with {response.text[-MOST_REASON_CHARACTERS:]!r}"
        return ""

    async def close(self) -> None:
        await self._client.aclose()

    async def _trace(self, event: str, _: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self.connected = time.time()


class GrpcConnection:
    def __init__(self, settings: dict[str, Any], request: dict[str, Any]) -> None:
        self.connected = time.time()
        self._content = read_content(request)
        headers: dict[str, str] = settings["headers"]
        self._metadata = [(name.lower(), value) for name, value in headers.items()]
        # Channels with the same arguments would share a connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(settings["grpc"], options)
        self._infer = self._channel.unary_unary(INFER_METHOD)

    async def send(self) -> str:
        try:
            await self._infer(self._content, metadata=self._metadata, timeout=READ_TIMEOUT_S)
        except grpc.aio.AioRpcError as exc:
            reason = f"{exc.code().name} {exc.details() or ''}"[:MOST_REASON_CHARACTERS]
            if UNCONNECTED in reason:
                raise Refused(reason) from None
            return reason
        return ""

    async def close(self) -> None:
        await self._channel.close()


def read_content(request: dict[str, Any]) -> bytes:
    if "base64" in request:
        return base64.b64decode(request["base64"])
    return json.dumps(request["json"]).encode()


class Sender:
    """Sends requests of one kind at a steady rate, each on an idle connection or on a new one."""

    def __init__(self, settings: dict[str, Any], request: dict[str, Any]) -> None:
        self.kind: str = request["kind"]
        self.answered = 0
        self.longest_s = 0.0
        self.began: set[float] = set()  # of the requests in progress
        self._settings = settings
        self._request = request
        self._rate: float = request["rate"]
        self._most: int = request.get("most", MOST_IN_PROGRESS)
        self._keeps_connection: bool = request.get("keeps_connection", True)
        self._slow_s: float = settings["slow_s"]
        self._idle: list[Connection] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        due = time.monotonic()
        while True:
            if len(self._tasks) < self._most:
                task = asyncio.create_task(self._send_and_report())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            due += 1 / self._rate
            await asyncio.sleep(max(due - time.monotonic(), 0.0))

    def count(self) -> tuple[int, float]:
        """Return the number of responses since the last count, and the longest time in seconds."""
        counted = self.answered, self.longest_s
        self.answered = 0
        self.longest_s = 0.0
        return counted

    async def _send_and_report(self) -> None:
        began = time.time()
        self.began.add(began)
        connection = self._idle.pop() if self._idle else self._connect()
        try:
            is_answered = await self._send(connection, began)
        finally:
            self.began.discard(began)
        if is_answered and self._keeps_connection:
            self._idle.append(connection)
        else:
            await connection.close()

    def _connect(self) -> Connection:
        kind = GrpcConnection if self._request.get("is_grpc", False) else HttpConnection
        return kind(self._settings, self._request)

    async def _send(self, connection: Connection, began: float) -> bool:
        """Return whether the request was answered.

        Nothing was sent on a connection that was refused: another attempt follows, as any proxy makes it.
        """
        while True:
            attempted = time.time()
            try:
                reason = await connection.send()
            except Refused as exc:
                if time.time() - began > CONNECT_DEADLINE_S:
                    reason = f"no connection in {CONNECT_DEADLINE_S:g} s: {exc}"
                    self._report("failed", began, began, reason)
                    return False
                self._report("refused", began, began, str(exc))
                await asyncio.sleep(CONNECT_PAUSE_S)
                continue
            connected = min(connection.connected, attempted)
            if reason:
                self._report("failed", connected, attempted, reason)
                return False
            took_s = time.time() - attempted
            self.answered += 1
            self.longest_s = max(self.longest_s, took_s)
            if took_s > self._slow_s:
                self._report("slow", connected, attempted, f"{took_s:.1f} s")
            return True

    def _report(self, what: str, connected: float, began: float, reason: str) -> None:
        write_line(
            {
                what: self.kind,
                "connected": connected,
                "began": began,
                "ended": time.time(),
                "reason": reason,
            }
        )


async def send(settings: dict[str, Any]) -> None:
    senders = [Sender(settings, each) for each in settings["requests"]]
    tasks = [asyncio.create_task(sender.run()) for sender in senders]
    while not any(task.done() for task in tasks):
        await asyncio.sleep(COUNT_INTERVAL_S)
        answered: Counter[str] = Counter()
        longest_s = 0.0
        for sender in senders:
            count, sender_longest_s = sender.count()
            answered[sender.kind] += count
            longest_s = max(longest_s, sender_longest_s)
        now = time.time()
        oldest = min((began for sender in senders for began in sender.began), default=now)
        write_line({"at": now, "answered": answered, "oldest": oldest, "longest_s": longest_s})
    await asyncio.gather(*tasks)  # raises what ended one of them


async def ask(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the status and the body of each response, or the error."""

    async def ask_one(client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
        try:
            response = await client.request(**request)
        except httpx.HTTPError as exc:
            return {"status": 0, "body": repr(exc)}
        return {"status": response.status_code, "body": response.text}

    async with httpx.AsyncClient(timeout=READ_TIMEOUT_S, verify=False) as client:
        return await asyncio.gather(*(ask_one(client, request) for request in requests))


def main(arguments: list[str]) -> None:
    if arguments[0] == "send":
        with open(arguments[1]) as file:  # noqa: PTH123 — a plain script
            settings = json.load(file)
        asyncio.run(send(settings))
    else:
        requests = json.load(sys.stdin)
        responses = asyncio.run(ask(requests))
        write_line({"now": time.time(), "responses": responses})


if __name__ == "__main__":
    main(sys.argv[1:])
