"""Shadow traffic on a real Triton: copies of requests, their comparison, and what they never do."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton_http
from prometheus_client.parser import text_string_to_metric_families

from gateway.callers import Caller
from gateway.capabilities.versions.label_router import ActiveLabel, SequenceVersions
from gateway.capabilities.versions.labels import Shadow, VersionLabel
from gateway.capabilities.versions.metrics import LabelMetrics
from gateway.capabilities.versions.output_comparison import compare_outputs
from gateway.capabilities.versions.shadows import BUSY, MAX_COPIES, ShadowRunner
from gateway.capacity.admission import AdmissionQueue, Slot
from gateway.config.settings import Settings
from gateway.fleet.pool import ReplicaPool
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_info import RequestInfo
from tests.capabilities.versions.support.versioned import (
    NAME,
    V1_BODY,
    V2_BODY,
    set_behaviour,
    write_version,
    write_versions,
)
from tests.support.measurements import forget_peaks, peak_bytes
from tests.support.servers import Command, Triton, gateway
from tests.support.wait import wait_until

QUICK = {"poll_interval_s": "0.1", "connect_timeout_s": "10", "max_shadow_bytes": "200000"}
V1, V2 = f"/v1/models/{NAME}/versions/stable", f"/v2/models/{NAME}/versions/stable"
TEXTS = "texts"
Results = dict[str, float]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_versions(tmp_path_factory.mktemp("models"))
    for version in (1, 2):
        write_version(folder, version, name=TEXTS, datatype="STRING")
    return folder


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[tuple[httpx.Client, Command]]:
    with Triton(repository, NAME, TEXTS) as triton:
        triton.wait()
        with gateway(triton.options.url, **QUICK) as (client, command):
            for model in (NAME, TEXTS):
                wait_until(lambda: client.get(f"/v1/models/{model}").status_code == 200)  # noqa: B023
            yield client, command


@pytest.fixture
def client(served: tuple[httpx.Client, Command], repository: Path) -> httpx.Client:
    for version in (1, 2):
        set_behaviour(repository, version)
    return served[0]


def put(client: httpx.Client, model: str = NAME, **shadow: Any) -> None:
    label = {"version": "1", "shadow": {"version": "2", **shadow}}
    client.put(f"/v1/models/{model}/labels/stable", json=label).raise_for_status()


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


def post(
    client: httpx.Client, path: str, body: Any, **options: Any
) -> Callable[[], httpx.Response]:
    def send() -> httpx.Response:
        answer = client.post(path, json=body, **options)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-model-version"] == "1"
        return answer

    return send


@pytest.mark.long
def test_copy_of_a_request_of_any_format_is_compared(client: httpx.Client) -> None:
    put(client)
    tensor = triton_http.InferInput("X", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2]], np.float32))
    with triton_http.InferenceServerClient(client.base_url.netloc.decode()) as triton_client:

        def send_binary(**options: Any) -> None:
            result = triton_client.infer(NAME, [tensor], model_version="stable", **options)
            assert result.as_numpy("Y").tolist() == [[1, 2]]

        for send in (
            post(client, f"{V1}/infer", V1_BODY),
            post(client, f"{V1}:predict", {"instances": [[1.0, 2.0]]}),
            post(client, f"{V2}/infer", V2_BODY),
            post(client, f"{V2}/infer", V2_BODY, headers={"Accept-Encoding": "gzip"}),
            post(client, f"{V2}/infer", V2_BODY, headers={"Accept-Encoding": "identity"}),
            post(client, f"{V2}/generate", {"X": 1.0}),
            send_binary,
            lambda: send_binary(request_compression_algorithm="gzip"),
            lambda: send_binary(response_compression_algorithm="deflate"),
        ):
            assert results_of(client, 1, send) == {"equal": 1}


@pytest.mark.fault("a shadow version hangs, fails or responds differently")
@pytest.mark.parametrize(
    ("behaviour", "result"),
    [
        ({"factor": 1.0001}, "close"),
        ({"factor": 1.01}, "different"),
        ({"fail_every": 1}, "failed"),
    ],
)
def test_other_result_is_counted_by_its_kind(
    client: httpx.Client, repository: Path, behaviour: Any, result: str
) -> None:
    put(client)
    set_behaviour(repository, 2, **behaviour)
    assert results_of(client, 2, post(client, f"{V2}/infer", V2_BODY)) == {result: 2}
    assert results_of(client, 2, post(client, f"{V1}/infer", V1_BODY)) == {result: 2}


def test_first_difference_is_logged_with_its_request(repository: Path, tmp_path: Path) -> None:
    with Triton(repository, NAME) as triton:
        triton.wait()
        settings = {**QUICK, "log_format": "json", "log_level": "warning"}
        with gateway(triton.options.url, **settings) as (client, command):
            wait_until(lambda: client.get(f"/v1/models/{NAME}").status_code == 200)
            put(client)
            set_behaviour(repository, 2, factor=3)
            send = post(client, f"{V2}/infer", V2_BODY, headers={"X-Request-ID": "the-first"})
            assert results_of(client, 5, send) == {"different": 5}
            line = json.loads(command.wait_for("shadow version 2"))
            assert line["request_id"] == "the-first"
            assert "output 'Y' differs by 4, its largest value is 2" in line["message"]
            assert sum("shadow version 2" in each for each in command.lines) == 1


def test_percentage_of_the_requests_is_copied(client: httpx.Client) -> None:
    put(client, percent=25)
    before = read_results(client)
    send = post(client, f"{V2}/infer", V2_BODY)
    for _ in range(10):
        for _ in range(3):
            send()
        assert results_of(client, 1, send) == {"equal": 1}
    assert subtract(read_results(client), before) == {"equal": 10}


def test_large_body_is_copied_up_to_the_limit(client: httpx.Client) -> None:
    put(client)
    for count, result in ((20_000, "equal"), (60_000, "dropped")):
        values = np.ones((1, count), np.float32)
        tensor = triton_http.InferInput("X", values.shape, "FP32")
        tensor.set_data_from_numpy(values)
        with triton_http.InferenceServerClient(client.base_url.netloc.decode()) as triton_client:
            sent = lambda: triton_client.infer(NAME, [tensor], model_version="stable")  # noqa: B023, E731
            assert results_of(client, 1, sent) == {result: 1}
        npy = {"inputs": {"X": values[0].tolist()}}
        assert results_of(client, 1, post(client, f"{V1}/infer", npy)) == {result: 1}


@pytest.mark.fault(
    "a response of one long text and thousands of short ones, which a shadow version"
)
def test_texts_of_any_length_are_compared_in_little_memory(
    served: tuple[httpx.Client, Command], client: httpx.Client
) -> None:
    """NumPy's own strings are as long as the longest of them: these would take 320 MB, twice."""
    pid = served[1].pid
    put(client, TEXTS)
    body = {"X": ["a" * 40_000, *"b" * 2_000]}
    path = f"/v2/models/{TEXTS}/versions/stable/generate"
    assert results_of(client, 1, post(client, path, {"X": ["a"]})) == {"equal": 1}
    forget_peaks(pid)
    before = peak_bytes(pid)
    assert results_of(client, 1, post(client, path, body)) == {"equal": 1}
    assert peak_bytes(pid) < before + (64 << 20)
    # What is larger when it is inflated is not compared.
    body = {"X": ["a" * 250_000]}
    send = post(client, path, body, headers={"Accept-Encoding": "gzip"})
    assert results_of(client, 1, send) == {"dropped": 1}


