"""benchmarks/performance.md and its charts, from benchmarks/results.json: python -m benchmarks.page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from benchmarks import charts, verdicts
from benchmarks.results import MeasuredRun, read_measured
from benchmarks.workloads import EVENTS, FORM_TITLE, JPEG_TITLE, NPY_TITLE, STREAM_TITLE, TEXT_TITLE
from tests.support.servers import ROOT

DOCS: Final = ROOT / "docs"
PAGE: Final = ROOT / "benchmarks" / "performance.md"
PASS_THROUGH: Final = "1 KB binary infer, 16 connections, one worker each"
ONE_CONNECTION: Final = "1 KB binary infer, 1 connection, one worker each"
INSTANT: Final = "1 KB of JSON to a server that answers at once, 16 connections"
LATENCY: Final = "1 KB binary infer, connections: "
# Followed by the model, the limit and the load.
OVERLOAD: Final = "overload: "
GATEWAY_V1: Final = "gateway /v1"
GATEWAY_V2: Final = "gateway /v2"
CONVERSIONS: Final = {
    "a text": TEXT_TITLE,
    "a JPEG as FP32": JPEG_TITLE,
    ".npy of 3×224×224": NPY_TITLE,
    "8 JPEGs as FP32": FORM_TITLE,
}
TEMPLATE: Final = Path(__file__).with_name("performance.md.template")


def list_cpu(measured: MeasuredRun, table: str, *left_out: str) -> dict[str, float]:
    """Return the CPU time per request of each server in a table."""
    servers = measured.tables[table]
    return {name: row["cpu_us"] for name, row in servers.items() if name not in left_out}


def format_answer(measured: MeasuredRun) -> str:
    spent = list_cpu(measured, PASS_THROUGH)
    own_us = spent[GATEWAY_V2]
    servers = {"nginx": "nginx's", "Envoy": "Envoy's"}
    ratios = [
        f"{own_us / spent[name]:.1f} times {text}"
        for name, text in servers.items()
        if name in spent
    ]
    one = measured.tables[ONE_CONNECTION]
    added_ms = one[GATEWAY_V2]["p50_ms"] - one["direct"]["p50_ms"]
    nginx_ms = one["nginx"]["p50_ms"] - one["direct"]["p50_ms"]
    conversions = [measured.tables[title] for title in CONVERSIONS.values()]
    shares = [
        100 * row[GATEWAY_V1]["cpu_us"] / row[verdicts.PLAIN]["cpu_us"] for row in conversions
    ]
    return (
        f"**For a small request to `/v2`, {own_us:.0f} µs of CPU time and"
        f" {added_ms:.2f} ms of latency**: {' and '.join(ratios)} CPU time, and"
        f" {100 * own_us / spent[verdicts.PLAIN]:.0f} % of what an application of your own in plain FastAPI"
        f" costs (nginx adds {nginx_ms:.2f} ms). One worker passes"
        f" {measured.tables[PASS_THROUGH][GATEWAY_V2]['requests_per_s']:,.0f} requests per second. Where it"
        f" converts files to tensors (`/v1`), it needs {min(shares):.0f} to {max(shares):.0f} % of the CPU"
        " time of plain FastAPI."
    )


def format_instant(measured: MeasuredRun) -> str:
    has_router = "vLLM router" in measured.tables[INSTANT]
    router = ", beside vLLM's router, which knows only the paths of LLM servers"
    return f"The same in front of a server that answers at once{router if has_router else ''}:\n\n"


def format_events(measured: MeasuredRun) -> str:
    stream = measured.tables[STREAM_TITLE]
    rates = {name: row["requests_per_s"] * EVENTS for name, row in stream.items()}
    return (
        f"Events of a decoupled model as server-sent events. One worker sends"
        f" {rates[GATEWAY_V1]:,.0f} events per second, plain FastAPI {rates[verdicts.PLAIN]:,.0f}."
        " With an event every 20 ms, as from a language model,"
        f" an event costs {measured.values[f'slow stream, {GATEWAY_V1}']:.0f} µs of CPU time instead of"
        f" {measured.values[f'slow stream, {verdicts.PLAIN}']:.0f} µs."
    )


def format_idle(measured: MeasuredRun) -> str:
    medians = {name: verdicts.take_median(values) for name, values in measured.ratios.items()}
    return (
        "A gateway without requests probes every replica twice a second. Before 100 simulated replicas"
        f" with 200 models each, it needs {medians['idle CPU']:.1f} % of a core and"
        f" {medians['idle memory']:.0f} MiB, and knows a model that one replica has loaded after"
        f" {medians['idle change']:.2f} s at most. A scrape of such a fleet's `/metrics` has"
        f" {measured.values['scrape MB']:.0f} MB and takes {measured.values['scrape s']:.1f} s;"
        " `GATEWAY_METRICS_REPLICAS=false` leaves the replicas' metrics out."
    )


def format_page(measured: MeasuredRun) -> str:
    # A row that is new is shown after the next run.
    suites = [row.suite for row in verdicts.ROWS if row.name in measured.ratios]
    judged = verdicts.format_verdicts(measured.ratios, suites)
    _, *table = judged
    loads = [name for name in measured.tables if name.startswith(LATENCY)]
    return TEMPLATE.read_text().format(
        answer=format_answer(measured),
        date=measured.date,
        machine=measured.machine,
        rounds=f"{measured.count} rounds of {measured.seconds:g} s for each server",
        instant=format_instant(measured),
        connections=max(int(name.removeprefix(LATENCY)) for name in loads),
        events=format_events(measured),
        idle=format_idle(measured),
        verdicts="\n".join(table),
    )


def draw_latency(measured: MeasuredRun) -> str:
    tables = [rows for name, rows in measured.tables.items() if name.startswith(LATENCY)]
    colours = {
        "nginx": charts.COMPARED,
        GATEWAY_V2: charts.EMPHASIZED,
        verdicts.PLAIN: charts.SECOND_COMPARED,
    }
    lines = [
        charts.Line(
            name, [(rows[name]["requests_per_s"], rows[name]["p50_ms"]) for rows in tables], colour
        )
        for name, colour in colours.items()
    ]
    title = "Median latency by load, 1 KB to /v2"
    return charts.draw_lines(title, lines, "requests per second", "ms")


def draw_overload(measured: MeasuredRun) -> Iterator[tuple[str, str]]:
    """Yield the charts of overload, if it was measured."""
    latencies: dict[str, list[tuple[float, float]]] = {}
    goodput: dict[str, list[tuple[float, float]]] = {}
    for name, rows in measured.tables.items():
        if not name.startswith(f"{OVERLOAD}python, "):
            continue
        _, limit, load = name.removeprefix(OVERLOAD).split(", ")
        # The axis is logarithmic.
        percent = max(100 * rows["all"]["goodput"], 1.0)
        goodput.setdefault(limit, []).append((float(load), percent))
        if "interactive" in rows:
            point = (float(load), rows["interactive"]["p99_ms"])
            latencies.setdefault(limit, []).append(point)
    colours = {
        "fixed": charts.EMPHASIZED,
        "none": charts.COMPARED,
    }
    for name, title, values, unit in (
        ("overload-latency", "99th percentile of interactive requests", latencies, "ms"),
        (
            "overload-goodput",
            "Inferences answered in time",
            goodput,
            "% of what is possible, 0 to 1 at the bottom",
        ),
    ):
        lines = [
            charts.Line(f"limit: {limit}", values[limit], colour)
            for limit, colour in colours.items()
            if limit in values
        ]
        if lines:
            yield name, charts.draw_lines(title, lines, "load, relative to the capacity", unit)


def draw_charts(measured: MeasuredRun) -> Iterator[tuple[str, str]]:
    """Yield the name of each file and its content."""
    cpu = "CPU µs"

    def draw(title: str, values: Mapping[str, float], unit: str = cpu) -> str:
        return charts.draw_bars(title, charts.make_bars(values, "gateway"), unit)

    left_out = ("direct", "KServe transformer, V1 JSON")
    request = list_cpu(measured, PASS_THROUGH, *left_out)
    yield "request", draw("CPU time of a request with 1 KB, before Triton", request)
    proxies = list_cpu(measured, INSTANT)
    yield (
        "proxies",
        draw("CPU time of a request with 1 KB, before a server that answers at once", proxies),
    )
    yield "latency", draw_latency(measured)
    yield from draw_overload(measured)
    conversions = {}
    for label, title in CONVERSIONS.items():
        row = list_cpu(measured, title)
        conversions[f"gateway, {label}"] = row[GATEWAY_V1] / row[verdicts.PLAIN]
    conversions[verdicts.PLAIN] = 1.0
    yield "conversions", draw("CPU time of a request to /v1, of plain FastAPI", conversions, "")
    events = {
        f"{name}, {label}": value
        for label, values in (
            (
                "fast",
                {
                    name: row["cpu_us"] / EVENTS
                    for name, row in measured.tables[STREAM_TITLE].items()
                },
            ),
            (
                "20 ms apart",
                {
                    name: measured.values[f"slow stream, {name}"]
                    for name in (GATEWAY_V1, verdicts.PLAIN)
                },
            ),
        )
        for name, value in values.items()
        if name in (GATEWAY_V1, verdicts.PLAIN)
    }
    yield "events", draw("CPU time of an event of a stream", events)


def write_page(measured: MeasuredRun) -> None:
    for name, svg in draw_charts(measured):
        (DOCS / "charts" / f"{name}.svg").write_text(svg)
    PAGE.write_text(format_page(measured))


if __name__ == "__main__":
    write_page(read_measured())
