"""In which order the requests of clients begin whose last one was refused."""

from __future__ import annotations

import asyncio
from collections import deque


class RefusedClients:
    """Their requests begin one in each pass of the event loop; those of other clients begin at once.

    Without it a flood of requests that are refused costs every other request the time of the whole flood
    at each of its steps.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_running = False

    def enqueue(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return what the next request of such a client waits for."""
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
