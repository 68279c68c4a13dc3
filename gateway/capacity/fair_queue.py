"""The order in which waiting requests are admitted: by priority, and by turns of their callers.

Both levels are start-time fair queues (Goyal, Vin and Cheng, 1996). A priority, and within it a caller, has
a start: the seconds of inference that it has had, divided by its weight. The lowest start is next. Who
begins to wait starts where the last one that was admitted did, and who waits for a model without room goes
along, so that nobody saves up time.

The seconds are estimated when a request is admitted, and corrected when it ends: a caller whose requests
take a hundred times as long gets a hundredth of the turns.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

from gateway.callers import Priority

WEIGHTS: Final = {Priority.interactive: 8, Priority.normal: 4, Priority.background: 1}
FIRST_ESTIMATE_S: Final = 0.05
ESTIMATE_GAIN: Final = 0.2
MAX_ESTIMATES: Final = 1024
MAX_REMEMBERED_CALLERS: Final = 1024


class Waiter:
    """A request that waits for a place, and then has it."""

    __slots__ = (
        "admitted", "admitted_at", "deadline", "estimate_s", "is_stream", "key", "line", "model",
    )  # fmt: skip

    def __init__(self, model: str, line: CallerLine) -> None:
        self.model = model
        self.line = line
        # Times of `perf_counter`.
        self.deadline = inf
        self.admitted_at = 0.0
        self.is_stream = False
        self.key = ""  # the name of the caller's key or rule
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.estimate_s = 0.0

    @property
    def priority(self) -> Priority:
        return self.line.priority


class CallerLine:
    """The waiting requests of one caller with one priority. Its models take turns."""

    __slots__ = ("caller", "pending_s", "priority", "queues", "running", "start_s", "waiting")

    def __init__(self, caller: str, priority: Priority) -> None:
        self.caller = caller
        self.priority = priority
        self.queues: dict[str, deque[Waiter]] = {}
        self.waiting = 0
        self.running = 0
        self.start_s = 0.0
        # The estimated seconds of what is running, which are part of the start.
        self.pending_s = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.queues and not self.running

    def find_model(self, has_room: Callable[[str], bool]) -> str | None:
        return next((model for model in self.queues if has_room(model)), None)

    def add(self, waiter: Waiter) -> None:
        self.queues.setdefault(waiter.model, deque()).append(waiter)
        self.waiting += 1

    def remove(self, waiter: Waiter) -> None:
        queue = self.queues[waiter.model]
        queue.remove(waiter)
        self.waiting -= 1
        if not queue:
            del self.queues[waiter.model]

    def take(self, model: str) -> Waiter:
        queue = self.queues.pop(model)
        waiter = queue.popleft()
        self.waiting -= 1
        if queue:
            self.queues[model] = queue
        return waiter


class PriorityLine:
    """The callers that wait with one priority."""

    def __init__(self, priority: Priority) -> None:
        self.priority = priority
        self.start_s = 0.0
        self.pending_s = 0.0
        self.waiters: dict[Waiter, None] = {}
        self._callers: dict[str, CallerLine] = {}
        # Where the caller that was admitted last had its start.
        self._clock_s = 0.0

    def find_caller(self, caller: str) -> CallerLine:
        line = self._callers.get(caller)
        if line is None:
            if len(self._callers) >= MAX_REMEMBERED_CALLERS:
                self._forget_idle_callers()
            line = self._callers[caller] = CallerLine(caller, self.priority)
        return line

    def count(self, model: str, caller: str) -> tuple[int, int]:
        line = self._callers.get(caller)
        return (0, 0) if line is None else (len(line.queues.get(model, ())), line.waiting)

    def add(self, waiter: Waiter) -> None:
        line = waiter.line
        if not line.queues:
            line.start_s = max(line.start_s - line.pending_s, self._clock_s) + line.pending_s
        line.add(waiter)
        self.waiters[waiter] = None

    def remove(self, waiter: Waiter) -> None:
        waiter.line.remove(waiter)
        self._leave(waiter)

    def take_next(self, has_room: Callable[[str], bool]) -> Waiter | None:
        """Return the next waiter whose model has room, which waits no longer."""
        chosen: tuple[CallerLine, str] | None = None
        for line in self._callers.values():
            is_earlier = chosen is None or line.start_s < chosen[0].start_s
            if is_earlier and (model := line.find_model(has_room)) is not None:
                chosen = line, model
        if chosen is None:
            return None
        line, model = chosen
        for each in self._callers.values():
            if each.queues:
                each.start_s = max(each.start_s, line.start_s)
        self._clock_s = max(self._clock_s, line.start_s)
        waiter = line.take(model)
        line.running += 1
        self._leave(waiter)
        return waiter

    def charge(self, line: CallerLine, seconds: float, pending_s: float) -> None:
        """Charge seconds of inference, of which so many are an estimate until the request ends."""
        weight = WEIGHTS[self.priority]
        line.start_s += seconds
        line.pending_s += pending_s
        self.start_s += seconds / weight
        self.pending_s += pending_s / weight

    def _leave(self, waiter: Waiter) -> None:
        del self.waiters[waiter]
        if not self.waiters:
            self._forget_idle_callers()

    def _forget_idle_callers(self) -> None:
        for line in [line for line in self._callers.values() if line.is_idle]:
            del self._callers[line.caller]


class FairQueue:
    """The requests that wait for a place."""

    def __init__(self) -> None:
        self._lines = {priority: PriorityLine(priority) for priority in WEIGHTS}
        self._models: Counter[str] = Counter()
        self._estimates_s: dict[str, float] = {}
        # Where the priority that was admitted last had its start.
        self._clock_s = 0.0

    def __bool__(self) -> bool:
        return bool(self._models)

    def __len__(self) -> int:
        return sum(len(line.waiters) for line in self._lines.values())

    @property
    def models(self) -> Mapping[str, int]:
        """The number of waiting requests by model, of those that have any."""
        return self._models

    def count_from(self, priority: Priority) -> int:
        return sum(len(line.waiters) for each, line in self._lines.items() if each >= priority)

    def count(self, priority: Priority) -> int:
        return len(self._lines[priority].waiters)

    def count_like(self, model: str, caller: str, priority: Priority) -> tuple[int, int]:
        """Return how many requests of this caller wait with this priority: for the model, and for any."""
        return self._lines[priority].count(model, caller)

    def add(self, model: str, caller: str, priority: Priority) -> Waiter:
        line = self._lines[priority]
        if not line.waiters:
            line.start_s = max(line.start_s - line.pending_s, self._clock_s) + line.pending_s
        waiter = Waiter(model, line.find_caller(caller))
        line.add(waiter)
        self._models[model] += 1
        return waiter

    def remove(self, waiter: Waiter) -> None:
        self._lines[waiter.priority].remove(waiter)
        self._forget_model_of(waiter)

    def remove_newest_below(self, priority: Priority) -> Waiter | None:
        """Return the newest waiter of the lowest priority below this one, which waits no longer."""
        for each in sorted(self._lines):
            line = self._lines[each]
            if each < priority and line.waiters:
                newest = next(reversed(line.waiters))
                self.remove(newest)
                return newest
        return None

    def take_next(self, has_room: Callable[[str], bool]) -> Waiter | None:
        """Return the next waiter whose model has room, which waits no longer."""
        waiting = [line for line in self._lines.values() if line.waiters]
        # A stable sort: of two equal starts, that of the higher priority is first.
        waiting.sort(key=lambda line: line.start_s)
        for line in waiting:
            start_s = line.start_s
            waiter = line.take_next(has_room)
            if waiter is not None:
                for each in waiting:
                    each.start_s = max(each.start_s, start_s)
                self._clock_s = max(self._clock_s, start_s)
                self._forget_model_of(waiter)
                waiter.estimate_s = self._estimates_s.get(waiter.model, FIRST_ESTIMATE_S)
                line.charge(waiter.line, waiter.estimate_s, waiter.estimate_s)
                return waiter
        return None

    def _forget_model_of(self, waiter: Waiter) -> None:
        self._models[waiter.model] -= 1
        if not self._models[waiter.model]:
            del self._models[waiter.model]

    def end(self, waiter: Waiter, held_s: float) -> None:
        """Correct what was charged for a request that was admitted, and learn how long its model takes."""
        self._correct(waiter, held_s)
        estimate_s = self._estimates_s.pop(waiter.model, held_s)
        self._estimates_s[waiter.model] = estimate_s + ESTIMATE_GAIN * (held_s - estimate_s)
        if len(self._estimates_s) > MAX_ESTIMATES:
            del self._estimates_s[next(iter(self._estimates_s))]

    def refund(self, waiter: Waiter) -> None:
        """Take back what was charged for a request that was admitted, but does not run."""
        self._correct(waiter, 0.0)

    def _correct(self, waiter: Waiter, held_s: float) -> None:
        line = self._lines[waiter.priority]
        line.charge(waiter.line, held_s - waiter.estimate_s, -waiter.estimate_s)
        waiter.line.running -= 1
