"""`triton-gateway top`: live traffic, models and replicas."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from gateway.client import Client, GatewayError
from gateway.client.replies import ResponseBuffer
from gateway.commands import tables
from gateway.commands.errors import ACCESS_STATUSES, ClientError
from gateway.messages import escape_unprintable
from gateway.telemetry.exposition import (
    LABEL_PAIR,
    Families,
    InvalidExposition,
    parse_families,
    split_page,
)

REQUEST_DURATION_METRIC: Final = "gateway_request_duration_seconds"
GAUGE_TITLES: Final = {
    "gateway_requests_in_flight": "in flight",
    "gateway_requests_waiting": "waiting",
}
TRAFFIC_COLUMNS: Final = ("MODEL", "STATE", "REQUESTS/S", "ERRORS/S", "MEAN MS", "P95 MS")
MAX_NAME_CHARS: Final = 24
FIRST_INTERVAL_S: Final = 0.2


@dataclass
class ModelTraffic:
    """The traffic of a model since the gateway started; bucket counts by upper bound in seconds."""

    count: float = 0
    failed: float = 0
    total_s: float = 0
    buckets: dict[float, float] = field(default_factory=dict)

    def subtract(self, earlier: ModelTraffic) -> ModelTraffic:
        if self.count < earlier.count:
            return self
        return ModelTraffic(
            self.count - earlier.count,
            self.failed - earlier.failed,
            self.total_s - earlier.total_s,
            {bound: count - earlier.buckets.get(bound, 0) for bound, count in self.buckets.items()},
        )

    def add_sample(self, name: str, labels: Mapping[str, str], value: float, *, ok: bool) -> None:
        if name.endswith("_bucket"):
            bound = float(labels["le"])
            self.buckets[bound] = self.buckets.get(bound, 0) + value
        elif name.endswith("_sum"):
            self.total_s += value
        else:
            self.count += value
            self.failed += 0 if ok else value

    def p95_s(self) -> float:
        """Return the smallest bucket bound that covers 95 % of the requests."""
        return min(
            (bound for bound, count in self.buckets.items() if count >= 0.95 * self.count),
            default=float("inf"),
        )


@dataclass(frozen=True)
class QueueState:
    """The admission queue: what waits now and was refused, by priority, and the seconds waited by caller."""

    lengths: Mapping[str, float] = field(default_factory=dict)
    refusals: Mapping[str, float] = field(default_factory=dict)
    waited_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GatewaySnapshot:
    """The state at one time; replicas and metrics are empty if the key may not read them."""

    taken_at: float
    models: Sequence[Mapping[str, Any]]
    replicas: Sequence[Mapping[str, Any]]
    gauges: Mapping[str, float]
    traffic: Mapping[str, ModelTraffic]
    queue: QueueState = field(default_factory=QueueState)


def take_snapshot(client: Client) -> GatewaySnapshot:
    models = client.request("GET", "/v1/models")["models"]
    replicas: Sequence[Mapping[str, Any]] = []
    with ignore_missing_rights():
        replicas = client.request("GET", "/v1/replicas")["replicas"]
    families: Families = {}
    with ignore_missing_rights():
        families = read_families(client)
    gauges = {
        title: sum(float(value) for _, _, value in families[name].samples)
        for name, title in GAUGE_TITLES.items()
        if name in families
    }
    return GatewaySnapshot(
        time.monotonic(),
        models,
        replicas,
        gauges,
        aggregate_traffic(families),
        read_queue(families),
    )


def read_queue(families: Families) -> QueueState:
    def read(family: str, label: str) -> dict[str, float]:
        samples = families[family].samples if family in families else ()
        return {dict(LABEL_PAIR.findall(text))[label]: float(value) for _, text, value in samples}

    return QueueState(
        read("gateway_queue_length", "priority"),
        read("gateway_queue_refusals_total", "priority"),
        read("gateway_caller_queue_seconds_total", "caller"),
    )


@contextmanager
def ignore_missing_rights() -> Iterator[None]:
    try:
        yield
    except GatewayError as exc:
        if exc.status not in ACCESS_STATUSES:
            raise


def read_families(client: Client) -> Families:
    page = ResponseBuffer(client.url)
    for data in client.download("/metrics"):
        page.add(data)
    try:
        return parse_families(split_page(page.take()))
    except InvalidExposition as exc:
        raise ClientError(f"the metrics page cannot be read: {exc}") from None


def aggregate_traffic(families: Families) -> dict[str, ModelTraffic]:
    traffic_by_model: dict[str, ModelTraffic] = {}
    family = families.get(REQUEST_DURATION_METRIC)
    for name, label_text, value in family.samples if family else ():
        labels = dict(LABEL_PAIR.findall(label_text))
        if model := labels.get("model"):
            traffic = traffic_by_model.setdefault(model, ModelTraffic())
            traffic.add_sample(name, labels, float(value), ok=labels.get("status") == "2xx")
    return traffic_by_model


def render_snapshot(current: GatewaySnapshot, previous: GatewaySnapshot) -> RenderableType:
    elapsed_s = max(current.taken_at - previous.taken_at, 1e-9)
    changes = {
        name: traffic.subtract(previous.traffic.get(name, ModelTraffic()))
        for name, traffic in current.traffic.items()
    }
    counts = {name: traffic.count for name, traffic in changes.items() if traffic.count}
    active = [model for model in current.models if model["name"] in counts]
    active.sort(key=lambda model: (-counts[model["name"]], model["name"]))
    fleet = format_fleet(current, changes.values(), elapsed_s)
    parts: list[RenderableType] = [Text(escape_unprintable(fleet), "bold")]
    if queue := format_queue(current.queue, previous.queue, elapsed_s):
        parts.append(Text(escape_unprintable(queue)))
    if current.replicas:
        replicas = map(tables.format_replica_row, current.replicas)
        parts.append(tables.build_table(tables.REPLICA_COLUMNS, replicas))
    rows = (format_traffic_row(model, changes[model["name"]], elapsed_s) for model in active)
    parts += [Text(), tables.build_table(TRAFFIC_COLUMNS, rows)]
    idle = [shorten_name(each["name"]) for each in current.models if each not in active]
    line = f"{len(idle)} without requests: {', '.join(idle)}"
    folded = Text(escape_unprintable(line), "dim", no_wrap=True, overflow="ellipsis")
    return Group(*parts, folded)


def format_fleet(
    snapshot: GatewaySnapshot, changes: Collection[ModelTraffic], elapsed_s: float
) -> str:
    if not snapshot.gauges:
        return "the key may not read the metrics"
    up = sum(replica["state"] == "UP" for replica in snapshot.replicas)
    count = sum(each.count for each in changes)
    failed = sum(each.failed for each in changes)
    parts = [f"{up}/{len(snapshot.replicas)} replicas up"] if snapshot.replicas else []
    parts += [f"{count / elapsed_s:.1f} requests/s", f"{failed / elapsed_s:.1f} errors/s"]
    return ", ".join(parts + [f"{value:.0f} {title}" for title, value in snapshot.gauges.items()])


def format_queue(current: QueueState, previous: QueueState, elapsed_s: float) -> str:
    """Return who waits and is refused; empty if nobody is."""
    refusals = sum(current.refusals.values()) - sum(previous.refusals.values())
    lengths = [f"{count:.0f} {priority}" for priority, count in current.lengths.items() if count]
    if not lengths and refusals <= 0:
        return ""
    waits = {
        caller: seconds - previous.waited_s.get(caller, 0)
        for caller, seconds in current.waited_s.items()
    }
    first = max(waits, key=lambda caller: waits[caller], default="")
    most = f", most of {shorten_name(first)}" if waits.get(first, 0) > 0 else ""
    waiting = ", ".join(reversed(lengths)) or "none"
    return f"queue: {waiting}{most}; {max(refusals, 0) / elapsed_s:.1f} refused/s"


def format_traffic_row(
    model: Mapping[str, Any], traffic: ModelTraffic, elapsed_s: float
) -> tuple[str, ...]:
    rates = f"{traffic.count / elapsed_s:.1f}", f"{traffic.failed / elapsed_s:.1f}"
    state = tables.describe_model_state(model)
    return shorten_name(model["name"]), state, *rates, *format_latencies(traffic)


def shorten_name(name: str) -> str:
    """Shorten a long name in its middle: its beginning and its end tell it from others."""
    half = MAX_NAME_CHARS // 2
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: half - 1]}…{name[-half:]}"


def format_latencies(traffic: ModelTraffic) -> tuple[str, str]:
    bound = traffic.p95_s()
    p95 = f"< {1000 * bound:g}" if bound != float("inf") else "> buckets"
    return f"{1000 * traffic.total_s / traffic.count:.1f}", p95


def run_top(client: Client, interval_s: float) -> None:
    """Refresh until q or Ctrl-C; without a terminal, print one snapshot."""
    previous = take_snapshot(client)
    time.sleep(FIRST_INTERVAL_S)
    current = take_snapshot(client)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        tables.print_renderable(render_snapshot(current, previous))
        return
    with (
        cbreak_terminal(),
        Live(render_snapshot(current, previous), screen=True, auto_refresh=False) as live,
    ):
        live.refresh()
        while not wait_for_quit(interval_s):
            previous, current = current, take_snapshot(client)
            live.update(render_snapshot(current, previous), refresh=True)


@contextmanager
def cbreak_terminal() -> Iterator[None]:
    attributes = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, attributes)


def wait_for_quit(timeout_s: float) -> bool:
    """Return True if q is pressed within `timeout_s` or the terminal is closed."""
    deadline = time.monotonic() + timeout_s
    while (remaining_s := deadline - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], remaining_s)[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if key in (b"q", b"Q", b""):
                return True
    return False
