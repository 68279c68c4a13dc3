"""Labels, splits and models on demand over gRPC, as over HTTP."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.capabilities.grpc_api.support.grpc_gateway import fp32
from tests.capabilities.on_demand.support.on_demand import (
    model_names,
    on_demand_gateway,
    tritons_with,
)
from tests.capabilities.versions.support.versioned import (
    LABELS,
    NAME,
    add_version,
    remove_version,
    set_behaviour,
    write_versions,
)
from tests.support.metrics import metric
from tests.support.servers import Triton, free_ports, gateway_before
from tests.support.wait import TIMEOUT_S, wait_until

COPIES = f'gateway_shadow_requests_total{{model="{NAME}",label="stable",version="2",result="%s"}}'
# By the behaviour of the shadow version.
RESULTS: dict[str, dict[str, Any]] = {"succeeded": {}, "failed": {"fail_every": 1}}


def infer(
    client: triton_grpc.InferenceServerClient,
    model: str,
    version: str = "",
    shape: tuple[int, ...] = (1, 2),
) -> str:
    """Return the version that answered."""
    value = triton_grpc.InferInput("X", shape, "FP32")
    value.set_data_from_numpy(np.ones(shape, np.float32))
    answer = client.infer(model, [value], model_version=version, client_timeout=60)
    return str(answer.get_response().model_version)


def infer_in_stream(client: triton_grpc.InferenceServerClient, model: str, version: str) -> str:
    """Return the version that answered."""
    answers: Queue[tuple[triton_grpc.InferResult, object]] = Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer(model, [fp32(1, 2, shape=(1, 2))], model_version=version)
    result, error = answers.get(timeout=TIMEOUT_S)
    client.stop_stream()
    assert error is None, error
    return str(result.get_response().model_version)


def test_labels_and_splits_choose_the_version_of_a_call(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with (
        Triton(write_versions(tmp_path / "models"), NAME) as triton,
        gateway_before(triton.options.url, grpc_port=str(port)) as http,
        triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
    ):
        triton.wait()
        wait_until(lambda: http.get(f"/v1/models/{NAME}").status_code == 200)
        for label, versions in (("stable", {"2": 1}), ("default", {"1": 3, "2": 1})):
            answer = http.put(f"{LABELS}/{label}", json={"versions": versions})
            assert answer.status_code == 200, answer.text
        assert {infer(client, NAME, "stable") for _ in range(5)} == {"2"}
        versions = Counter[str]()
        for _ in range(40):  # reads between the requests take no turn of the split
            assert client.get_model_config(NAME) == client.get_model_config(NAME, "1")
            versions[infer(client, NAME)] += 1
        assert versions == {"1": 30, "2": 10}
        statistics = client.get_inference_statistics(NAME).model_stats
        assert {each.version for each in statistics} == {"1", "2", "3"}
        assert infer(client, NAME, "3") == "3"
        assert client.get_model_metadata(NAME, "stable").versions
        assert client.is_model_ready(NAME, "stable")
        with pytest.raises(InferenceServerException, match="version string 'unknown'"):
            infer(client, NAME, "unknown")


@pytest.mark.fault(
    "a version that a label means is unloaded, or its Triton or the gateway restarts"
)
def test_call_to_an_unloaded_version_goes_to_another_one(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with (
        Triton(write_versions(tmp_path / "models"), NAME) as triton,
        # The gateway learns of the change from Triton's answers, and not from a probe.
        gateway_before(triton.options.url, grpc_port=str(port), poll_interval_s="30") as http,
        triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
    ):
        triton.wait()
        http.post("/v2/repository/index").raise_for_status()  # probes the replica
        label = {"versions": {"1": 1, "3": 1}}
        http.put(f"{LABELS}/canary", json=label).raise_for_status()
        for call in (infer, infer_in_stream):
            assert Counter(call(client, NAME, "canary") for _ in range(4)) == {"1": 2, "3": 2}
            remove_version(triton, 3)
            assert {call(client, NAME, "canary") for _ in range(4)} == {"1"}
            add_version(triton, 3)
            http.post("/v2/repository/index").raise_for_status()
        page = http.get("/metrics").text
        assert 'gateway_label_redirects_total{model="split",label="canary",version="3"}' in page


def test_call_is_copied_to_the_shadow_of_its_label(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    repository = write_versions(tmp_path / "models")
    with (
        Triton(repository, NAME) as triton,
        gateway_before(triton.options.url, grpc_port=str(port)) as http,
        triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
    ):
        triton.wait()
        http.post("/v2/repository/index").raise_for_status()
        label = {"version": "1", "shadow": {"version": "2"}}
        http.put(f"{LABELS}/stable", json=label).raise_for_status()
        for result, behaviour in RESULTS.items():
            set_behaviour(repository, 2, **behaviour)
            assert infer(client, NAME, "stable") == "1"
            wait_until(partial(metric, http, COPIES % result))
        assert infer(client, NAME, "stable", shape=(1, 300_000)) == "1"
        wait_until(partial(metric, http, COPIES % "too_large"))
        assert infer_in_stream(client, NAME, "stable") == "1"
        wait_until(partial(metric, http, COPIES % "unsupported"))


@pytest.mark.long
def test_first_call_loads_a_model_on_demand(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    models = model_names(2)
    with (
        tritons_with(tmp_path, 1, models) as tritons,
        on_demand_gateway(tritons, max_loaded_models="1", grpc_port=str(port)),
        triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client,
    ):
        assert client.get_model_metadata(models[1]).name == models[1]
        assert client.is_model_ready(models[1])
        assert not client.is_model_ready(models[0])
        for model in (*models, *models):
            assert infer(client, model, shape=(2,)) == "1"
