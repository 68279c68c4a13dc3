"""Admission control: a limit of concurrent inferences with a fair queue."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Final

from gateway.callers import Priority
from gateway.capacity.fair_queue import FairQueue, Waiter
from gateway.errors import DeadlinePassed, GatewayError, Overloaded
from gateway.messages import quote_text
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_info import RequestInfo, measure_phase

DEPARTURES_WINDOW_S: Final = 10.0
MAX_MODELS_WITH_RATES: Final = 1024
CALLER_SHARE: Final = 2  # requests of a caller that wait, of the free room
MAX_RETRY_AFTER_S: Final = 60
ANSWER_TIME_GAIN: Final = 0.2
MAX_ANSWER_TIMES: Final = 1024
MAX_ANSWER_TIME_AGE_S: Final = 5.0
FOREGROUND_USE_S: Final = 10.0


class AdmissionQueueFull(Overloaded):
    """The concurrency limit is reached, and the queue, or the caller's share of it, is full."""

    def __init__(self, model: str, running: int, waiting: int, retry_after_s: int = 1) -> None:
        super().__init__(
            f"cannot admit another request for model {quote_text(model)}: {running} inferences are "
            f"running and {waiting} are waiting, of all models; try again in {retry_after_s} s",
            headers={"Retry-After": str(retry_after_s)},
        )


class DisplacedFromQueue(Overloaded):
    """A request with a higher priority took the place in the full queue."""

    def __init__(self, waiter: Waiter, retry_after_s: int) -> None:
        super().__init__(
            f"the request for model {quote_text(waiter.model)} waited with priority "
            f"{waiter.priority.name}, and gave way to one with a higher priority; "
            f"try again in {retry_after_s} s",
            headers={"Retry-After": str(retry_after_s)},
        )


class DeadlineTooNear(DeadlinePassed):
    """The time that is left to a request when its turn comes is shorter than the model takes."""

    def __init__(self, waiter: Waiter, needed_s: float) -> None:
        GatewayError.__init__(
            self,
            f"the request for model {quote_text(waiter.model)} waited for its turn until its timeout was so "
            f"near that the model, which takes {needed_s:.2g} s or longer at present, would not answer in "
            "time; set a longer timeout with X-Request-Timeout, in seconds, or try again later",
        )


class AnswerTime:
    """The time that a model takes to answer a caller: its mean, and the mean deviation (Jacobson, 1988)."""

    __slots__ = ("_deviation_s", "_mean_s", "_measured_at")

    def __init__(self, seconds: float) -> None:
        self._mean_s = seconds
        self._deviation_s = seconds / 2
        self._measured_at = perf_counter()

    def add(self, seconds: float) -> None:
        error_s = seconds - self._mean_s
        self._mean_s += ANSWER_TIME_GAIN * error_s
        self._deviation_s += ANSWER_TIME_GAIN * (abs(error_s) - self._deviation_s)
        self._measured_at = perf_counter()

    @property
    def shortest_s(self) -> float:
        """Return what hardly any answer stays below; 0 if times differ much, or are not known any more."""
        if perf_counter() - self._measured_at > MAX_ANSWER_TIME_AGE_S:
            return 0.0
        return max(self._mean_s - 2 * self._deviation_s, 0.0)


