"""Requests that wait for the first Triton of a fleet."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from PIL import Image

from tests.support.fleet import QUICK, V2_BODY, url_of, write_echo
from tests.support.servers import Command, Triton, gateway

PICTURE_CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "X" data_type: TYPE_FP32 dims: [ 3, 4, 4 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 3, 4, 4 ] } ]
"""


class Sleeping(NamedTuple):
    """A gateway, and the Triton before which it stands, which has not started."""

    client: httpx.Client
    command: Command
    triton: Triton


@contextmanager
def sleeping_fleet(folder: Path, **settings: str) -> Iterator[Sleeping]:
    """The model `picture` is declared, and `echo` is loaded on demand."""
    repository = folder / "models"
    for name in ("echo", "picture"):
        write_echo(repository, name)
    (repository / "picture" / "config.pbtxt").write_text(PICTURE_CONFIG)
    (folder / "models.yaml").write_text("models: [picture, {name: echo, on_demand: true}]")
    triton = Triton(repository)
    with ExitStack() as stack:
        client, command = stack.enter_context(waiting_gateway(folder, triton, **settings))
        stack.callback(triton.end)
        yield Sleeping(client, command, triton)


def waiting_gateway(
    folder: Path, triton: Triton, **settings: str
) -> AbstractContextManager[tuple[httpx.Client, Command]]:
    """A gateway before the fleet in the folder."""
    options = {**settings, "poll_interval_s": QUICK["poll_interval_s"], "connect_timeout_s": "10"}
    options.setdefault("hold_s", "60")
    options.setdefault("log_level", "warning")
    return gateway(url_of(triton), models_file=str(folder / "models.yaml"), **options)


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (1, 2, 3)).save(file, "PNG")
    return file.getvalue()


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([1, 2], np.float32))
    return file.getvalue()


def send_request(url: str, number: int) -> httpx.Response:
    """Send an image, an array, or a request of `/v2`, by turns."""
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/models/picture/infer", {"content": png(), "headers": {"Content-Type": "image/png"}}),
        (
            "/v1/models/echo/infer",
            {"content": npy(), "headers": {"Content-Type": "application/x-npy"}},
        ),
        ("/v2/models/echo/infer", {"json": V2_BODY}),
    ]
    path, content = kinds[number % len(kinds)]
    return httpx.post(f"{url}{path}", timeout=120, **content)


class WaitingClients:
    """Connections with one request each, in one event loop, to each gateway in turn."""

    def __init__(self, *urls: str) -> None:
        self._urls = cycle([httpx.URL(url) for url in urls])
        body = json.dumps(V2_BODY).encode()
        self._request = (
            b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"X-Request-Timeout: 200\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.statuses: list[int] = []

    async def run(self, count: int, until_waiting: Callable[[], Awaitable[None]]) -> None:
        """Send the requests, call the function with the number of those sent, and read the answers."""
        connections = [await self._open() for _ in range(count)]
        try:
            await until_waiting()
            readers = (reader for reader, _ in connections)
            self.statuses = await asyncio.gather(*map(self._read_status, readers))
        finally:
            for _, writer in connections:
                writer.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        url = next(self._urls)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(self._request)
        return reader, writer

    async def _read_status(self, reader: asyncio.StreamReader) -> int:
        answer = await reader.read()
        return int(answer.split()[1])
