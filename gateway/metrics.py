"""The gateway's own metrics, on a registry of their own."""

from __future__ import annotations

import os
from bisect import bisect_left

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Pending:
    """Durations that were counted, and not passed on yet.

    prometheus_client takes two locks for each, which on the way of a small request is too much.
    """

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0


class Metrics:
    """One object per application. Only models that Triton knows become label values."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.duration = Histogram(
            "gateway_request_duration_seconds",
            "Time from a request's arrival to its answer's end.",
            ("route", "model", "status"),
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._pending: dict[tuple[str, str, int], Pending] = {}
        self.scrape_failures = Counter(
            "gateway_scrape_failures_total",
            "Metrics pages of a replica that did not come.",
            ("replica",),
            registry=self.registry,
        )

    def observe(self, route: str, model: str, status: int, duration_s: float) -> None:
        key = (route, model, status)
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = Pending()
        pending.counts[bisect_left(BUCKETS, duration_s)] += 1
        pending.seconds += duration_s

    def flush(self) -> None:
        """Pass on what was counted since the last time."""
        for (route, model, status), pending in self._pending.items():
            histogram = self.duration.labels(route, model, str(status))
            for bucket, count in zip(histogram._buckets, pending.counts, strict=True):
                bucket.inc(count)
            histogram._sum.inc(pending.seconds)
        self._pending.clear()

    def page(self) -> str:
        """This process's metrics, or all workers' when there are several (`--workers`)."""
        self.flush()
        registry = self.registry
        if folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            registry = CollectorRegistry()
            MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        return generate_latest(registry).decode()
