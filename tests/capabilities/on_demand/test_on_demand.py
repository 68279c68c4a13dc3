"""Models are loaded by their first request and unloaded for others: three real tritonservers."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
import tritonclient.grpc as triton_grpc

from tests.support.errors import assert_error
from tests.support.fleet import BODY, V2_BODY, load_behind, write_echo
from tests.support.keys import ADMIN, INFER, bearer, entry, written
from tests.support.measurements import assert_number, compares_numbers
from tests.support.metrics import metric
from tests.support.on_demand import (
    TRACE_SECONDS,
    IndexWatch,
    Trace,
    count_lru_loads,
    evictions,
    list_held,
    loads,
    model_names,
    on_demand_fleet,
    on_demand_gateway,
    read_index,
    tritons_with,
    used_continuously,
)
from tests.support.servers import Triton
from tests.support.wait import wait_until

MODELS = model_names(12)
# Of the traffic that is measured during a load, and before it.
WINDOW_S, ROUNDS = (6.0, 5) if compares_numbers() else (2.0, 1)
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


@pytest.mark.fault(
    "a key for inference provokes errors of replicas, servers of completions and loads"
)
def test_a_key_for_inference_does_not_read_why_a_load_failed(
    three: list[Triton], tmp_path: Path
) -> None:
    """Triton's reason can name other models, such as a step that an ensemble lacks."""
    for triton in three:
        (triton.repository / "model11" / "trouble").write_text("broken")
    keys = written(tmp_path / "keys.yaml", [entry(INFER, "infer"), entry(ADMIN, "admin")])
    try:
        with on_demand_fleet(three, keys_file=str(keys), log_level="warning") as fleet:
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
    finally:
        for triton in three:
            (triton.repository / "model11" / "trouble").unlink()


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
        assert metric(fleet.client, "gateway_on_demand_wait_seconds_count") >= 1


@pytest.mark.long
@pytest.mark.parametrize("seconds", TRACE_SECONDS)
@pytest.mark.parametrize("budget", [4, 2])
def test_the_budget_is_kept_and_loads_are_as_few_as_those_of_one_lru_cache(
    three: list[Triton], budget: int, seconds: float
) -> None:
    trace = Trace(MODELS)
    with on_demand_fleet(three, max_loaded_models=str(budget), log_level="warning") as fleet:
        with IndexWatch(three) as watch:
            trace.run([str(fleet.client.base_url)], seconds)
        loaded, expected = loads(fleet), count_lru_loads(trace.began, 3 * budget)
        print(
            f"budget {budget}: {len(trace.began)} requests, {loaded} loads, {expected} of one LRU, "
            f"{evictions(fleet)} evictions, at most {watch.most} in {watch.samples} samples"
        )
        assert not trace.failures
        assert max(watch.most.values()) <= budget
        assert loaded <= 1.2 * expected + 1
        assert evictions(fleet) == loaded - sum(len(list_held(triton)) for triton in three)


@pytest.mark.fault("the load of an on-demand model fails")
def test_a_model_whose_load_fails_costs_one_attempt(three: list[Triton]) -> None:
    for triton in three:
        (triton.repository / "model11" / "trouble").write_text("broken")
    try:
        with on_demand_fleet(three) as fleet:
            with ThreadPoolExecutor(20) as pool:
                answers = list(pool.map(lambda _: fleet.infer("model11"), range(20)))
            assert {answer.status_code for answer in answers} == {422}
            error = answers[0].json()
            assert error["code"] == "LOAD_FAILED"
            assert "weights.bin are broken" in error["error"]
            assert "/opt/secret" not in error["error"]
            assert fleet.infer("model11").json()["error"] == error["error"]
            assert metric(fleet.client, 'gateway_on_demand_loads_total{outcome="failed"}') == 1
            for triton in three:
                (triton.repository / "model11" / "trouble").unlink()
            wait_until(lambda: fleet.infer("model11").status_code == 200)
    finally:
        for triton in three:
            (triton.repository / "model11" / "trouble").unlink(missing_ok=True)


