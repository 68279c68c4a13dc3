"""The load of `make test-cluster`, and its questions to single gateways.

Runs in a pod of the gateway's image, from a ConfigMap: it needs Python and httpx, nothing of this project.
`load.py send FILE` sends the requests that a JSON file describes until it is stopped, and writes JSON: a line
a second that counts the responses, and one for each failed request and refused connection.
`load.py ask` sends the requests on its standard input, once, and writes their responses.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

import httpx

CONNECT_TIMEOUT_S = 3.0  # TCP sends a lost packet again after a second
CONNECT_PAUSE_S = 0.2
CONNECT_DEADLINE_S = 10.0  # of all attempts of a request
READ_TIMEOUT_S = 30.0
COUNT_INTERVAL_S = 1.0
END_OF_STREAM = "event: end"
MOST_REASON_CHARACTERS = 300


def write_line(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


class Sender:
    """Sends one kind of request again and again: the next one when the last one is answered."""

    def __init__(self, url: str, headers: dict[str, str], settings: dict[str, Any]) -> None:
        self.kind: str = settings["kind"]
        self.answered = 0
        self.began: float | None = None  # of the request in progress
        self._path: str = settings["path"]
        self._content = json.dumps(settings["json"])
        self._is_stream: bool = settings.get("is_stream", False)
        self._pause_s: float = settings.get("pause_s", 0.1)
        self._connected = 0.0
        accept = {"Accept": "text/event-stream"} if self._is_stream else {}
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Content-Type": "application/json", **accept, **headers},
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(
                max_connections=1,
                max_keepalive_connections=1 if settings.get("keeps_connection", True) else 0,
            ),
            verify=False,
        )

    async def run(self) -> None:
        while True:
            self.began = time.time()
            reason = await self._send(self.began)
            if reason:
                self._report("failed", self.began, reason)
            else:
                self.answered += 1
            self.began = None
            await asyncio.sleep(self._pause_s)

    async def _send(self, began: float) -> str:
        """Return why the request failed; empty if it did not.

        Nothing was sent on a connection that was refused: another attempt follows, as any proxy makes it.
        """
        while True:
            try:
                response = await self._client.post(
                    self._path, content=self._content, extensions={"trace": self._trace}
                )
            except (httpx.ConnectError, httpx.ConnectTimeout) as exc:
                if time.time() - began > CONNECT_DEADLINE_S:
                    return f"no connection in {CONNECT_DEADLINE_S:g} s: {exc!r}"
                self._report("refused", began, repr(exc))
                await asyncio.sleep(CONNECT_PAUSE_S)
            except httpx.HTTPError as exc:
                return repr(exc)
            else:
                return self._find_fault(response)

    def _find_fault(self, response: httpx.Response) -> str:
        if response.status_code != 200:
            return f"{response.status_code} {response.text[:MOST_REASON_CHARACTERS]}"
        if self._is_stream and END_OF_STREAM not in response.text:
            return f"the stream ended with {response.text[-MOST_REASON_CHARACTERS:]!r}"
        return ""

    async def _trace(self, event: str, _: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._connected = time.time()

    def _report(self, what: str, began: float, reason: str) -> None:
        connected = min(self._connected, began) if what == "failed" else began
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
    senders = [
        Sender(settings["url"], settings["headers"], each)
        for each in settings["requests"]
        for _ in range(each.get("count", 1))
    ]
    tasks = [asyncio.create_task(sender.run()) for sender in senders]
    while not any(task.done() for task in tasks):
        await asyncio.sleep(COUNT_INTERVAL_S)
        answered: Counter[str] = Counter()
        for sender in senders:
            answered[sender.kind] += sender.answered
            sender.answered = 0
        began = [sender.began for sender in senders if sender.began is not None]
        now = time.time()
        write_line({"at": now, "answered": answered, "oldest": min(began, default=now)})
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
