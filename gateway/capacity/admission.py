"""Admission control: a limit of concurrent inferences with a fair queue."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Final

from gateway.callers import Priority
from gateway.capacity.fair_queue import FairQueue, Waiter
from gateway.errors import DeadlinePassed, Overloaded
from gateway.messages import quote_text
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_info import RequestInfo, measure_phase

# To say when a client is to try again: how long an inference is taken to last.
ASSUMED_INFERENCE_S: Final = 0.1
MAX_RETRY_AFTER_S: Final = 60
FOREGROUND_USE_S: Final = 10.0


class AdmissionQueueFull(Overloaded):
    """The concurrency limit is reached, and the queue, or the caller's half of it, is full."""

    def __init__(self, model: str, running: int, waiting: int, retry_after_s: int = 1) -> None:
        super().__init__(
            f"cannot admit another request for model {quote_text(model)}: {running} inferences are "
            f"running and {waiting} are waiting, of all models; try again in {retry_after_s} s",
            headers={"Retry-After": str(retry_after_s)},
        )


class Slot:
    """The place of one request among those of its model that run. It is given back at most once."""

    __slots__ = (
        "_admission",
        "_info",
        "_model",
        "is_taken",
    )

    def __init__(self, admission: AdmissionQueue, model: str, info: RequestInfo) -> None:
        self._admission = admission
        self._model = model
        self._info = info
        self.is_taken = False

    def try_acquire(self) -> bool:
        admission = self._admission
        if admission.foreground_uses:
            admission.record_foreground_use(self._model, self._info)
        self.is_taken = admission.try_acquire(self._model)
        return self.is_taken

    async def acquire(self, timeout_s: float) -> float:
        """Take the place or wait for it; return the remaining seconds.

        Raises `AdmissionQueueFull` at once, or `DeadlinePassed`.
        """
        if not self.try_acquire():
            admission = self._admission
            waiter = admission.enqueue(self._model, self._info)
            timeout_s = await admission.wait(waiter, timeout_s)
        self.is_taken = True
        return timeout_s

    def transfer(self) -> Slot:
        """Return a slot with the place of this one, which does not release it any longer."""
        slot = Slot(self._admission, self._model, self._info)
        slot.is_taken, self.is_taken = self.is_taken, False
        return slot

    def release(self) -> None:
        if self.is_taken:
            self.is_taken = False
            self._admission.release(self._model)

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Release the slot, or if Triton still works on the request, release it after that."""
        if error is not None and isinstance(error, DeadlinePassed) and error.work_ended is not None:
            slot = self.transfer()
            error.work_ended.add_done_callback(lambda _: slot.release())
        else:
            self.release()


class AdmissionQueue:
    """Limits the concurrent inferences of the process and of each model, with a short fair queue.

    One model cannot take all slots, and `FairQueue` says who is admitted next. Each priority has places of
    its own in the queue. The waiting requests of a caller grow only while the free places exceed their own
    number, as in switches with a shared buffer (Choudhury and Hahne, Dynamic Queue Length Thresholds, 1998):
    they get half of the places, and the next caller still finds some.
    """

    def __init__(
        self,
        max_running: int,
        max_running_per_model: int,
        max_waiting: int,
        metrics: Metrics,
        find_model_priority: Callable[[str], Priority | None] = lambda model: None,
    ) -> None:
        self._max_running = max_running
        self.max_running_per_model = max_running_per_model
        self.max_waiting = max_waiting
        self._metrics = metrics
        self._running_by_model: dict[str, int] = {}
        # When requests above the priority `background` used models last, of those on which batches have run.
        self.foreground_uses: dict[str, float] = {}
        self.queue = FairQueue()
        self.running = 0
        # The priority in a model's config, for callers without one.
        self._find_model_priority = find_model_priority
        # Records the model of each request that ends, if models are loaded on demand.
        self.record_use: Callable[[str], None] | None = None

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def has_room(self, model: str) -> bool:
        return self._running_by_model.get(model, 0) < self.max_running_per_model

    def try_acquire(self, model: str) -> bool:
        """Take a slot if one is free, to be given back with `release`.

        This overtakes no waiting request of the model: requests wait only while it has no free slot.
        """
        running = self._running_by_model.get(model, 0)
        if self.running >= self._max_running or running >= self.max_running_per_model:
            return False
        self.running += 1
        self._running_by_model[model] = running + 1
        return True

    def enqueue(self, model: str, info: RequestInfo) -> Waiter:
        """Return a new last waiter of the caller. Raises `AdmissionQueueFull`."""
        priority = self.find_priority(model, info)
        queue = self.queue
        caller = info.caller_name
        if queue.count_caller(caller, priority) >= self.max_waiting - queue.count(priority):
            self._metrics.shed.labels("queue_full").inc()
            self._metrics.queue_refusals.labels(priority.name).inc()
            retry_after_s = self._find_retry_after_s(model)
            raise AdmissionQueueFull(model, self.running, len(queue), retry_after_s)
        waiter = Waiter(model, caller, priority, info.key)
        queue.add(waiter)
        return waiter

    def _find_retry_after_s(self, model: str) -> int:
        """Return the seconds in which the waiting requests of a model end, if each takes the usual time."""
        turns = self.queue.models.get(model, 0) / self.max_running_per_model
        return min(max(math.ceil(turns * ASSUMED_INFERENCE_S), 1), MAX_RETRY_AFTER_S)

    def find_priority(self, model: str, info: RequestInfo) -> Priority:
        """Return the priority of the caller, or that of the model; a request may ask for a lower one."""
        priority = info.caller.priority
        if priority is None:
            priority = self._find_model_priority(model)
        if priority is None:
            priority = Priority.normal
        wanted = info.wanted_priority
        return priority if wanted is None else min(priority, wanted)

    def record_foreground_use(self, model: str, info: RequestInfo) -> None:
        is_watched = model in self.foreground_uses
        if is_watched and self.find_priority(model, info) is not Priority.background:
            self.foreground_uses[model] = perf_counter()

    def is_in_foreground_use(self, model: str) -> bool:
        """Return whether such a request was a few seconds ago. They are noticed from the first call on."""
        used_at = self.foreground_uses.setdefault(model, -math.inf)
        return perf_counter() - used_at < FOREGROUND_USE_S

    async def wait(self, waiter: Waiter, timeout_s: float) -> float:
        """Wait for a slot; return the remaining seconds. Raises `DeadlinePassed`."""
        started_at = perf_counter()
        admitted = waiter.admitted
        try:
            with measure_phase("admission"):
                await asyncio.wait((admitted,), timeout=max(timeout_s, 0))
            if not admitted.done():
                raise DeadlinePassed(timeout_s)
        except BaseException:
            if admitted.done():  # at the same moment
                self.release(waiter.model)
            else:
                self.queue.remove(waiter)
            raise
        finally:
            waited_s = perf_counter() - started_at
            self._metrics.queue_wait.labels(waiter.priority.name).observe(waited_s)
            self._metrics.count_caller_wait(waiter.key, waited_s)
        return timeout_s - waited_s

    def count_requests(self, model: str) -> int:
        return self._running_by_model.get(model, 0) + self.queue.models.get(model, 0)

    def count_all_requests(self) -> dict[str, int]:
        return dict(Counter(self._running_by_model) + Counter(self.queue.models))

    def is_awaited(self, model: str) -> bool:
        """Return whether requests wait for the model, or of any model for a place in the process."""
        return model in self.queue.models or (
            bool(self.queue) and self.running >= self._max_running
        )

    @property
    def running_ratio(self) -> float:
        return self.running / self._max_running

    @property
    def waiting_ratio(self) -> float:
        """The share of its places in the queue that the priority with most waiting requests uses."""
        longest = max(map(self.queue.count, Priority))
        return longest / self.max_waiting if self.max_waiting else 0.0

    def release(self, model: str) -> None:
        self.running -= 1
        running = self._running_by_model[model] - 1
        if running:
            self._running_by_model[model] = running
        else:
            del self._running_by_model[model]
        if self.record_use is not None:
            self.record_use(model)
        if self.queue:
            self._admit_next()

    def _admit_next(self) -> None:
        """Admit the next waiter, if there is one whose model has a free slot."""
        waiter = self.queue.take_next(self.has_room)
        if waiter is not None:
            self.running += 1
            self._running_by_model[waiter.model] = self._running_by_model.get(waiter.model, 0) + 1
            waiter.admitted.set_result(None)
