"""Models are loaded by their first request and unloaded for others: three real tritonservers."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from time import perf_counter

import httpx
import pytest

from gateway.capabilities.on_demand.held_models import MIN_AGE_S
from tests.capabilities.on_demand.support.on_demand import (
    evictions,
    flooded,
    list_held,
    loads,
    model_names,
    on_demand_fleet,
    on_demand_gateway,
    read_index,
    tritons_with,
    used_continuously,
)
from tests.support.errors import assert_error
from tests.support.fleet import BODY, V2_BODY, load_behind, write_echo
from tests.support.keys import ADMIN, BOTH, INFER, bearer, entry, written
from tests.support.metrics import metric
from tests.support.servers import Triton
from tests.support.wait import wait_until

MODELS = model_names(12)
# An input whose inference lasts until its model's folder has no file "hold".
HELD_V2_BODY = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [-1000, 0]}]}
# Sends a response, and ends the stream when there is the file "end".
STREAM = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.end = os.path.join(args["model_repository"], "end")

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            value = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", value)]))
            while not os.path.exists(self.end):
                time.sleep(0.01)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Triton]]:
    with tritons_with(tmp_path_factory.mktemp("three"), 3, MODELS) as tritons:
        yield tritons


@contextmanager
def load_trouble(
    tritons: list[Triton], model: str, trouble: str = "hold"
) -> Iterator[Callable[[], None]]:
    """Let the loads of a model wait, or fail; yield a function that ends this before the block does."""
    files = [triton.repository / model / "trouble" for triton in tritons]

    def end() -> None:
        for file in files:
            file.unlink(missing_ok=True)

    for file in files:
        file.write_text(trouble)
    try:
        yield end
    finally:
        end()


@contextmanager
def held_inferences(triton: Triton, model: str) -> Iterator[Path]:
    """Let inferences of `HELD_V2_BODY` wait until the block ends; yield a file that the first one makes."""
    hold, held = (triton.repository / model / name for name in ("hold", "held"))
    held.unlink(missing_ok=True)
    hold.touch()
    try:
        yield held
    finally:
        hold.unlink(missing_ok=True)


@pytest.mark.fault(
    "a key for inference provokes errors of replicas, servers of completions and loads"
)
def test_reason_of_a_failed_load_is_for_administrators_alone(
    three: list[Triton], tmp_path: Path
) -> None:
    """Triton's reason can name other models, such as a step that an ensemble lacks."""
    keys = written(tmp_path / "keys.yaml", [entry(INFER, "infer"), entry(ADMIN, "admin")])
    with (
        load_trouble(three, "model11", "broken"),
        on_demand_fleet(three, keys_file=str(keys), log_level="warning") as fleet,
    ):
        path = "/v2/models/model11/infer"
        for _ in range(2):  # by its load, and during the pause after it
            refused = fleet.client.post(path, json=V2_BODY, headers=bearer(INFER))
            assert_error(refused, 422, "LOAD_FAILED", "an administrator finds the reason")
            assert "weights.bin" not in refused.text
        full = fleet.client.post(path, json=V2_BODY, headers=bearer(ADMIN))
        assert_error(full, 422, "LOAD_FAILED", "weights.bin are broken")
        assert "weights.bin are broken" in fleet.command.wait_for("loading model model11 on")
        models = fleet.client.get("/v1/models", headers=bearer(ADMIN)).json()["models"]
        assert any("weights.bin are broken" in str(each) for each in models)


