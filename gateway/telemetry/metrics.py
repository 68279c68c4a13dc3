"""The gateway's own metrics. Only models that exist in Triton become label values.

What every request counts is added up in plain numbers first: prometheus_client takes a lock for each number,
which would cost a tenth of a request to `/v2`. `flush` hands the sums over, periodically and for every page.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from prometheus_client.values import ValueClass

from gateway import __version__
from gateway.callers import Priority
from gateway.memory import MEMORY_KINDS
from gateway.tasks import background_failures
from gateway.telemetry.refusals import MAX_CALLERS, REFUSED_STATUSES
from gateway.telemetry.request_info import CLIENT_CLOSED_REQUEST, RequestInfo

DURATION_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
PHASE_BUCKETS: Final = (0.001, 0.01, 0.1, 1.0, 10.0)
# A request waits for its client, for a slot, for the load of its model, for the conversion of its body, for
# Triton and for the encoding of its response.
PHASES: Final = ("receive", "admission", "load", "decode", "upstream", "render")
OTHER_CALLERS: Final = "other"
LIMITS: Final = ("connections", "inferences", "memory", "queue")
# The labels `status`, a class, and `code`, the exact status of a failure.
STATUS_LABELS: Final = {
    status: (f"{status // 100}xx", str(status) if status >= 500 else "")
    for status in range(100, 600)
} | {CLIENT_CLOSED_REQUEST: (str(CLIENT_CLOSED_REQUEST), "")}
SHED_REASONS: Final = ("queue_full", "rate", "quota", "inflight", "memory")
REFUSAL_REASONS: Final = (
    "malformed_request", "request_too_slow", "url_too_long", "header_too_large",
    "too_many_connections", "answer_not_taken",
)  # fmt: skip
# Requests of /v2 are passed through; the gateway processes all others.
V2_ROUTE = "/v2"
V1_ROUTE = "/v1"
Labels = tuple[str, ...]
REPLACED_WORKER_PREFIX: Final = "replaced-worker-"  # the name of a file for each


class BatchedCounter:
    """A counter of prometheus_client that is increased by what is pending."""

    def __init__(self, counter: Counter) -> None:
        self.pending: defaultdict[Labels, float] = defaultdict(float)
        self._counter = counter

    def flush(self) -> None:
        while self.pending:
            labels, amount = self.pending.popitem()
            self._counter.labels(*labels).inc(amount)

    def remove(self, labels: dict[str, str]) -> None:
        self.flush()
        self._counter.remove_by_labels(labels)


class BatchedHistogram(Collector):
    """A histogram that gets its observations in batches, for which prometheus_client's has no method."""

    def __init__(
        self,
        name: str,
        documentation: str,
        label_names: Labels,
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._label_names = label_names
        self._bounds = bounds
        self._bound_texts = [floatToGoString(bound) for bound in (*bounds, math.inf)]
        # The count of each bucket, and the sum.
        self._pending = defaultdict[Labels, list[float]](lambda: [0.0] * (len(bounds) + 2))
        self._values: dict[Labels, list[Any]] = {}  # the same, also for other workers
        registry.register(self)

    def observe(self, labels: Labels, amount: float) -> None:
        pending = self._pending[labels]
        pending[bisect_left(self._bounds, amount)] += 1
        pending[-1] += amount

    def flush(self) -> None:
        while self._pending:
            labels, amounts = self._pending.popitem()
            if labels not in self._values:
                self._values[labels] = self._create_values(labels)
            for value, amount in zip(self._values[labels], amounts, strict=True):
                value.inc(amount)

    def _create_values(self, labels: Labels) -> list[Any]:
        create = partial(ValueClass, "histogram", self._name)
        bucket_labels = (*self._label_names, "le")
        return [
            *(
                create(f"{self._name}_bucket", bucket_labels, (*labels, text), self._documentation)
                for text in self._bound_texts
            ),
            create(f"{self._name}_sum", self._label_names, labels, self._documentation),
        ]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._label_names)
        for labels, values in list(self._values.items()):
            *counts, total = [value.get() for value in values]
            buckets = zip(self._bound_texts, accumulate(counts), strict=True)
            family.add_metric(labels, list(buckets), total)
        yield family


