"""deploy/monitoring holds together: promtool takes it, it names what there is, every alert is tried."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.monitoring import prometheusrule
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.servers import ROOT
from tests.support.wait import TIMEOUT_S

FOLDER = ROOT / "deploy" / "monitoring"
RULES = ("rules.yml", "alerts.yml")
RULE_TESTS = ("rules_test.yml", "alerts_test.yml")

# What enumerations of labels may say.
VALUES = {
    ("gateway_request_duration_seconds", "status"): {"2xx", "3xx", "4xx", "5xx", "499"},
    ("gateway_request_duration_seconds", "code"): {"500", "502", "503", "504"},
    ("gateway_upstream_attempts", "outcome"): {
        "answered",
        "failed",
        "refused",
        "bad_answer",
        "deadline",
    },
    ("gateway_replica_state", "state"): {"up", "ejected", "slow", "down"},
    ("gateway_replica_models", "state"): {"READY", "UNAVAILABLE", "LOADING", "UNLOADING"},
    ("gateway_model_actions", "action"): {"load", "unload"},
    ("gateway_model_actions", "by"): {"api", "reconciler"},
    ("gateway_model_actions", "outcome"): {"done", "failed"},
    ("gateway_shadow_requests", "result"): {"equal", "close", "different", "failed", "dropped"},
}
# Triton's only on a machine with a GPU (docs/user_guide/metrics.md of its repository).
GPU = dict.fromkeys(
    (
        "nv_gpu_utilization",
        "nv_gpu_memory_total_bytes",
        "nv_gpu_memory_used_bytes",
        "nv_gpu_power_usage",
        "nv_gpu_power_limit",
        "nv_energy_consumption",
    ),
    frozenset({"replica", "gpu_uuid"}),
)
PROMETHEUS = {
    "up": frozenset[str](),
    "scrape_duration_seconds": frozenset[str](),
    "ALERTS": frozenset({"alertname", "alertstate"}),
}
FROM_THE_TARGET = {"namespace", "job", "instance"}

KEYWORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}
GROUPING = re.compile(
    r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^()]*)\)", re.IGNORECASE
)
SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^{}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
NAME = re.compile(r"(?<![\w:.])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])")


def promtool(*arguments: str, folder: Path = FOLDER) -> str:
    """What it prints; a complaint of its is a failure."""
    if shutil.which("promtool") is None:
        pytest.fail("promtool is missing: apt-get install prometheus", pytrace=False)
    run = subprocess.run(
        ["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def rules_of(*files: str) -> list[dict[str, Any]]:
    documents = [yaml.safe_load((FOLDER / name).read_text()) for name in files]
    return [
        rule for document in documents for group in document["groups"] for rule in group["rules"]
    ]


DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = {rule["alert"]: rule for rule in rules_of("alerts.yml")}
RECORDED = [rule["record"] for rule in rules_of("rules.yml")]


def in_the_dashboard() -> Iterator[tuple[str, str]]:
    """Every place with an expression, and the expression as Prometheus gets it."""
    found = [
        (f"{panel['title']} {target['refId']}", target["expr"])
        for panel in PANELS
        for target in panel["targets"]
    ]
    found += [(note["name"], note["expr"]) for note in DASHBOARD["annotations"]["list"]]
    for variable in DASHBOARD["templating"]["list"]:
        if series := re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]):
            found.append((f"${variable['name']}", series[1]))
    chosen = {
        variable["name"]: variable["allValue"]
        for variable in DASHBOARD["templating"]["list"]
        if "allValue" in variable
    } | {"__rate_interval": "5m"}
    for place, expression in found:
        yield place, re.sub(r"\$(\w+)", lambda name: chosen[name[1]], expression)


def in_the_rules() -> Iterator[tuple[str, str]]:
    for rule in rules_of(*RULES):
        yield rule.get("alert") or rule["record"], rule["expr"]


EXPRESSIONS = [*in_the_rules(), *in_the_dashboard()]


def own_metrics() -> Iterator[tuple[str, frozenset[str]]]:
    """The gateway's metrics and their labels, from the table that test_docs compares with the code."""
    table = re.findall(
        r"^\| `(gateway_\w+)` \| (\w+) \| ([\w, ]*?) *\|",
        (ROOT / "docs" / "metrics.md").read_text(),
        re.MULTILINE,
    )
    for name, kind, listed in table:
        labels = frozenset(re.findall(r"\w+", listed))
        if kind == "histogram":
            yield f"{name}_bucket", labels | {"le"}
            yield f"{name}_sum", labels
            yield f"{name}_count", labels
        else:
            yield name, labels


