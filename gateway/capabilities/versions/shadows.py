"""Shadow traffic: copies of requests to another version, whose responses are compared and dropped.

A copy is sent after the response of its request. It takes no slot, waits for none, and does not count for the
health of a replica. While other requests are in progress, copies add at most `BUSY_SHARE` to their number.
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

BUSY_SHARE: Final = 0.01  # copies per request while other requests are in progress
MAX_COPIES: Final = 4  # copies in progress at the same time
LOG_INTERVAL_S: Final = 10.0  # minimum time between two lines of a label
MAX_INLINE_BYTES: Final = 64 << 10  # larger outputs are compared in a thread
FAILED = "failed"
DROPPED = "dropped"


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
        self._allowed_copies = 1.0  # a token bucket
        self._next_log: dict[tuple[str, str], float] = {}
        self._unlogged: Counter[tuple[str, str]] = Counter()

    async def close(self) -> None:
        await cancel_tasks(self._tasks)

    def choose_shadow(self, label: ActiveLabel) -> Shadow | None:
        """Return the label's shadow if a request that holds a slot is to be copied."""
        if label.value.shadow is None:
            return None
        self._allowed_copies = min(self._allowed_copies + BUSY_SHARE, MAX_COPIES)
        shadow = label.take_shadow()
        if shadow is None or self._may_copy():
            return shadow
        self.count_result(label, shadow, DROPPED)
        return None

    def _may_copy(self) -> bool:
        if self._admission.waiting:
            return False
        if self._admission.running <= 1:  # the request itself
            return True
        if self._allowed_copies < 1:
            return False
        self._allowed_copies -= 1
        return True

    def start(self, copy: ShadowCopy) -> None:
        """Send a copy in the background, or drop it if it is large or there are too many."""
        if copy.size_bytes > self.max_bytes or len(self._tasks) >= MAX_COPIES:
            self.count_result(copy.label, copy.shadow, DROPPED)
            return
        self._tasks.start(self._run(copy))

    def count_result(self, label: ActiveLabel, shadow: Shadow, result: str) -> None:
        copies = self._metrics.shadow_requests
        copies.labels(label.model, label.name, shadow.version, result).inc()

    async def _run(self, copy: ShadowCopy) -> None:
        current_request_info.set(None)  # its log line and metrics are complete
        try:
            comparison = await self._compare(copy)
        except (TooLarge, UpstreamResponseTooLarge) as exc:
            comparison = Comparison(DROPPED, exc.detail)
        except GatewayError as exc:
            comparison = Comparison(FAILED, exc.detail)
        self.count_result(copy.label, copy.shadow, comparison.result)
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