def count_inferences(client: httpx.Client, version: int) -> int:
    """Return how many inferences of the version Triton itself counts, a moment after its responses."""
    (stats,) = client.get(f"/v2/models/{NAME}/versions/{version}/stats").json()["model_stats"]
    return int(stats["inference_stats"]["success"]["count"])


STEP = {"sequence_id": 7, "sequence_start": True, "sequence_end": True}
STEP_HEADERS = {"X-Sequence-ID": "7", "X-Sequence": "start, end"}
LARGE = [1.0] * 24_000  # 120 KB, which arrive in several pieces; a larger step is refused


def large_v2_body(**more: Any) -> dict[str, Any]:
    tensor = {"name": "X", "datatype": "FP32", "shape": [1, len(LARGE)], "data": LARGE}
    return {"inputs": [tensor], **more}


def gzipped(document: Any) -> dict[str, Any]:
    content = gzip.compress(json.dumps(document).encode())
    return {"content": content, "headers": {"Content-Encoding": "gzip"}}


SEQUENCES: dict[str, tuple[str, dict[str, Any]]] = {
    "v1 headers": (f"{V1}/infer", {"json": V1_BODY, "headers": STEP_HEADERS}),
    "v1 parameters": (f"{V1}/infer", {"json": {**V1_BODY, "parameters": STEP}}),
    "predict": (f"{V1}:predict", {"json": {"instances": [[1.0]]}, "headers": STEP_HEADERS}),
    "v2 headers": (f"{V2}/infer", {"json": V2_BODY, "headers": STEP_HEADERS}),
    "v2 parameters": (f"{V2}/infer", {"json": {**V2_BODY, "parameters": STEP}}),
    "v2 compressed": (f"{V2}/infer", gzipped({**V2_BODY, "parameters": STEP})),
    "v2 large": (f"{V2}/infer", {"json": large_v2_body(parameters=STEP)}),
    "v2 large compressed": (f"{V2}/infer", gzipped(large_v2_body(parameters=STEP))),
    "generate": (f"{V2}/generate", {"json": {"X": 1.0, **STEP}}),
    "generate parameters": (f"{V2}/generate", {"json": {"X": 1.0, "parameters": STEP}}),
}


