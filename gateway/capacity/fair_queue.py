"""The order in which waiting requests are admitted: by priority, and by turns of their callers.

A priority has a start: the requests that were admitted with it, divided by its weight. The lowest start is
next. A priority for which requests begin to wait starts where the last one that was admitted did, and one
whose requests wait for models without room goes along, so that none saves up turns. Within a priority the
callers take turns, and for each caller its models.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final

from gateway.callers import Priority

WEIGHTS: Final = {Priority.interactive: 8, Priority.normal: 4, Priority.background: 1}


class Waiter:
    """A request that waits for a place."""

    __slots__ = ("admitted", "caller", "key", "model", "priority")

    def __init__(self, model: str, caller: str, priority: Priority, key: str = "") -> None:
        self.model = model
        self.caller = caller
        self.priority = priority
        self.key = key  # the name of the caller's key or rule
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class PriorityLine:
    """The requests that wait with one priority."""

    def __init__(self, priority: Priority) -> None:
        self.start = 0.0
        self.waiting = 0
        self._turn = 1 / WEIGHTS[priority]
        # By caller and model, both in the order of their turns.
        self._callers: dict[str, dict[str, deque[Waiter]]] = {}

    def count_caller(self, caller: str) -> int:
        return sum(map(len, self._callers.get(caller, {}).values()))

    def add(self, waiter: Waiter) -> None:
        queues = self._callers.setdefault(waiter.caller, {})
        queues.setdefault(waiter.model, deque()).append(waiter)
        self.waiting += 1

    def remove(self, waiter: Waiter) -> None:
        queues = self._callers[waiter.caller]
        queues[waiter.model].remove(waiter)
        self._forget_if_empty(queues, waiter)

    def take_next(self, has_room: Callable[[str], bool]) -> Waiter | None:
        """Return the next waiter whose model has room, which waits no longer."""
        for caller, queues in self._callers.items():
            model = next(filter(has_room, queues), None)
            if model is not None:
                waiter = queues[model].popleft()
                # The next turns are those of the other callers, and of the caller's other models.
                self._callers[caller] = self._callers.pop(caller)
                queues[model] = queues.pop(model)
                self._forget_if_empty(queues, waiter)
                self.start += self._turn
                return waiter
        return None

    def _forget_if_empty(self, queues: dict[str, deque[Waiter]], waiter: Waiter) -> None:
        self.waiting -= 1
        if not queues[waiter.model]:
            del queues[waiter.model]
        if not queues:
            del self._callers[waiter.caller]


class FairQueue:
    """The requests that wait for a place."""

    def __init__(self) -> None:
        self._lines = {priority: PriorityLine(priority) for priority in WEIGHTS}
        self._models: Counter[str] = Counter()
        # Where the priority that was admitted last had its start.
        self._clock = 0.0

    def __bool__(self) -> bool:
        return bool(self._models)

    def __len__(self) -> int:
        return sum(line.waiting for line in self._lines.values())

    @property
    def models(self) -> Mapping[str, int]:
        """The number of waiting requests by model, of those that have any."""
        return self._models

    def count(self, priority: Priority) -> int:
        return self._lines[priority].waiting

    def count_caller(self, caller: str, priority: Priority) -> int:
        """Return how many requests of this caller wait with this priority."""
        return self._lines[priority].count_caller(caller)

    def add(self, waiter: Waiter) -> None:
        line = self._lines[waiter.priority]
        if not line.waiting:
            line.start = max(line.start, self._clock)
        line.add(waiter)
        self._models[waiter.model] += 1

    def remove(self, waiter: Waiter) -> None:
        self._lines[waiter.priority].remove(waiter)
        self._forget_model_of(waiter)

    def take_next(self, has_room: Callable[[str], bool]) -> Waiter | None:
        """Return the next waiter whose model has room, which waits no longer."""
        waiting = [line for line in self._lines.values() if line.waiting]
        # A stable sort: of two equal starts, that of the higher priority is first.
        waiting.sort(key=lambda line: line.start)
        for line in waiting:
            start = line.start
            waiter = line.take_next(has_room)
            if waiter is not None:
                for each in waiting:
                    each.start = max(each.start, start)
                self._clock = max(self._clock, start)
                self._forget_model_of(waiter)
                return waiter
        return None

    def _forget_model_of(self, waiter: Waiter) -> None:
        self._models[waiter.model] -= 1
        if not self._models[waiter.model]:
            del self._models[waiter.model]
