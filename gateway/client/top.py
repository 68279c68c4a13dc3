"""`triton-gateway top`: what the gateway does right now, until a key is pressed."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from gateway.client import tables
from gateway.client.api import Api
from gateway.client.errors import ClientError, NotAllowed
from gateway.exposition.families import PAIR, NotExposition, Sample
from gateway.exposition.reading import lines_of, read

REQUESTS: Final = "gateway_request_duration_seconds"
GAUGES: Final = {
    "gateway_requests_in_flight": "in flight",
    "gateway_requests_waiting": "waiting",
    "gateway_connections": "connections",
}
COLUMNS: Final = ("MODEL", "READY", "PER SECOND", "FAILED PER SECOND", "MEAN MS", "P95 MS")
FIRST_WAIT_S: Final = 0.2


@dataclass
class Traffic:
    """Of one model, since the gateway began; buckets by their upper bounds in seconds."""

    count: float = 0
    failed: float = 0
    seconds: float = 0
    buckets: dict[float, float] = field(default_factory=dict)

    def since(self, before: Traffic) -> Traffic:
        return Traffic(
            self.count - before.count,
            self.failed - before.failed,
            self.seconds - before.seconds,
            {bound: count - before.buckets.get(bound, 0) for bound, count in self.buckets.items()},
        )

    def p95_s(self) -> float:
        """The bound that 95 % stay under."""
        return min(
            (bound for bound, count in self.buckets.items() if count >= 0.95 * self.count),
            default=float("inf"),
        )


@dataclass(frozen=True)
class Look:
    """What was seen at one time. Without the right to it, there are no replicas and no metrics."""

    at: float
    models: Sequence[Mapping[str, Any]]
    replicas: Sequence[Mapping[str, Any]]
    gauges: Mapping[str, float]
    traffic: Mapping[str, Traffic]


def look(api: Api) -> Look:
    """Raises `ClientError`."""
    models = api.get("/v1/models")["models"]
    try:
        replicas = api.get("/v1/replicas")["replicas"]
    except NotAllowed:
        replicas = []
    try:
        families = read(lines_of(api.text("/metrics")))
    except NotAllowed:
        families = {}
    except NotExposition as exc:
        raise ClientError(f"the metrics page cannot be read: {exc}") from None
    gauges = {
        title: sum(float(value) for _, _, value in families[name].samples)
        for name, title in GAUGES.items()
        if name in families
    }
    requests = families[REQUESTS].samples if REQUESTS in families else []
    return Look(time.monotonic(), models, replicas, gauges, traffic_of(requests))


def traffic_of(samples: Sequence[Sample]) -> dict[str, Traffic]:
    """By model; what concerns none is left out."""
    found: dict[str, Traffic] = {}
    for name, written, rest in samples:
        labels = dict(PAIR.findall(written))
        if not (model := labels.get("model")):
            continue
        value = float(rest.split()[0])
        traffic = found.setdefault(model, Traffic())
        if name == f"{REQUESTS}_bucket":
            bound = float(labels["le"])
            traffic.buckets[bound] = traffic.buckets.get(bound, 0) + value
        elif name == f"{REQUESTS}_sum":
            traffic.seconds += value
        else:
            traffic.count += value
            traffic.failed += value if labels.get("status") != "2xx" else 0
    return found


def picture(now: Look, before: Look) -> RenderableType:
    took_s = max(now.at - before.at, 1e-9)
    rows = []
    for model in now.models:
        name = model["name"]
        traffic = now.traffic.get(name, Traffic()).since(before.traffic.get(name, Traffic()))
        told = ("", "") if not traffic.count else latencies(traffic)
        rates = f"{traffic.count / took_s:.1f}", f"{traffic.failed / took_s:.1f}"
        if model["ready"] or traffic.count:
            rows.append((name, "yes" if model["ready"] else "no", *rates, *told))
    rows.sort(key=lambda row: (-float(row[2]), row[0]))
    gauges = ", ".join(f"{value:.0f} {title}" for title, value in now.gauges.items())
    parts: list[RenderableType] = [Text(gauges or "no right to the metrics", "bold")]
    if now.replicas:
        parts.append(tables.table(tables.REPLICAS, map(tables.replica_row, now.replicas)))
    return Group(*parts, Text(), tables.table(COLUMNS, rows))


def latencies(traffic: Traffic) -> tuple[str, str]:
    bound = traffic.p95_s()
    most = f"< {1000 * bound:g}" if bound != float("inf") else "over all bounds"
    return f"{1000 * traffic.seconds / traffic.count:.1f}", most


def top(api: Api, interval_s: float) -> None:
    """In a terminal until q or Ctrl-C; else one picture."""
    before = look(api)
    time.sleep(FIRST_WAIT_S)
    now = look(api)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        tables.draw(picture(now, before))
        return
    with keys(), Live(picture(now, before), screen=True, auto_refresh=False) as live:
        live.refresh()
        while not pressed(interval_s):
            before, now = now, look(api)
            live.update(picture(now, before), refresh=True)


@contextmanager
def keys() -> Iterator[None]:
    """The terminal gives each key at once."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def pressed(within_s: float) -> bool:
    """Whether it shall end: q was pressed in this time, or the terminal is gone."""
    until = time.monotonic() + within_s
    while (left_s := until - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            key = os.read(sys.stdin.fileno(), 1)
            if key in (b"q", b"Q", b""):
                return True
    return False
