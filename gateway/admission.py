"""How much at a time: inferences, each model's share of them, and anything that has a weight."""

from __future__ import annotations

import asyncio
from collections import deque

from gateway.errors import DeadlinePassed, Overloaded
from gateway.messages import quote_text
from gateway.metrics import Metrics


class WeightedSemaphore:
    """A semaphore of weights, in turn: who asks for more than there is gets all of it, alone."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, weight: int) -> int:
        """Wait for one's turn; give back what this returns."""
        weight = min(weight, self._total)
        if not self._waiters and weight <= self._free:
            self._free -= weight
            return weight
        turn = asyncio.get_running_loop().create_future()
        self._waiters.append((weight, turn))
        try:
            await turn
        except BaseException:
            # Whoever leaves the queue may have had the turn, or stood before one who can go.
            self.release(weight if turn.done() and not turn.cancelled() else 0)
            raise
        return weight

    def release(self, weight: int) -> None:
        self._free += weight
        while self._waiters and (
            self._waiters[0][1].cancelled() or self._waiters[0][0] <= self._free
        ):
            weight, turn = self._waiters.popleft()
            if not turn.cancelled():
                self._free -= weight
                turn.set_result(None)


class AdmissionQueueFull(Overloaded):
    """More than is taken at a time, and more than may wait for it."""

    def __init__(self, model: str, running: int, waiting: int) -> None:
        super().__init__(
            f"{running} requests are being served and {waiting} wait; there is no place for one more of "
            f"model {quote_text(model)}; try again shortly"
        )


class AdmissionQueue:
    """Inferences at a time, of the process and of each model, and a short queue.

    Nobody starves. One model cannot take all places, and who waits is admitted by turns of model and
    caller. A line grows only while more room is free than it takes itself, as switches share their
    buffers (Choudhury and Hahne, Dynamic Queue Length Thresholds, 1998): alone it gets half of the room,
    and whoever comes next finds some.
    """

    def __init__(
        self, max_running: int, max_running_per_model: int, max_waiting: int, metrics: Metrics
    ) -> None:
        self._max_running = max_running
        self._max_running_per_model = max_running_per_model
        self._max_waiting = max_waiting
        self._metrics = metrics
        self._running_by_model: dict[str, int] = {}
        self._queues: dict[tuple[str, str], deque[asyncio.Future[None]]] = {}
        self.running = 0
        self.waiting = 0

    def try_acquire(self, model: str) -> bool:
        """Whether there is a place, which is taken then; give it back with `leave`.

        Nobody is overtaken: who waits does so because there is no place, or none for that model.
        """
        held = self._running_by_model.get(model, 0)
        if self.running >= self._max_running or held >= self._max_running_per_model:
            return False
        self.running += 1
        self._running_by_model[model] = held + 1
        return True

    async def acquire(self, model: str, timeout_s: float, caller: str = "") -> None:
        """Take a place, or wait for one. Raises `TooMany` at once, or `DeadlinePassed`."""
        if self.try_acquire(model):
            return
        of = model, caller
        line = self._queues.get(of) or deque()
        if len(line) >= self._max_waiting - self.waiting:
            self._metrics.shed.labels("queue_full").inc()
            raise AdmissionQueueFull(model, self.running, self.waiting)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues[of] = line
        line.append(turn)
        self.waiting += 1
        try:
            await asyncio.wait_for(asyncio.shield(turn), timeout_s)
        except BaseException as exc:
            if turn.done():
                self.release(model)  # admitted in the same moment
            else:
                turn.cancel()
                self._remove_waiter(of, turn)
            if isinstance(exc, asyncio.TimeoutError):
                raise DeadlinePassed(timeout_s) from None
            raise

    def release(self, model: str) -> None:
        self.running -= 1
        held = self._running_by_model[model] - 1
        if held:
            self._running_by_model[model] = held
        else:
            del self._running_by_model[model]
        if self.waiting:
            self._admit_next()

    def _admit_next(self) -> None:
        """Let in the first whom the place that has become free is for: there is never one for two."""
        for of, line in self._queues.items():
            if (held := self._running_by_model.get(of[0], 0)) < self._max_running_per_model:
                turn = line[0]
                self._remove_waiter(of, turn)
                if line:  # the others come before its next
                    self._queues[of] = self._queues.pop(of)
                self.running += 1
                self._running_by_model[of[0]] = held + 1
                turn.set_result(None)
                return

    def _remove_waiter(self, queue_key: tuple[str, str], waiter: asyncio.Future[None]) -> None:
        line = self._queues[queue_key]
        line.remove(waiter)
        self.waiting -= 1
        if not line:
            del self._queues[queue_key]