@dataclass(slots=True)
class OpenConnections:
    """The client connections of this process, and how many it accepts."""

    count: int = 0
    maximum: int = 1

    def open(self, maximum: int) -> None:
        self.count += 1
        self.maximum = maximum

    def close(self) -> None:
        self.count -= 1


class MetricFactory:
    """Constructors of metrics in one registry. A level is the sum over all workers, a worst the maximum."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.histogram = partial(Histogram, registry=registry)
        self.counter = partial(Counter, registry=registry)
        self.level = partial(Gauge, registry=registry, multiprocess_mode="livesum")
        self.worst = partial(Gauge, registry=registry, multiprocess_mode="livemax")


class Metrics:
    """The metrics of one application; `collector_registry` holds those that are read from other objects."""

    def __init__(self) -> None:
        # Otherwise every counter has an additional `_created` series.
        disable_created_metrics()
        self.registry = CollectorRegistry()
        self.collector_registry = CollectorRegistry()
        self.in_flight = {V2_ROUTE: 0, V1_ROUTE: 0}
        self._callers: set[str] = set()  # label values
        self._batched: list[BatchedCounter | BatchedHistogram] = []
        self._dropped_lines = 0
        self.open_connections = OpenConnections()
        self._replicas: set[str] = set()
        self.create = MetricFactory(self.registry)  # also for the metrics of capabilities
        self._create_request_metrics(self.create)
        self._create_caller_metrics(self.create)
        self._create_replica_metrics(self.create)
        self._create_process_metrics(self.create)

    def _batch_counter(self, name: str, documentation: str, labels: Labels) -> BatchedCounter:
        counter = BatchedCounter(self.create.counter(name, documentation, labels))
        self._batched.append(counter)
        return counter

    def _batch_histogram(
        self, name: str, documentation: str, labels: Labels, bounds: Sequence[float]
    ) -> BatchedHistogram:
        histogram = BatchedHistogram(name, documentation, labels, bounds, self.registry)
        self._batched.append(histogram)
        return histogram

    def _create_request_metrics(self, create: MetricFactory) -> None:
        self.duration = self._batch_histogram(
            "gateway_request_duration_seconds",
            "Time from the arrival of a request to the end of its response.",
            ("route", "model", "version", "status", "code"),
            DURATION_BUCKETS,
        )
        self.phase_duration = self._batch_histogram(
            "gateway_request_phase_seconds",
            f"Time of requests in each phase that they had: {', '.join(PHASES)}.",
            ("phase", "model"),
            PHASE_BUCKETS,
        )
        self.bytes_in = self._batch_counter(
            "gateway_request_bytes_total", "Bytes of request bodies.", ("model",)
        )
        self.bytes_out = self._batch_counter(
            "gateway_answer_bytes_total", "Bytes of response bodies.", ("model",)
        )
        self.running = create.level(
            "gateway_requests_in_flight",
            "Requests in progress: passed through (/v2), or processed by the gateway (/v1).",
            ("route",),
        )
        self.waiting = create.level(
            "gateway_requests_waiting", "Inferences in the admission queue."
        )
        self.queue_length = create.level(
            "gateway_queue_length", "Inferences in the admission queue by priority.", ("priority",)
        )
        self.queue_wait = create.histogram(
            "gateway_queue_wait_seconds",
            "Time that inferences waited in the admission queue, if they had to.",
            ("priority",),
            buckets=DURATION_BUCKETS,
        )
        self.queue_refusals = create.counter(
            "gateway_queue_refusals_total",
            "Inferences rejected because the admission queue was full.",
            ("priority",),
        )
        self.request_memory = create.level(
            "gateway_request_memory_bytes",
            "Memory held by requests and responses, by kind: "
            f"{', '.join(MEMORY_KINDS)}. GATEWAY_MAX_BYTES_IN_FLIGHT limits the sum.",
            ("kind",),
        )
        self.decodes_waiting = create.level(
            "gateway_decodes_waiting",
            "Requests whose bodies wait for a thread or a process that decodes them.",
        )
        self.shed = create.counter(
            "gateway_requests_shed_total",
            f"Requests rejected because of overload, by reason: {', '.join(SHED_REASONS)}.",
            ("reason",),
        )
        self.refusals = create.counter(
            "gateway_requests_refused_total",
            "Malformed or excess requests rejected and slow clients disconnected, by reason: "
            f"{', '.join(REFUSAL_REASONS)}.",
            ("reason",),
        )
        for priority in Priority:
            self.queue_length.labels(priority.name)
            self.queue_refusals.labels(priority.name)
        for memory_kind in MEMORY_KINDS:
            self.request_memory.labels(memory_kind)
        # A series that exists from the start makes its first event visible to increase().
        for reason in SHED_REASONS:
            self.shed.labels(reason)
        for reason in REFUSAL_REASONS:
            self.refusals.labels(reason)

    def _create_caller_metrics(self, create: MetricFactory) -> None:
        self.caller_requests = self._batch_counter(
            "gateway_caller_requests_total",
            "Requests by the name of the key or rule; beyond 1,000 names, other.",
            ("caller", "model"),
        )
        self.caller_inference = self._batch_counter(
            "gateway_caller_inference_seconds_total",
            "Time for which requests waited for Triton, by the name of the key or rule.",
            ("caller", "model"),
        )
        self.caller_bytes = self._batch_counter(
            "gateway_caller_bytes_total",
            "Bytes of request bodies (in) and response bodies (out), by the name of the key or rule.",
            ("caller", "model", "direction"),
        )
        self.caller_refusals = self._batch_counter(
            "gateway_caller_refusals_total",
            "Requests refused with 401, 403 or 429, by the name of the key or rule and the code.",
            ("caller", "code"),
        )
        self.caller_wait = self._batch_counter(
            "gateway_caller_queue_seconds_total",
            "Time that inferences waited in the admission queue, by the name of the key or rule. The rate is "
            "the number that waits.",
            ("caller",),
        )

    def _create_replica_metrics(self, create: MetricFactory) -> None:
        self.attempts = self._batch_counter(
            "gateway_upstream_attempts_total",
            "Requests sent to a replica, by outcome: answered, failed, refused, bad_answer, deadline, "
            "given_up.",
            ("replica", "outcome"),
        )
        self.retries = create.counter(
            "gateway_upstream_retries_total",
            "Requests retried on another replica because this one had not run them.",
            ("replica",),
        )
        self.ejections = create.counter(
            "gateway_upstream_ejections_total",
            "Ejections of a replica from load balancing because requests to it failed.",
            ("replica",),
        )
        self.model_actions = create.counter(
            "gateway_model_actions_total",
            "Loads and unloads on a replica, by origin (api, reconciler, on_demand) and outcome (done, "
            "failed).",
            ("action", "by", "outcome", "model"),
        )

    def _create_process_metrics(self, create: MetricFactory) -> None:
        self.connections = create.level("gateway_connections", "Open client connections.")
        self.limits = create.worst(
            "gateway_limit_used_ratio",
            f"Used share of a limit of the process: {', '.join(LIMITS)}.",
            ("limit",),
        )
        self.dropped_lines = create.counter(
            "gateway_log_lines_dropped_total",
            "Lines of the log and the audit log that could not be written, or not in time.",
        )
        self.background_failures = create.counter(
            "gateway_background_failures_total",
            "Unexpected errors of loops in the background, which are logged and go on.",
            ("loop",),
        )
        self.loop_lag = create.worst(
            "gateway_event_loop_lag_seconds",
            "Maximum delay of the event loop over the last ten seconds.",
        )
        build = create.worst(
            "gateway_build_info", "Constant 1, with the gateway's version.", ("version",)
        )
        build.labels(__version__).set(1)
        for limit in LIMITS:
            self.limits.labels(limit)

    def add_replica(self, replica: str) -> None:
        self._replicas.add(replica)
        # A series that starts at 0 makes its first event visible to increase().
        self.retries.labels(replica)
        self.ejections.labels(replica)

    def remove_replica(self, replica: str) -> None:
        # Otherwise a fleet with changing addresses would add series without bound. With several workers they
        # remain: prometheus_client cannot remove them from its files.
        if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            self._replicas.discard(replica)  # requests in progress there are not counted
            labels = {"replica": replica}
            self.attempts.remove(labels)
            self.retries.remove_by_labels(labels)
            self.ejections.remove_by_labels(labels)

    def count_event(self, counter: Counter, replica: str) -> None:
        """Count an event of a replica, unless that was removed."""
        if replica in self._replicas:
            counter.labels(replica).inc()

    def count_attempt(self, replica: str, outcome: str) -> None:
        """Count a request that was sent to a replica, unless that was removed."""
        if replica in self._replicas:
            self.attempts.pending[replica, outcome] += 1

    def observe(self, info: RequestInfo, status: int, duration_s: float) -> None:
        model = info.model
        upstream_s = info.upstream_s
        status_class, code = STATUS_LABELS[status]
        self.duration.observe((info.route, model, info.version, status_class, code), duration_s)
        self.bytes_in.pending[(model,)] += info.bytes_in
        self.bytes_out.pending[(model,)] += info.bytes_out
        if model:
            if upstream_s:
                self.phase_duration.observe(("upstream", model), upstream_s)
            if info.phases is not None:
                for phase, phase_s in info.phases.items():
                    self.phase_duration.observe((phase, model), phase_s)
        if info.key:
            caller = self._label_caller(info.key)
            self.caller_requests.pending[caller, model] += 1
            self.caller_inference.pending[caller, model] += upstream_s
            self.caller_bytes.pending[caller, model, "in"] += info.bytes_in
            self.caller_bytes.pending[caller, model, "out"] += info.bytes_out
        if status in REFUSED_STATUSES:
            self.caller_refusals.pending[self._label_caller(info.key), info.error_code] += 1

    def count_caller_wait(self, caller: str, seconds: float) -> None:
        if caller:
            self.caller_wait.pending[(self._label_caller(caller),)] += seconds

    def _label_caller(self, caller: str) -> str:
        if caller not in self._callers and len(self._callers) >= MAX_CALLERS:
            return OTHER_CALLERS
        self._callers.add(caller)
        return caller

    def flush(self) -> None:
        for metric in self._batched:
            metric.flush()
        while background_failures:
            loop, count = background_failures.popitem()
            self.background_failures.labels(loop).inc(count)
        for route, running in self.in_flight.items():
            self.running.labels(route).set(running)
        self.connections.set(self.open_connections.count)

    def update_dropped_lines(self, total: int) -> None:
        self.dropped_lines.inc(total - self._dropped_lines)
        self._dropped_lines = total

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this process, or of all workers (`--workers`).

        Call `flush` first, on the event loop, and this in a thread: with many models it takes a while.
        """
        folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
        yield CounterMetricFamily(
            "gateway_workers_replaced",
            "Worker processes (serve --workers) that exited or hung and were replaced.",
            value=count_replaced_workers(Path(folder)) if folder else 0,
        )
        if not folder:
            yield from self.registry.collect()
            return
        remove_dead_worker_files(Path(folder))
        yield from MultiProcessCollector(None, folder).collect()


def record_replaced_worker(folder: Path) -> None:
    # The supervisor of the workers has no metrics of its own, so it counts files in their directory.
    (folder / f"{REPLACED_WORKER_PREFIX}{count_replaced_workers(folder)}").touch()


def count_replaced_workers(folder: Path) -> int:
    return sum(1 for _ in folder.glob(f"{REPLACED_WORKER_PREFIX}*"))


def remove_dead_worker_files(folder: Path) -> None:
    # Gauges such as open connections end with their worker; its counters stay.
    for file in folder.glob("gauge_live*_*.db"):
        pid = file.stem.rpartition("_")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with suppress(FileNotFoundError):  # another worker removed it
                file.unlink()