@pytest.mark.parametrize("kind", SEQUENCES)
def test_sequence_is_never_copied(client: httpx.Client, kind: str) -> None:
    put(client)
    path, options = SEQUENCES[kind]
    primary, shadow = count_inferences(client, 1), count_inferences(client, 2)
    for _ in range(3):
        answer = client.post(path, **options)
        assert answer.status_code == 200, answer.text
    wait_until(lambda: count_inferences(client, 1) == primary + 3)
    # The copy of one more request is the only one that version 2 gets, and is sent after all others.
    send = post(client, f"{V2}/infer", V2_BODY)
    assert results_of(client, 1, send)["equal"] == 1
    wait_until(lambda: count_inferences(client, 2) == shadow + 1)


def test_stream_read_or_request_of_another_version_is_never_copied(client: httpx.Client) -> None:
    put(client)
    before = read_results(client)
    numbered = [f"/v2/models/{NAME}/versions/{version}/infer" for version in ("1", "2")]
    primary, shadow = count_inferences(client, 1), count_inferences(client, 2)
    for accept in ("text/event-stream", "application/x-ndjson"):
        for path, body in ((f"{V1}/infer", V1_BODY), (f"{V2}/generate_stream", {"X": 1.0})):
            answer = client.post(path, json=body, headers={"Accept": accept})
            assert answer.status_code == 200, answer.text
    for path in numbered:
        assert client.post(path, json=V2_BODY).status_code == 200
    assert client.get(f"{V2}/ready").status_code == 200
    # The copy of one more request is the only one, and is sent after all others.
    assert results_of(client, 1, post(client, f"{V2}/infer", V2_BODY)) == {"equal": 1}
    assert subtract(read_results(client), before) == {"equal": 1}
    wait_until(lambda: count_inferences(client, 1) == primary + 6)
    wait_until(lambda: count_inferences(client, 2) == shadow + 2)


