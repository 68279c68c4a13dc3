"""Requests that are wrong or hostile, before a real Triton."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.errors import assert_error
from tests.support.fake_triton import port_of
from tests.support.measurements import assert_number, forget_peaks, peak_bytes, process_tree
from tests.support.model_zoo.zoo import AS_WRITTEN, Zoo
from tests.support.servers import Command, gateway
from tests.support.wait import TIMEOUT_S

MIB = 1 << 20
TEXTS, NUMBERS = "single_BYTES", "batched_FP32"  # models


@pytest.fixture(scope="module")
def running(zoo_triton: EmbeddedTriton) -> Iterator[tuple[httpx.Client, Command]]:
    """A gateway whose memory and time no other test uses."""
    with gateway(zoo_triton.options.url, connect_timeout_s="10") as (client, command):
        Zoo(client, AS_WRITTEN).load(TEXTS, NUMBERS)
        yield client, command


@pytest.fixture
def client(running: tuple[httpx.Client, Command]) -> httpx.Client:
    return running[0]


@pytest.fixture
def pid(running: tuple[httpx.Client, Command]) -> int:
    return running[1].pid


JSON = {"Content-Type": "application/json"}
GOOD: dict[str, Any] = {"name": "X", "datatype": "FP32", "shape": [1, 1, 2], "data": [1, 2]}
TENSORS: dict[str, dict[str, Any]] = {
    "a negative dimension": {"inputs": [{**GOOD, "shape": [1, 1, -2]}]},
    "a dimension of 2⁶³": {"inputs": [{**GOOD, "shape": [1, 1, 2**63]}]},
    "a dimension that is none": {"inputs": [{**GOOD, "shape": [1, 1, "two"]}]},
    "no shape": {"inputs": [{"name": "X", "datatype": "FP32", "data": [1, 2]}]},
    "no dimensions": {"inputs": [{**GOOD, "shape": []}]},
    "a batch of 0": {"inputs": [{**GOOD, "shape": [0, 1, 2], "data": []}]},
    "a batch that is too large": {"inputs": [{**GOOD, "shape": [9, 1, 2], "data": [1] * 18}]},
    "too few values": {"inputs": [{**GOOD, "data": [1]}]},
    "too many values": {"inputs": [{**GOOD, "data": [1, 2, 3]}]},
    "ragged values": {"inputs": [{**GOOD, "data": [[1, 2], [3]]}]},
    "texts": {"inputs": [{**GOOD, "data": ["a", "b"]}]},
    "no values": {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1, 2]}]},
    "values that are none": {"inputs": [{**GOOD, "data": {"a": 1}}]},
    "another datatype": {"inputs": [{**GOOD, "datatype": "INT64"}]},
    "a datatype that is none": {"inputs": [{**GOOD, "datatype": "FP7"}]},
    "an unknown input": {"inputs": [{**GOOD, "name": "Z"}]},
    "an input twice": {"inputs": [GOOD, GOOD]},
    "no input": {"inputs": []},
    "inputs that are none": {"inputs": {"X": [1, 2]}},
    "an unknown output": {"inputs": [GOOD], "outputs": [{"name": "Z"}]},
    "a length of −1": {"inputs": [{**GOOD, "parameters": {"binary_data_size": -1}}]},
    "a length of 2⁶³": {"inputs": [{**GOOD, "parameters": {"binary_data_size": 2**63}}]},
    "a region of shared memory": {
        "inputs": [{**GOOD, "parameters": {"shared_memory_region": "a", "shared_memory_byte_size": 8}}]
    },
    "a sequence that is none": {"inputs": [GOOD], "parameters": {"sequence_id": []}},
}  # fmt: skip


@pytest.mark.fault(
    "tensors with missing, unknown or duplicate inputs, ragged, of a wrong type, count"
)
def test_invalid_tensors_over_v2_are_client_errors(
    client: httpx.Client,
) -> None:
    """Triton itself answers 500 to some of them, and accepts some."""
    wrong = []
    url = f"/v2/models/{NUMBERS}"
    for name, document in TENSORS.items():
        answer = client.post(f"{url}/infer", json=document)
        if answer.status_code not in (200, 400, 404, 422):
            wrong.append((name, answer.status_code, answer.text))
    for version, status in (("abc", 400), ("99", 404), ("-1", 400)):
        answer = client.post(f"{url}/versions/{version}/infer", json={"inputs": [GOOD]})
        if answer.status_code not in (status, 404):
            wrong.append((f"version {version}", answer.status_code, answer.text))
    assert wrong == [], "\n".join(map(str, wrong))
    assert client.post(f"{url}/infer", json={"inputs": [GOOD]}).status_code == 200


@pytest.mark.long
@pytest.mark.fault("invalid gzip, or 10 MB of gzip that decompress to 10 GB")
def test_gzip_bomb_is_413_and_not_inflated_in_memory(client: httpx.Client, pid: int) -> None:
    bomb = gzip.compress(bytes(100_000_000), 9) * 100
    forget_peaks(pid)
    before = peak_bytes(pid)
    for path in (f"/v1/models/{TEXTS}/infer", f"/v2/models/{TEXTS}/infer"):
        headers = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
        answer = client.post(path, content=bomb, headers=headers)
        assert_error(answer, 413, "TOO_LARGE", "")
    grown_mib = (peak_bytes(pid) - before) / MIB
    assert grown_mib < 200, f"{grown_mib:.0f} MiB more memory"


@pytest.mark.fault("65,537 chunks of six bytes, JSON with 100,000 keys")
def test_body_of_65_537_small_chunks_is_accepted(client: httpx.Client) -> None:
    """Each part of a body costs something: many small ones must not cost much."""
    count = 65_537
    head = f"POST /v1/models/{TEXTS}/infer HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
    wire = head.encode() + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire += b"6\r\nsix by\r\n" * count + b"0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port_of(client)), TIMEOUT_S) as sent:
        sent.sendall(wire)
        answer = b"".join(iter(lambda: sent.recv(MIB), b""))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"six by") == count


def cpu_s(pid: int, work: Callable[[], object]) -> float:
    """Return the CPU seconds of a process and its children during `work`; the least of three runs."""
    # As clock_getcpuclockid(3) names them.
    clocks = [~each << 3 | 2 for each in process_tree(pid)]

    def once() -> float:
        before = sum(map(time.clock_gettime, clocks))
        work()
        return sum(map(time.clock_gettime, clocks)) - before

    return min(once() for _ in range(3))


@pytest.mark.long
@pytest.mark.fault("65,537 chunks of six bytes, JSON with 100,000 keys")
@pytest.mark.parametrize(
    ("known", "status"), [({}, 422), ({"inputs": "a"}, 400)], ids=["inputs", "fields"]
)
def test_json_with_100_000_keys_has_a_linear_cost(
    client: httpx.Client, pid: int, known: dict[str, str], status: int
) -> None:
    """About as much as eight documents of an eighth of the keys, and not eight times as much."""

    def post(keys: int) -> httpx.Response:
        unknown = {f"k{number}": 1 for number in range(keys)}
        document = {**known, **unknown} if known else {"inputs": unknown}
        return client.post(f"/v1/models/{TEXTS}/infer", content=json.dumps(document), headers=JSON)

    answer = post(100_000)
    whole_s = cpu_s(pid, lambda: post(100_000))
    parts_s = cpu_s(pid, lambda: [post(12_500) for _ in range(8)])
    assert answer.status_code == status
    assert len(answer.content) < 10_000
    assert whole_s < 4 * parts_s, f"{whole_s:.3f} s of CPU, eight parts {parts_s:.3f} s"
    assert_number("answered after", answer.elapsed.total_seconds(), "s", at_most=2)
