"""Triton is killed, full, short of a model, or cannot load one: a real Triton and the real gateway."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.errors import assert_error
from tests.support.fleet import ECHO, Fleet, Load, fleet_of, load_behind, unload_behind, write_echo
from tests.support.measurements import assert_number
from tests.support.wait import wait_until

CLIENTS = 16
# Without batches Triton has no queue whose length is limited.
CROWDED = (
    "max_batch_size: 0",
    "max_batch_size: 1 dynamic_batching { default_queue_policy { max_queue_size: 2 } }",
)
PLACES = 4  # of `crowded`: one runs, two wait in its queue, and one may be on its way between


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("models")
    with fleet_of(folder, 1, ("echo",), connect_timeout_s="10", log_level="warning") as fleet:
        yield fleet


@pytest.fixture
def alone(running: Fleet) -> Iterator[Fleet]:
    """A gateway before one Triton, where each test begins with `echo`."""
    yield running
    running.restore()


@pytest.mark.fault("the only Triton is killed under load")
def test_only_triton_that_is_killed_under_load_gives_503_until_it_is_back(alone: Fleet) -> None:
    (triton,) = alone.tritons
    with Load(str(alone.client.base_url), clients=CLIENTS) as load:
        load.wait_for_more()
        triton.kill()
        wait_until(lambda: alone.client.get("/readyz").status_code == 503)
        alive, refused = alone.client.get("/livez"), alone.infer()
        refusals = load.wait_for_more()
        triton.start()
        triton.wait()
        back_s = wait_until(lambda: alone.infer().status_code == 200)
        served = load.wait_for_more()
    assert alive.status_code == 200
    assert_error(refused, 503, "NO_REPLICA", "no Triton is reachable")
    assert refused.headers["retry-after"] == "1"
    assert {each.status for each in refusals} == {503}
    assert {each.status for each in served} == {200}
    assert set(load.statuses) <= {200, 502, 503}
    assert load.statuses[502] <= CLIENTS + 1  # one for each connection that there was
    took_ms = sorted(each.took_s * 1000 for each in refusals)
    assert_number("half of the refusals within", took_ms[len(took_ms) // 2], "ms", at_most=10)
    assert_number("99 % within", took_ms[int(len(took_ms) * 0.99)], "ms", at_most=100)
    assert_number("served again after", back_s, "s", at_most=2)


@pytest.mark.fault("a model's queue in Triton is full")
def test_full_queue_of_a_model_is_429_and_other_models_are_served(alone: Fleet) -> None:
    folder = alone.tritons[0].repository / "crowded"
    write_echo(folder.parent, "crowded")
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace(*CROWDED))
    assert alone.load("crowded").status_code == 200
    hold = folder / "hold"

    def ask(_: int) -> httpx.Response:
        url, patient = "/v1/models/crowded/infer", {"X-Request-Timeout": "300"}
        return alone.client.post(url, json={"inputs": {"X": [-1000.0, 0.0]}}, headers=patient)

    with ThreadPoolExecutor(20) as pool:
        hold.touch()
        try:
            calls = [pool.submit(ask, number) for number in range(20)]
            wait_until(lambda: sum(call.done() for call in calls) >= len(calls) - PLACES)
            others = [alone.infer() for _ in range(100)]
        finally:
            hold.unlink()
        answers = [call.result() for call in calls]
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert statuses[200] <= PLACES
    for answer in answers:
        if answer.status_code == 429:
            assert_error(answer, 429, "OVERLOADED", "queue")
            assert int(answer.headers["retry-after"]) >= 1
    assert {answer.status_code for answer in others} == {200}
    slowest_s = max(answer.elapsed.total_seconds() for answer in others)
    assert_number("the slowest of another model", slowest_s * 1000, "ms", at_most=400)


@pytest.mark.fault("a model is unloaded without the gateway's knowledge")
def test_model_unloaded_directly_in_triton_is_503_and_others_are_served(
    alone: Fleet,
) -> None:
    (triton,) = alone.tritons

    def listed() -> bool:
        models = alone.client.get("/v1/models").json()["models"]
        return any(model["name"] == "late" and model["ready"] for model in models)

    load_behind(triton, "late")
    wait_until(lambda: alone.infer("late").status_code == 200)
    unload_behind(triton, "late")
    noticed_s = wait_until(lambda: alone.infer("late").status_code != 200)
    assert_error(alone.infer("late"), 503, "MODEL_NOT_READY", "late")
    noticed_s += wait_until(lambda: not listed())
    assert alone.infer().status_code == 200
    load_behind(triton, "late")
    wait_until(lambda: alone.infer("late").status_code == 200)
    assert_number("noticed after", noticed_s, "s", at_most=1)


def spoil_config(folder: Path) -> None:
    (folder / "config.pbtxt").write_text('backend: "python"\ninput [ { name: "X" nonsense')


def spoil_backend(folder: Path) -> None:
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace('"python"', '"nowhere"'))


def remove_version(folder: Path) -> None:
    """The whole version: of one without its model.py Triton's Python backend would wait for ever."""
    shutil.rmtree(folder / "1")


def raise_at_the_start(folder: Path) -> None:
    (folder / "1" / "model.py").write_text(ECHO)
    (folder / "trouble").write_text("damaged")


SPOILED = (spoil_config, spoil_backend, remove_version, raise_at_the_start)


@pytest.mark.fault("a load fails: an invalid config, no version, an exception at startup")
def test_failed_load_is_an_error_without_secrets_and_the_old_version_serves(
    alone: Fleet,
) -> None:
    repository = alone.tritons[0].repository
    folder = repository / "echo"
    kept = {path: path.read_bytes() for path in folder.rglob("*.p*")}
    for spoil in SPOILED:
        spoil(folder)
        refused = alone.load("echo")
        assert refused.status_code in (422, 502), spoil.__name__
        assert not re.search(rf"{repository}|/opt/secret|Traceback|\.cc|0x", refused.text)
        assert alone.infer().status_code == 200
        for path, content in kept.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        (folder / "trouble").unlink(missing_ok=True)
    assert alone.load("echo").status_code == 200
