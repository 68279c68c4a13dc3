"""deploy/monitoring: promtool accepts it, it names existing metrics, and every alert is tested."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.monitoring import prometheusrule
from tests.support.documents import read_all
from tests.support.missing import find_program
from tests.support.servers import ROOT
from tests.support.tools import TRITON
from tests.support.wait import TIMEOUT_S

FOLDER = ROOT / "deploy" / "monitoring"
RULES = ("rules.yml", "alerts.yml")
RULE_TESTS = ("rules_test.yml", "alerts_test.yml")

# The values of labels that have a fixed set of them.
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
    ("gateway_shadow_requests", "result"): {"succeeded", "failed", "busy", "too_many", "too_large"},
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
    # The label of a Triton that Prometheus scrapes itself.
    "up": frozenset({"replica"}),
    "scrape_duration_seconds": frozenset({"replica"}),
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
    """Run promtool in a folder, without complaints; return what it prints."""
    command = [find_program("promtool", "prometheus"), *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
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
        (ROOT / "docs/operate/metrics.md").read_text(),
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


def groups_in(expression: str) -> set[str]:
    """The labels that an expression groups by."""
    listed = (labels.split(",") for labels in GROUPING.findall(expression))
    return {label.strip() for labels in listed for label in labels if label.strip()}


def selectors_in(expression: str) -> Iterator[tuple[str, str, str, str]]:
    """Metric, label, operator and value of each condition."""
    for name, conditions in SELECTOR.findall(expression):
        for label, operator, value in MATCHER.findall(conditions):
            yield name, label, operator, value


@pytest.fixture(scope="module")
def known() -> dict[str, frozenset[str]]:
    """The labels of every metric: those of a recorded page of Triton have `replica`."""
    triton: dict[str, frozenset[str]] = {}
    for name, labels in re.findall(r"^(nv_\w+)(?:\{(.*)\})? ", TRITON, re.MULTILINE):
        triton[name] = triton.get(name, frozenset()) | {"replica", *re.findall(r'(\w+)="', labels)}
    own = dict(own_metrics())
    assert len(own) > 20
    return {**own, **triton, **GPU, **PROMETHEUS}


def test_prometheus_accepts_every_configuration_and_expression(tmp_path: Path) -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", *RULES)
    assert sorted(set(RECORDED)) == sorted(RECORDED)
    for name in ("compose/prometheus.yml", "monitoring/rules.yml", "monitoring/alerts.yml"):
        shutil.copy(ROOT / "deploy" / name, tmp_path)
    promtool("check", "config", "prometheus.yml", folder=tmp_path)
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, (_, expression) in enumerate(in_the_dashboard())
    ]
    document = {"groups": [{"name": "dashboard", "rules": rules}]}
    (tmp_path / "dashboard.yml").write_text(yaml.safe_dump(document))
    printed = promtool("check", "rules", "dashboard.yml", folder=tmp_path)
    assert f"{len(rules)} rules found" in printed


@pytest.mark.long
@pytest.mark.parametrize("file", RULE_TESTS)
def test_rules_and_alerts_pass_their_tests_of_promtool(file: str) -> None:
    assert "SUCCESS" in promtool("test", "rules", file)


def test_expression_uses_only_existing_metrics_labels_and_values(
    known: dict[str, frozenset[str]], subtests: pytest.Subtests
) -> None:
    for place, expression in EXPRESSIONS:
        with subtests.test(place):
            names = names_in(expression)
            assert names or "vector(" in expression
            assert names - known.keys() - {*RECORDED} == set()
            for name, label, _, value in selectors_in(expression):
                assert name not in known or label in known[name] | FROM_THE_TARGET
                for (metric, enumerated), values in VALUES.items():
                    if name.startswith(metric) and label == enumerated:
                        assert {*value.split("|")} <= values
            if not names & {*RECORDED}:  # whose labels are those of their own expressions
                assert groups_in(expression) <= FROM_THE_TARGET.union(
                    *(known[name] for name in names)
                )


@pytest.mark.parametrize("name", ALERTS)
def test_alert_has_a_severity_two_sentences_and_a_runbook(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert alert["annotations"].keys() == {"summary", "description", "runbook", "runbook_url"}
    for sentence in (alert["annotations"]["summary"], alert["annotations"]["description"]):
        assert sentence.endswith(".")
        assert ". " not in sentence
    assert alert["annotations"]["runbook"] == f"docs/operate/monitoring.md#{name.lower()}"
    placeholder = "https://docs.example.com/triton-gateway"
    assert (
        alert["annotations"]["runbook_url"] == f"{placeholder}/operate/monitoring.md#{name.lower()}"
    )


def test_address_of_the_runbooks_can_be_replaced() -> None:
    text = (FOLDER / "alerts.yml").read_text()
    replaced = yaml.safe_load(prometheusrule.replace_runbooks(text, "https://git.local/docs/"))
    urls = {
        rule["alert"]: rule["annotations"]["runbook_url"]
        for group in replaced["groups"]
        for rule in group["rules"]
    }
    assert urls == {
        name: f"https://git.local/docs/operate/monitoring.md#{name.lower()}" for name in ALERTS
    }


def test_every_alert_has_cases_that_fire_and_are_silent() -> None:
    """The silent ones are the healthy fleet's, and one of its own."""
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
    cases = [
        (case["alertname"], bool(case.get("exp_alerts")))
        for test in tests
        for case in test["alert_rule_test"]
    ]
    assert {name for name, _ in cases} == ALERTS.keys()
    assert [name for name in ALERTS if cases.count((name, True)) < 1] == []
    assert [name for name in ALERTS if cases.count((name, False)) < 2] == []