def test_a_request_does_not_wait_longer_than_its_deadline(
    three: list[Triton], tmp_path: Path
) -> None:
    holds = [triton.repository / "model10" / "trouble" for triton in three]
    for hold in holds:
        hold.write_text("hold")
    try:
        with on_demand_fleet(three) as fleet:
            refused = fleet.infer("model10", headers={"X-Request-Timeout": "0.5"})
            assert refused.status_code == 503
            assert refused.json()["code"] == "MODEL_LOADING"
            assert int(refused.headers["Retry-After"]) >= 1
            # Others are served meanwhile.
            assert fleet.infer("model00").status_code == 200
            for hold in holds:
                hold.unlink()
            assert fleet.infer("model10").status_code == 200
            assert loads(fleet) == 2  # the first request's load was used
    finally:
        for hold in holds:
            hold.unlink(missing_ok=True)


@pytest.mark.long
def test_a_model_that_another_client_unloads_during_its_load_is_loaded_again(
    three: list[Triton],
) -> None:
    """Two gateways without a shared state do this to each other."""
    (triton, *_) = three
    hold = triton.repository / "model09" / "trouble"
    hold.write_text("hold")
    try:
        with (
            on_demand_fleet([triton]) as fleet,
            ThreadPoolExecutor(1) as pool,
            closing(HTTPConnection(triton.address, timeout=60)) as connection,
        ):
            waiting = pool.submit(fleet.infer, "model09")
            wait_until(lambda: read_index(triton)["model09"] == "LOADING")
            connection.request("POST", "/v2/repository/models/model09/unload")
            hold.unlink()
            assert connection.getresponse().status == 200  # when the model is loaded
            assert waiting.result().status_code == 200
    finally:
        hold.unlink(missing_ok=True)


def test_a_model_in_use_and_one_loaded_by_the_api_are_never_evicted(three: list[Triton]) -> None:
    (triton, *_) = three
    hold, held = (triton.repository / "model01" / name for name in ("hold", "held"))
    with on_demand_fleet([triton], max_loaded_models="2") as fleet, ThreadPoolExecutor(1) as pool:
        assert fleet.load("model00").status_code == 200
        hold.touch()
        try:
            body = {"inputs": {"X": [-1000.0, 0.0]}}
            waiting = pool.submit(fleet.client.post, "/v1/models/model01/infer", json=body)
            wait_until(held.exists)
            refused = fleet.infer("model02", headers={"X-Request-Timeout": "1"})
            assert refused.status_code == 503
            assert refused.json()["code"] == "NO_ROOM"
            assert "'model00'" in refused.json()["error"]
            assert "'model01'" in refused.json()["error"]
            assert list_held(triton) == {"model00", "model01"}
        finally:
            hold.unlink()
        assert waiting.result().status_code == 200
        assert fleet.infer("model02").status_code == 200
        assert list_held(triton) == {"model00", "model02"}
        # Unloaded by the API, a model is one on demand again.
        assert fleet.unload("model00").status_code == 200
        assert fleet.infer("model00").status_code == 200
        held.unlink()


@pytest.mark.long
def test_a_model_is_described_without_another_load(three: list[Triton]) -> None:
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


def test_an_idle_model_is_unloaded(three: list[Triton]) -> None:
    with on_demand_fleet(three, idle_unload_s="1") as fleet:
        assert fleet.load("model05").status_code == 200
        assert fleet.infer("model00").status_code == 200
        wait_until(lambda: not any("model00" in list_held(triton) for triton in three))
        wait_until(lambda: evictions(fleet, "idle") == 1)  # counted when Triton has answered
        assert all("model05" in list_held(triton) for triton in three)  # the API wants it
        assert fleet.infer("model00").status_code == 200


