"""Version labels on real Tritons with three versions: paths, splits, versions that come and go."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.capabilities.versions.support.versioned import (
    LABELS,
    NAME,
    V1_BODY,
    V2_BODY,
    add_version,
    count_versions,
    remove_version,
    write_version,
    write_versions,
)
from tests.support.errors import assert_error
from tests.support.gateway_forks import run_gateway
from tests.support.keys import bearer, entry, written
from tests.support.model_zoo.zoo import AS_WRITTEN, COUNTING, write_repository
from tests.support.redis_server import RedisServer
from tests.support.servers import Triton, gateway, gateway_before
from tests.support.wait import wait_until

QUICK = {"poll_interval_s": "0.1", "connect_timeout_s": "10", "log_level": "warning"}
LATEST = "latest"  # a model of which Triton serves the latest version alone
V1, V2 = f"/v1/models/{NAME}", f"/v2/models/{NAME}"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    repository = write_versions(tmp_path_factory.mktemp("models"))
    for version in (1, 2):
        write_version(repository, version, LATEST, policy="latest { num_versions: 1 }")
    with Triton(repository, NAME, LATEST) as running:
        running.wait()
        yield running


@pytest.fixture(scope="module", name="shared")
def shared_gateway(triton: Triton) -> Iterator[httpx.Client]:
    with gateway_before(triton.options.url, **QUICK) as client:
        wait_until(lambda: client.get(V1).status_code == 200)
        yield client


@pytest.fixture
def client(shared: httpx.Client) -> Iterator[httpx.Client]:
    """The gateway without labels."""
    yield shared
    for label in shared.get(LABELS).json()["labels"]:
        assert shared.delete(f"{LABELS}/{label['label']}").status_code == 200


def put(client: httpx.Client, name: str, **label: Any) -> dict[str, Any]:
    answer = client.put(f"{LABELS}/{name}", json=label)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


# Labels.


def test_label_is_stored_listed_and_deleted(client: httpx.Client) -> None:
    kept = put(client, "stable", version="2")
    assert kept == {
        "model": NAME,
        "label": "stable",
        "version": "2",
        "ready": {"2": True},
        "model_version_status": [
            {
                "version": "2",
                "state": "AVAILABLE",
                "status": {"error_code": "OK", "error_message": ""},
            }
        ],
    }
    assert client.get(f"{LABELS}/stable").json() == kept
    canary = put(client, "canary", versions={"2": 10, "1": 90}, sticky="key")
    assert canary["versions"] == {"1": 90, "2": 10}
    assert canary["sticky"] == "key"
    assert client.get(LABELS).json() == {"model": NAME, "labels": [canary, kept]}
    assert client.delete(f"{LABELS}/stable").json() == kept
    for gone in (client.get(f"{LABELS}/stable"), client.delete(f"{LABELS}/stable")):
        assert_error(gone, 404, "LABEL_NOT_FOUND", "has no label 'stable'; its labels are canary")


NOT_READY = "not in this replica's index"


@pytest.mark.parametrize(
    ("name", "label", "status", "code", "message"),
    [
        ("Stable", {"version": "2"}, 400, "MALFORMED_REQUEST", "not a valid label"),
        ("stable", {}, 400, "MALFORMED_REQUEST", 'an object with "version"'),
        ("stable", {"version": "9"}, 409, "VERSION_NOT_READY", NOT_READY),
        ("stable", {"versions": {"1": 1, "9": 1}}, 409, "VERSION_NOT_READY", NOT_READY),
        (
            "stable",
            {"version": "1", "shadow": {"version": "9"}},
            409,
            "VERSION_NOT_READY",
            NOT_READY,
        ),
    ],
)
def test_invalid_label_is_refused(
    client: httpx.Client, name: str, label: Any, status: int, code: str, message: str
) -> None:
    assert_error(client.put(f"{LABELS}/{name}", json=label), status, code, message)
    assert client.get(LABELS).json()["labels"] == []


def test_policy_that_excludes_the_version_is_named(client: httpx.Client) -> None:
    refused = client.put(f"/v1/models/{LATEST}/labels/old", json={"version": "1"})
    policy = 'the version_policy of the model is {"latest":{"num_versions":1}}: change it'
    assert_error(refused, 409, "VERSION_NOT_READY", policy)
    assert "load it first" not in refused.text


@pytest.mark.fault("thousands of labels and of operations in the background, long names of load")
def test_labels_of_a_model_are_bounded(client: httpx.Client) -> None:
    large = client.put(f"{LABELS}/a", json={"unknown": "x" * 70_000})
    assert large.status_code == 413
    for number in range(65):
        label = client.put(f"{LABELS}/l{number}", json={"version": "1"})
        assert label.status_code == (200 if number < 64 else 409)
    assert "64 labels" in label.json()["error"]
    assert client.put(f"{LABELS}/l0", json={"version": "1"}).status_code == 200


def test_label_of_an_unknown_model_is_not_found(client: httpx.Client) -> None:
    for method in ("GET", "PUT", "DELETE"):
        answer = client.request(method, "/v1/models/nobody/labels/stable", json={"version": "1"})
        assert_error(answer, 404, "MODEL_NOT_FOUND")
    assert_error(client.get("/v1/models/nobody/labels"), 404, "MODEL_NOT_FOUND")
    assert_error(
        client.post("/v1/models/nobody/versions/stable/infer", json=V1_BODY), 404, "MODEL_NOT_FOUND"
    )


def test_administrator_changes_labels_with_an_audit_and_others_read_them(
    triton: Triton, tmp_path: Path
) -> None:
    entries = [
        entry("tgw_admin", "admin", "infer"),
        entry("tgw_app", "infer"),
        entry("tgw_other", "infer", models=["other*"]),
    ]
    keys = written(tmp_path / "keys.yaml", entries)
    settings = {**QUICK, "keys_file": str(keys), "log_format": "json"}
    with gateway(triton.options.url, **settings) as (client, command):
        label, body = f"{LABELS}/stable", {"version": "2"}
        app = bearer("tgw_app")
        assert client.put(label, json=body, headers=bearer("tgw_admin")).status_code == 200
        line = json.loads(command.wait_for("gateway.audit"))
        assert (line["label"], line["outcome"]) == ("stable", "succeeded")
        (event,) = client.get("/v1/events", headers=bearer("tgw_admin")).json()["events"]
        assert event["changes"] == line["changes"]
        assert line["changes"] == [
            {"subject": f"label stable of model {LABELS.split('/')[3]}", "from": None, "to": body}
        ]
        assert_error(client.put(label, json=body, headers=app), 403, "FORBIDDEN", "role 'admin'")
        assert client.get(label, headers=app).json()["version"] == "2"
        assert_error(client.delete(label, headers=app), 403, "FORBIDDEN")
        hidden = client.get(label, headers=bearer("tgw_other"))
        assert_error(hidden, 404, "MODEL_NOT_FOUND")


# Requests with a label.


def test_label_is_accepted_wherever_a_version_is(client: httpx.Client) -> None:
    put(client, "stable", version="2")
    answer = client.post(f"{V1}/versions/stable/infer", json=V1_BODY)
    assert (answer.json()["version"], answer.headers["x-model-version"]) == ("2", "2")
    assert client.get(f"{V1}/versions/stable").status_code == 200
    answer = client.post(f"{V2}/versions/stable/infer", json=V2_BODY)
    assert (answer.json()["model_version"], answer.headers["x-model-version"]) == ("2", "2")
    for path in ("", "/ready", "/config", "/stats"):
        read = client.get(f"{V2}/versions/stable{path}")
        assert read.status_code == 200, read.text
        assert read.headers["x-model-version"] == "2"
    stats = client.get(f"{V2}/versions/stable/stats").json()["model_stats"]
    assert [each["version"] for each in stats] == ["2"]
    generated = client.post(f"{V2}/versions/stable/generate", json={"X": 1.0})
    assert generated.json()["model_version"] == "2"
    # Nothing but the version in the path is changed on the way to Triton.
    for method, path, body in (
        ("POST", "/infer", V2_BODY),
        ("GET", "/config", None),
        ("GET", "", None),
    ):
        numbered, labelled = (
            client.request(method, f"{V2}/versions/{version}{path}", json=body)
            for version in ("2", "stable")
        )
        assert numbered.content == labelled.content


def test_calls_of_tensorflow_servings_documentation_work(client: httpx.Client) -> None:
    put(client, "stable", version="2")
    # https://www.tensorflow.org/tfx/serving/api_rest
    answer = client.post(
        f"{V1}/labels/stable:predict", json={"instances": [[1.0, 2.0], [3.0, 4.0]]}
    )
    assert answer.json() == {"predictions": [[1.0, 2.0], [3.0, 4.0]]}
    assert answer.headers["x-model-version"] == "2"
    for path, version in (("labels/stable", "2"), ("versions/1", "1")):
        status = client.get(f"{V1}/{path}").json()["model_version_status"]
        assert [(each["version"], each["state"]) for each in status] == [(version, "AVAILABLE")]
    assert_error(
        client.post(f"{V1}/labels/beta:predict", json={"instances": [[1.0]]}),
        404,
        "LABEL_NOT_FOUND",
    )


def test_unknown_label_is_not_found(client: httpx.Client) -> None:
    for answer in (
        client.post(f"{V1}/versions/stable/infer", json=V1_BODY),
        client.post(f"{V2}/versions/stable/infer", json=V2_BODY),
        client.get(f"{V2}/versions/stable/ready"),
        client.get(f"{V1}/versions/stable"),
    ):
        assert_error(answer, 404, "LABEL_NOT_FOUND", "model 'split' has no label 'stable'")


def test_label_default_decides_for_requests_without_a_version(client: httpx.Client) -> None:
    assert client.post(f"{V2}/infer", json=V2_BODY).json()["model_version"] == "3"
    put(client, "default", version="1")
    assert client.post(f"{V1}/infer", json=V1_BODY).json()["version"] == "1"
    assert client.post(f"{V2}/infer", json=V2_BODY).json()["model_version"] == "1"
    assert client.post(f"{V2}/versions/3/infer", json=V2_BODY).json()["model_version"] == "3"
    assert client.get(f"{V2}/ready").headers["x-model-version"] == "1"
    # Without a version, Triton's statistics are those of all versions.
    stats = client.get(f"{V2}/stats").json()["model_stats"]
    assert sorted(each["version"] for each in stats) == ["1", "2", "3"]
    client.delete(f"{LABELS}/default")
    assert client.post(f"{V2}/infer", json=V2_BODY).json()["model_version"] == "3"


# Splits.


def test_split_is_exact(client: httpx.Client) -> None:
    put(client, "canary", versions={"1": 90, "2": 10})
    for path in (f"{V1}/versions/canary/infer", f"{V2}/versions/canary/infer"):
        assert count_versions(client, path, 100) == {"1": 90, "2": 10}
    put(client, "default", versions={"1": 1, "2": 1, "3": 2})
    assert count_versions(client, f"{V2}/infer", 100) == {"1": 25, "2": 25, "3": 50}
    # Reads of metadata are no requests of the split.
    for _ in range(3):
        assert client.get(f"{V2}/versions/canary/config").headers["x-model-version"] == "1"
    dry = client.post(f"{V1}/versions/canary/infer?dry_run=true", json=V1_BODY)
    assert dry.status_code == 200


def test_user_of_a_split_keeps_a_version(client: httpx.Client) -> None:
    put(client, "canary", versions={"1": 50, "2": 50})
    paths = (f"{V1}/versions/canary/infer", f"{V2}/versions/canary/infer")
    versions = Counter[str]()
    for user in range(40):
        headers = {"X-Split-Key": f"user {user}"}
        seen = {each for path in paths for each in count_versions(client, path, 3, headers=headers)}
        assert len(seen) == 1
        versions[seen.pop()] += 1
    assert min(versions["1"], versions["2"]) >= 8


def test_key_keeps_a_version_if_the_label_is_sticky(triton: Triton, tmp_path: Path) -> None:
    users = [f"user{number}" for number in range(8)]
    entries = [entry(f"tgw_{name}", "admin", "infer") for name in users]
    keys = written(tmp_path / "keys.yaml", entries)
    with gateway_before(triton.options.url, **QUICK, keys_file=str(keys)) as client:
        label = {"versions": {"1": 50, "2": 50}, "sticky": "key"}
        client.put(f"{LABELS}/canary", json=label, headers=bearer("tgw_user0")).raise_for_status()
        path, versions = f"{V2}/versions/canary/infer", Counter[str]()
        for user in users:
            seen = count_versions(client, path, 5, headers=bearer(f"tgw_{user}"))
            assert len(seen) == 1
            versions += seen
        assert len(versions) == 2


def test_batch_in_pieces_stays_on_one_version(client: httpx.Client) -> None:
    put(client, "canary", versions={"1": 50, "2": 50})
    before = count_executions(client)
    rows = [[float(number), 0.0] for number in range(40)]  # ten pieces of four
    answer = client.post(f"{V1}/versions/canary/infer", json={"inputs": {"X": rows}})
    assert answer.json()["outputs"]["Y"] == rows
    after = count_executions(client)
    added = {version: after[version] - before[version] for version in after}
    assert added[answer.json()["version"]] == 40
    assert sum(added.values()) == 40


def count_executions(client: httpx.Client) -> dict[str, int]:
    stats = client.get(f"{V2}/stats").json()["model_stats"]
    return {each["version"]: each["inference_count"] for each in stats}


# Versions that are unloaded and loaded.


@pytest.mark.long
@pytest.mark.fault(
    "a version that a label means is unloaded, or its Triton or the gateway restarts"
)
def test_unloaded_version_of_a_label_is_redirected_or_refused_until_it_returns(
    tmp_path: Path,
) -> None:
    with ExitStack() as stack:
        triton = stack.enter_context(Triton(write_versions(tmp_path), NAME))
        triton.wait()
        settings = {**QUICK, "state": f"file://{tmp_path}/state.db"}
        with gateway(triton.options.url, **settings) as (client, command):
            wait_until(lambda: client.get(V1).status_code == 200)
            put(client, "newest", version="3")
            put(client, "default", version="3")
            put(client, "canary", versions={"1": 50, "3": 50})
            path = f"{V2}/versions/canary/infer"
            remove_version(triton, 3)
            wait_until(lambda: client.get(f"{LABELS}/newest").json()["ready"] == {"3": False})
            # The share of a split goes to the others, with a warning and a metric.
            assert count_versions(client, path, 20) == {"1": 20}
            command.wait_for("version 3 of label canary of model split is not ready")
            assert redirects(client) == 10
            answer = client.post(f"{V2}/versions/newest/infer", json=V2_BODY)
            assert_error(answer, 503, "LABEL_NOT_READY", "means version 3, which is not ready")
            assert answer.headers["retry-after"] == "1"
            # What is asked of all versions needs none of the label `default`.
            assert client.get(f"{V2}/stats").status_code == 200
            assert client.delete(f"{LABELS}/default").is_success
        # A gateway that starts now has the labels, and waits for the version.
        with gateway(triton.options.url, **settings) as (client, command):
            wait_until(lambda: client.get(V1).status_code == 200)
            answer = client.post(f"{V2}/versions/newest/infer", json=V2_BODY)
            assert_error(answer, 503, "LABEL_NOT_READY")
            assert count_versions(client, path, 20) == {"1": 20}
            add_version(triton, 3)
            wait_until(lambda: client.get(f"{LABELS}/newest").json()["ready"] == {"3": True})
            assert count_versions(client, path, 20) == {"1": 10, "3": 10}
            assert client.post(f"{V2}/versions/newest/infer", json=V2_BODY).status_code == 200
            # A Triton that restarts brings them back as well.
            triton.kill()
            wait_until(lambda: client.get("/readyz").status_code == 503)
            answer = client.post(f"{V2}/versions/newest/infer", json=V2_BODY)
            assert_error(answer, 503, "NO_REPLICA")
            triton.start()
            wait_until(lambda: client.get(f"{LABELS}/newest").json()["ready"] == {"3": True})
            assert count_versions(client, path, 20) == {"1": 10, "3": 10}


@pytest.mark.long
@pytest.mark.fault(
    "a version that a label means is unloaded, or its Triton or the gateway restarts"
)
def test_split_answers_while_one_of_its_versions_is_unloaded_and_loaded(tmp_path: Path) -> None:
    with ExitStack() as stack:
        triton = stack.enter_context(Triton(write_versions(tmp_path), NAME))
        triton.wait()
        # The gateway learns of the change from Triton's answers, and not from a probe.
        client = stack.enter_context(
            gateway_before(triton.options.url, **{**QUICK, "poll_interval_s": "30"})
        )
        wait_until(lambda: client.get(V1).status_code == 200)
        put(client, "canary", versions={"1": 50, "3": 50})
        remove_version(triton, 3)  # whose signature the gateway has not read
        assert count_versions(client, f"{V1}/versions/canary/infer", 4) == {"1": 4}
        add_version(triton, 3)
        client.post("/v2/repository/index")  # probes the replicas
        for path in (f"{V1}/versions/canary/infer", f"{V2}/versions/canary/infer"):
            assert count_versions(client, path, 10) == {"1": 5, "3": 5}
            remove_version(triton, 3)
            assert count_versions(client, path, 20) == {"1": 20}
            add_version(triton, 3)
            client.post("/v2/repository/index")
            assert count_versions(client, path, 10) == {"1": 5, "3": 5}


def redirects(client: httpx.Client) -> float:
    name = 'gateway_label_redirects_total{label="canary",model="split",version="3"}'
    lines = client.get("/metrics").text.splitlines()
    values = [line.rpartition(" ")[2] for line in lines if line.startswith(name.partition("{")[0])]
    return sum(map(float, values))


# Sequences.


def step_as_headers(number: int, flags: str) -> dict[str, Any]:
    headers = {"X-Sequence-ID": str(number), "X-Sequence": flags}
    return {"url": "/v1/models/counting/versions/canary/infer", "json": ONE, "headers": headers}


def step_as_parameters(number: int, flags: str) -> dict[str, Any]:
    body = {**ONE, "parameters": sequence_parameters(number, flags)}
    return {"url": "/v1/models/counting/versions/canary/infer", "json": body}


def step_of_triton(number: int, flags: str) -> dict[str, Any]:
    tensor = {"name": "X", "datatype": "INT32", "shape": [1, 1], "data": [1]}
    body = {"inputs": [tensor], "parameters": sequence_parameters(number, flags)}
    return {"url": "/v2/models/counting/versions/canary/infer", "json": body}


def sequence_parameters(number: int, flags: str) -> dict[str, Any]:
    started, ended = "start" in flags, "end" in flags
    return {"sequence_id": number, "sequence_start": started, "sequence_end": ended}


ONE = {"inputs": {"X": [1]}}
STEPS = [step_as_headers, step_as_parameters, step_of_triton]


@pytest.mark.long
def test_sequence_never_changes_its_version(tmp_path: Path) -> None:
    write_repository(tmp_path, AS_WRITTEN, (COUNTING,))
    folder = tmp_path / COUNTING.name
    shutil.copytree(folder / "1", folder / "2")
    config = folder / "config.pbtxt"
    config.write_text(f"{config.read_text()}\nversion_policy {{ all {{ }} }}")
    with ExitStack() as stack:
        triton = stack.enter_context(Triton(tmp_path, COUNTING.name))
        triton.wait()
        client = stack.enter_context(gateway_before(triton.options.url, **QUICK))
        wait_until(lambda: client.get("/v1/models/counting").status_code == 200)
        label = "/v1/models/counting/labels/canary"
        client.put(label, json={"versions": {"1": 50, "2": 50}}).raise_for_status()
        versions: dict[int, set[str]] = {number: set() for number in range(1, 25)}
        for position, flags in enumerate(("start", "", "", "end")):
            if position == 2:  # all new requests go to version 2 from now on
                client.put(label, json={"version": "2"}).raise_for_status()
            for number, seen in versions.items():
                answer = client.post(**STEPS[number % 3](number, flags))
                assert answer.status_code == 200, answer.text
                document = answer.json()
                seen.add(document.get("version") or document["model_version"])
                assert read_count(document) == position + 1
        assert {len(seen) for seen in versions.values()} == {1}
        assert set.union(*versions.values()) == {"1", "2"}


def read_count(document: dict[str, Any]) -> int:
    outputs = document["outputs"]
    if isinstance(outputs, dict):
        (count,) = np.ravel(outputs["COUNT"])
    else:
        (count,) = next(each["data"] for each in outputs if each["name"] == "COUNT")
    return int(count)


# Several gateways, and the models file.


def test_two_gateways_with_one_redis_share_labels(triton: Triton, tmp_path: Path) -> None:
    with RedisServer(tmp_path) as redis, ExitStack() as stack:
        settings = {**QUICK, "state": redis.url()}
        one, two = (
            stack.enter_context(gateway_before(triton.options.url, **settings)) for _ in range(2)
        )
        for client in (one, two):
            wait_until(lambda client=client: client.get(V1).status_code == 200)  # type: ignore[misc]
        for writer, reader, version in ((one, two, "1"), (two, one, "2"), (one, two, "3")):
            put(writer, "stable", version=version)
            wait_until(
                lambda reader=reader, version=version: (  # type: ignore[misc]
                    reader.get(f"{LABELS}/stable").json().get("version") == version
                )
            )
            answer = reader.post(f"{V2}/versions/stable/infer", json=V2_BODY)
            assert answer.json()["model_version"] == version
        one.delete(f"{LABELS}/stable")
        wait_until(lambda: two.get(f"{LABELS}/stable").status_code == 404)


def test_declared_label_follows_the_models_file_alone(triton: Triton, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "models: [{name: split, labels: {stable: 2, canary: {versions: {1: 90, 2: 10}}}}]"
    )
    with gateway_before(triton.options.url, **QUICK, models_file=str(file)) as client:
        wait_until(lambda: client.get(V1).status_code == 200)
        answer = client.post(f"{V2}/versions/stable/infer", json=V2_BODY)
        assert answer.json()["model_version"] == "2"
        assert client.get(f"{LABELS}/stable").json()["declared"] is True
        assert client.get(f"{LABELS}/canary").json()["versions"] == {"1": 90, "2": 10}
        for change in (
            client.put(f"{LABELS}/stable", json={"version": "1"}),
            client.delete(f"{LABELS}/stable"),
        ):
            assert_error(change, 409, "CONFLICT", "declared in the models file")
        put(client, "other", version="3")
        file.write_text("models: [{name: split, labels: {stable: 1}}]")
        wait_until(lambda: client.get(f"{LABELS}/stable").json()["version"] == "1")
        labels = client.get(LABELS).json()["labels"]
        assert [each["label"] for each in labels] == ["other", "stable"]


# Commands.


def run_command(client: httpx.Client, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_gateway(*arguments, "--url", str(client.base_url))


def read_table(ended: subprocess.CompletedProcess[str]) -> list[list[str]]:
    assert ended.returncode == 0, ended.stderr
    return [re.split(r"\s{2,}", line.strip()) for line in ended.stdout.splitlines()[1:]]


def test_label_commands_set_list_and_delete(client: httpx.Client, tmp_path: Path) -> None:
    ended = run_command(client, "label", "set", NAME, "stable", "2")
    assert read_table(ended) == [[NAME, "stable", "2"]]
    run_command(client, "label", "set", NAME, "canary", "1=30", "2=10", "--sticky")
    labels = {each["label"]: each for each in client.get(LABELS).json()["labels"]}
    assert labels["stable"]["version"] == "2"
    assert labels["canary"]["versions"] == {"1": 30, "2": 10}
    assert labels["canary"]["sticky"] == "key"
    assert read_table(run_command(client, "label", "list", NAME)) == [
        [NAME, "canary", "1: 75 %, 2: 25 %"],
        [NAME, "stable", "2"],
    ]
    listed = run_command(client, "label", "list", NAME, "--json")
    assert json.loads(listed.stdout) == [labels["canary"], labels["stable"]]
    before = count_executions(client)
    (tmp_path / "row.json").write_text('{"inputs": [1, 0]}')
    run_command(client, "infer", NAME, str(tmp_path / "row.json"), "--version", "stable")
    wait_until(lambda: count_executions(client)["2"] == before["2"] + 1)
    assert run_command(client, "label", "delete", NAME, "stable").stdout == "deleted stable\n"
    assert client.get(f"{LABELS}/stable").status_code == 404


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("set", NAME, "stable", "1=90", "2"), 2, "expected VERSION=SHARE"),
        (("set", NAME, "stable", "1=90", "1=10"), 2, "a version is given twice"),
        (("set", NAME, "stable", "9"), 1, "version 9 of model 'split', which is not ready"),
        (("delete", NAME, "stable"), 1, "has no label 'stable'"),
        (("list", "nobody"), 1, "triton-gateway models lists the models"),
    ],
)
def test_failed_label_command_says_why(
    client: httpx.Client, arguments: tuple[str, ...], status: int, message: str
) -> None:
    ended = run_command(client, "label", *arguments)
    assert (ended.returncode, ended.stdout) == (status, "")
    assert message in ended.stderr