def test_every_metric_of_the_gateway_is_asked_for() -> None:
    shown = (ROOT / "gateway/commands/top.py", *(ROOT / "gateway/capabilities/page").rglob("*.js"))
    asked = {name for _, expression in EXPRESSIONS for name in names_in(expression)}
    asked |= {name for path in shown for name in re.findall(r"gateway_\w+", path.read_text())}
    for family in {re.sub("_(bucket|sum|count)$", "", name) for name, _ in own_metrics()}:
        names = {family, *(f"{family}_{part}" for part in ("bucket", "sum", "count"))}
        assert names & asked, f"no rule, alert, panel, page or command uses {family}"


def test_documents_name_every_alert_and_existing_panels() -> None:
    monitoring = (ROOT / "docs/operate/monitoring.md").read_text()
    sections = re.findall(r"^### (\w+)\n\n(.+?)(?=^#|\Z)", monitoring, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in sections} == ALERTS.keys()
    panels = set(re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", monitoring)) - {"All"}
    assert len(panels) > 10
    assert panels <= {panel["title"] for panel in PANELS}


# Questions of operators.


def read_questions() -> dict[str, str]:
    """The documented questions that a query answers, and the text below each."""
    sections = re.findall(r"^## ([^\n]+\?)\n(.+?)(?=^# |^## |\Z)", read_all(), re.M | re.DOTALL)
    return {question: text for question, text in sections if "```promql" in text}


def queries_in(section: str) -> list[str]:
    return re.findall(r"^```promql\n(.+?)^```", section, re.MULTILINE | re.DOTALL)


def panels_in(section: str) -> set[str]:
    (line,) = re.findall(r"^Panels?: (.+?)\.", section, re.MULTILINE)
    return set(re.findall(r"\*([^*]+)\*", line))


def test_questions_name_existing_panels_and_metrics(known: dict[str, frozenset[str]]) -> None:
    titles = {panel["title"] for panel in PANELS}
    assert read_questions()
    for section in read_questions().values():
        assert panels_in(section) <= titles
        for query in queries_in(section):
            assert names_in(query) - known.keys() - {*RECORDED} == set()
