"""`/v2/**`: the real tritonserver asked directly and through the gateway gives the same answer.

Where a real one cannot tell what reached it, or cannot be made to stall, a fake one stands in.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import queue
import re
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from gateway.errors import serialize_error
from tests.support.fake_triton import (
    FAKE_BODY,
    Fake,
    Headers,
    RawResponse,
    Wire,
    ask,
    fake_triton,
    port_of,
)
from tests.support.model_zoo.zoo import LABELS, TICKING, Model, Names, T, identity, write_repository
from tests.support.servers import gateway_before, triton_on_free_ports
from tests.support.wait import TIMEOUT_S, lengthening

MODELS = (
    identity("wide", "FP32", (-1,)),
    identity("numbers", "INT64", (-1,)),
    identity("text", "BYTES", (-1,)),
    Model(
        "pair", "arithmetic",
        (T("A", "INT32", (2,)), T("B", "INT32", (2,))),
        (T("SUM", "INT32", (2,)), T("PRODUCT", "INT32", (2,))),
        8,
    ),
    Model("classes", "identity", (T("X", "FP32", (3,)),), (T("Y", "FP32", (3,), labels=LABELS),), 8),
    Model("failing", "failing", (T("X", "FP32", (1,)),), (T("Y", "FP32", (1,)),), 8),
    TICKING,
)  # fmt: skip

MIB = 1 << 20


@dataclass(frozen=True)
class Ports:
    """The ports of a Triton and of the gateway before it."""

    triton: int
    gateway: int
    url: str

    def both(self, *request: Any) -> tuple[RawResponse, RawResponse]:
        return ask(self.triton, *request), ask(self.gateway, *request)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    folder = tmp_path_factory.mktemp("v2")
    write_repository(folder, Names(), MODELS)
    with triton_on_free_ports(folder) as triton, gateway_before(triton.options.url) as client:
        yield Ports(triton.options.http_port, port_of(client), triton.options.url)


@pytest.fixture(scope="module")
def limited(ports: Ports) -> Iterator[int]:
    """The port of a gateway before the same Triton that takes bodies of a megabyte."""
    with gateway_before(ports.url, max_body_bytes="1000000") as client:
        yield port_of(client)


@pytest.fixture(scope="module")
def shared_fake() -> Iterator[tuple[Fake, int]]:
    """A fake Triton, and the port of a gateway before it, which waits for answers for an hour."""
    hour = {"request_timeout_s": "3600", "max_request_timeout_s": "3600"}
    with fake_triton() as fake, gateway_before(f"http://127.0.0.1:{fake.port}", **hour) as client:
        yield fake, port_of(client)


@pytest.fixture
def faked(shared_fake: tuple[Fake, int]) -> tuple[Fake, int]:
    shared_fake[0].clear()
    return shared_fake


def assert_error(response: RawResponse, status: int, code: str) -> str:
    """Assert that it is an error of the gateway; return its message."""
    assert response.status == status, response.body
    assert response.header("content-type") == "application/json"
    document = json.loads(response.body)
    assert document.keys() == {"error", "code", "request_id"}
    message = str(document["error"])
    assert document["code"] == code
    assert document["request_id"] == response.header("x-request-id") != ""
    assert response.body == serialize_error(message, code, document["request_id"])
    assert_no_internals(message)
    return message


def assert_no_internals(message: str) -> None:
    assert message
    assert not re.search(r"/srv|/tmp|\.py|Traceback|At:|0x|shm|\n|^\{", message), message


# Triton's own Python client, both kinds of it.

CALLS: list[tuple[str, dict[str, Any]]] = [
    ("is_server_live", {}),
    ("is_server_ready", {}),
    ("is_model_ready", {"model_name": "pair"}),
    ("is_model_ready", {"model_name": "pair", "model_version": "1"}),
    ("is_model_ready", {"model_name": "nobody"}),
    ("get_server_metadata", {}),
    ("get_server_metadata", {"query_params": {"a": "b c", "d": [1, 2]}}),
    ("get_model_metadata", {"model_name": "pair", "headers": {"X-Any": "thing"}}),
    ("get_model_metadata", {"model_name": "pair", "model_version": "1"}),
    ("get_model_config", {"model_name": "classes"}),
    ("get_model_config", {"model_name": "classes", "model_version": "1"}),
    ("get_model_repository_index", {}),
    ("unload_model", {"model_name": "numbers"}),
    ("load_model", {"model_name": "numbers"}),
    ("get_inference_statistics", {}),
    ("get_inference_statistics", {"model_name": "pair"}),
    ("get_inference_statistics", {"model_name": "pair", "model_version": "1"}),
    ("update_trace_settings", {"model_name": "pair", "settings": {"trace_rate": "7"}}),
    ("get_trace_settings", {}),
    ("get_trace_settings", {"model_name": "pair"}),
    ("update_log_settings", {"settings": {"log_verbose_level": 0}}),
    ("get_log_settings", {}),
]


def steady(answer: Any) -> Any:
    """Remove times and counts, which an unload resets."""
    if isinstance(answer, dict):
        return {name: steady(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [steady(value) for value in answer]
    return type(answer) if isinstance(answer, int) and not isinstance(answer, bool) else answer


def tensor(name: str, array: np.ndarray, *, binary: bool = True) -> triton_http.InferInput:
    datatype = triton_http.np_to_triton_dtype(array.dtype)
    made = triton_http.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def wanted(name: str, **options: Any) -> triton_http.InferRequestedOutput:
    return triton_http.InferRequestedOutput(name, **options)


A, B = np.array([[1, -2], [3, 4]], np.int32), np.array([[10, 20], [30, 40]], np.int32)
WIDE = np.linspace(-1, 1, 4096, dtype=np.float32)
TEXT = np.array([b"", b"\xff\x00\xfe", "안녕 ☕".encode()], object)
WORDS = np.array(["plain", "", "안녕 ☕"], object)
SCORES = np.array([[0.1, 0.7, 0.2]], np.float32)
X_WIDE = [tensor("X", WIDE)]

INFERENCES: dict[str, dict[str, Any]] = {
    "binary": {"model_name": "pair", "inputs": [tensor("A", A), tensor("B", B)]},
    "JSON": {
        "model_name": "pair",
        "inputs": [tensor("A", A, binary=False), tensor("B", B, binary=False)],
        "outputs": [wanted("SUM", binary_data=False), wanted("PRODUCT", binary_data=False)],
    },
    "mixed": {
        "model_name": "pair",
        "model_version": "1",
        "inputs": [tensor("B", B, binary=False), tensor("A", A)],
        "outputs": [wanted("PRODUCT", binary_data=False), wanted("SUM")],
        "request_id": "my own/id",
        "parameters": {"mine": "yes", "count": 3, "flag": True},
        "priority": 1,
        "timeout": 20_000_000,
        "sequence_id": 5,
        "sequence_start": True,
        "query_params": {"why": "not"},
        "headers": {"X-Any": "thing"},
    },
    "one of the outputs": {
        "model_name": "pair",
        "inputs": [tensor("A", A), tensor("B", B)],
        "outputs": [wanted("PRODUCT")],
    },
    "bytes": {"model_name": "text", "inputs": [tensor("X", TEXT)]},
    "text as JSON": {
        "model_name": "text",
        "inputs": [tensor("X", WORDS, binary=False)],
        "outputs": [wanted("Y", binary_data=False)],
    },
    "classes": {
        "model_name": "classes",
        "inputs": [tensor("X", SCORES)],
        "outputs": [wanted("Y", class_count=2)],
    },
    "no elements": {"model_name": "wide", "inputs": [tensor("X", WIDE[:0])]},
    **{
        f"{up} up, {down} down": {
            "model_name": "wide",
            "inputs": X_WIDE,
            "request_compression_algorithm": up,
            "response_compression_algorithm": down,
        }
        for up, down in [
            ("gzip", None), ("deflate", None), (None, "gzip"), (None, "deflate"), ("gzip", "deflate")
        ]
    },
}  # fmt: skip
FAILURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "an unknown model": ({"model_name": "nobody", "inputs": X_WIDE}, "404", "nobody"),
    "an unknown version": (
        {"model_name": "wide", "model_version": "9", "inputs": X_WIDE}, "404", "version 9",
    ),
    "a wrong shape": (
        {"model_name": "pair", "inputs": [tensor("A", A[:, :1]), tensor("B", B)]}, "400", "shape",
    ),
    "a missing input": ({"model_name": "pair", "inputs": [tensor("A", A)]}, "400", "inputs"),
    "an unknown output": (
        {"model_name": "wide", "inputs": X_WIDE, "outputs": [wanted("Z")]}, "400", "'Z'",
    ),
    "a model that raises": ({"model_name": "failing", "inputs": [tensor("X", SCORES[:, :1])]}, "500", "boom"),
    "a model that streams": (
        {
            "model_name": "ticking",
            "inputs": [tensor("COUNT", A[0, :1]), tensor("SECONDS", WIDE[-1:])],
        },
        "400", "stream",
    ),
}  # fmt: skip


def seen(result: triton_http.InferResult) -> tuple[Any, dict[str, tuple[Any, Any]]]:
    document = result.get_response()
    arrays = {output["name"]: result.as_numpy(output["name"]) for output in document["outputs"]}
    return document, {name: (array.dtype, array.tolist()) for name, array in arrays.items()}


def by_the_sync_client(port: int) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    with triton_http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        results = {name: seen(client.infer(**infer)) for name, infer in INFERENCES.items()}
        failures = {}
        for name, (infer, _, _) in FAILURES.items():
            with pytest.raises(InferenceServerException) as caught:
                client.infer(**infer)
            failures[name] = caught.value
        headers: dict[str, str] = {}
        client.infer(**INFERENCES["binary"], headers=headers)
        assert "Inference-Header-Content-Length" in headers  # and so in these calls
        calls = [
            steady(getattr(client, name)(**{"headers": headers, **arguments}))
            for name, arguments in CALLS
        ]
    return calls, results, failures


async def by_the_aio_client(port: int) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    async with triton_aio.InferenceServerClient(f"127.0.0.1:{port}") as client:
        results = {name: seen(await client.infer(**infer)) for name, infer in INFERENCES.items()}
        failures = {}
        for name, (infer, _, _) in FAILURES.items():
            with pytest.raises(InferenceServerException) as caught:
                await client.infer(**infer)
            failures[name] = caught.value
        headers: dict[str, str] = {}
        await client.infer(**INFERENCES["binary"], headers=headers)
        assert "Inference-Header-Content-Length" in headers
        calls = [
            steady(await getattr(client, name)(**{"headers": headers, **arguments}))
            for name, arguments in CALLS
        ]
    return calls, results, failures


@pytest.mark.parametrize("kind", ["sync", pytest.param("aio", marks=pytest.mark.long)])
def test_triton_client_gets_the_same_results_through_the_gateway(ports: Ports, kind: str) -> None:
    def through(port: int) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        if kind == "sync":
            return by_the_sync_client(port)
        return asyncio.run(by_the_aio_client(port))

    direct, (calls, results, failures) = through(ports.triton), through(ports.gateway)
    for (name, arguments), expected, found in zip(CALLS, direct[0], calls, strict=True):
        assert found == expected, (name, arguments)
    for name, expected in direct[1].items():
        assert results[name] == expected, name
    assert results["mixed"][0]["id"] == "my own/id"
    assert results["mixed"][1]["SUM"][1] == (A + B).tolist()
    assert results["gzip up, deflate down"][1]["Y"][1] == WIDE.tolist()
    assert results["classes"][1]["Y"][1] == [[b"0.700000:1:dog", b"0.200000:2:a bird: any"]]
    for name, (_, status, words) in FAILURES.items():
        assert isinstance(direct[2][name], InferenceServerException)
        assert failures[name].status() == status, (name, failures[name])
        assert words in failures[name].message(), name
        assert_no_internals(failures[name].message())


def test_shared_memory_is_listed_as_empty_and_cannot_be_registered(ports: Ports) -> None:
    for kind in ("system", "cuda"):
        base = f"/v2/{kind}sharedmemory"
        for method, path in (
            ("GET", "/status"), ("POST", "/unregister"), ("POST", "/region/mine/unregister"),
        ):  # fmt: skip
            direct, through = ports.both(method, base + path)
            assert through.content == direct.content
            assert through.header("content-length") == direct.header("content-length")
        region = ask(ports.gateway, "GET", f"{base}/region/mine/status")
        assert (region.status, region.body) == (200, b"[]")
        for method, path in (("POST", "/status"), ("GET", "/unregister")):
            direct, through = ports.both(method, base + path)
            assert through.status == direct.status
            assert_error(through, 405, "METHOD_NOT_ALLOWED")
    with triton_http.InferenceServerClient(f"127.0.0.1:{ports.gateway}") as client:
        for register, arguments in (
            (client.register_system_shared_memory, ("mine", "/mine", 4)),
            (client.register_cuda_shared_memory, ("mine", b"handle", 0, 4)),
        ):
            with pytest.raises(InferenceServerException, match="shared memory cannot") as caught:
                register(*arguments)
            assert caught.value.status() == "403"


# Bytes.

PAIR = {
    "id": "1",
    "inputs": [
        {"name": "A", "shape": [1, 2], "datatype": "INT32", "data": [1, 2]},
        {"name": "B", "shape": [1, 2], "datatype": "INT32", "data": [3, 4]},
    ],
}
PAIR_JSON = json.dumps(PAIR).encode()
SLICES = [PAIR_JSON[i : i + 7] for i in range(0, len(PAIR_JSON), 7)]


def binary(model_input: str, array: np.ndarray) -> tuple[Headers, bytes]:
    """Return the headers and the body of a request in the binary extension."""
    body, length = triton_http.InferenceServerClient.generate_request_body(
        [tensor(model_input, array)]
    )
    return [("Inference-Header-Content-Length", str(length))], body


BINARY, BINARY_BODY = binary("X", WIDE)
JSON_TYPE = ("Content-Type", "application/json")
# JSON as the body of `wide` is one tensor: its bytes are the values.
EXCHANGES: list[tuple[str, str, Headers, bytes | list[bytes]]] = [
    ("GET", "/v2/health/live", [], b""),
    ("GET", "/v2/health/ready", [], b""),
    ("GET", "/v2", [], b""),
    ("GET", "/v2?a=%20b&a=c+d&&=%zz", [], b""),
    ("GET", "/v2/models/pair", [("Accept-Encoding", "gzip, deflate")], b""),
    ("GET", "/v2/models/pair/ready", [], b""),
    ("GET", "/v2/models/pair/versions/1/ready", [], b""),
    ("GET", "/v2/models/pair/versions/1", [], b""),
    ("GET", "/v2/models/pair/config", [], b""),
    ("GET", "/v2/models/pair/versions/1/config", [], b""),
    ("GET", "/v2/models/pair/stats", [], b""),
    ("GET", "/v2/models/stats", [], b""),
    ("GET", "/v2/logging", [], b""),
    ("GET", "/v2/trace/setting", [], b""),
    ("GET", "/v2/models/pair", BINARY, b""),
    ("POST", "/v2/models/pair/infer", [JSON_TYPE], PAIR_JSON),
    ("POST", "/v2/models/pair/versions/1/infer?a=b", [JSON_TYPE], PAIR_JSON),
    ("POST", "/v2/models/pair/infer", [("Content-Type", "text/nonsense")], PAIR_JSON),
    ("POST", "/v2/models/pair/infer", [JSON_TYPE], [PAIR_JSON]),
    ("POST", "/v2/models/pair/infer", [JSON_TYPE], SLICES),
    ("POST", "/v2/models/pair/infer", [("Expect", "100-continue")], PAIR_JSON),
    ("POST", "/v2/models/pair/infer", [("Content-Encoding", "gzip")], gzip.compress(PAIR_JSON)),
    ("POST", "/v2/models/pair/infer", [("Accept-Encoding", "gzip")], PAIR_JSON),
    ("POST", "/v2/models/wide/infer", BINARY, BINARY_BODY),
    ("POST", "/v2/models/wide/infer", BINARY, [BINARY_BODY[:1000], BINARY_BODY[1000:]]),
    ("POST", "/v2/models/wide/infer", [*BINARY, ("Content-Encoding", "gzip")], gzip.compress(BINARY_BODY)),
    ("POST", "/v2/models/wide/infer", [*BINARY, ("Accept-Encoding", "deflate")], BINARY_BODY),
    ("POST", "/v2/models/wide/infer", [("Inference-Header-Content-Length", "0")], WIDE.tobytes()),
    ("POST", "/v2/models/wide/infer", [("Inference-Header-Content-Length", "0")], [WIDE.tobytes()] * 3),
    ("POST", "/v2/models/text/generate", [], b'{"X": "one", "extra": "kept"}'),
    ("POST", "/v2/models/text/generate", BINARY, b'{"X": "one"}'),
    ("POST", "/v2/models/numbers/generate", [JSON_TYPE], b'{"X": [7, 8], "id": "g"}'),
    ("POST", "/v2/models/numbers/generate_stream", [JSON_TYPE], b'{"X": 9}'),
]  # fmt: skip


def test_response_is_the_same_byte_for_byte(ports: Ports) -> None:
    with Wire(ports.triton) as triton, Wire(ports.gateway) as gateway:
        for exchange in EXCHANGES:
            direct = triton.ask(*exchange)
            response = gateway.ask(*exchange)
            assert direct.status == 200, (exchange[:3], direct)
            length = direct.header("content-length")
            assert response.content == direct.content, exchange[:3]
            assert re.fullmatch("[0-9a-f]{32}", response.header("x-request-id"))
            assert not length or response.header("content-length") == length, exchange[:3]


def test_head_has_no_body_and_leaves_the_connection_usable(ports: Ports) -> None:
    targets = [
        "/v2", "/v2/health/live", "/v2/models/pair", "/v2/models/pair/config", "/v2/models/stats"
    ]  # fmt: skip
    with Wire(ports.gateway) as wire:
        for target in targets:
            whole = ask(ports.triton, "GET", target)
            head = wire.ask("HEAD", target)
            assert head.content == (200, whole.content[1], b"")
            assert head.header("content-length") == whole.header("content-length")
            for _ in range(20):
                assert wire.ask("GET", target).content == whole.content
        refused = wire.ask("HEAD", "/v2/nowhere")
        assert (refused.status, refused.body) == (404, b"")
        assert wire.ask("GET", "/v2").status == 200


@pytest.mark.fault("a client does not read its response")
def test_tensors_of_16_mib_are_streamed_and_not_held(ports: Ports) -> None:
    large = np.arange(4 * MIB, dtype=np.float32)
    headers, body = binary("X", large)
    pieces = [body[i : i + MIB] for i in range(0, len(body), MIB)]
    raw = [("Inference-Header-Content-Length", "0")]
    target = "/v2/models/wide/infer"
    expected = ask(ports.triton, "POST", target, headers, body)
    assert expected.body.endswith(large.tobytes())
    before = peak_bytes(process_listening_at(ports.gateway))
    requests = [(headers, body), (headers, pieces), (headers, body), (raw, [large.tobytes()])]
    with ThreadPoolExecutor(len(requests)) as pool:
        asked = [pool.submit(ask, ports.gateway, "POST", target, *request) for request in requests]
        assert [future.result().content == expected.content for future in asked] == [True] * 4
    grown = peak_bytes(process_listening_at(ports.gateway)) - before
    assert grown < 16 * MIB, f"128 MiB flowed through; held at once: {grown / MIB:.0f} MiB"


def process_listening_at(port: int) -> psutil.Process:
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,):
            return psutil.Process(connection.pid)
    raise AssertionError(f"nobody listens at {port}")


def peak_bytes(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s*(\d+) kB", status)[0]) * 1024


# Streams.


def events(port: int, pause_s: float, status: int = 200) -> Iterator[tuple[float, Any]]:
    """Yield the time of each event of a stream, and its data."""
    url = f"http://127.0.0.1:{port}/v2/models/ticking/generate_stream"
    asked = {"COUNT": 4, "SECONDS": pause_s}
    with httpx.stream("POST", url, json=asked, timeout=TIMEOUT_S) as response:
        assert response.status_code == status
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        for line in response.iter_lines():
            if line:
                yield time.time(), json.loads(line.removeprefix("data: "))


def test_events_of_a_stream_are_passed_as_they_are_produced(ports: Ports) -> None:
    one = b'{"COUNT": 1, "SECONDS": 0}'
    direct, through = ports.both("POST", "/v2/models/ticking/generate_stream", [], one)
    assert through.content[:2] == direct.content[:2]
    assert [event["NUMBER"] for _, event in events(ports.triton, 0)] == [0, 1, 2, 3]
    for pause_s in lengthening(0.05):
        arrived = list(events(ports.gateway, pause_s))
        assert [event["NUMBER"] for _, event in arrived] == [0, 1, 2, 3]
        if all(at < following["MADE"] for (at, _), (_, following) in pairwise(arrived)):
            return
    raise AssertionError("no event arrived before the next one was made")


def test_error_that_begins_a_stream_is_passed_at_once_with_what_follows(ports: Ports) -> None:
    (_, refused), *direct = events(ports.triton, -0.001, status=400)
    assert "boom first" in refused["error"]
    for pause_s in lengthening(0.05):
        (at, refused), *others = events(ports.gateway, -pause_s, status=400)
        assert (refused["error"], refused["code"]) == (
            "boom first at weights.bin",
            "REFUSED_BY_MODEL",
        )
        numbers = [event["NUMBER"] for _, event in others]
        assert numbers == [event["NUMBER"] for _, event in direct] == [0, 1, 2, 3]
        if at < others[0][1]["MADE"]:
            return
    raise AssertionError("the error did not arrive before the model went on")


def test_long_error_that_begins_a_stream_ends_it(faked: tuple[Fake, int]) -> None:
    response = ask(faked[1], "POST", "/v2/models/long_error/generate_stream", [], b"{}")
    assert response.status == 400
    (event,) = response.body.removesuffix(b"\n\n").split(b"\n\n")
    document = json.loads(event.removeprefix(b"data: "))
    assert document["error"] == "Triton rejected the request"


@pytest.mark.fault("exceptions provoked in a model")
def test_error_of_a_stream_is_an_event_without_internals(ports: Ports) -> None:
    target, body = "/v2/models/ticking/generate_stream", b'{"COUNT": -2, "SECONDS": 0}'
    response = ask(ports.gateway, "POST", target, [], body)
    events = filter(None, response.body.split(b"\n\n"))
    *good, bad = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert [event["NUMBER"] for event in good] == [0, 1]
    assert "boom" in bad["error"]
    assert_no_internals(bad["error"])

    # If it is the first event, the stream has an error's status, as Triton's own.
    direct, response = ports.both("POST", "/v2/models/failing/generate_stream", [], b'{"X": 1}')
    assert direct.body.startswith(b'data: {"error":')
    assert direct.body.endswith(b"\n\n")
    assert response.header("content-type") == direct.header("content-type")
    assert direct.status == 400
    assert response.status == 500  # because it is a fault of the model, not of the request
    event = json.loads(response.body.removeprefix(b"data: "))
    assert response.body == b"data: %b\n\n" % serialize_error(
        event["error"], event["code"], event["request_id"]
    )
    assert event["code"] == "MODEL_FAULT"
    assert event["request_id"] == response.header("x-request-id")
    assert "boom 1.0" in event["error"]
    assert_no_internals(event["error"])

    # A request that is refused before there is a stream gets JSON from Triton, too.
    for target, body in (
        ("/v2/models/nobody/generate_stream", b"{}"),
        ("/v2/models/failing/generate_stream", b'{"Z": 1}'),
    ):
        direct, response = ports.both("POST", target, [], body)
        assert (
            response.header("content-type") == direct.header("content-type") == "application/json"
        )


# Requests that are refused.

SPELLINGS = [
    "/v2/%73ystemsharedmemory/status",
    "/v2/systemsharedmemory%2Fstatus",
    "/v2/%63udasharedmemory%2fstatus",
    "/%76%32/systemsharedmemory/status",
    "/v%32/cudasharedmemory/region/mine/register",
    "//v2/systemsharedmemory/status",
    "/v2//cudasharedmemory/status",
    "/v2/./systemsharedmemory/status",
    "/v2/models/../systemsharedmemory/status",
    "/v2/models/%2e%2e/systemsharedmemory/status",
    "/V2/SystemSharedMemory/status",
    "/v2/systemsharedmemory;x/status",
    "/v2/systemsharedmemory%00/status",
]
PLAIN = [
    f"/v2/{kind}sharedmemory{rest}"
    for kind in ("system", "cuda")
    for rest in ("", "/", "/region/mine", "/region/mine/register", "/region//status", "/register")
] + [
    "http://somewhere/v2/systemsharedmemory/region/mine/register",
    "/v2/systemsharedmemory/region/mine/register?a=b",
]
# Answered by the gateway itself.
ANSWERED = [
    f"/v2/{kind}sharedmemory{rest}"
    for kind in ("system", "cuda")
    for rest in ("/status", "/region/mine/status", "/unregister", "/region/mine/unregister?a=b")
] + ["http://somewhere/v2/systemsharedmemory/status", "/v2/systemsharedmemory/status?a=b"]


@pytest.mark.fault("shared memory of the machine, however it is spelled")
def test_shared_memory_in_any_spelling_never_reaches_triton(
    faked: tuple[Fake, int],
) -> None:
    fake, gateway = faked
    with Wire(gateway) as wire:
        for target in ANSWERED:
            method = "POST" if "unregister" in target else "GET"
            assert wire.ask(method, target, [], b"{}" * (method == "POST")).status == 200
        for target in PLAIN:
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
                sentence = assert_error(wire.ask(method, target), 403, "FORBIDDEN")
                assert "send the tensors in the body" in sentence
            assert (wire.ask("HEAD", target).status, wire.ask("POST", target).status) == (403, 403)
        for target in SPELLINGS:
            for method in ("GET", "POST"):
                response = wire.ask(method, target)
                assert response.status in (400, 403, 404), (method, target)
                assert json.loads(response.body).keys() == {"error", "code", "request_id"}
        assert fake.requests.empty()
        assert wire.ask("GET", "/v2").body == FAKE_BODY
    assert fake.requests.get(timeout=TIMEOUT_S)[0].startswith(b"GET /v2 ")


@pytest.mark.fault("names with ../, %00, CR and LF, of 300 characters; invalid versions")
def test_error_has_the_status_and_code_of_the_gateway(
    ports: Ports, subtests: pytest.Subtests
) -> None:
    infer = "/v2/models/pair/infer"
    body, large = b"{}", bytes(3 * MIB)
    tensor_of_one = {"name": "X", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    one = json.dumps({"inputs": [tensor_of_one]}).encode()
    not_found = (404, "NOT_FOUND")
    unknown_model = (404, "MODEL_NOT_FOUND")
    wrong_method = (405, "METHOD_NOT_ALLOWED")
    malformed = (400, "MALFORMED_REQUEST")
    fault = (500, "MODEL_FAULT")
    of_header = BINARY[0][0]
    table: list[tuple[tuple[Any, ...], tuple[int, str], str, str]] = [
        (("GET", "/v2/nowhere"), not_found, "", ""),
        (("POST", "/v2/models/pair/nowhere", [], large), not_found, "", ""),
        (("GET", "/v2/models//config"), not_found, "", ""),
        (("GET", "/v2/models/pair/versions/1/nowhere"), not_found, "", ""),
        (("GET", infer), wrong_method, "POST", ""),
        (("PUT", infer, [], body), wrong_method, "POST", ""),
        (("DELETE", "/v2/models/pair"), wrong_method, "GET, HEAD", ""),
        (("POST", "/v2/models/pair", [], large), wrong_method, "GET, HEAD", ""),
        (("POST", "/v2/health/live", [], [large]), wrong_method, "GET, HEAD", ""),
        (("PUT", "/v2/logging", [], body), wrong_method, "GET, HEAD, POST", ""),
        (("GET", "/v2/models/nobody"), unknown_model, "", "nobody"),
        (("GET", "/v2/models/nobody/config"), unknown_model, "", "nobody"),
        (("POST", "/v2/models/nobody/infer", [], large), unknown_model, "", "nobody"),
        (("POST", "/v2/models/nobody/generate_stream", [], body), unknown_model, "", "nobody"),
        (("GET", "/v2/models/nobody/ready"), (503, "MODEL_NOT_READY"), "", ""),
        (("GET", "/v2/models/pair/versions/9/config"), unknown_model, "", "version 9"),
        (("GET", "/v2/models/pair/versions/9/stats"), unknown_model, "", "version 9"),
        (("GET", f"/v2/models/pair/versions/{'9' * 20}"), malformed, "", "(details: stol), version"),
        (("POST", "/v2/models/pair/versions/9/infer", [], PAIR_JSON), unknown_model, "", "version 9"),
        (("POST", "/v2/models/pair/versions/9/generate", [], body), unknown_model, "", "version 9"),
        (("POST", infer, [], b"not JSON"), malformed, "", ""),
        (("POST", infer, [], body), malformed, "", ""),
        (("POST", infer, [("X-Request-Timeout", "soon")], body), malformed, "", ""),
        (("POST", "/v2/models/wide/infer", [(of_header, "9999")], body), malformed, "", "header size"),
        (("POST", "/v2/models/wide/infer", [(of_header, "-1")], body), malformed, "", "header size"),
        (("POST", "/v2/models/failing/infer", [], one), fault, "", "boom 1.0"),
        (("POST", "/v2/models/failing/generate", [], b'{"X": 1}'), fault, "", "boom 1.0"),
    ]  # fmt: skip
    with Wire(ports.gateway) as wire:  # one connection: a refusal leaves nothing of the body behind
        for request, (status, code), allow, words in table:
            with subtests.test(f"{request[0]} {request[1]}"):
                response = wire.ask(*request)
                assert words in assert_error(response, status, code)
                assert response.header("allow") == allow
                assert wire.ask("GET", "/v2/health/live").status == 200


def test_model_that_is_not_loaded_is_503_on_each_of_its_paths(ports: Ports) -> None:
    repository = "/v2/repository/models/numbers"
    assert ask(ports.gateway, "POST", f"{repository}/unload").status == 200
    try:
        for path in ("", "/config", "/versions/1", "/trace/setting", "/stats"):
            refused = ask(ports.gateway, "GET", f"/v2/models/numbers{path}")
            assert "'numbers' is not ready" in assert_error(refused, 503, "MODEL_NOT_READY")
    finally:
        assert ask(ports.gateway, "POST", f"{repository}/load").status == 200


# A target, headers, and the status. Triton closes the connection of a longer one.
LONG_HEADS = {
    "value": ("/v2/models/pair", [("X-Any", "a" * 8191)], 200),
    "longer value": ("/v2/models/pair", [("X-Any", "a" * 8192)], 431),
    "name": ("/v2/models/pair", [("X" * 8192, "a")], 431),
    "weights": ("/v2/models/pair", [("Accept-Encoding", "gzip;q=0.5," + "gzip," * 1600)], 431),
    "query": ("/v2/models/pair?".ljust(8100, "a"), [], 200),
    "longer query": ("/v2/models/pair?".ljust(8101, "a"), [], 414),
}


@pytest.mark.parametrize(
    ("target", "headers", "status"), LONG_HEADS.values(), ids=LONG_HEADS.keys()
)
def test_head_that_triton_does_not_accept_is_no_fault_of_the_replica(
    ports: Ports, target: str, headers: Headers, status: int
) -> None:
    response = ask(ports.gateway, "GET", target, headers)
    assert response.status == status
    if status != 200:
        assert_error(response, status, {414: "URL_TOO_LONG", 431: "HEADER_TOO_LARGE"}[status])


def test_long_trace_context_is_not_sent_to_triton(ports: Ports) -> None:
    document = b'{"inputs": {"A": [1, 2], "B": [3, 4]}}'
    headers = [("Content-Type", "application/json"), ("tracestate", "a" * 9000)]
    assert ask(ports.gateway, "POST", "/v1/models/pair/infer", headers, document).status == 200


@pytest.mark.fault("bodies over the limit, with a length or chunked")
def test_body_over_the_limit_is_413_with_a_length_or_chunked(limited: int) -> None:
    def pieces(count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield bytes(100_000)

    target, headers = "/v2/models/wide/infer", [("Inference-Header-Content-Length", "0")]
    for body, status in (
        (bytes(1_000_000), 200), (bytes(1_000_001), 413), (pieces(10), 200), (pieces(11), 413),
    ):  # fmt: skip
        response = ask(limited, "POST", target, headers, body)
        assert response.status == status
        if status == 413:
            assert "1000000 bytes" in assert_error(response, 413, "TOO_LARGE")


TAKING_BODIES = [
    "/v2/models/pair/infer", "/v2/models/pair/versions/1/infer", "/v2/models/pair/generate",
    "/v2/models/ticking/generate_stream", "/v2/logging", "/v2/trace/setting",
    "/v2/models/pair/trace/setting", "/v2/repository/index", "/v2/repository/models/pair/load",
    "/v2/repository/models/pair/unload",
]  # fmt: skip


def test_content_encoding_that_triton_lacks_is_415_on_every_route(ports: Ports) -> None:
    with Wire(ports.gateway) as wire:
        for target in TAKING_BODIES:
            for encoding, body in (("br", PAIR_JSON), ("gzip, br", SLICES)):
                response = wire.ask("POST", target, [("Content-Encoding", encoding)], body)
                sentence = assert_error(response, 415, "UNSUPPORTED_BODY")
                assert f"Content-Encoding '{encoding}'" in sentence
                assert response.header("accept-encoding") == "gzip, deflate"
        assert wire.ask("GET", "/v2/models/pair/ready").status == 200  # nothing was unloaded


def test_body_that_does_not_match_its_content_encoding_is_400(ports: Ports) -> None:
    target = "/v2/models/pair/infer"
    headers = [("Content-Encoding", "gzip")]
    for body in (b"plain", gzip.compress(b"cut short")[:-9], gzip.compress(b"x") + b"more"):
        response = ask(ports.gateway, "POST", target, headers, body)
        sentence = assert_error(response, 400, "MALFORMED_REQUEST")
        assert "compressed" in sentence or "Content-Encoding" in sentence
    twice = [*headers, ("Content-Encoding", "identity")]
    response = ask(ports.gateway, "POST", target, twice, gzip.compress(PAIR_JSON))
    assert "more than one Content-Encoding" in assert_error(response, 400, "MALFORMED_REQUEST")


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "two members": lambda body: gzip.compress(body[:10]) + gzip.compress(body[10:]),
}


@pytest.mark.parametrize("way", COMPRESSED)
def test_body_that_inflates_beyond_the_limit_is_413(limited: int, way: str) -> None:
    target = "/v2/models/wide/infer"
    compress = COMPRESSED[way]
    headers = [
        ("Inference-Header-Content-Length", "0"),
        ("Content-Encoding", "deflate" if way == "deflate" else "gzip"),
    ]
    for size in (1_000_001, 20_000_000):
        body = compress(bytes(size))
        for sent in (body, pieces_of(body)):
            response = ask(limited, "POST", target, headers, sent)
            assert "1000000 bytes" in assert_error(response, 413, "TOO_LARGE")
    text = compress(PAIR_JSON)
    for sent in (text, pieces_of(text)):
        response = ask(limited, "POST", "/v2/models/pair/infer", headers[1:], sent)
        assert response.status == 200


def pieces_of(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 50):
        yield body[start : start + 50]


# Headers.

PASSED = [
    ("Content-Type", "application/json"),
    ("Accept", "a/b"),
    ("Accept-Encoding", "gzip"),
    ("User-Agent", "caf\xe9 \xff"),
    ("X-Two", "first"),
    ("X-Two", "second"),
    ("X-Request-ID", "mine"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("Cookie", "a=b"),
]
STOPPED = [
    ("Connection", "keep-alive, X-Named"),
    ("Connection", "x-also-named, Content-Length, Transfer-Encoding"),
    ("X-Named", "secret"),
    ("X-Also-Named", "secret"),
    ("Keep-Alive", "timeout=5"),
    ("Proxy-Connection", "keep-alive"),
    ("Proxy-Authorization", "Basic secret"),
    ("TE", "trailers"),
    ("Trailer", "X-Last"),
    ("Upgrade", "h2c"),
    ("Expect", "100-continue"),
    ("Authorization", "Bearer secret"),
    ("X-API-Key", "secret"),
    ("X-Request-Timeout", "20"),
]


@pytest.mark.fault("keys in requests that fail, `Connection` headers that name the key's header")
def test_request_headers_for_triton_are_passed_and_no_others(faked: tuple[Fake, int]) -> None:
    fake, gateway = faked
    target = "/v2/models/a%20b/versions/1/infer?x=%zz&y=a+b&&z"
    bodies: list[tuple[bytes | list[bytes], set[str]]] = [
        (b"a body", {"content-length: 6"}),
        # In pieces, or in one when all of them were here at once.
        ([b"in", b" ", b"pieces"], {"transfer-encoding: chunked", "content-length: 9"}),
    ]
    passed = [f"{name.lower()}: {value}" for name, value in PASSED]
    for body, framings in bodies:
        assert ask(gateway, "POST", target, [*PASSED, *STOPPED], body).body == FAKE_BODY
        head, received = fake.requests.get(timeout=TIMEOUT_S)
        first, *lines = head.decode("latin-1").splitlines()
        assert first == f"POST {target} HTTP/1.1"
        assert [line for line in lines if line in passed] == passed
        host, framing = (line for line in lines if line not in passed)
        assert host == f"host: 127.0.0.1:{fake.port}"
        assert framing in framings
        assert received == (body if isinstance(body, bytes) else b"".join(body))


def test_request_that_is_repeated_reaches_triton_unchanged(faked: tuple[Fake, int]) -> None:
    fake, gateway = faked
    requests = [b"GET /v2/models/a HTTP/1.1\r\nHost: x\r\n\r\n"]  # the gateway adds the framing
    for encoding, body in ((b"gzip", gzip.compress(b"{}")), (b"identity", b"{}")):
        head = b"POST /v2/models/a/infer HTTP/1.1\r\nHost: x\r\nContent-Encoding: %b\r\n" % encoding
        requests.append(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    for request in requests:
        with Wire(gateway) as wire:
            ids = set()
            for _ in range(4):
                wire.socket.sendall(request)
                response = wire.read()
                assert response.status == 200
                ids.add(response.header("x-request-id"))
        assert len(ids) == 4
        first, *others = [fake.requests.get(timeout=TIMEOUT_S) for _ in range(4)]
        assert others == [first] * 3


def test_response_headers_of_triton_are_passed_unchanged(faked: tuple[Fake, int]) -> None:
    fake, gateway = faked
    response = ask(gateway, "GET", "/v2/models/odd")
    assert fake.requests.get(timeout=TIMEOUT_S)[0].startswith(b"GET /v2/models/odd ")
    assert response.headers[:-1] == [
        ("x-two", "first"),
        ("x-odd", "caf\xe9 \xff"),
        ("x-two", "second"),
        ("content-length", "2"),
        ("server", "a fake"),
        ("x-content-type-options", "nosniff"),
    ]
    assert response.headers[-1][0] == "x-request-id"


# Clients that disconnect.


def before_the_answer(wire: Wire) -> None:
    wire.send("POST", "/v2/models/silent/infer", [], b"{}")


def in_the_middle_of_the_answer(wire: Wire) -> None:
    wire.send("POST", "/v2/models/half/infer", [], b"{}")
    assert wire.socket.recv(10)


def in_the_middle_of_the_events(wire: Wire) -> None:
    wire.send("POST", "/v2/models/events/generate_stream", [], b"{}")
    received = b""
    while b"data: one" not in received:
        data = wire.socket.recv(65536)
        assert data, received
        received += data


def in_the_middle_of_the_body(wire: Wire) -> None:
    head = "POST /v2/models/whole/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n"
    wire.socket.sendall(head.encode() + bytes(500_000))


def in_the_middle_of_a_chunk(wire: Wire) -> None:
    head = "POST /v2/models/whole/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    # As much as is sent on before it is whole.
    wire.socket.sendall(head.encode() + b"20001\r\n%b\r\nff\r\nnot all" % bytes(0x20001))


@pytest.mark.fault("a client disconnects")
@pytest.mark.parametrize(
    "leaves",
    [
        before_the_answer,
        in_the_middle_of_the_answer,
        in_the_middle_of_the_events,
        in_the_middle_of_the_body,
        in_the_middle_of_a_chunk,
    ],
)
def test_client_that_disconnects_ends_the_request_to_triton(
    faked: tuple[Fake, int], leaves: Callable[[Wire], None]
) -> None:
    """The gateway stays healthy; the connection to Triton is closed, long before the request's deadline,
    and never used again."""
    fake, gateway = faked
    before = fake.opened
    for _ in range(3):
        with Wire(gateway) as wire:
            leaves(wire)
            fake.heads.get(timeout=TIMEOUT_S)
        try:
            fake.aborted.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise AssertionError("the request to Triton is still open") from None
    with Wire(gateway) as wire:
        for _ in range(5):
            assert wire.ask("GET", "/v2").body == FAKE_BODY
        assert wire.ask("GET", "/livez").status == 200
    assert fake.opened - before in (3, 4)  # the first may find a connection of an earlier test