def names_in(expression: str) -> set[str]:
    """The metrics that an expression of PromQL names."""
    for name in re.findall(r'__name__=~"([^"]*)"', expression):
        expression += " " + name.replace("|", " ")
    bare = re.sub(r'"(?:[^"\\]|\\.)*"|#.*', "", expression)
    bare = GROUPING.sub(" ", re.sub(r"\{[^{}]*\}|\[[^\]]*\]", "", bare))
    return {name for name in NAME.findall(bare) if name.lower() not in KEYWORDS}


def selectors_in(expression: str) -> Iterator[tuple[str, str, str, str]]:
    """Metric, label, operator and value of each condition."""
    for name, conditions in SELECTOR.findall(expression):
        for label, operator, value in MATCHER.findall(conditions):
            yield name, label, operator, value


@pytest.fixture(scope="module")
def known(demo_triton: EmbeddedTriton) -> dict[str, frozenset[str]]:
    """Every metric that there is, and its labels: Triton's as a real one shows them, plus `replica`."""
    port = demo_triton.options.metrics_port
    page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S).text
    triton: dict[str, frozenset[str]] = {}
    for name, labels in re.findall(r"^(nv_\w+)(?:\{(.*)\})? ", page, re.MULTILINE):
        triton[name] = triton.get(name, frozenset()) | {"replica", *re.findall(r'(\w+)="', labels)}
    own = dict(own_metrics())
    assert len(own) > 20
    return {**own, **triton, **GPU, **PROMETHEUS}


def test_prometheus_takes_the_configuration_and_its_rules() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", *RULES)


@pytest.mark.long
@pytest.mark.parametrize("file", RULE_TESTS)
def test_the_rules_compute_and_the_alerts_fire_as_their_tests_say(file: str) -> None:
    assert "SUCCESS" in promtool("test", "rules", file)


def test_every_expression_of_the_dashboard_can_be_parsed(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, (_, expression) in enumerate(in_the_dashboard())
    ]
    document = {"groups": [{"name": "dashboard", "rules": rules}]}
    (tmp_path / "dashboard.yml").write_text(yaml.safe_dump(document))
    assert f"{len(rules)} rules found" in promtool(
        "check", "rules", "dashboard.yml", folder=tmp_path
    )


def test_an_expression_is_read_for_its_metrics() -> None:
    text = 'sum by (m, le) (rate(a_total{x="b or c"}[5m])) / on (job) group_left () d:e offset 1h > 1e6 and f'
    assert names_in(text) == {"a_total", "d:e", "f"}
    assert names_in('{__name__=~"g|h", job="x"}') == {"g", "h"}
    assert list(selectors_in('a{x="1", y!~"2|3"} + b{z=~".+"}')) == [
        ("a", "x", "=", "1"),
        ("a", "y", "!~", "2|3"),
        ("b", "z", "=~", ".+"),
    ]


def test_only_metrics_that_there_are_are_named(known: dict[str, frozenset[str]]) -> None:
    unknown = {
        place: names - known.keys() - {*RECORDED}
        for place, expression in EXPRESSIONS
        if (names := names_in(expression)) - known.keys() - {*RECORDED}
    }
    assert not unknown
    assert all(
        names_in(expression) or expression.startswith("vector(") for _, expression in EXPRESSIONS
    )


def test_only_labels_that_a_metric_has_are_asked_for(known: dict[str, frozenset[str]]) -> None:
    wrong = [
        (place, name, label)
        for place, expression in EXPRESSIONS
        for name, label, _, _ in selectors_in(expression)
        if name in known and label not in known[name] | FROM_THE_TARGET
    ]
    assert not wrong


def test_only_groups_by_labels_that_one_of_the_metrics_has(
    known: dict[str, frozenset[str]],
) -> None:
    wrong = []
    for place, expression in EXPRESSIONS:
        names = names_in(expression)
        if any(name in RECORDED for name in names):
            continue  # its labels are those of its own expression
        labels = FROM_THE_TARGET.union(*(known[name] for name in names))
        for listed in GROUPING.findall(expression):
            asked = {label.strip() for label in listed.split(",") if label.strip()}
            wrong += [(place, label) for label in asked - labels]
    assert not wrong


