"""How much at a time: inferences, each model's share of them, and anything that has a weight."""

from __future__ import annotations

import asyncio
from collections import deque

from gateway.errors import DeadlinePassed, Overloaded
from gateway.metrics import Metrics
from gateway.words import quoted


class Budget:
    """A semaphore of weights, in turn: who asks for more than there is gets all of it, alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, weight: int) -> int:
        """Wait for one's turn; give back what this returns."""
        weight = min(weight, self._total)
        if not self._queue and weight <= self._free:
            self._free -= weight
            return weight
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((weight, turn))
        try:
            await turn
        except BaseException:
            # Whoever leaves the queue may have had the turn, or stood before one who can go.
            self.give(weight if turn.done() and not turn.cancelled() else 0)
            raise
        return weight

    def give(self, weight: int) -> None:
        self._free += weight
        while self._queue and (self._queue[0][1].cancelled() or self._queue[0][0] <= self._free):
            weight, turn = self._queue.popleft()
            if not turn.cancelled():
                self._free -= weight
                turn.set_result(None)


class TooMany(Overloaded):
    """More than is taken at a time, and more than may wait for it."""

    def __init__(self, model: str, running: int, waiting: int) -> None:
        super().__init__(
            f"{running} requests are being served and {waiting} wait; there is no place for one more of "
            f"model {quoted(model)}; try again shortly"
        )


class Gate:
    """Inferences at a time, of the process and of each model, and a short queue.

    Nobody starves. One model cannot take all places, and who waits is admitted by turns of model and
    caller. A line grows only while more room is free than it takes itself, as switches share their
    buffers (Choudhury and Hahne, Dynamic Queue Length Thresholds, 1998): alone it gets half of the room,
    and whoever comes next finds some.
    """

    def __init__(self, places: int, places_per_model: int, queue: int, metrics: Metrics) -> None:
        self._places = places
        self._places_per_model = places_per_model
        self._room = queue
        self._metrics = metrics
        self._running: dict[str, int] = {}
        self._lines: dict[tuple[str, str], deque[asyncio.Future[None]]] = {}
        self.running = 0
        self.waiting = 0

    def enters(self, model: str) -> bool:
        """Whether there is a place, which is taken then; give it back with `leave`.

        Nobody is overtaken: who waits does so because there is no place, or none for that model.
        """
        held = self._running.get(model, 0)
        if self.running >= self._places or held >= self._places_per_model:
            return False
        self.running += 1
        self._running[model] = held + 1
        return True

    async def enter(self, model: str, timeout_s: float, caller: str = "") -> None:
        """Take a place, or wait for one. Raises `TooMany` at once, or `DeadlinePassed`."""
        if self.enters(model):
            return
        of = model, caller
        line = self._lines.get(of) or deque()
        if len(line) >= self._room - self.waiting:
            self._metrics.shed.labels("queue_full").inc()
            raise TooMany(model, self.running, self.waiting)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines[of] = line
        line.append(turn)
        self.waiting += 1
        try:
            await asyncio.wait_for(asyncio.shield(turn), timeout_s)
        except BaseException as exc:
            if turn.done():
                self.leave(model)  # admitted in the same moment
            else:
                turn.cancel()
                self._forget(of, turn)
            if isinstance(exc, asyncio.TimeoutError):
                raise DeadlinePassed(timeout_s) from None
            raise

    def leave(self, model: str) -> None:
        self.running -= 1
        held = self._running[model] - 1
        if held:
            self._running[model] = held
        else:
            del self._running[model]
        if self.waiting:
            self._admit()

    def _admit(self) -> None:
        """Let in the first whom the place that has become free is for: there is never one for two."""
        for of, line in self._lines.items():
            if (held := self._running.get(of[0], 0)) < self._places_per_model:
                turn = line[0]
                self._forget(of, turn)
                if line:  # the others come before its next
                    self._lines[of] = self._lines.pop(of)
                self.running += 1
                self._running[of[0]] = held + 1
                turn.set_result(None)
                return

    def _forget(self, of: tuple[str, str], turn: asyncio.Future[None]) -> None:
        line = self._lines[of]
        line.remove(turn)
        self.waiting -= 1
        if not line:
            del self._lines[of]