def test_a_hundred_first_requests_share_one_load(three: list[Triton]) -> None:
    with on_demand_fleet(three, max_loaded_models="4") as fleet:
        listed = {model["name"]: model for model in fleet.client.get("/v1/models").json()["models"]}
        assert listed["model00"]["state"] == "ON_DEMAND"
        assert set(listed["model00"]["replicas"].values()) == {"ON_DEMAND"}
        assert fleet.client.get("/readyz").status_code == 200
        calls = [
            lambda: fleet.infer("model00"),
            lambda: fleet.client.post("/v2/models/model00/infer", json=V2_BODY),
            lambda: fleet.client.post(
                "/v1/models/model00:predict", json={"inputs": {"X": [1.0, 2.0]}}
            ),
            lambda: fleet.client.get("/v2/models/model00"),
        ]
        with ThreadPoolExecutor(100) as pool:
            answers = list(pool.map(lambda number: calls[number % 4](), range(100)))
        assert [answer.status_code for answer in answers] == [200] * 100
        assert loads(fleet) == 1
        assert sum("model00" in list_held(triton) for triton in three) == 1
        listed = {model["name"]: model for model in fleet.client.get("/v1/models").json()["models"]}
        assert (listed["model00"]["state"], listed["model00"]["on_demand"]) == ("READY", True)
        waits = 'gateway_request_phase_seconds_count{phase="load",model="model00"}'
        assert metric(fleet.client, waits) >= 1


@pytest.mark.fault("the load of an on-demand model fails")
def test_failed_load_is_attempted_once_and_again_after_a_pause(three: list[Triton]) -> None:
    with load_trouble(three, "model11", "broken") as end_trouble, on_demand_fleet(three) as fleet:
        with ThreadPoolExecutor(20) as pool:
            answers = list(pool.map(lambda _: fleet.infer("model11"), range(20)))
        assert {answer.status_code for answer in answers} == {422}
        error = answers[0].json()
        assert error["code"] == "LOAD_FAILED"
        assert "weights.bin are broken" in error["error"]
        assert "/opt/secret" not in error["error"]
        assert fleet.infer("model11").json()["error"] == error["error"]
        assert loads(fleet, "failed") == 1
        end_trouble()
        wait_until(lambda: fleet.infer("model11").status_code == 200)


def test_request_waits_for_a_load_until_its_deadline_while_other_models_answer(
    three: list[Triton],
) -> None:
    with load_trouble(three, "model10") as end_trouble, on_demand_fleet(three) as fleet:
        refused = fleet.infer("model10", headers={"X-Request-Timeout": "0.5"})
        assert_error(refused, 503, "MODEL_LOADING")
        assert int(refused.headers["Retry-After"]) >= 1
        assert fleet.infer("model00").status_code == 200
        end_trouble()
        assert fleet.infer("model10").status_code == 200
        assert loads(fleet) == 2  # the first request's load was used


@pytest.mark.long
def test_model_that_is_unloaded_by_another_client_during_its_load_is_loaded_again(
    three: list[Triton],
) -> None:
    """Two gateways without a shared state do this to each other."""
    (triton, *_) = three
    with (
        load_trouble([triton], "model09") as end_trouble,
        on_demand_fleet([triton]) as fleet,
        ThreadPoolExecutor(1) as pool,
        closing(HTTPConnection(triton.address, timeout=60)) as connection,
    ):
        waiting = pool.submit(fleet.infer, "model09")
        wait_until(lambda: read_index(triton)["model09"] == "LOADING")
        connection.request("POST", "/v2/repository/models/model09/unload")
        end_trouble()
        assert connection.getresponse().status == 200  # when the model is loaded
        assert waiting.result().status_code == 200


def test_model_in_use_or_loaded_by_the_api_is_never_evicted(three: list[Triton]) -> None:
    (triton, *_) = three
    with on_demand_fleet([triton], max_loaded_models="2") as fleet, ThreadPoolExecutor(1) as pool:
        assert fleet.load("model00").status_code == 200
        with held_inferences(triton, "model01") as held:
            waiting = pool.submit(fleet.client.post, "/v2/models/model01/infer", json=HELD_V2_BODY)
            wait_until(held.exists)
            headers = {"X-Request-Timeout": str(MIN_AGE_S + 2)}
            refused = fleet.infer("model02", headers=headers)
            assert_error(refused, 503, "NO_ROOM", "'model00'")
            assert "'model01'" in refused.json()["error"]
            assert "unloading model" not in fleet.command.output
            assert list_held(triton) == {"model00", "model01"}
        assert waiting.result().status_code == 200
        assert fleet.infer("model02").status_code == 200
        assert list_held(triton) == {"model00", "model02"}
        # Unloaded by the API, a model is one on demand again.
        assert fleet.unload("model00").status_code == 200
        assert fleet.infer("model00").status_code == 200