@pytest.mark.long
def test_an_unload_that_is_reversed_delays_no_other_load(three: list[Triton]) -> None:
    (triton, *_) = three
    hold, held = (triton.repository / "model00" / name for name in ("hold", "held"))
    held.unlink(missing_ok=True)
    hold.touch()
    try:
        with on_demand_fleet([triton], idle_unload_s="1") as fleet, ThreadPoolExecutor(1) as pool:
            assert fleet.infer("model00").status_code == 200
            body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [-1000, 0]}]}
            url = f"http://{triton.address}/v2/models/model00/infer"
            waiting = pool.submit(httpx.post, url, json=body, timeout=60)
            wait_until(held.exists)
            wait_until(lambda: read_index(triton)["model00"] == "UNLOADING")
            load_behind(triton, "model00")
            wait_until(lambda: read_index(triton)["model00"] == "READY")
            answer = fleet.infer("model01", headers={"X-Request-Timeout": "20"})
            hold.unlink()
            waiting.result()
            assert answer.status_code == 200, answer.text
            # The gateway unloads it after all.
            wait_until(lambda: not list_held(triton))
    finally:
        hold.unlink(missing_ok=True)


@pytest.mark.long
def test_demand_is_reported_during_a_slow_unload(three: list[Triton]) -> None:
    (triton, *_) = three
    folders = [triton.repository / name for name in ("model00", "model01")]
    for folder in folders:
        (folder / "held").unlink(missing_ok=True)
        (folder / "hold").touch()
    body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [2], "data": [-1000, 0]}]}
    try:
        with on_demand_fleet([triton], idle_unload_s="1") as fleet, ThreadPoolExecutor(2) as pool:
            assert fleet.infer("model00").status_code == 200
            url = f"http://{triton.address}/v2/models/model00/infer"
            pool.submit(httpx.post, url, json=body, timeout=60)
            wait_until((folders[0] / "held").exists)
            wait_until(lambda: read_index(triton)["model00"] == "UNLOADING")
            waiting = pool.submit(fleet.client.post, "/v2/models/model01/infer", json=body)
            # Sooner than the gateway stops to wait for the unload.
            wait_until(lambda: metric(fleet.client, "gateway_demand") == 1, timeout_s=8)
            assert read_index(triton)["model00"] == "UNLOADING"
            for folder in folders:
                (folder / "hold").unlink()
            assert waiting.result().status_code == 200
            wait_until(lambda: metric(fleet.client, "gateway_demand") == 0)
    finally:
        for folder in folders:
            (folder / "hold").unlink(missing_ok=True)