class Slot:
    """The place of one request among those of its model that run. It is given back at most once."""

    __slots__ = (
        "_admission",
        "_callbacks",
        "_info",
        "_model",
        "_more_rows",
        "_waiter",
        "is_taken",
    )

    def __init__(self, admission: AdmissionQueue, model: str, info: RequestInfo) -> None:
        self._admission = admission
        self._model = model
        self._info = info
        self._callbacks: tuple[Callable[[], None], ...] = ()
        # Set for a request that had to wait.
        self._waiter: Waiter | None = None
        self._more_rows = 0
        self.is_taken = False

    def try_acquire(self) -> bool:
        admission = self._admission
        if admission.foreground_uses:
            admission.record_foreground_use(self._model, self._info)
        self.is_taken = admission.try_acquire(self._model)
        return self.is_taken

    async def acquire(self, timeout_s: float) -> float:
        """Take the place or wait for it; return the remaining seconds.

        Raises `AdmissionQueueFull` at once, `DisplacedFromQueue` or `DeadlinePassed`.
        """
        if not self.try_acquire():
            admission = self._admission
            waiter = admission.enqueue(self._model, self._info, timeout_s)
            timeout_s = await admission.wait(waiter, timeout_s)
            self._waiter = waiter
            waiter.admitted_at = perf_counter()
        self.is_taken = True
        return timeout_s

    def mark_stream(self) -> None:
        """Do not learn how long the model takes to answer: the client sends or reads in pieces meanwhile."""
        if self._waiter is not None:
            self._waiter.is_stream = True

    @property
    def counts_rows(self) -> bool:
        return self._model in self._admission.batching_models

    def weigh(self, rows: int) -> None:
        """Count the request as that many inferences, if the gateway chose the limit of the model."""
        limit = self._admission.limits.get(self._model)
        if limit is not None and self.is_taken:
            more_rows = max(min(rows, limit), 1) - 1
            self._admission.add_rows(self._model, more_rows - self._more_rows)
            self._more_rows = more_rows

    def call_when_released(self, callback: Callable[[], None]) -> None:
        self._callbacks += (callback,)

    def transfer(self) -> Slot:
        """Return a slot with the place of this one, which does not release it any longer."""
        slot = Slot(self._admission, self._model, self._info)
        slot.is_taken, self.is_taken = self.is_taken, False
        slot._callbacks, self._callbacks = self._callbacks, ()
        slot._waiter = self._waiter
        slot._more_rows = self._more_rows
        return slot

    def release(self, *, is_late: bool = False) -> None:
        if self.is_taken:
            self.is_taken = False
            waiter = self._waiter
            if waiter is not None:
                held_s = perf_counter() - waiter.admitted_at
                self._admission.queue.end(waiter, held_s)
                answer_s = held_s if is_late else self._info.upstream_s
                if answer_s and not waiter.is_stream:
                    self._admission.learn_answer_time(self._model, self._info.caller_name, answer_s)
            if self._more_rows:
                self._admission.add_rows(self._model, -self._more_rows)
            self._admission.release(self._model, self._info.caller_name)
            for callback in self._callbacks:
                callback()

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Release the slot, or if Triton still works on the request, release it after that."""
        if error is not None and isinstance(error, DeadlinePassed) and error.work_ended is not None:
            slot = self.transfer()
            error.work_ended.add_done_callback(lambda _: slot.release(is_late=True))
        else:
            self.release()


class AdmissionQueue:
    """Limits the concurrent inferences of the process and of each model, with a short fair queue.

    One model cannot take all slots, and `FairQueue` says who is admitted next. The waiting requests of a
    caller to a model grow only while the free room exceeds their own number, as in switches with a shared
    buffer (Choudhury and Hahne, Dynamic Queue Length Thresholds, 1998): they get half of the room, those of
    one caller to all models two thirds, and the next caller still finds some. A request finds the room of
    those with a lower priority free, and displaces the newest of them.
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
        self._default_limit = max_running_per_model
        # The limits that the gateway chose.
        self.limits: dict[str, int] = {}
        self.max_waiting = max_waiting
        self._metrics = metrics
        self._running_by_model: dict[str, int] = {}
        # Those of the models that batch requests by their rows.
        self.batching_models: set[str] = set()
        # The rows of running requests, without the first of each.
        self._more_rows: Counter[str] = Counter()
        # By model and caller: the long requests of one must not have the short ones of others refused.
        self._answer_times: dict[tuple[str, str], AnswerTime] = {}
        # When requests above the priority `background` used models last, of those on which batches have run.
        self.foreground_uses: dict[str, float] = {}
        self.queue = FairQueue()
        self.running = 0
        # The priority in a model's config, for callers without one.
        self._find_model_priority = find_model_priority
        self._departures = Departures()
        # Records the model and the caller of each request that ends, if models are loaded on demand.
        self.record_use: Callable[[str, str], None] | None = None

    @property
    def waiting(self) -> int:
        return len(self.queue)

    def get_limit(self, model: str) -> int:
        return self.limits.get(model, self._default_limit)

    def has_room(self, model: str) -> bool:
        return self._count_running(model) < self.get_limit(model)

    def _count_running(self, model: str) -> int:
        return self._running_by_model.get(model, 0) + self._more_rows.get(model, 0)

    def set_limit(self, model: str, limit: int) -> None:
        """Limit the concurrent inferences of a model, and admit those that wait for a higher limit."""
        limit = min(limit, self._max_running)
        self.limits[model] = limit
        self._metrics.model_limit.labels(model).set(limit)
        self._admit_all()

    def forget_limit(self, model: str) -> None:
        del self.limits[model]
        self.batching_models.discard(model)

    def add_rows(self, model: str, rows: int) -> None:
        self._more_rows[model] += rows
        if not self._more_rows[model]:
            del self._more_rows[model]

    def learn_answer_time(self, model: str, caller: str, seconds: float) -> None:
        times = self._answer_times
        known = times.get((model, caller))
        if known is not None:
            known.add(seconds)
            return
        if len(times) >= MAX_ANSWER_TIMES:
            del times[next(iter(times))]
        times[model, caller] = AnswerTime(seconds)

    def try_acquire(self, model: str) -> bool:
        """Take a slot if one is free, to be given back with `release`.

        This overtakes no waiting request of the model: requests wait only while it has no free slot.
        """
        running = self._running_by_model.get(model, 0)
        limit = self.limits.get(model, self._default_limit)
        if self._more_rows:
            limit -= self._more_rows.get(model, 0)
        if self.running >= self._max_running or running >= limit:
            return False
        self.running += 1
        self._running_by_model[model] = running + 1
        return True

    def enqueue(self, model: str, info: RequestInfo, timeout_s: float) -> Waiter:
        """Return a new last waiter of the caller. Raises `AdmissionQueueFull`."""
        priority = self.find_priority(model, info)
        queue = self.queue
        room = self.max_waiting - queue.count_from(priority)
        of_model, of_caller = queue.count_like(model, info.caller_name, priority)
        if of_model >= room or of_caller >= CALLER_SHARE * room:
            self._count_refusal("queue_full", priority)
            raise AdmissionQueueFull(
                model,
                self.running,
                len(queue),
                self._departures.estimate_wait_s(model, queue.models),
            )
        if not queue:
            self._departures.restart()
        if len(queue) >= self.max_waiting:
            self._displace_newest_below(priority)
        waiter = queue.add(model, info.caller_name, priority)
        waiter.deadline = perf_counter() + timeout_s
        waiter.key = info.key
        return waiter

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
        """Wait for a slot; return the remaining seconds.

        Raises `DisplacedFromQueue`, `DeadlineTooNear` or `DeadlinePassed`.
        """
        started_at = perf_counter()
        admitted = waiter.admitted
        try:
            with measure_phase("admission"):
                await asyncio.wait((admitted,), timeout=max(timeout_s, 0))
            if not admitted.done():
                raise DeadlinePassed(timeout_s)
            admitted.result()
        except BaseException:
            if not admitted.done():
                admitted.cancel()
                self.queue.remove(waiter)
            elif admitted.exception() is None:
                # Admitted at the same moment.
                self.queue.refund(waiter)
                self.release(waiter.model, waiter.line.caller)
            raise
        finally:
            waited_s = perf_counter() - started_at
            self._metrics.queue_wait.labels(waiter.priority.name).observe(waited_s)
            self._metrics.count_caller_wait(waiter.key, waited_s)
        return timeout_s - waited_s

    def _displace_newest_below(self, priority: Priority) -> None:
        waiter = self.queue.remove_newest_below(priority)
        if waiter is not None:
            self._count_refusal("displaced", waiter.priority)
            wait_s = self._departures.estimate_wait_s(waiter.model, self.queue.models)
            waiter.admitted.set_exception(DisplacedFromQueue(waiter, wait_s))

    def _count_refusal(self, reason: str, priority: Priority) -> None:
        self._metrics.shed.labels(reason).inc()
        self._metrics.queue_refusals.labels(priority.name).inc()

    def count_requests(self, model: str) -> int:
        return self._running_by_model.get(model, 0) + self.queue.models.get(model, 0)

    def count_all_requests(self) -> dict[str, int]:
        return dict(Counter(self._running_by_model) + Counter(self.queue.models))

    def is_crowded(self, model: str) -> bool:
        """Return whether requests of the model wait, or half of its slots are taken."""
        limit = self.get_limit(model)
        is_half_taken = 2 * self._count_running(model) > limit
        return is_half_taken or model in self.queue.models

    def is_awaited(self, model: str) -> bool:
        """Return whether requests wait for the model, or of any model for a place in the process."""
        return model in self.queue.models or (
            bool(self.queue) and self.running >= self._max_running
        )

    @property
    def is_busy(self) -> bool:
        """Return whether requests of any model wait, or half of all slots are taken."""
        return bool(self.waiting) or 2 * self.running > self._max_running

    @property
    def running_ratio(self) -> float:
        return self.running / self._max_running

    @property
    def waiting_ratio(self) -> float:
        return self.waiting / self.max_waiting if self.max_waiting else 0.0

    def release(self, model: str, caller: str = "") -> None:
        self.running -= 1
        running = self._running_by_model[model] - 1
        if running:
            self._running_by_model[model] = running
        else:
            del self._running_by_model[model]
        if self.record_use is not None:
            self.record_use(model, caller)
        # A slot became free, or several rows. After a limit was lowered, it may be one too many.
        if self.queue:
            self._departures.record(model)
            self._admit_all()

    def _admit_all(self) -> None:
        while self.queue and self.running < self._max_running and self._admit_next():
            pass

    def _admit_next(self) -> bool:
        """Admit the next waiter whose model has a free slot; return whether there was one.

        Those before it whose model would not answer in time are refused.
        """
        while any(map(self.has_room, self.queue.models)):
            waiter = self.queue.take_next(self.has_room)
            if waiter is None:
                return False
            if self._refuse_if_late(waiter):
                continue
            self.running += 1
            self._running_by_model[waiter.model] = self._running_by_model.get(waiter.model, 0) + 1
            waiter.admitted.set_result(None)
            return True
        return False

    def _refuse_if_late(self, waiter: Waiter) -> bool:
        times = self._answer_times.get((waiter.model, waiter.line.caller))
        needed_s = 0.0 if times is None else times.shortest_s
        if not needed_s or perf_counter() + needed_s <= waiter.deadline:
            return False
        self.queue.refund(waiter)
        self._count_refusal("deadline", waiter.priority)
        waiter.admitted.set_exception(DeadlineTooNear(waiter, needed_s))
        return True


class Departures:
    """The rates at which requests end while others wait, from which clients learn when to try again."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        # By model, in the window before.
        self._last_rates: Mapping[str, float] = {}
        self._since = perf_counter()

    def restart(self) -> None:
        self._counts.clear()
        self._since = perf_counter()

    def record(self, model: str) -> None:
        if len(self._counts) < MAX_MODELS_WITH_RATES or model in self._counts:
            self._counts[model] += 1

    def estimate_wait_s(self, model: str, waiting: Mapping[str, int]) -> int:
        """Return the seconds in which the waiting requests of a model end.

        Before one has ended, that is at least the time that has passed.
        """
        elapsed_s = perf_counter() - self._since
        if count := self._counts[model]:
            wait_s = waiting.get(model, 1) * elapsed_s / count
        elif rate := self._last_rates.get(model):
            wait_s = waiting.get(model, 1) / rate
        else:
            wait_s = elapsed_s
        if elapsed_s > DEPARTURES_WINDOW_S:
            self._last_rates = {each: count / elapsed_s for each, count in self._counts.items()}
            self.restart()
        return min(max(math.ceil(wait_s), 1), MAX_RETRY_AFTER_S)
