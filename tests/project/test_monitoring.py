"""deploy/monitoring: promtool accepts it, it names existing metrics, and every alert is tested."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from deploy.monitoring import prometheusrule
from tests.support.fleet import QUICK, V2_BODY, repository, write_echo
from tests.support.keys import ADMIN, METRICS, bearer, entry, written
from tests.support.missing import find_program
from tests.support.prometheus import Prometheus
from tests.support.redis_server import RedisServer
from tests.support.servers import ROOT, Triton, gateway
from tests.support.tools import TRITON
from tests.support.wait import TIMEOUT_S, wait_until

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


def test_metrics_and_selectors_of_an_expression_are_found() -> None:
    text = 'sum by (m, le) (rate(a_total{x="b or c"}[5m])) / on (job) group_left () d:e offset 1h > 1e6 and f'
    assert names_in(text) == {"a_total", "d:e", "f"}
    assert names_in('{__name__=~"g|h", job="x"}') == {"g", "h"}
    assert list(selectors_in('a{x="1", y!~"2|3"} + b{z=~".+"}')) == [
        ("a", "x", "=", "1"),
        ("a", "y", "!~", "2|3"),
        ("b", "z", "=~", ".+"),
    ]


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


def test_every_alert_has_a_case_that_fires_and_two_that_are_silent() -> None:
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


def test_every_panel_has_a_description_and_an_id_a_title_and_a_place_of_its_own() -> None:
    for unique in ("id", "title"):
        found = [panel[unique] for panel in DASHBOARD["panels"]]
        assert sorted(set(found)) == sorted(found)
    for panel in PANELS:
        title = panel["title"]
        assert panel["description"].endswith("."), title
        assert panel["fieldConfig"]["defaults"]["unit"], title
        assert panel["type"] in {"heatmap", "stat", "state-timeline", "timeseries"}, "no plugins"
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, title
        references = [target["refId"] for target in panel["targets"]]
        assert sorted(set(references)) == sorted(references), title
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


def test_variables_of_the_dashboard_select_models_and_replicas() -> None:
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


# The page of questions, before a real Prometheus.


APP, BATCH, GREEDY = "tgw_app-secret", "tgw_batch-secret", "tgw_greedy-secret"
WIDE = 50_000
Found = list[dict[str, Any]]
Check = Callable[[Found], bool]


def read_questions() -> dict[str, str]:
    """The questions of the page, and the text below each."""
    page = (ROOT / "docs/operate/metrics.md").read_text()
    return dict(re.findall(r"^## ([^\n]+\?)\n(.+?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))


def queries_in(section: str) -> list[str]:
    return re.findall(r"^```promql\n(.+?)^```", section, re.MULTILINE | re.DOTALL)


def panels_in(section: str) -> set[str]:
    (line,) = re.findall(r"^Panels?: (.+?)\.", section, re.MULTILINE)
    return set(re.findall(r"\*([^*]+)\*", line))


class Observed(NamedTuple):
    """Two Tritons and two gateways under load, and a Prometheus."""

    tritons: list[Triton]
    client: httpx.Client
    prometheus: Prometheus

    def label_sets(self, found: Found, *labels: str) -> set[tuple[str, ...]]:
        return {tuple(each["metric"].get(label, "") for label in labels) for each in found}

    def answers(self) -> dict[str, list[Check]]:
        """What the expressions of each question must find."""
        one, two = (triton.address for triton in self.tritons)

        def has(labels: str, *expected: tuple[str, ...]) -> Check:
            return lambda found: {*expected} <= self.label_sets(found, *labels.split())

        def is_first(model: str) -> Check:
            return lambda found: [each["metric"]["model"] for each in found][:1] == [model]

        phases = has(
            "model phase",
            ("other", "upstream"),
            ("other", "admission"),
            ("late", "load"),
            ("wide", "receive"),
            ("wide", "decode"),
            ("wide", "render"),
        )
        return {
            "Who sends the load?": [
                has("caller model", ("app", "echo"), ("batch", "other")),
                has("caller", ("app",), ("batch",)),
                has("caller direction", ("app", "in"), ("app", "out")),
                has("caller model", ("app", "echo"), ("batch", "other")),
            ],
            "Who is refused, and why?": [
                has(
                    "caller code",
                    ("greedy", "OVERLOADED"),
                    ("app", "FORBIDDEN"),
                    ("", "UNAUTHENTICATED"),
                ),
                has("reason", ("rate",)),
            ],
            "Which model is slow, and is it the queue or the compute?": [
                is_first("other"),
                is_first("other"),
                is_first("other"),
            ],
            "Which replica is slow, or fails?": [
                has("replica", (one,), (two,)),
                has("replica outcome", (two, "failed")),
            ],
            "Where does a request spend its time inside the gateway?": [
                phases,
                phases,
                has("model", ("other",), ("wide",)),
            ],
            "What changed at 14:03, and by whom?": [
                has(
                    "action model by outcome",
                    ("load", "foreign", "api", "done"),
                    ("load", "late", "on_demand", "done"),
                )
            ],
            "What is near its limit?": [
                has("limit", ("inferences",)),
                has("model", ("other",)),
                has("replica", (one,), (two,)),
            ],
        }


def send_slowly(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 1 << 16):
        yield body[start : start + (1 << 16)]
        time.sleep(0.005)


def send_load(client: httpx.Client, broken: Path) -> None:
    """Send some of each request, of which one in a few fails on the replica with the broken model."""
    other = json.dumps({"inputs": {"X": [-0.1, 0.0]}}).encode()
    wide = json.dumps({"inputs": {"X": [0.5] * WIDE}}).encode()
    as_json = {"content-type": "application/json"}

    def infer(model: str, key: str, **body: Any) -> httpx.Response:
        headers = {**as_json, **bearer(key)}
        return client.post(f"/v1/models/{model}/infer", headers=headers, **body)

    with ThreadPoolExecutor(12) as pool:
        slow = [pool.submit(infer, "other", BATCH, content=other) for _ in range(12)]
        assert infer("wide", APP, content=send_slowly(wide)).is_success
        assert infer("late", APP, json={"inputs": {"X": [1.0, 2.0]}}).is_success
        broken.write_text("INTERNAL")
        for _ in range(6):
            client.post("/v2/models/echo/infer", json=V2_BODY, headers=bearer(APP))
        broken.unlink(missing_ok=True)  # the load through the other gateway does the same
        for _ in range(3):
            client.post("/v2/models/echo/infer", json=V2_BODY, headers=bearer(GREEDY))
        refused = client.post("/v2/repository/models/foreign/load", headers=bearer(APP))
        assert refused.status_code == 403
        assert client.post("/v2/models/echo/infer", json=V2_BODY).status_code == 401
        assert {each.result().status_code for each in slow} == {200}


def scrape_job(name: str, *addresses: str, **more: Any) -> dict[str, Any]:
    labels = {"namespace": "triton-gateway"}
    configs = [{"targets": [*addresses], "labels": labels | more.pop("labels", {})}]
    return {"job_name": name, "static_configs": configs, **more}


def scrape_triton(triton: Triton) -> dict[str, Any]:
    """The scrape of a Triton that the PodMonitor configures."""
    folder = ROOT / "k8s/components/monitoring-tritons"
    monitor = yaml.safe_load((folder / "podmonitor.yaml").read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    snake = {"sourceLabels": "source_labels", "targetLabel": "target_label"}

    def relabel(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{snake.get(key, key): value for key, value in rule.items()} for rule in rules]

    rules = relabel(endpoint["relabelings"])
    for rule in rules:
        rule["replacement"] = rule["replacement"].replace("8000", str(triton.options.http_port))
    return scrape_job(
        f"triton-{triton.options.http_port}",
        f"127.0.0.1:{triton.options.metrics_port}",
        labels={"__meta_kubernetes_pod_ip": "127.0.0.1"},
        relabel_configs=rules,
        metric_relabel_configs=relabel(endpoint["metricRelabelings"]),
    )


@pytest.fixture(scope="module", params=["from the gateways", "from the Tritons"])
def observed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("observed")
    is_direct = request.param == "from the Tritons"
    keys = [entry(ADMIN, "admin"), entry(METRICS, "metrics"), entry(APP, "infer")]
    keys += [entry(BATCH, "infer"), entry(GREEDY, "infer", requests_per_second=1)]
    stop = threading.Event()
    with ExitStack() as stack:
        tritons = []
        for name in ("one", "two"):
            models = repository(folder / name)
            write_echo(models, "wide", dims=WIDE)
            tritons.append(stack.enter_context(Triton(models, "echo", "other", "wide")))
        for triton in tritons:
            triton.wait()
        settings = {
            "keys_file": str(written(folder / "keys.yaml", keys)),
            "state": stack.enter_context(RedisServer(folder)).url(),
            "metrics_replicas": str(not is_direct),
            "on_demand_models": "late",
            "max_inflight": "4",
            "max_model_inflight": "4",
        }
        urls = [triton.options.url for triton in tritons]
        started = (gateway(*urls, **settings, **QUICK) for _ in range(2))
        clients = [stack.enter_context(each)[0] for each in started]
        job = scrape_job(
            "triton-gateway",
            *(f"{client.base_url.host}:{client.base_url.port}" for client in clients),
            authorization={"credentials": METRICS},
        )
        jobs = [job, *map(scrape_triton, tritons)] if is_direct else [job]
        rules = [FOLDER / name for name in RULES]
        prometheus = stack.enter_context(Prometheus(folder, jobs, rules))
        for client in clients:
            loaded = client.post("/v2/repository/models/foreign/load", headers=bearer(ADMIN))
            assert loaded.is_success, loaded.text

        def run_load(client: httpx.Client) -> None:
            broken = tritons[1].repository / "echo" / "broken"
            while not stop.is_set():
                send_load(client, broken)

        pool = stack.enter_context(ThreadPoolExecutor(len(clients)))
        stack.callback(stop.set)
        running = [pool.submit(run_load, client) for client in clients]
        wait_until(prometheus.answers)
        yield Observed(tritons, clients[0], prometheus)
        stop.set()
        for each in running:
            each.result()


@pytest.mark.long
def test_questions_are_answered_by_a_real_prometheus(
    observed: Observed, subtests: pytest.Subtests
) -> None:
    answers = observed.answers()
    questions = read_questions()
    assert answers.keys() == questions.keys()
    for question, section in questions.items():
        for query, check in zip(queries_in(section), answers[question], strict=True):
            with subtests.test(query):
                wait_until(lambda: check(observed.prometheus.query(query)))  # noqa: B023 - called here
    events = observed.client.get("/v1/events", headers=bearer(ADMIN)).json()["events"]
    loads = [event for event in events if event["action"] == "load" and "foreign" in str(event)]
    assert {event["caller"] for event in loads} == {"admin"}


@pytest.mark.long
def test_rules_panels_and_scaling_have_their_samples_from_a_real_prometheus(
    observed: Observed, subtests: pytest.Subtests
) -> None:
    prometheus = observed.prometheus

    def find_unhealthy_rules() -> list[str]:
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        return [rule["name"] for rule in rules if rule["health"] == "err"]

    assert find_unhealthy_rules() == []
    shown = set().union(*map(panels_in, read_questions().values())) - {"GPU memory"}
    for place, expression in in_the_dashboard():
        with subtests.test(place):
            if place.rpartition(" ")[0] in shown:
                wait_until(lambda: prometheus.query(expression))  # noqa: B023 - called here
            else:
                prometheus.query(expression)
    scaling = yaml.safe_load((ROOT / "k8s/components/keda/scaledobject.yaml").read_text())
    for trigger in scaling["spec"]["triggers"]:
        wait_until(lambda: prometheus.query(trigger["metadata"]["query"]))  # noqa: B023 - called here
    assert prometheus.complaints() == []


def test_questions_name_existing_panels_and_metrics(known: dict[str, frozenset[str]]) -> None:
    titles = {panel["title"] for panel in PANELS}
    for section in read_questions().values():
        assert panels_in(section) <= titles
        for query in queries_in(section):
            assert names_in(query) - known.keys() - {*RECORDED} == set()
