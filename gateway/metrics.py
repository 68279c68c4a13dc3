"""The gateway's own metrics, on a registry of their own."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


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
        self._durations: dict[tuple[str, str, int], Histogram] = {}
        self.scrape_failures = Counter(
            "gateway_scrape_failures_total",
            "Metrics pages of a replica that did not come.",
            ("replica",),
            registry=self.registry,
        )

    def observe(self, route: str, model: str, status: int, duration_s: float) -> None:
        # prometheus_client's own look-up of a child takes a lock and makes strings each time.
        key = (route, model, status)
        child = self._durations.get(key)
        if child is None:
            child = self._durations[key] = self.duration.labels(route, model, str(status))
        child.observe(duration_s)

    def page(self) -> str:
        """This process's metrics, or all workers' when there are several (`--workers`)."""
        registry = self.registry
        if folder := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            registry = CollectorRegistry()
            MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
        return generate_latest(registry).decode()