@pytest.mark.long
def test_an_overloaded_model_does_not_starve_requests_that_waited_for_a_load(
    three: list[Triton],
) -> None:
    (triton, *_) = three
    hold = triton.repository / "model10" / "trouble"
    hold.write_text("hold")
    limits = {"max_inflight": "4", "max_model_inflight": "2", "max_queue": "200"}
    slow = {"inputs": {"X": [-0.2, 0.0]}}
    try:
        with (
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
            hold.unlink()
            assert Counter(answer.result().status_code for answer in answers) == {200: 60}
    finally:
        hold.unlink(missing_ok=True)


@pytest.mark.long
def test_a_model_was_used_until_its_last_stream_ended(three: list[Triton]) -> None:
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
def test_a_slow_load_delays_no_other_model(three: list[Triton]) -> None:
    """Times without a load, with one of the gateway and with one by Triton's client take turns.

    All have the same neighbours, and what a load costs on the same CPUs is not the gateway's.
    """
    holds = [triton.repository / "model10" / "trouble" for triton in three]
    without, during, control = (Trace(MODELS[:4]) for _ in range(3))
    with on_demand_fleet(three) as fleet, ThreadPoolExecutor(1) as pool:
        urls = [str(fleet.client.base_url)]
        for model in MODELS[:4]:
            assert fleet.infer(model).status_code == 200

        def run_while_loading(trace: Trace, load: Callable[[], object]) -> Triton:
            """Return the Triton that loaded the model."""
            for hold in holds:
                hold.write_text("hold")
            try:
                waiting = pool.submit(load)
                wait_until(lambda: any("model10" in list_held(triton) for triton in three))
                trace.run(urls, WINDOW_S, clients=4)
                assert not waiting.done()  # so that none of the others waited for the load
                (loading,) = [triton for triton in three if "model10" in list_held(triton)]
            finally:
                for hold in holds:
                    hold.unlink()
            waiting.result()
            return loading

        for _ in range(ROUNDS):
            without.run(urls, WINDOW_S, clients=4)
            triton = run_while_loading(during, lambda: fleet.infer("model10").raise_for_status())
            assert fleet.unload("model10").status_code == 200
            with triton_grpc.InferenceServerClient(
                f"127.0.0.1:{triton.options.grpc_port}"
            ) as client:
                run_while_loading(control, lambda: client.load_model("model10"))
                client.unload_model("model10")
    for when, trace in (("without", without), ("during", during), ("Triton alone", control)):
        print(f"{when}: p99 of others {trace.p99_s * 1e3:.1f} ms, {len(trace.took_s)} requests")
        assert not trace.failures
    ratio = max(control.p99_s / without.p99_s, 1)
    print(f"p99 during a load by Triton's client, relative to none: {ratio:.2f}")
    assert_number(
        "p99 during a load of the gateway, relative to none",
        during.p99_s / without.p99_s,
        at_most=1.25 * ratio,
    )


@pytest.mark.fault("the only Triton with an on-demand model is killed")
def test_a_model_is_loaded_elsewhere_when_its_only_replica_vanishes(three: list[Triton]) -> None:
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


def test_a_gateway_killed_in_the_middle_of_a_load_leaves_it_to_the_next_one(
    three: list[Triton],
) -> None:
    holds = [triton.repository / "model10" / "trouble" for triton in three]
    for hold in holds:
        hold.write_text("hold")
    try:
        with on_demand_fleet(three) as fleet, ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(fleet.infer, "model10")
            wait_until(lambda: any("model10" in list_held(triton) for triton in three))
            os.kill(fleet.command.pid, signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                waiting.result()
        with on_demand_gateway(three) as fleet, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(fleet.infer, "model10")
            wait_until(lambda: metric(fleet.client, "gateway_requests_held") == 1)
            for hold in holds:
                hold.unlink()
            assert waiting.result().status_code == 200
            assert loads(fleet) == 0  # it waited for the load that was in progress
            assert sum("model10" in list_held(triton) for triton in three) == 1
    finally:
        for hold in holds:
            hold.unlink(missing_ok=True)


def test_a_model_is_not_loaded_on_a_cordoned_replica(three: list[Triton]) -> None:
    with on_demand_fleet(three) as fleet:
        for triton in three[:2]:
            cordon = fleet.client.post(f"/v1/replicas/{triton.address}/cordon")
            assert cordon.status_code == 200, cordon.text
        for model in MODELS[:3]:
            assert fleet.infer(model).status_code == 200
        assert [len(list_held(triton)) for triton in three] == [0, 0, 3]
        assert loads(fleet) == 3


@pytest.mark.long
def test_the_memory_of_models_is_kept_within_its_budget(tmp_path: Path) -> None:
    sizes_mb = {"model00": 400, "model01": 100, "model02": 400, "model03": 100}
    with tritons_with(tmp_path, 1, tuple(sizes_mb)) as tritons:
        for model in ("model00", "model02"):  # the others have the default size
            with (tritons[0].repository / model / "config.pbtxt").open("a") as config:
                config.write(
                    '\nparameters { key: "gateway.memory_mb" value { string_value: "400" } }\n'
                )

        def held_mb() -> int:
            return sum(sizes_mb[name] for name in list_held(tritons[0]))

        settings = {"model_memory_mb": "500", "default_model_memory_mb": "100"}
        with on_demand_gateway(tritons, **settings) as fleet:
            for model in (*sizes_mb, *sizes_mb):
                assert fleet.infer(model).status_code == 200
                wait_until(lambda: held_mb() <= 500)
                assert model in list_held(tritons[0])
            # Small models stay beside a large one.
            assert list_held(tritons[0]) == {"model02", "model03"}