@pytest.mark.long
@pytest.mark.fault("a key asks for many on-demand models at a time, and for more than fit")
def test_caller_that_asks_for_many_models_costs_another_one_a_reload_per_minimum_age(
    tmp_path: Path,
) -> None:
    model, *others = model_names(50)  # more than one each 50 ms, so that each is idle for a while
    keys = written(tmp_path / "keys.yaml", [entry(INFER, "infer"), entry(BOTH, "infer")])
    user = bearer(INFER)
    with (
        tritons_with(tmp_path, 1, [model, *others]) as tritons,
        on_demand_gateway(tritons, max_loaded_models="2", keys_file=str(keys)) as fleet,
        flooded(fleet, others, headers=bearer(BOTH)) as loaded,
    ):
        with used_continuously(fleet, model, headers=user) as statuses:
            wait_until(lambda: 200 in statuses)
            wait_until(lambda: len(loaded) > 3)
        assert set(statuses) == {200}
        assert len(re.findall(f"loading model {model} on", fleet.command.output)) == 1
        # At worst, it is used again as soon as it is unloaded.
        started_at = perf_counter()
        for _ in range(3):
            wait_until(lambda: model not in list_held(tritons[0]))
            assert fleet.infer(model, headers=user).status_code == 200
        assert perf_counter() - started_at > 2 * MIN_AGE_S


@pytest.mark.long
def test_loads_that_need_the_same_room_get_it_in_their_order(three: list[Triton]) -> None:
    (triton, *_) = three
    wanted = ["model03", "model01", "model05", "model02"]
    with (
        load_trouble([triton], "model03") as end_trouble,
        on_demand_fleet([triton], max_loaded_models="1") as fleet,
        ThreadPoolExecutor(len(wanted)) as pool,
    ):
        answers = []
        for model in wanted:
            answers.append(pool.submit(fleet.infer, model))
            held_count = len(answers)
            wait_until(lambda: metric(fleet.client, "gateway_requests_held") == held_count)  # noqa: B023 - called here
        end_trouble()
        assert [answer.result().status_code for answer in answers] == [200] * 4
        assert re.findall(r"loading model (\w+) on", fleet.command.output) == wanted


@pytest.mark.long
def test_an_unload_that_a_replica_missed_is_not_retried_and_says_so(three: list[Triton]) -> None:
    """The reconciler leaves models on demand alone."""
    with on_demand_fleet(three) as fleet:
        assert fleet.infer("model00").status_code == 200
        (holder,) = (triton for triton in three if "model00" in list_held(triton))
        holder.signal(signal.SIGSTOP)
        try:
            unloaded = fleet.unload("model00")
        finally:
            holder.signal(signal.SIGCONT)
        assert (unloaded.status_code, unloaded.json()["code"]) == (502, "PARTLY_DONE")
        assert "is unloaded on 2 of 3 replicas; repeat the call; error on" in unloaded.text
        wait_until(lambda: fleet.unload("model00").status_code == 200)
        assert "model00" not in list_held(holder)


@pytest.mark.long
def test_unloaded_model_is_described_without_another_load(three: list[Triton]) -> None:
    with on_demand_fleet(three) as fleet:
        first = fleet.client.get("/v1/models/model00").json()
        assert (first["ready"], first["inputs"][0]["shape"]) == (True, [2])
        assert fleet.unload("model00").status_code == 200
        again = fleet.client.get("/v1/models/model00").json()
        assert again["ready"] is False
        assert all(again[key] == first[key] for key in ("inputs", "outputs", "curl", "platform"))
        assert fleet.client.get("/v1/models/model00/metadata").status_code == 200
        assert fleet.client.get("/v2/models/model00/ready").status_code == 503
        assert loads(fleet) == 1


