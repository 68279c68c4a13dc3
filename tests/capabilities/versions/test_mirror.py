"""The mirror on a real Triton: which requests the shadow version gets, and what its responses never do."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton_http
from prometheus_client.parser import text_string_to_metric_families

from gateway.capabilities.versions.mirror import MAX_COPIES
from tests.capabilities.versions.support.versioned import (
    NAME,
    V1_BODY,
    V2_BODY,
    add_version,
    remove_version,
    set_behaviour,
    write_versions,
)
from tests.support.servers import Command, Triton, gateway
from tests.support.wait import wait_until

QUICK = {"poll_interval_s": "0.1", "connect_timeout_s": "10"}
V1, V2 = f"/v1/models/{NAME}/versions/stable", f"/v2/models/{NAME}/versions/stable"
Results = dict[str, float]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_versions(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def triton(repository: Path) -> Iterator[Triton]:
    with Triton(repository, NAME) as server:
        server.wait()
        yield server


@pytest.fixture(scope="module")
def served(triton: Triton) -> Iterator[tuple[httpx.Client, Command]]:
    with gateway(triton.options.url, **QUICK) as (client, command):
        wait_until(lambda: client.get(f"/v1/models/{NAME}").status_code == 200)
        yield client, command


@pytest.fixture
def client(served: tuple[httpx.Client, Command], repository: Path) -> httpx.Client:
    for version in (1, 2):
        set_behaviour(repository, version)
    return served[0]


def put(client: httpx.Client, **shadow: Any) -> None:
    label = {"version": "1", "shadow": {"version": "2", **shadow}}
    client.put(f"/v1/models/{NAME}/labels/stable", json=label).raise_for_status()


def read_results(client: httpx.Client) -> Results:
    results: Results = defaultdict(float)
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = sample.labels
            if sample.name == "gateway_shadow_requests_total":
                assert (labels["label"], labels["version"]) == ("stable", "2")
                results[labels["result"]] += sample.value
    return results


def results_of(client: httpx.Client, count: int, send: Callable[[], object]) -> Results:
    """Return the results of the copies of some requests, each of which is waited for."""
    before = read_results(client)
    for number in range(count):
        send()
        wait_until(
            lambda number=number: (  # type: ignore[misc]
                sum(read_results(client).values()) > sum(before.values()) + number
            )
        )
    return subtract(read_results(client), before)


def subtract(after: Results, before: Results) -> Results:
    added = {result: value - before.get(result, 0) for result, value in after.items()}
    return {result: value for result, value in added.items() if value}


def post(client: httpx.Client, path: str, **options: Any) -> Callable[[], httpx.Response]:
    def send() -> httpx.Response:
        answer = client.post(path, **options)
        assert answer.status_code == 200, answer.text
        return answer

    return send


def count_inferences(client: httpx.Client, version: int) -> int:
    """Return how many inferences of the version Triton itself counts, a moment after its responses."""
    (stats,) = client.get(f"/v2/models/{NAME}/versions/{version}/stats").json()["model_stats"]
    return int(stats["inference_stats"]["success"]["count"])


def encode_npy(*values: float) -> dict[str, Any]:
    file = io.BytesIO()
    np.save(file, np.array([values], np.float32))
    return {"content": file.getvalue(), "headers": {"Content-Type": "application/x-npy"}}


def encode_gzip(document: Any) -> dict[str, Any]:
    content = gzip.compress(json.dumps(document).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    return {"content": content, "headers": headers}


STREAM = {"Accept": "application/x-ndjson"}
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "v1": (f"{V1}/infer", {"json": V1_BODY}),
    "v1 compressed": (f"{V1}/infer", encode_gzip(V1_BODY)),
    "v1 query": (f"{V1}/infer?dry_run=false", {"json": V1_BODY}),
    "v1 stream": (f"{V1}/infer", {"json": V1_BODY, "headers": STREAM}),
    "npy": (f"{V1}/infer", encode_npy(1, 2)),
    "predict": (f"{V1}:predict", {"json": {"instances": [[1.0, 2.0]]}}),
    "TensorFlow": (f"/v1/models/{NAME}/labels/stable:predict", {"json": {"instances": [[1.0]]}}),
    "v2": (f"{V2}/infer", {"json": V2_BODY}),
    "v2 compressed": (f"{V2}/infer", encode_gzip(V2_BODY)),
    "v2 in pieces": (f"{V2}/infer", {"content": iter([json.dumps(V2_BODY).encode()])}),
    "generate": (f"{V2}/generate", {"json": {"X": 1.0}}),
    "generate stream": (f"{V2}/generate_stream", {"json": {"X": 1.0}}),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_shadow_gets_a_request_of_any_format(client: httpx.Client, kind: str) -> None:
    put(client)
    path, options = FORMATS[kind]
    before = count_inferences(client, 2)
    assert results_of(client, 1, post(client, path, **options)) == {"succeeded": 1}
    wait_until(lambda: count_inferences(client, 2) == before + 1)


def test_shadow_gets_binary_tensors(client: httpx.Client) -> None:
    put(client)
    tensor = triton_http.InferInput("X", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2]], np.float32))
    with triton_http.InferenceServerClient(client.base_url.netloc.decode()) as triton_client:
        for algorithm in (None, "gzip"):

            def send(algorithm: str | None = algorithm) -> None:
                options = {"request_compression_algorithm": algorithm}
                result = triton_client.infer(NAME, [tensor], model_version="stable", **options)
                assert result.as_numpy("Y").tolist() == [[1, 2]]

            assert results_of(client, 1, send) == {"succeeded": 1}


@pytest.mark.fault("a shadow version hangs, fails or is not ready")
def test_failed_copy_is_counted_and_nothing_else(
    served: tuple[httpx.Client, Command], client: httpx.Client, repository: Path
) -> None:
    put(client)
    set_behaviour(repository, 2, fail_every=1)
    for path, body in ((f"{V1}/infer", V1_BODY), (f"{V2}/infer", V2_BODY)):
        send = post(client, path, json=body, headers={"X-Request-ID": "original"})
        assert results_of(client, 1, send) == {"failed": 1}
    line = served[1].wait_for("shadow version 2 of label stable of model split failed")
    assert "it failed" in line
    page = client.get("/metrics").text
    assert re.search(r"^gateway_request_duration_seconds_count\{.*infer.*version=\"1\"", page, re.M)
    assert not re.search(r"^gateway_request_duration_\w+\{.*infer.*version=\"2\"", page, re.M)


@pytest.mark.fault("a shadow version hangs, fails or is not ready")
def test_slow_shadow_delays_no_request(client: httpx.Client, repository: Path) -> None:
    put(client)
    set_behaviour(repository, 2, sleep_s=0.5)
    before = read_results(client)
    send = post(client, f"{V2}/infer", json=V2_BODY)
    for _ in range(MAX_COPIES + 16):
        assert send().json()["outputs"][0]["data"] == [1, 2]
    # All requests are answered while most copies are still held.
    assert subtract(read_results(client), before)["too_many"] > 0
    set_behaviour(repository, 2)
    wait_until(lambda: sum(subtract(read_results(client), before).values()) == MAX_COPIES + 16)


def test_copy_gives_way_to_requests_that_wait(triton: Triton, repository: Path) -> None:
    with gateway(triton.options.url, **QUICK, max_model_inflight="1") as (client, _):
        wait_until(lambda: client.get(f"/v1/models/{NAME}").status_code == 200)
        put(client)
        set_behaviour(repository, 1, sleep_s=0.3)
        send = post(client, f"{V2}/infer", json=V2_BODY)
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda _: send(), range(4)))
        wait_until(lambda: sum(read_results(client).values()) == 4)
        assert read_results(client)["busy"] > 0


def test_body_that_is_too_large_is_not_copied(client: httpx.Client) -> None:
    put(client)
    for count, result in ((200_000, "succeeded"), (300_000, "too_large")):
        send = post(client, f"{V1}/infer", **encode_npy(*np.ones(count)))
        assert results_of(client, 1, send) == {result: 1}


def test_percentage_of_the_requests_is_copied(client: httpx.Client) -> None:
    put(client, percent=50)
    before = read_results(client)
    send = post(client, f"{V2}/infer", json=V2_BODY)
    for _ in range(400):
        send()
    put(client)
    send()
    wait_until(lambda: subtract(read_results(client), before))
    assert 100 < sum(subtract(read_results(client), before).values()) < 300


STEP = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
STEP_HEADERS = {"X-Sequence-ID": "7", "X-Sequence": "start, end"}
LARGE = [1.0] * 24_000  # 120 KB, which arrive in several pieces; a larger step is refused


def large_v2_body(**more: Any) -> dict[str, Any]:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, len(LARGE)], "data": LARGE}
    return {"inputs": [tensor], **more}


SEQUENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "v1 headers": (f"{V1}/infer", {"json": V1_BODY, "headers": STEP_HEADERS}),
    "v1 parameters": (f"{V1}/infer", {"json": {**V1_BODY, "parameters": STEP}}),
    "predict": (f"{V1}:predict", {"json": {"instances": [[1.0]]}, "headers": STEP_HEADERS}),
    "v2 headers": (f"{V2}/infer", {"json": V2_BODY, "headers": STEP_HEADERS}),
    "v2 compressed": (f"{V2}/infer", encode_gzip({**V2_BODY, "parameters": STEP})),
    "v2 large": (f"{V2}/infer", {"json": large_v2_body(parameters=STEP)}),
    "generate": (f"{V2}/generate", {"json": {"X": 1.0, **STEP}}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "another version": (f"/v2/models/{NAME}/versions/1/infer", {"json": V2_BODY}),
    "no inference": (f"{V1}/infer?dry_run=true", {"json": V1_BODY}),
}


@pytest.mark.parametrize("kind", [*SEQUENCES, *OTHERS])
def test_request_that_is_never_copied(client: httpx.Client, kind: str) -> None:
    put(client)
    path, options = {**SEQUENCES, **OTHERS}[kind]
    shadow = count_inferences(client, 2)
    post(client, path, **options)()
    assert client.post(f"{V2}/infer", json={"inputs": []}).status_code == 400
    # The copy of one more request is the only one that version 2 gets, and is sent after all others.
    results_of(client, 1, post(client, f"{V2}/infer", json=V2_BODY))
    wait_until(lambda: count_inferences(client, 2) > shadow)
    assert count_inferences(client, 2) == shadow + 1


@pytest.mark.fault("a shadow version hangs, fails or is not ready")
def test_shadow_that_is_not_ready_fails(client: httpx.Client, triton: Triton) -> None:
    put(client)
    remove_version(triton, 2)
    wait_until(lambda: not client.get(f"/v1/models/{NAME}/labels/stable").json()["ready"]["2"])
    assert results_of(client, 1, post(client, f"{V2}/infer", json=V2_BODY)) == {"failed": 1}
    add_version(triton, 2)
    wait_until(lambda: client.get(f"/v1/models/{NAME}/labels/stable").json()["ready"]["2"])
