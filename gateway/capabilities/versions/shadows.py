"""Shadow traffic: copies of requests to another version, whose responses are compared and dropped.

A copy is sent after the response of its request. It gives way to every request that waits, takes no slot,
because the instances of another version are not those of the label's, and does not count for the health of a
replica. A version that hangs holds up `MAX_COPIES`, and no request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final

from gateway.capabilities.versions.label_router import ActiveLabel
from gateway.capabilities.versions.labels import Shadow
from gateway.capabilities.versions.metrics import LabelMetrics
from gateway.capabilities.versions.output_comparison import (
    DIFFERENT,
    Arrays,
    Comparison,
    compare_outputs,
)
from gateway.capacity.admission import AdmissionQueue
from gateway.errors import GatewayError, TooLarge, UpstreamResponseTooLarge
from gateway.fleet.balancer import choose_less_loaded
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.tasks import TaskSet, cancel_tasks
from gateway.telemetry.request_info import current_request_info

log = logging.getLogger(__name__)

MAX_COPIES: Final = 32  # copies in progress at the same time
MAX_COPIED_BYTES: Final = 32 << 20  # the bodies of all of them together
LOG_INTERVAL_S: Final = 10.0  # minimum time between two lines of a label
MAX_INLINE_BYTES: Final = 64 << 10  # larger outputs are compared in a thread
FAILED = "failed"
DROPPED = "dropped"
# Reasons of dropped copies.
BUSY: Final = "busy"  # requests wait, even if only in the background
TOO_MANY: Final = "too_many"
TOO_LARGE: Final = "too_large"
IN_PIECES: Final = "in_pieces"


@dataclass(frozen=True)
class ShadowCopy:
    """A copy of a request, and the response of the request itself."""

    label: ActiveLabel
    shadow: Shadow
    request_id: str
    size_bytes: int  # size of the request or the response, whichever is larger
    send: Callable[[Replica], Awaitable[Arrays]]
    read_response: Callable[[], Awaitable[Arrays]]  # returns the outputs of the original request


class ShadowRunner:
    """Sends copies of requests while that delays no request, and counts the results."""

    def __init__(
        self, pool: ReplicaPool, admission: AdmissionQueue, metrics: LabelMetrics, max_bytes: int
    ) -> None:
        self.max_bytes = max_bytes  # limit for the body of a copied request, and of a response
        self._pool = pool
        self._admission = admission
        self._metrics = metrics
        self._tasks = TaskSet()
        self._copied_bytes = 0
        self._next_log: dict[tuple[str, str], float] = {}
        self._unlogged: Counter[tuple[str, str]] = Counter()

    async def close(self) -> None:
        await cancel_tasks(self._tasks)

    def choose_shadow(self, label: ActiveLabel) -> Shadow | None:
        """Return the label's shadow if a request that holds a slot is to be copied."""
        if label.value.shadow is None:
            return None
        shadow = label.take_shadow()
        if shadow is not None and self._admission.is_awaited(label.model):
            self.drop(label, shadow, BUSY)
            return None
        return shadow

    def start(self, copy: ShadowCopy) -> None:
        """Send a copy in the background, or drop it if it is large or there are too many."""
        if copy.size_bytes > self.max_bytes:
            self.drop(copy.label, copy.shadow, TOO_LARGE)
        elif (
            len(self._tasks) >= MAX_COPIES
            or self._copied_bytes + copy.size_bytes > MAX_COPIED_BYTES
        ):
            self.drop(copy.label, copy.shadow, TOO_MANY)
        else:
            self._tasks.start(self._run(copy))

    def drop(self, label: ActiveLabel, shadow: Shadow, reason: str) -> None:
        label.dropped_copies[reason] += 1
        drops = self._metrics.shadow_drops
        drops.labels(label.model, label.name, shadow.version, reason).inc()
        self._count_result(label, shadow, DROPPED)

    def _count_result(self, label: ActiveLabel, shadow: Shadow, result: str) -> None:
        copies = self._metrics.shadow_requests
        copies.labels(label.model, label.name, shadow.version, result).inc()

    async def _run(self, copy: ShadowCopy) -> None:
        current_request_info.set(None)  # its log line and metrics are complete
        self._copied_bytes += copy.size_bytes
        try:
            await self._run_and_count(copy)
        finally:
            self._copied_bytes -= copy.size_bytes

    async def _run_and_count(self, copy: ShadowCopy) -> None:
        try:
            comparison = await self._compare(copy)
        except (TooLarge, UpstreamResponseTooLarge):
            self.drop(copy.label, copy.shadow, TOO_LARGE)
            return
        except GatewayError as exc:
            comparison = Comparison(FAILED, exc.detail)
        self._count_result(copy.label, copy.shadow, comparison.result)
        if comparison.result in (DIFFERENT, FAILED):
            self._log_difference(copy, comparison, monotonic())

    async def _compare(self, copy: ShadowCopy) -> Comparison:
        candidates = self._pool.get_candidates(copy.label.model, copy.shadow.version)
        other = await copy.send(choose_less_loaded(candidates))
        primary = await copy.read_response()
        if copy.size_bytes <= MAX_INLINE_BYTES:
            return compare_outputs(primary, other, copy.shadow.tolerance)
        return await asyncio.to_thread(compare_outputs, primary, other, copy.shadow.tolerance)

    def _log_difference(self, copy: ShadowCopy, comparison: Comparison, now: float) -> None:
        key = (copy.label.model, copy.label.name)
        if now < self._next_log.get(key, 0.0):
            self._unlogged[key] += 1
            return
        self._next_log[key] = now + LOG_INTERVAL_S
        unlogged = self._unlogged.pop(key, 0)
        log.warning(
            "shadow version %s of label %s of model %s: %s: %s%s",
            copy.shadow.version,
            copy.label.name,
            copy.label.model,
            comparison.result,
            comparison.reason,
            f" ({unlogged} more since the last line)" if unlogged else "",
            extra={"request_id": copy.request_id},
        )
