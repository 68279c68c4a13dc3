"""A queue for the requests of clients whose last request was rejected."""

from __future__ import annotations

import asyncio
from collections import deque


class RefusedClients:
    """Starts one request of such clients in each pass of the event loop; other requests start at once.

    Otherwise a flood of rejected requests would delay every step of every other request by the whole flood.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_running = False

    def enqueue(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return a future that is done when the request may start."""
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._is_running:
            self._is_running = True
            loop.call_soon(self._start_next, loop)
        return turn

    def _start_next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # not cancelled
                turn.set_result(None)
                loop.call_soon(self._start_next, loop)
                return
        self._is_running = False
