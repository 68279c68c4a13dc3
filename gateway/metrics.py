"""The gateway's own metrics. Only models that Triton knows become label values.

The way of a small request touches none of prometheus_client's objects, which take a lock or two for each
sample: it counts into plain numbers, and these are passed on every second and for every page.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from gateway import __version__
from gateway.request_info import RequestInfo

DURATION_BUCKETS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
)
DECODE_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
CLIENT_CLOSED_REQUEST: Final = 499
# The labels `status`, a class, and `code`, the exact status of a failure.
STATUS_LABELS: Final = {
    status: (f"{status // 100}xx", str(status) if status >= 500 else "")
    for status in range(100, 600)
} | {CLIENT_CLOSED_REQUEST: (str(CLIENT_CLOSED_REQUEST), "")}
SHED_REASONS: Final = ("queue_full", "rate", "memory")  # the reasons
REFUSAL_REASONS: Final = (
    "malformed_request",
    "request_too_slow",
    "url_too_long",
    "header_too_large",
    "too_many_connections",
    "answer_not_taken",
)
V2_ROUTE, V1_ROUTE = "/v2", "/v1"  # through the gateway, or made here


REPLACED_WORKER_PREFIX: Final = "replaced-worker-"  # how a file for each begins


class PendingCounts:
    """What was counted of one kind of request, and not passed on yet."""

    __slots__ = ("bucket_counts", "bytes_in", "bytes_out", "seconds", "upstream_s")

    def __init__(self) -> None:
        self.bucket_counts = [0] * (len(DURATION_BUCKETS) + 1)
        self.seconds = 0.0
        self.upstream_s = 0.0
        self.bytes_in = 0
        self.bytes_out = 0


class Metrics:
    """One object per application; what it is asked of other objects is in `views`."""

    def __init__(self) -> None:
        # Else every counter has a second series beside it, which nobody asks for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.collector_registry = CollectorRegistry()
        self.in_flight = {V2_ROUTE: 0, V1_ROUTE: 0}
        self._pending: dict[tuple[str, str, str, tuple[str, str]], PendingCounts] = {}
        self._dropped_lines = 0
        self.pending_attempts: Counts[tuple[str, str]] = Counts()

        histogram = partial(Histogram, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        level = partial(Gauge, registry=self.registry, multiprocess_mode="livesum")
        worst = partial(Gauge, registry=self.registry, multiprocess_mode="livemax")
        kind = ("route", "model", "version")

        self.duration = histogram(
            "gateway_request_duration_seconds",
            "Time from a request's arrival to its answer's end.",
            (*kind, "status", "code"),
            buckets=DURATION_BUCKETS,
        )
        self.upstream_seconds = counter(
            "gateway_request_upstream_seconds_total",
            "Time that requests waited for Triton; the rest of their duration is the gateway's own.",
            kind,
        )
        self.bytes_in = counter("gateway_request_bytes_total", "Bytes of requests' bodies.", kind)
        self.bytes_out = counter("gateway_answer_bytes_total", "Bytes of answers' bodies.", kind)
        self.running = level(
            "gateway_requests_in_flight",
            "Requests that are being served: passed through (/v2), or made here (/v1).",
            ("route",),
        )
        self.waiting = level("gateway_requests_waiting", "Inferences that wait for a place.")
        self.request_memory = level(
            "gateway_request_memory_bytes",
            "Memory that the bodies and answers of requests hold, of GATEWAY_MAX_BYTES_IN_FLIGHT.",
        )
        self.decode_duration = histogram(
            "gateway_image_decode_seconds",
            "Time in a thread that turns images or large arrays into tensors.",
            buckets=DECODE_BUCKETS,
        )
        self.decodes_waiting = level(
            "gateway_decodes_waiting",
            "Requests whose images wait for a thread, or for pixels to become free.",
        )
        self.attempts = counter(
            "gateway_upstream_attempts_total",
            "Requests sent to a replica, by what came of it: answered, refused, bad_answer, deadline, "
            "given_up.",
            ("replica", "outcome"),
        )
        self.retries = counter(
            "gateway_upstream_retries_total",
            "Requests that went to another replica, because this one had not run them.",
            ("replica",),
        )
        self.ejections = counter(
            "gateway_upstream_ejections_total",
            "Times that a replica was left alone for a while, because requests to it failed.",
            ("replica",),
        )
        self.model_actions = counter(
            "gateway_model_actions_total",
            "Loads and unloads on a replica, by who asked (api, reconciler) and outcome (done, failed).",
            ("action", "by", "outcome"),
        )
        self.shed = counter(
            "gateway_requests_shed_total",
            "Requests that were refused because there were too many: queue_full, rate, memory.",
            ("reason",),
        )
        self.refusals = counter(
            "gateway_requests_refused_total",
            "Requests that were not looked at, and clients that were cut off, by why: "
            f"{', '.join(REFUSAL_REASONS)}.",
            ("reason",),
        )
        self.connections = level("gateway_connections", "Clients' connections that are open.")
        self.dropped_lines = counter(
            "gateway_log_lines_dropped_total",
            "Lines of the log that were dropped, because standard error was not read in time.",
        )
        self.loop_lag = worst(
            "gateway_event_loop_lag_seconds",
            "How late the event loop came to what was due, at worst in the last seconds.",
        )
        build = worst("gateway_build_info", "1, with the gateway's version.", ("version",))
        build.labels(__version__).set(1)
        self._initialize_series()

    def _initialize_series(self) -> None:
        """What there is from the start: the first of them is an increase."""
        for reason in SHED_REASONS:
            self.shed.labels(reason)
        for reason in REFUSAL_REASONS:
            self.refusals.labels(reason)
        for labels in product(("load", "unload"), ("api", "reconciler"), ("done", "failed")):
            self.model_actions.labels(*labels)

    def add_replica(self, replica: str) -> None:
        """What never happened to it yet is 0 from now on, so that its first time is an increase."""
        self.retries.labels(replica)
        self.ejections.labels(replica)

    def remove_replica(self, replica: str) -> None:
        """Else a fleet whose addresses come and go would add series for ever.

        Those of several workers stay: prometheus_client cannot take them out of its files.
        """
        if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            for metric in (self.attempts, self.retries, self.ejections):
                metric.remove_by_labels({"replica": replica})

    # On the way of every request: plain numbers.

    def observe(self, info: RequestInfo, status: int, duration_s: float) -> None:
        key = (info.route, info.model, info.version, STATUS_LABELS[status])
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = PendingCounts()
        pending.bucket_counts[bisect_left(DURATION_BUCKETS, duration_s)] += 1
        pending.seconds += duration_s
        pending.upstream_s += info.upstream_s
        pending.bytes_in += info.bytes_in
        pending.bytes_out += info.bytes_out

    # From time to time.

    def update_dropped_lines(self, total: int) -> None:
        """How many there were since the start of this process."""
        self.dropped_lines.inc(total - self._dropped_lines)
        self._dropped_lines = total

    def flush(self) -> None:
        """Pass on what was counted since the last time."""
        waiting, self._pending = self._pending, {}
        for (route, model, number, (status, code)), pending in waiting.items():
            histogram = self.duration.labels(route, model, number, status, code)
            for bucket, count in zip(histogram._buckets, pending.bucket_counts, strict=True):
                bucket.inc(count)
            histogram._sum.inc(pending.seconds)
            self.upstream_seconds.labels(route, model, number).inc(pending.upstream_s)
            self.bytes_in.labels(route, model, number).inc(pending.bytes_in)
            self.bytes_out.labels(route, model, number).inc(pending.bytes_out)
        attempts, self.pending_attempts = self.pending_attempts, Counts()
        for labels, count in attempts.items():
            self.attempts.labels(*labels).inc(count)
        for route, count in self.in_flight.items():
            self.running.labels(route).set(count)

    def collect(self) -> Iterator[Metric]:
        """What was passed on, of this process, or of all workers when there are several (`--workers`).

        For a thread: with many models it takes a while. `flush` before it, on the event loop.
        """
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        yield CounterMetricFamily(
            "gateway_workers_replaced",
            "Worker processes (serve --workers) that ended by themselves or hung, and were replaced.",
            value=count_replaced_workers(Path(folder)) if folder else 0,
        )
        if not folder:
            yield from self.registry.collect()
            return
        remove_dead_worker_files(Path(folder))
        yield from MultiProcessCollector(None, folder).collect()  # type: ignore[no-untyped-call]


def record_replaced_worker(folder: Path) -> None:
    """Called by the supervisor of the workers, which has no metrics of its own: they share the folder."""
    (folder / f"{REPLACED_WORKER_PREFIX}{count_replaced_workers(folder)}").touch()


def count_replaced_workers(folder: Path) -> int:
    return sum(1 for _ in folder.glob(f"{REPLACED_WORKER_PREFIX}*"))


def remove_dead_worker_files(folder: Path) -> None:
    """A worker that is gone has no connections and no requests; what it counted stays counted."""
    for file in folder.glob("gauge_live*_*.db"):
        pid = file.stem.rpartition("_")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with suppress(FileNotFoundError):  # another worker was quicker
                file.unlink()
