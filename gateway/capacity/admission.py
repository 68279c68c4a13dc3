"""Admission control: a weighted semaphore, and a fair queue for concurrent inferences."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter

from gateway.errors import DeadlinePassed, Overloaded
from gateway.messages import quote_text
from gateway.telemetry.metrics import Metrics


class WeightedSemaphore:
    """A FIFO weighted semaphore. A weight above the total waits for, and takes, the whole budget."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = total
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, weight: int) -> int:
        """Wait until `weight` is free and take it; return the weight to release."""
        weight = min(weight, self._total)
        if not self._waiters and weight <= self._free:
            self._free -= weight
            return weight
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append((weight, waiter))
        try:
            await waiter
        except BaseException:
            # A cancelled waiter may already hold its weight, or may have blocked a smaller one behind it.
            self.release(weight if waiter.done() and not waiter.cancelled() else 0)
            raise
        return weight

    def release(self, weight: int) -> None:
        self._free += weight
        while self._waiters and (
            self._waiters[0][1].cancelled() or self._waiters[0][0] <= self._free
        ):
            weight, waiter = self._waiters.popleft()
            if not waiter.cancelled():
                self._free -= weight
                waiter.set_result(None)


class AdmissionQueueFull(Overloaded):
    """The concurrency limit is reached, and the queue is full."""

    def __init__(self, model: str, running: int, waiting: int) -> None:
        super().__init__(
            f"cannot admit another request for model {quote_text(model)}: {running} are running and "
            f"{waiting} are waiting; try again shortly"
        )


class Slot:
    """The place of one request among those of its model that run. It is given back at most once."""

    __slots__ = ("_admission", "_callbacks", "_caller", "_model", "is_taken")

    def __init__(self, admission: AdmissionQueue, model: str, caller: str) -> None:
        self._admission = admission
        self._model = model
        self._caller = caller
        self._callbacks: tuple[Callable[[], None], ...] = ()
        self.is_taken = False

    def try_acquire(self) -> bool:
        """Take the place if it is free."""
        self.is_taken = self._admission.try_acquire(self._model)
        return self.is_taken

    async def acquire(self, timeout_s: float) -> float:
        """Take the place or wait for it; return the remaining seconds.

        Raises `AdmissionQueueFull` at once, or `DeadlinePassed`.
        """
        if not self.try_acquire():
            timeout_s = await self._admission.acquire(self._model, timeout_s, self._caller)
        self.is_taken = True
        return timeout_s

    def call_when_released(self, callback: Callable[[], None]) -> None:
        self._callbacks += (callback,)

    def transfer(self) -> Slot:
        """Return a slot with the place of this one, which does not release it any longer."""
        slot = Slot(self._admission, self._model, self._caller)
        slot.is_taken, self.is_taken = self.is_taken, False
        slot._callbacks, self._callbacks = self._callbacks, ()
        return slot

    def release(self) -> None:
        if self.is_taken:
            self.is_taken = False
            self._admission.release(self._model, self._caller)
            for callback in self._callbacks:
                callback()

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class AdmissionQueue:
    """Limits the concurrent inferences of the process and of each model, with a short fair queue.

    One model cannot take all slots, and waiting requests are admitted in turn by model and caller. Each
    queue grows only while the free room exceeds its own length, as in switches with a shared buffer
    (Choudhury and Hahne, Dynamic Queue Length Thresholds, 1998): a single queue gets half of the room, and
    the next one still finds some.
    """

    def __init__(
        self, max_running: int, max_running_per_model: int, max_waiting: int, metrics: Metrics
    ) -> None:
        self._max_running = max_running
        self._max_running_per_model = max_running_per_model
        self.max_waiting = max_waiting
        self._metrics = metrics
        self._running_by_model: dict[str, int] = {}
        self._queues: dict[tuple[str, str], deque[asyncio.Future[None]]] = {}
        self.running = 0
        self.waiting = 0
        # Records the model and the caller of each request that ends, if models are loaded on demand.
        self.record_use: Callable[[str, str], None] | None = None

    def try_acquire(self, model: str) -> bool:
        """Take a slot if one is free, to be given back with `release`.

        This overtakes no waiting request of the model: requests wait only while it has no free slot.
        """
        running = self._running_by_model.get(model, 0)
        if self.running >= self._max_running or running >= self._max_running_per_model:
            return False
        self.running += 1
        self._running_by_model[model] = running + 1
        return True

    async def acquire(self, model: str, timeout_s: float, caller: str = "") -> float:
        """Take a slot or wait for one; return the remaining seconds.

        Raises `AdmissionQueueFull` at once, or `DeadlinePassed`.
        """
        if self.try_acquire(model):
            return timeout_s
        queue_key = model, caller
        queue = self._queues.get(queue_key) or deque()
        if len(queue) >= self.max_waiting - self.waiting:
            self._metrics.shed.labels("queue_full").inc()
            raise AdmissionQueueFull(model, self.running, self.waiting)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues[queue_key] = queue
        queue.append(waiter)
        self.waiting += 1
        started_at = perf_counter()
        try:
            await asyncio.wait_for(asyncio.shield(waiter), timeout_s)
        except BaseException as exc:
            if waiter.done():
                self.release(model, caller)  # admitted at the same moment
            else:
                waiter.cancel()
                self._remove_waiter(queue_key, waiter)
            if isinstance(exc, asyncio.TimeoutError):
                raise DeadlinePassed(timeout_s) from None
            raise
        return timeout_s - (perf_counter() - started_at)

    def count_requests(self, model: str) -> int:
        waiting = sum(len(queue) for (name, _), queue in self._queues.items() if name == model)
        return self._running_by_model.get(model, 0) + waiting

    def count_all_requests(self) -> dict[str, int]:
        waiting = {model for model, _ in self._queues}
        return {
            model: self.count_requests(model) for model in waiting | self._running_by_model.keys()
        }

    def is_crowded(self, model: str) -> bool:
        """Return whether requests of the model wait, or half of its slots are taken."""
        is_half_taken = 2 * self._running_by_model.get(model, 0) > self._max_running_per_model
        return is_half_taken or any(name == model for name, _ in self._queues)

    @property
    def is_busy(self) -> bool:
        """Return whether requests of any model wait, or half of all slots are taken."""
        return bool(self.waiting) or 2 * self.running > self._max_running

    def release(self, model: str, caller: str = "") -> None:
        self.running -= 1
        running = self._running_by_model[model] - 1
        if running:
            self._running_by_model[model] = running
        else:
            del self._running_by_model[model]
        if self.record_use is not None:
            self.record_use(model, caller)
        if self.waiting:
            self._admit_next()

    def _admit_next(self) -> None:
        """Admit the first waiter whose model has a free slot; a release frees one slot only."""
        for queue_key, queue in self._queues.items():
            model = queue_key[0]
            if (running := self._running_by_model.get(model, 0)) < self._max_running_per_model:
                waiter = queue[0]
                self._remove_waiter(queue_key, waiter)
                if queue:  # the other queues come before its next waiter
                    self._queues[queue_key] = self._queues.pop(queue_key)
                self.running += 1
                self._running_by_model[model] = running + 1
                waiter.set_result(None)
                return

    def _remove_waiter(self, queue_key: tuple[str, str], waiter: asyncio.Future[None]) -> None:
        queue = self._queues[queue_key]
        queue.remove(waiter)
        self.waiting -= 1
        if not queue:
            del self._queues[queue_key]