def test_idle_model_is_unloaded(three: list[Triton]) -> None:
    with on_demand_fleet(three, idle_unload_s="1") as fleet:
        assert fleet.load("model05").status_code == 200
        assert fleet.infer("model00").status_code == 200
        wait_until(lambda: not any("model00" in list_held(triton) for triton in three))
        wait_until(lambda: evictions(fleet, "idle") == 1)  # counted when Triton has answered
        assert all("model05" in list_held(triton) for triton in three)  # the API wants it
        assert fleet.infer("model00").status_code == 200


@pytest.mark.long
def test_reversed_unload_delays_no_other_load(three: list[Triton]) -> None:
    (triton, *_) = three
    url = f"http://{triton.address}/v2/models/model00/infer"
    with on_demand_fleet([triton], idle_unload_s="1") as fleet, ThreadPoolExecutor(1) as pool:
        with held_inferences(triton, "model00") as held:
            assert fleet.infer("model00").status_code == 200
            waiting = pool.submit(httpx.post, url, json=HELD_V2_BODY, timeout=60)
            wait_until(held.exists)
            wait_until(lambda: read_index(triton)["model00"] == "UNLOADING")
            load_behind(triton, "model00")
            wait_until(lambda: read_index(triton)["model00"] == "READY")
            answer = fleet.infer("model01", headers={"X-Request-Timeout": "20"})
        waiting.result()
        assert answer.status_code == 200, answer.text
        # The gateway unloads it after all.
        wait_until(lambda: not list_held(triton))


@pytest.mark.long
def test_slow_unload_of_an_idle_model_delays_no_other_load(three: list[Triton]) -> None:
    (triton, *_) = three
    url = f"http://{triton.address}/v2/models/model00/infer"
    with on_demand_fleet([triton], idle_unload_s="1") as fleet, ThreadPoolExecutor(1) as pool:
        with held_inferences(triton, "model00") as held:
            assert fleet.infer("model00").status_code == 200
            pool.submit(httpx.post, url, json=HELD_V2_BODY, timeout=60)
            wait_until(held.exists)
            wait_until(lambda: read_index(triton)["model00"] == "UNLOADING")
            assert fleet.infer("model01").status_code == 200
            assert read_index(triton)["model00"] == "UNLOADING"
        wait_until(lambda: metric(fleet.client, "gateway_demand") == 0)


@pytest.mark.long
def test_overloaded_model_does_not_starve_requests_that_waited_for_a_load(
    three: list[Triton],
) -> None:
    (triton, *_) = three
    limits = {"max_inflight": "4", "max_model_inflight": "2", "max_queue": "200"}
    slow = {"inputs": {"X": [-0.2, 0.0]}}
    with (
        load_trouble([triton], "model10") as end_trouble,
        on_demand_fleet([triton], **limits) as fleet,
        used_continuously(fleet, "model00", slow, clients=6) as statuses,
        ThreadPoolExecutor(60) as pool,
    ):
        answers = [
            pool.submit(fleet.infer, "model10", headers={"X-Request-Timeout": "20"})
            for _ in range(60)
        ]
        wait_until(lambda: 200 in statuses)
        wait_until(lambda: metric(fleet.client, "gateway_requests_held") == 60)
        end_trouble()
        assert Counter(answer.result().status_code for answer in answers) == {200: 60}


@pytest.mark.long
def test_model_counts_as_used_until_its_last_stream_ended(three: list[Triton]) -> None:
    (triton, *_) = three
    folder = triton.repository / "stream"
    write_echo(triton.repository, "stream")
    (folder / "1" / "model.py").write_text(STREAM)
    with (folder / "config.pbtxt").open("a") as config:
        config.write("model_transaction_policy { decoupled: true }")
    with on_demand_fleet([triton], max_loaded_models="2") as fleet:
        headers = {"Accept": "text/event-stream"}
        path = "/v1/models/stream/infer"
        with fleet.client.stream("POST", path, json=BODY, headers=headers) as response:
            lines = response.iter_lines()
            assert next(lines) == "id: 1"
            assert fleet.infer("model00").status_code == 200
            (folder / "end").touch()
            assert "event: end" in list(lines)
        assert fleet.infer("model01").status_code == 200
        assert list_held(triton) == {"stream", "model01"}