@pytest.mark.long
@pytest.mark.fault("a shadow version hangs, fails or responds differently")
def test_slow_shadow_delays_no_request(client: httpx.Client, repository: Path) -> None:
    put(client)
    set_behaviour(repository, 2, sleep_s=10)
    before = read_results(client)
    send = post(client, f"{V2}/infer", V2_BODY)
    count = MAX_COPIES + 16
    for _ in range(count):
        assert send().json()["outputs"][0]["data"] == [1, 2]
    # All requests are answered while the first copies are still held.
    added = subtract(read_results(client), before)
    assert set(added) <= {"dropped"}
    assert added["dropped"] == 16
    label = client.get(f"/v1/models/{NAME}/labels/stable").json()
    assert label["dropped_copies"]["too_many"] == 16
    wait_until(lambda: sum(subtract(read_results(client), before).values()) == count)


# The comparison.


def outputs(*values: Any, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    return {"Y": np.array(values, dtype)}


@pytest.mark.parametrize(
    ("primary", "other", "result"),
    [
        (outputs(1, 2), outputs(1, 2), "equal"),
        (outputs(1, np.nan), outputs(1, np.nan), "equal"),
        (outputs(1, np.nan), outputs(1.0001, np.nan), "close"),
        (outputs(1, np.nan), outputs(1, 2), "different"),
        (outputs(1, np.inf), outputs(1.0001, np.inf), "close"),
        (outputs(1, np.inf), outputs(1, -np.inf), "different"),
        (outputs(1, 1e-9), outputs(1, -1e-9), "close"),
        (outputs(1000, 1), outputs(1000, 3), "different"),
        (outputs(0, 0), outputs(0, 1e-9), "different"),
        (outputs(1, 2), outputs(1, 2, dtype=np.float64), "different"),
        (outputs(1, 2), outputs([1, 2]), "different"),
        (outputs(1, 2), {"Z": np.array([1, 2], np.float32)}, "different"),
        (outputs(2**62, dtype=np.int64), outputs(2**62 + 1, dtype=np.int64), "close"),
        (outputs(255, dtype=np.uint8), outputs(0, dtype=np.uint8), "different"),
        (outputs(True, dtype=bool), outputs(False, dtype=bool), "different"),
        (outputs(b"a", dtype=object), outputs(b"a", dtype=object), "equal"),
        (outputs(b"a", dtype=object), outputs(b"b", dtype=object), "different"),
        (outputs(), outputs(), "equal"),
    ],
)
def test_outputs_are_compared_by_value(primary: Any, other: Any, result: str) -> None:
    assert compare_outputs(primary, other, 0.001).result == result


# How many are copied.


async def count_copies(slots: int, percent: float, *, waits: bool = False) -> tuple[int, int]:
    """Return how many of a thousand requests are copied, and dropped, while so many hold a slot."""
    metrics = Metrics()
    admission = AdmissionQueue(slots, slots, 1, metrics)
    pool = ReplicaPool((), Settings(), metrics=metrics)
    label_metrics = LabelMetrics(metrics.create)
    runner = ShadowRunner(pool, admission, label_metrics, 1 << 20)
    value = VersionLabel({"1": 1}, shadow=Shadow("2", percent))
    label = ActiveLabel(
        pool,
        SequenceVersions(),
        label_metrics.redirects,
        model=NAME,
        name="stable",
        value=value,
    )
    assert all(admission.try_acquire(NAME) for _ in range(slots))
    info = RequestInfo("0" * 32)
    info.caller = Caller("caller")
    slot = Slot(admission, NAME, info)
    waiting = asyncio.create_task(slot.acquire(60)) if waits else None
    await asyncio.sleep(0)
    chosen = sum(runner.choose_shadow(label) is not None for _ in range(1000))
    if waiting is not None:
        waiting.cancel()
    return chosen, label.dropped_copies[BUSY]


@pytest.mark.fault("a shadow version hangs, fails or responds differently")
async def test_percentage_is_copied_while_no_request_waits() -> None:
    assert await count_copies(1, 100) == (1000, 0)
    assert await count_copies(32, 20) == (200, 0)
    assert await count_copies(32, 20, waits=True) == (0, 200)
