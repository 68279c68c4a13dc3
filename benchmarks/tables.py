"""Interleaved rounds of measurements, and their tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import psutil

from benchmarks import servers
from benchmarks.load import Measured, measure
from benchmarks.requests import Request


@dataclass(frozen=True)
class Target:
    """A server with the URL and request that are measured."""

    name: str
    url: str
    process: psutil.Process
    request: Request
    beside: str = ""  # a shell command that runs during the measurement
    max_pause_ms: int = 0  # of a connection between two requests


Rounds = Mapping[str, Sequence[Measured]]


def measure_rounds(
    targets: Sequence[Target],
    connections: int,
    seconds: float,
    count: int,
    report: Callable[[int, str], None],
) -> Rounds:
    """Measure the targets in turns; return the measurements of each. `report` shows the progress."""
    results: dict[str, list[Measured]] = {target.name: [] for target in targets}
    for number in range(count):
        for target in targets:
            report(number, target.name)
            with servers.shell(target.beside):
                result = measure(
                    target.url,
                    target.request,
                    target.process,
                    connections,
                    seconds,
                    target.max_pause_ms,
                )
            results[target.name].append(result)
    return results


def take_medians(measurements: Sequence[Measured]) -> Measured:
    return Measured(*map(statistics.median, zip(*map(astuple, measurements), strict=True)))


def describe_spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median with the minimum and maximum."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def format_table(title: str, rounds: Rounds, base: str) -> Iterator[str]:
    """Return the lines of a table. The ratios are those of the same round, with their spread."""
    yield f"\n**{title}**\n"
    yield f"| | requests/s | of {base} | p50 ms | p99 ms | CPU µs per request | of {base} | MiB | growth |"
    yield "|---|---|---|---|---|---|---|---|---|"
    reference = rounds[base]
    for name, measurements in rounds.items():
        row = take_medians(measurements)
        pairs = list(zip(measurements, reference, strict=True))
        speed = statistics.median(one.requests_per_s / other.requests_per_s for one, other in pairs)
        cpu = describe_spread([one.cpu_us / other.cpu_us for one, other in pairs])
        yield (
            f"| {name} | {row.requests_per_s:,.0f} | {speed:.2f} "
            f"| {row.p50_ms:.2f} | {row.p99_ms:.2f} | {row.cpu_us:.0f} "
            f"| {cpu} | {row.peak_mib:.0f} | {row.growth_mib:.1f} |"
        )