@pytest.mark.long
@pytest.mark.fault("the only Triton with an on-demand model is killed")
def test_model_is_loaded_elsewhere_when_its_only_replica_is_killed(three: list[Triton]) -> None:
    with on_demand_fleet(three) as fleet:
        assert fleet.infer("model00").status_code == 200
        (holder,) = [triton for triton in three if "model00" in list_held(triton)]
        holder.kill()
        try:
            answers = [fleet.infer("model00") for _ in range(5)]
            assert {answer.status_code for answer in answers} <= {200, 502}
            assert answers[-1].status_code == 200
            others = [triton for triton in three if triton is not holder]
            assert sum("model00" in list_held(triton) for triton in others) == 1
        finally:
            holder.start()
            holder.wait()


def test_model_that_was_used_lately_is_loaded_again_when_its_replica_ends(
    three: list[Triton],
) -> None:
    with on_demand_fleet(three) as fleet:
        assert fleet.infer("model00").status_code == 200
        (holder,) = [triton for triton in three if "model00" in list_held(triton)]
        others = [triton for triton in three if triton is not holder]
        holder.kill()
        try:
            wait_until(lambda: any("model00" in list_held(triton) for triton in others))
        finally:
            holder.start()
            holder.wait()
        # When the gateway has seen that the replica is back.
        wait_until(lambda: fleet.unload("model00").status_code == 200)
        assert not any("model00" in list_held(triton) for triton in three)


def test_load_of_a_killed_gateway_is_used_by_the_next_one(three: list[Triton]) -> None:
    with load_trouble(three, "model10") as end_trouble:
        with on_demand_fleet(three) as fleet, ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(fleet.infer, "model10")
            wait_until(lambda: any("model10" in list_held(triton) for triton in three))
            os.kill(fleet.command.pid, signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                waiting.result()
        with on_demand_gateway(three) as fleet, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(fleet.infer, "model10")
            wait_until(lambda: metric(fleet.client, "gateway_requests_held") == 1)
            end_trouble()
            assert waiting.result().status_code == 200
            assert loads(fleet) == 0  # it waited for the load that was in progress
            assert sum("model10" in list_held(triton) for triton in three) == 1


def test_cordoned_replica_gets_no_loads(three: list[Triton]) -> None:
    with on_demand_fleet(three) as fleet:
        for triton in three[:2]:
            cordon = fleet.client.post(f"/v1/replicas/{triton.address}/cordon")
            assert cordon.status_code == 200, cordon.text
        for model in MODELS[:3]:
            assert fleet.infer(model).status_code == 200
        assert [len(list_held(triton)) for triton in three] == [0, 0, 3]
        assert loads(fleet) == 3


@pytest.mark.long
def test_memory_of_loaded_models_stays_within_its_budget(tmp_path: Path) -> None:
    sizes_mb = {"model00": 400, "model01": 100, "model02": 400, "model03": 100}
    with tritons_with(tmp_path, 1, tuple(sizes_mb)) as tritons:
        for model, size_mb in sizes_mb.items():
            with (tritons[0].repository / model / "config.pbtxt").open("a") as config:
                value = f'value {{ string_value: "{size_mb}" }}'
                config.write(f'\nparameters {{ key: "gateway.memory_mb" {value} }}\n')

        def held_mb() -> int:
            return sum(sizes_mb[name] for name in list_held(tritons[0]))

        with on_demand_gateway(tritons, model_memory_mb="500") as fleet:
            for model in sizes_mb:  # the size of a model is known when it was loaded once
                assert fleet.infer(model).status_code == 200
            for model in sizes_mb:
                assert fleet.infer(model).status_code == 200
                assert held_mb() <= 500
                assert model in list_held(tritons[0])
            # Small models stay beside a large one.
            assert list_held(tritons[0]) == {"model02", "model03"}
