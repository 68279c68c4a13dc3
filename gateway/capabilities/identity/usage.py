"""Usage by day, caller and model: collected in each process, added up in the state, summed for answers."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from itertools import chain
from typing import Any, Final

import anyio

from gateway.errors import MalformedRequest, StateUnavailable
from gateway.repository.state.content import Counts, sum_counts
from gateway.repository.state.interface import StateStore
from gateway.tasks import repeat
from gateway.telemetry.metrics import CallerUsage

WRITE_INTERVAL_S: Final = 3.0
LAST_WRITE_TIMEOUT_S: Final = 3.0  # the state may hang when the gateway stops
MAX_ANSWER_ROWS: Final = 50_000


def find_today() -> date:
    return datetime.now(timezone.utc).date()


@dataclass(frozen=True)
class Batch:
    """Counts of a day that are being written; after a failure, the same ones are written again."""

    day: str
    counts: Counts
    id: str = field(default_factory=lambda: secrets.token_hex(8))


class UsageLedger:
    """Collects the usage of this process, and adds it to that of all others in the state."""

    def __init__(self, store: StateStore, flush: Callable[[], None]) -> None:
        self._store = store
        self._flush = flush  # calls `add` with what is not counted yet
        self._unwritten_by_day: dict[str, Counts] = {}
        self._batch: Batch | None = None
        self._lock = asyncio.Lock()
        self._reading = asyncio.Lock()

    def add(self, caller: str, model: str, usage: CallerUsage) -> None:
        counts = {
            "requests": usage.requests,
            "rows": usage.rows,
            "inference_us": round(usage.inference_s * 1e6),
            "bytes_in": usage.bytes_in,
            "bytes_out": usage.bytes_out,
        }
        callers = self._unwritten_by_day.setdefault(find_today().isoformat(), {})
        sums = callers.setdefault(caller, {}).setdefault(model, dict.fromkeys(counts, 0))
        for measure, value in counts.items():
            sums[measure] += value

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Write every few seconds, and at the end."""
        writing = asyncio.create_task(repeat("usage", self._write_later))
        try:
            yield
        finally:
            with anyio.move_on_after(LAST_WRITE_TIMEOUT_S), suppress(StateUnavailable):
                async with self._lock:  # the store may finish a write that is cancelled
                    writing.cancel()
                await self._write()
            writing.cancel()

    async def _write_later(self) -> None:
        await asyncio.sleep(WRITE_INTERVAL_S)
        with suppress(StateUnavailable):  # the store logs it, and the next write includes this one
            await self._write()

    async def _write(self) -> None:
        self._flush()
        async with self._lock:
            while self._batch is not None or self._unwritten_by_day:
                if self._batch is None:
                    day = min(self._unwritten_by_day)
                    self._batch = Batch(day, self._unwritten_by_day.pop(day))
                batch = self._batch
                await self._store.add_counts(batch.day, batch.counts, batch.id)
                self._batch = None

    async def read(self, day: str) -> Sequence[Counts]:
        """Return the counts of a day in the state, and those that this process has not written yet."""
        self._flush()
        async with self._reading, self._lock:  # the writer waits for one reader at most
            stored = await self._store.read_counts(day)
            unwritten = [self._unwritten_by_day.get(day, {})]
            if self._batch is not None and self._batch.day == day:
                unwritten.append(self._batch.counts)
            return stored, sum_counts(*unwritten)


class UsageTable:
    """The usage by day and by groups (caller, model), of one caller or of all."""

    def __init__(self, by: Sequence[str], only_caller: str | None = None) -> None:
        self.by = by
        self._only_caller = only_caller
        self._rows: dict[tuple[str, ...], Counter[str]] = {}

    def add(self, day: str, *parts: Counts) -> None:
        """Add the counts of a day. Raises `MalformedRequest` for too many rows."""
        for caller, models in chain.from_iterable(part.items() for part in parts):
            if self._only_caller in (None, caller):
                for model, measures in models.items():
                    names = {"caller": caller, "model": model}
                    key = (day, *(names[group] for group in self.by))
                    self._rows.setdefault(key, Counter()).update(measures)
        if len(self._rows) > MAX_ANSWER_ROWS:
            raise MalformedRequest(
                f"the answer would have more than {MAX_ANSWER_ROWS} rows; ask for fewer days, or for fewer "
                "groups with by=caller or by=model"
            )

    def list_days(self) -> list[dict[str, Any]]:
        return self._sum_by(("day", *self.by))

    def list_totals(self) -> list[dict[str, Any]]:
        return self._sum_by(self.by)

    def _sum_by(self, columns: Sequence[str]) -> list[dict[str, Any]]:
        sums: dict[tuple[str, ...], Counter[str]] = {}
        for key, measures in self._rows.items():
            sums.setdefault(key[-len(columns) :] if columns else (), Counter()).update(measures)
        return [
            {
                **dict(zip(columns, key, strict=True)),
                "requests": measures["requests"],
                "rows": measures["rows"],
                "inference_seconds": measures["inference_us"] / 1e6,
                "bytes_in": measures["bytes_in"],
                "bytes_out": measures["bytes_out"],
            }
            for key, measures in sorted(sums.items())
        ]
