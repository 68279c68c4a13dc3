"""A Triton in model control mode poll or none: it decides by itself what it serves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.errors import DeadlinePassed, ModelControlModeConflict
from gateway.http_client.connection import RequestNotSent
from gateway.repository.operations import OperationReport, Outcome
from gateway.triton.error_mapping import LoadFailed
from tests.support.fleet import write_echo
from tests.support.up import Up
from tests.support.wait import TIMEOUT_S, wait_until

REFUSED = (409, "MODEL_CONTROL_MODE")
VERBS = ("load", "unload")


class Polling(Up):
    ready_at = 0.0


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name in ("echo", "other", "free"):
        write_echo(folder, name)
    return folder


@pytest.fixture(scope="module")
def polling(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Polling]:
    """Two models of three are declared, and one that is not there."""
    declared = tmp_path_factory.mktemp("declared") / "models.yaml"
    declared.write_text("models: [echo, other, absent]")
    flags = ("--model-control", "poll", "--poll-secs", "1")
    environment = {"GATEWAY_MODELS_FILE": str(declared), "GATEWAY_POLL_INTERVAL_S": "0.1"}
    with Polling(repository, *flags, environment=environment) as up:
        up.wait_for("ready after")
        up.ready_at = time.monotonic()
        yield up


def infer(up: Up, *numbers: float) -> httpx.Response:
    url = f"{up.url}/v1/models/echo/infer"
    return httpx.post(url, json={"inputs": list(numbers)}, timeout=TIMEOUT_S)


def manage(up: Up, verb: str, **more: Any) -> httpx.Response:
    url = f"{up.url}/v2/repository/models/free/{verb}"
    return httpx.post(url, timeout=TIMEOUT_S, **more)


def status_and_code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def models(up: Up) -> dict[str, Any]:
    found = up.get("/v1/models").json()["models"]
    return {model["name"]: model for model in found}


@pytest.mark.long
def test_polled_model_that_changes_its_shape_is_served(
    polling: Polling, repository: Path, tmp_path: Path
) -> None:
    assert infer(polling, 1, 2).json()["outputs"] == {"Y": [1, 2]}
    assert infer(polling, 1, 2, 3).status_code == 422
    write_echo(tmp_path, "echo", dims=3)
    (tmp_path / "echo" / "config.pbtxt").replace(repository / "echo" / "config.pbtxt")
    wait_until(lambda: infer(polling, 1, 2, 3).status_code == 200)
    assert infer(polling, 1, 2, 3).json()["outputs"] == {"Y": [1, 2, 3]}
    refused = infer(polling, 1, 2)
    assert status_and_code(refused) == (422, "DOES_NOT_FIT_MODEL")
    assert "[3]" in refused.json()["error"]


@pytest.mark.long
def test_polled_model_appears_and_disappears(
    polling: Polling, repository: Path, tmp_path: Path
) -> None:
    def status() -> int:
        return polling.get("/v2/models/late").status_code

    write_echo(tmp_path, "late")  # and at once into the repository: Triton reads what is half there
    assert status() == 404
    (tmp_path / "late").rename(repository / "late")
    wait_until(lambda: status() == 200)
    (repository / "late").rename(tmp_path / "late")
    wait_until(lambda: status() == 404 and "late" not in models(polling))


@pytest.mark.parametrize("verb", VERBS)
def test_load_or_unload_in_poll_mode_is_409_and_changes_no_desired_state(
    polling: Polling, verb: str
) -> None:
    refused = manage(polling, verb)
    assert status_and_code(refused) == REFUSED
    assert "model control mode poll" in refused.json()["error"]
    found = models(polling)["free"]
    assert found["ready"]
    assert "wished" not in found
    assert "error" not in found


def test_asynchronous_load_in_poll_mode_fails_in_its_operation(polling: Polling) -> None:
    started = manage(polling, "load", headers={"Prefer": "respond-async"})
    assert started.status_code == 202
    location = started.headers["location"]
    wait_until(lambda: polling.get(location).json()["operation"] != "running")
    operation = polling.get(location).json()
    assert (operation["operation"], operation["code"]) == ("failed", "MODEL_CONTROL_MODE")


def test_missing_declared_model_in_poll_mode_is_requested_once(polling: Polling) -> None:
    polling.wait_for(f"loading model absent on {polling.triton} failed")
    # It would have tried again by then: the reconciler's first pause is 1 s.
    wait_until(lambda: time.monotonic() > polling.ready_at + 1.5)
    tried = [line for line in polling.lines if "loading model absent" in line]
    assert len(tried) == 2, polling.output
    assert "model control mode poll" in tried[1]
    missing = polling.get("/readyz").json()["missing"]
    assert list(missing) == ["absent"]


def test_load_and_unload_in_mode_none_are_409(tmp_path: Path) -> None:
    write_echo(tmp_path, "free")
    with Up(tmp_path, "--model-control", "none") as up:
        up.wait_for("ready after")
        assert [status_and_code(manage(up, verb)) for verb in VERBS] == [REFUSED] * 2
        assert models(up)["free"]["ready"]


DOWN = Outcome("UNREACHABLE", RequestNotSent("it refuses"))
MODE = Outcome("READY", ModelControlModeConflict())
DONE = Outcome("READY")
BROKEN = Outcome("UNAVAILABLE", LoadFailed("echo", "the weights are damaged"))
SLOW = Outcome("LOADING", DeadlinePassed(300), is_in_progress=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("outcomes", "refused", "code"),
    [
        ((MODE, MODE), True, "MODEL_CONTROL_MODE"),
        ((DOWN, MODE), True, "MODEL_CONTROL_MODE"),
        ((DONE, MODE), False, "PARTLY_DONE"),
        ((DONE, BROKEN), False, "PARTLY_DONE"),
        ((DOWN, BROKEN), True, "LOAD_FAILED"),
        ((SLOW, BROKEN), True, "LOAD_FAILED"),
        ((DOWN, SLOW), False, "PARTLY_DONE"),
        ((DOWN, DOWN), True, "UNAVAILABLE"),
    ],
)
def test_operation_without_any_success_is_refused_with_the_error_of_a_replica(
    outcomes: tuple[Outcome, ...], refused: bool, code: str
) -> None:
    report = OperationReport("echo", True, len(outcomes), dict(zip("ab", outcomes, strict=True)))
    assert (report.is_refused, report.build_error().code) == (refused, code)


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_retried", "advice"), [(True, "the gateway keeps retrying"), (False, "repeat the call")]
)
def test_partial_failure_promises_retries_only_of_what_is_retried(
    is_retried: bool, advice: str
) -> None:
    outcomes = {"a": Outcome("UNAVAILABLE"), "b": DOWN}
    report = OperationReport("echo", False, 2, outcomes, is_retried=is_retried)
    assert f"unloaded on 1 of 2 replicas; {advice}; " in report.build_error().detail