def test_only_values_that_a_label_can_have_are_asked_for() -> None:
    wrong = [
        (place, name, label, value)
        for place, expression in EXPRESSIONS
        for name, label, _, value in selectors_in(expression)
        for (metric, of), values in VALUES.items()
        if name.startswith(metric) and label == of and not {*value.split("|")} <= values
    ]
    assert not wrong


def test_nothing_is_recorded_twice() -> None:
    assert sorted(set(RECORDED)) == sorted(RECORDED)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_is_wrong_in_a_sentence_and_where_help_is(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"].keys() == {"summary", "description", "runbook", "runbook_url"}
    for sentence in (alert["annotations"]["summary"], alert["annotations"]["description"]):
        assert sentence.endswith(".")
        assert ". " not in sentence
    assert alert["annotations"]["runbook"] == f"docs/monitoring.md#{name.lower()}"
    placeholder = "https://docs.example.com/triton-gateway"
    assert alert["annotations"]["runbook_url"] == f"{placeholder}/monitoring.md#{name.lower()}"


def test_runbooks_can_be_where_one_reads_them() -> None:
    text = (FOLDER / "alerts.yml").read_text()
    replaced = yaml.safe_load(prometheusrule.replace_runbooks(text, "https://git.local/docs/"))
    urls = {
        rule["alert"]: rule["annotations"]["runbook_url"]
        for group in replaced["groups"]
        for rule in group["rules"]
    }
    assert urls == {name: f"https://git.local/docs/monitoring.md#{name.lower()}" for name in ALERTS}


def test_every_alert_has_its_paragraph_and_there_is_no_other() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    sections = re.findall(r"^### (\w+)\n\n(.+?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in sections} == ALERTS.keys()
    short = [name for name, paragraph in sections if len(paragraph) < 150]
    assert not short


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_a_case_that_fires_and_one_that_is_silent(name: str) -> None:
    """Two silent ones: the healthy fleet's, and one of its own."""
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    cases = [
        bool(case.get("exp_alerts"))
        for test in tests
        for case in test["alert_rule_test"]
        if case["alertname"] == name
    ]
    assert cases.count(True) >= 1
    assert cases.count(False) >= 2


def test_the_tests_of_the_alerts_are_of_alerts_that_there_are() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    named = {case["alertname"] for test in tests for case in test["alert_rule_test"]}
    assert named == ALERTS.keys()


@pytest.mark.parametrize("what", ["id", "title"])
def test_panels_have_a_number_and_a_title_of_their_own(what: str) -> None:
    found = [panel[what] for panel in DASHBOARD["panels"]]
    assert sorted(set(found)) == sorted(found)


def test_the_panels_that_the_runbook_names_are_there() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", text)) - {"All"}
    assert len(named) > 10
    assert named <= {panel["title"] for panel in PANELS}


def test_panels_do_not_lie_upon_each_other() -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in DASHBOARD["panels"]]
    for title, at in places:
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24, title
    for (one, a), (other, b) in itertools.combinations(places, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, f"{one!r} and {other!r}"


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["type"] in {"heatmap", "stat", "state-timeline", "timeseries"}, "no plugins"
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    references = [target["refId"] for target in panel["targets"]]
    assert sorted(set(references)) == sorted(references)


def test_the_dashboard_can_be_narrowed() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert DASHBOARD["schemaVersion"] >= 39
    assert {"job", "model", "replica"} <= variables.keys()
    for variable, metrics in (("model", "nv_inference"), ("replica", "nv_")):
        loose = [
            target["expr"]
            for panel in PANELS
            for target in panel["targets"]
            for name, conditions in SELECTOR.findall(target["expr"])
            if name.startswith(metrics) and f"${variable}" not in conditions
        ]
        assert not loose


def test_deploying_says_of_every_alert_where_to_look() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text()
    linked = re.findall(r"\[(\w+)\]\(monitoring\.md#(\w+)\)", text)
    assert dict(linked) == {alert: alert.lower() for alert in ALERTS}
