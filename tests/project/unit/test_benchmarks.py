"""The parts of the benchmarks that measure nothing: their modules, tables and results file."""

from __future__ import annotations

import importlib
import pkgutil
import xml.etree.ElementTree as ET
from contextlib import ExitStack
from pathlib import Path

import pytest

import benchmarks
from benchmarks import charts, count, page, peers, results, verdicts
from benchmarks.in_process import (
    KEY_REQUEST,
    REPLICA,
    TOKEN_REQUEST,
    build_requests,
    find_message_end,
)
from benchmarks.load import Measured
from benchmarks.run import Run
from benchmarks.servers import ServerNotStarted
from benchmarks.tables import describe_spread, format_table
from benchmarks.verdicts import Row, Verdict

PEERS_ONLY = (
    "benchmarks.baselines.kserve_transformer"  # imports what only the peers' environment has
)
MODULES = [
    module.name
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")
    if module.name != PEERS_ONLY
]
COUNTS = {"a request": 1000, "another": 2000}


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name: str) -> None:
    assert importlib.import_module(name).__name__ == name


def test_ratios_are_those_of_the_same_round() -> None:
    slow_minute = 10.0
    base = [Measured(100, 1, 1, cpu_us, 1, 0) for cpu_us in (1.0, slow_minute)]
    other = [Measured(50, 1, 1, cpu_us, 1, 0) for cpu_us in (2.0, 4 * slow_minute)]
    *_, row = format_table("a table", {"nginx": base, "other": other}, "nginx")
    assert "| 3.00 (2.00–4.00) |" in row
    assert "| 50 | 0.50 |" in row


def test_spread_is_the_median_with_minimum_and_maximum() -> None:
    assert describe_spread([3.0, 1.0, 9.0], 1) == "3.0 (1.0–9.0)"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "results.md"
    path.write_text("# Results of the last run\n\nold tables\n")
    return path


def test_counts_and_tables_replace_only_themselves(recorded: Path) -> None:
    assert results.read_counts(recorded).instructions == {}
    results.write_counts("\n".join(count.format_section(COUNTS)) + "\n", recorded)
    assert results.read_counts(recorded).instructions == COUNTS
    results.write_tables("# Results of the last run\n\nnew tables\n", recorded)
    assert results.read_counts(recorded).instructions == COUNTS
    text = recorded.read_text()
    assert "new tables" in text
    assert "old tables" not in text
    results.write_counts("\n".join(count.format_section({"a request": 1})) + "\n", recorded)
    assert results.read_counts(recorded).instructions == {"a request": 1}
    assert "new tables" in recorded.read_text()


def test_recorded_counts_are_those_of_the_requests() -> None:
    assert results.read_counts().instructions.keys() == set(count.list_names())


def test_known_token_costs_what_a_key_costs() -> None:
    counts = results.read_counts().instructions
    assert counts[TOKEN_REQUEST] <= 1.05 * counts[KEY_REQUEST]


def test_only_a_change_of_more_than_five_percent_is_reported() -> None:
    assert list(count.list_changes(COUNTS, {"a request": 1040, "another": 2000})) == []
    changes = list(count.list_changes(COUNTS, {"a request": 1100, "another": 1800}))
    assert sorted(changes) == [
        "a request: 1,000 → 1,100 instructions (+10.0%)",
        "another: 2,000 → 1,800 instructions (-10.0%)",
    ]
    assert list(count.list_changes({}, {"a new one": 1})) == ["a new one: only in this run"]


def test_end_of_a_message_follows_from_its_length() -> None:
    messages = [*REPLICA.responses.values(), *build_requests().values()]
    assert [find_message_end(message + b"the next") for message in messages] == [
        len(message) for message in messages
    ]


def test_peer_that_is_not_installed_is_skipped_with_a_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerNotStarted, match="no-such-program is not installed"):
        peers.find_program("no-such-program")

    def start() -> ExitStack:
        raise ServerNotStarted(str(peers.find_program("no-such-program")))

    with ExitStack() as stack:
        assert peers.start_peer(stack, "A peer", start) is None  # type: ignore[arg-type]
    assert capsys.readouterr().err == (
        "skipped: A peer: no-such-program is not installed; run: make bench-peers\n"
    )


@pytest.mark.parametrize(
    ("row", "values", "verdict"),
    [
        (Row("a", "s", "", 0.7), [0.9, 0.6, 0.7], Verdict.PASSED),
        (Row("a", "s", "", 0.7), [0.1, 0.8, 0.8], Verdict.FAILED),
        (Row("a", "s", "", 0.95, is_minimum=True), [0.9, 1.0, 1.0], Verdict.PASSED),
        (Row("a", "s", "", 0.95, is_minimum=True), [0.9, 0.9, 1.0], Verdict.FAILED),
        (Row("a", "s", "", 1.05, is_noisy=True), [1.0, 1.2, 1.2], Verdict.PASSED),
        (Row("a", "s", "", 1.05, is_noisy=True), [1.1, 1.2, 1.2], Verdict.FAILED),
        (Row("a", "s", "", None), [9.0], Verdict.REPORTED),
        (Row("a", "s", "", 0.7), [], Verdict.FAILED),
        (Row("a", "s", "", 0.7, peer="Envoy"), [], Verdict.SKIPPED),
    ],
)
def test_median_decides_whether_a_measure_is_within_its_limit(
    row: Row, values: list[float], verdict: Verdict
) -> None:
    assert verdicts.judge(row, values) is verdict


def test_ratio_to_a_peer_that_is_not_installed_is_left_out() -> None:
    run = Run()
    rounds = {
        "gateway": [Measured(100, 1, 1, 3.0, 1, 0)],
        "nginx": [Measured(100, 1, 1, 2.0, 1, 0)],
    }
    run.record_cpu("Envoy", rounds, "gateway", "Envoy")
    run.record_cpu("nginx", rounds, "gateway", "nginx")
    assert run.ratios == {"nginx": [1.5]}


def test_page_and_its_charts_are_those_of_the_recorded_run() -> None:
    measured = results.read_measured()
    assert page.PAGE.read_text() == page.format_page(measured)
    for name, svg in page.draw_charts(measured):
        assert (page.DOCS / "charts" / f"{name}.svg").read_text() == svg
        assert ET.fromstring(svg).get("aria-label")


def test_bar_is_as_long_as_its_value_says() -> None:
    bars = charts.make_bars({"nginx": 10.0, "gateway": 40.0}, "gateway")
    svg = ET.fromstring(charts.draw_bars("A <title>", bars, "µs"))
    drawn = {
        each.get("class"): float(str(each.get("width")))
        for each in svg.iter()
        if "rect" in each.tag
    }
    assert drawn["b"] == pytest.approx(4 * drawn["a"], rel=0.01)
