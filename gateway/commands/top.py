"""`triton-gateway top`: live traffic, models and replicas."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, TypeAlias

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from gateway.client import Client, GatewayError
from gateway.client.replies import ResponseBuffer
from gateway.commands.errors import ACCESS_STATUSES, ClientError
from gateway.commands.resources import REPLICAS, Document, describe_model_state
from gateway.commands.tables import build_table, print_renderable
from gateway.messages import escape_unprintable
from gateway.telemetry.exposition import (
    LABEL_PAIR,
    Families,
    InvalidExposition,
    parse_families,
    split_page,
)

REQUEST_DURATION_METRIC: Final = "gateway_request_duration_seconds"
REFUSALS_METRIC: Final = "gateway_queue_refusals_total"
GAUGE_TITLES: Final = {
    "gateway_requests_in_flight": "in flight",
    "gateway_requests_waiting": "waiting",
}
COLUMNS: Final = ("MODEL", "STATE", "REQUESTS/S", "ERRORS/S", "MEAN MS", "P95 MS")
MAX_NAME_CHARS: Final = 24
FIRST_INTERVAL_S: Final = 0.2
REQUESTS: Final = "requests"
ERRORS: Final = "errors"
SECONDS: Final = "seconds"
# Of a model: requests, errors and seconds, and the requests of each bucket by its upper bound in seconds.
Traffic: TypeAlias = "defaultdict[str | float, float]"


@dataclass(frozen=True)
class Snapshot:
    """The state at one time; replicas and metrics are empty if the key may not read them."""

    taken_at: float
    models: Sequence[Document]
    replicas: Sequence[Document]
    gauges: Mapping[str, float]
    refusals: float  # since the gateway started, as the traffic by model
    traffic: Mapping[str, Traffic]


def take_snapshot(client: Client) -> Snapshot:
    models = client.request("GET", "/v1/models")["models"]
    replicas = ask_if_allowed(lambda: client.request("GET", "/v1/replicas")["replicas"]) or []
    families = ask_if_allowed(lambda: read_families(client)) or {}
    titles = GAUGE_TITLES.items()
    gauges = {title: add_samples(families, name) for name, title in titles if name in families}
    refusals = add_samples(families, REFUSALS_METRIC)
    traffic = read_traffic(families)
    return Snapshot(time.monotonic(), models, replicas, gauges, refusals, traffic)


def ask_if_allowed(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except GatewayError as exc:
        if exc.status in ACCESS_STATUSES:
            return None
        raise


def read_families(client: Client) -> Families:
    page = ResponseBuffer(client.url)
    for data in client.download("/metrics"):
        page.add(data)
    try:
        return parse_families(split_page(page.take()))
    except InvalidExposition as exc:
        raise ClientError(f"the metrics page cannot be read: {exc}") from None


def add_samples(families: Families, name: str) -> float:
    return sum(float(value) for _, _, value in families[name].samples) if name in families else 0


def read_traffic(families: Families) -> dict[str, Traffic]:
    traffic: dict[str, Traffic] = {}
    family = families.get(REQUEST_DURATION_METRIC)
    for name, label_text, text in family.samples if family else ():
        labels = dict(LABEL_PAIR.findall(label_text))
        if model := labels.get("model"):
            counts = traffic.setdefault(model, defaultdict(float))
            value = float(text)
            if name.endswith("_bucket"):
                counts[float(labels["le"])] += value
            elif name.endswith("_sum"):
                counts[SECONDS] += value
            else:
                counts[REQUESTS] += value
                counts[ERRORS] += 0 if labels.get("status") == "2xx" else value
    return traffic


def subtract(now: Traffic, before: Traffic) -> Traffic:
    """Return what was added, or all of it if the gateway started anew."""
    if now[REQUESTS] < before.get(REQUESTS, 0):
        return now
    return defaultdict(float, {name: now[name] - before.get(name, 0) for name in now})


def render_snapshot(current: Snapshot, previous: Snapshot) -> RenderableType:
    elapsed_s = max(current.taken_at - previous.taken_at, 1e-9)
    changes = {
        name: subtract(traffic, previous.traffic.get(name, defaultdict(float)))
        for name, traffic in current.traffic.items()
    }
    counts = {name: traffic[REQUESTS] for name, traffic in changes.items() if traffic[REQUESTS]}
    active = [model for model in current.models if model["name"] in counts]
    active.sort(key=lambda model: (-counts[model["name"]], model["name"]))
    refusals = max(current.refusals - previous.refusals, 0)
    fleet = format_fleet(current, list(changes.values()), refusals, elapsed_s)
    parts: list[RenderableType] = [Text(escape_unprintable(fleet), "bold")]
    if current.replicas:
        parts.append(build_table(REPLICAS.columns, map(REPLICAS.format_row, current.replicas)))
    rows = (format_traffic_row(model, changes[model["name"]], elapsed_s) for model in active)
    parts += [Text(), build_table(COLUMNS, rows)]
    idle = [shorten_name(each["name"]) for each in current.models if each not in active]
    line = escape_unprintable(f"{len(idle)} without requests: {', '.join(idle)}")
    return Group(*parts, Text(line, "dim", no_wrap=True, overflow="ellipsis"))


def format_fleet(
    snapshot: Snapshot, changes: Sequence[Traffic], refusals: float, elapsed_s: float
) -> str:
    if not snapshot.gauges:
        return "the key may not read the metrics"
    up = sum(replica["state"] == "UP" for replica in snapshot.replicas)
    parts = [f"{up}/{len(snapshot.replicas)} replicas up"] if snapshot.replicas else []
    totals = {title: sum(each[title] for each in changes) for title in (REQUESTS, ERRORS)}
    parts += [f"{total / elapsed_s:.1f} {title}/s" for title, total in totals.items()]
    parts += [f"{value:.0f} {title}" for title, value in snapshot.gauges.items()]
    return ", ".join([*parts, f"{refusals / elapsed_s:.1f} refused/s"] if refusals else parts)


def format_traffic_row(model: Document, traffic: Traffic, elapsed_s: float) -> tuple[str, ...]:
    rates = (f"{traffic[title] / elapsed_s:.1f}" for title in (REQUESTS, ERRORS))
    mean_ms = 1000 * traffic[SECONDS] / traffic[REQUESTS]
    # The smallest bound that covers 95 % of the requests.
    covered = 0.95 * traffic[REQUESTS]
    bounds = [each for each in traffic if isinstance(each, float) and traffic[each] >= covered]
    bound = min(bounds, default=inf)
    p95 = "> buckets" if bound == inf else f"< {1000 * bound:g}"
    return shorten_name(model["name"]), describe_model_state(model), *rates, f"{mean_ms:.1f}", p95


def shorten_name(name: str) -> str:
    """Shorten a long name in its middle: its beginning and its end tell it from others."""
    half = MAX_NAME_CHARS // 2
    return name if len(name) <= MAX_NAME_CHARS else f"{name[: half - 1]}…{name[-half:]}"


def run_top(client: Client, interval_s: float) -> None:
    """Refresh until Ctrl-C; without a terminal, print one snapshot."""
    previous = take_snapshot(client)
    time.sleep(FIRST_INTERVAL_S)
    current = take_snapshot(client)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print_renderable(render_snapshot(current, previous))
        return
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            live.update(render_snapshot(current, previous), refresh=True)
            time.sleep(interval_s)
            previous, current = current, take_snapshot(client)
