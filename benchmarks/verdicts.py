"""The measures that `make bench` judges, and their limits."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from benchmarks.tables import describe_spread


@dataclass(frozen=True)
class Row:
    """A measure and its limit: the most that it may be, or with `is_minimum` the least.

    Without a limit, it is only reported. A noisy measure fails if its best round exceeds the limit: the true
    median lies between the best and the worst of seven rounds with a probability of 98 %. A ratio compares
    two servers of one run. The suite measures it, and records it by this name; a row whose peer is not
    installed is skipped.
    """

    name: str
    suite: str
    measure: str
    limit: float | None
    is_minimum: bool = False
    unit: str = ""
    peer: str = ""
    is_noisy: bool = False


PLAIN: Final = "plain FastAPI"
PLAIN_GRPC: Final = "plain FastAPI with tritonclient.grpc.aio"
ROWS: Final = (
    Row("stream", "friendly", f"stream of 100 events, CPU per event of {PLAIN_GRPC}", 0.7),
    Row("slow stream", "streams", f"stream of an event every 20 ms, CPU per event of {PLAIN_GRPC}", 0.7),
    Row("first event", "streams", "first event of a stream, of Triton's own gRPC client", 1.9),
    Row("events", "friendly", f"events per second of one worker, of {PLAIN}", 0.95, is_minimum=True),
    Row("text", "friendly", "`/v1` line of text, CPU of `/v2` with the same tensor", 1.9),
    Row("JPEG", "friendly", f"JPEG of 640×480 to FP32 3×224×224, CPU of {PLAIN}", 0.6),
    Row("form", "friendly", f"form of 8 JPEGs to FP32 3×224×224, CPU of {PLAIN}", 0.6),
    Row("npy", "friendly", f"`.npy` of 3×224×224, CPU of {PLAIN}", 0.55),
    Row("gRPC", "grpc", "gRPC ModelInfer, CPU of a bare forwarder on grpc.aio", 1.35),
    Row("cancellable", "grpc", f"`/v1` of a cancellable model, CPU of {PLAIN_GRPC}", None),
    Row("idle CPU", "idle", "idle gateway before 100 replicas × 200 models, CPU", 5.0, unit="% of a core"),
    Row("idle memory", "idle", "idle gateway before 100 replicas × 200 models, memory", 150.0, unit="MiB"),
    Row("idle change", "idle", "idle gateway, until a change of an index is noticed", 1.0, unit="s"),
    Row("silent sink", "samples", "p99 while the sink of samples is silent, of none", 1.05, is_noisy=True),
    Row("no sink", "samples", "p99 while the sink of samples is down, of none", 1.05, is_noisy=True),
    Row("samples memory", "samples", "samples of 1,000 requests/s without a sink, memory", 20.0, unit="MiB"),
    Row("Envoy", "pass-through", "`/v2` with 1 KB, 16 connections, CPU of Envoy", 1.1, peer="Envoy"),
    Row("key", "pass-through", "`/v2` with a key and its rate, CPU of `/v2` without keys", None),
    Row("token", "pass-through", "`/v2` with a known token, CPU of `/v2` with a key", 1.05),
)  # fmt: skip


class Verdict(Enum):
    PASSED = "pass"
    FAILED = "FAIL"
    REPORTED = "report only"
    SKIPPED = "skipped"


def take_median(values: Sequence[float]) -> float:
    return statistics.median(values)


def judge(row: Row, values: Sequence[float]) -> Verdict:
    """Compare the median of the rounds with the limit, or the best one of a noisy measure."""
    if not values:
        return Verdict.SKIPPED if row.peer else Verdict.FAILED
    if row.limit is None:
        return Verdict.REPORTED
    value = min(values) if row.is_noisy else take_median(values)
    is_within = value >= row.limit if row.is_minimum else value <= row.limit
    return Verdict.PASSED if is_within else Verdict.FAILED


def format_limit(row: Row) -> str:
    if row.limit is None:
        return ""
    sign = "≥" if row.is_minimum else "≤"
    return f"{sign} {row.limit:g} {row.unit}".rstrip()


def format_verdicts(
    values_by_row: Mapping[str, Sequence[float]], suites: Sequence[str]
) -> Iterator[str]:
    """Return the lines of the table of the rows that these suites measure."""
    yield "\n**Measures and their limits: median (minimum–maximum) of the rounds**\n"
    yield "| measure | of this run | must be | |"
    yield "|---|---|---|---|"
    for row in ROWS:
        if row.suite in suites:
            values = values_by_row.get(row.name, ())
            spread = describe_spread(values) if values else ""
            verdict = judge(row, values)
            reason = f": {row.peer} is not installed" if verdict is Verdict.SKIPPED else ""
            measured = f"{spread} {row.unit}".strip()
            yield f"| {row.measure} | {measured} | {format_limit(row)} | {verdict.value}{reason} |"


def has_failed(values_by_row: Mapping[str, Sequence[float]], suites: Sequence[str]) -> bool:
    judged = (row for row in ROWS if row.suite in suites)
    return any(judge(row, values_by_row.get(row.name, ())) is Verdict.FAILED for row in judged)
