"""Invalid responses of a replica: the gateway answers 502, and its memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from gateway.fleet.index import MAX_INDEX_ENTRIES
from tests.support.errors import assert_error
from tests.support.scripted_server import (
    METADATA,
    TEXT,
    Replica,
    replica_with_invalid_messages,
    scripted_replica,
)
from tests.support.servers import gateway
from tests.support.wait import wait_until

MIB = 1 << 20
NUMBER = {"name": "Y", "datatype": "FP32", "shape": [1]}
UNREADABLE: dict[str, Any] = {
    "a number as BYTES": {"outputs": [{**TEXT, "data": [1]}]},
    "null as BYTES": {"outputs": [{**TEXT, "data": [None]}]},
    "half a surrogate": {"outputs": [{**TEXT, "data": ["\ud800"]}]},
    "a name that is none": {"outputs": [{**TEXT, "name": 1, "data": ["a"]}]},
    "a name of half a surrogate": {"outputs": [{**TEXT, "name": "\udfff", "data": ["a"]}]},
    "no datatype": {"outputs": [{"name": "Y", "shape": [1], "data": ["a"]}]},
    "an unknown datatype": {"outputs": [{**TEXT, "datatype": "TEXT", "data": ["a"]}]},
    "a datatype that is none": {"outputs": [{**TEXT, "datatype": ["BYTES"], "data": ["a"]}]},
    "a wrong shape": {"outputs": [{**TEXT, "shape": [2], "data": ["a"]}]},
    "a shape that is none": {"outputs": [{**TEXT, "shape": "a", "data": ["a"]}]},
    "an enormous shape": {"outputs": [{**TEXT, "shape": [1 << 62], "data": ["a"]}]},
    "a shape of large numbers": {"outputs": [{**TEXT, "shape": [1 << 70], "data": ["a"]}]},
    "a number out of range": {
        "outputs": [{"name": "Y", "datatype": "INT8", "shape": [1], "data": [1 << 70]}]
    },
    "ragged data": {"outputs": [{**NUMBER, "shape": [2], "data": [[1], [1, 2]]}]},
    "an object as data": {"outputs": [{**TEXT, "data": {"a": 1}}]},
    "no data": {"outputs": [TEXT]},
    "a size of what is not there": {"outputs": [{**TEXT, "parameters": {"binary_data_size": 99}}]},
    "outputs that are none": {"outputs": 1},
    "no object": [1],
    "a version of half a surrogate": {"model_version": "\ud800", "outputs": []},
    "no JSON": b"{",
    "deep JSON": b"[" * 100_000,
    "numbers in place of texts": {"outputs": [{**NUMBER, "data": [1.5]}]},
}
METADATAS: dict[str, Any] = {
    "inputs that are none": {**METADATA, "inputs": 1},
    "no name": {"inputs": [], "outputs": []},
    "a shape of texts": {**METADATA, "inputs": [{**TEXT, "shape": ["a"]}]},
    "an unknown datatype": {**METADATA, "inputs": [{**TEXT, "datatype": "X"}]},
    "a list": [1],
    "a text": "a",
    "null": None,
    "deep": b"[" * 100_000,
}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[httpx.Client, psutil.Process]]:
    with (
        scripted_replica() as replica,
        gateway(replica, max_answer_bytes=str(64 * MIB)) as (client, command),
    ):
        yield client, psutil.Process(command.pid)


def infer(client: httpx.Client, model: str, accept: str = "application/json") -> httpx.Response:
    headers = {"Content-Type": "text/plain", "Accept": accept}
    return client.post(f"/v1/models/{model}/infer", content="a", headers=headers)


@pytest.mark.long
@pytest.mark.fault(
    "a response is valid HTTP but not a Triton response: JSON of other types, shapes and"
)
@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_inference_response_is_502(
    served: tuple[httpx.Client, psutil.Process], name: str
) -> None:
    client, _ = served
    Replica.answers = {"m": UNREADABLE[name]}
    for accept in ("application/json", "application/octet-stream", "application/x-npz"):
        response = infer(client, "m", accept)
        if name == "numbers in place of texts" and accept != "application/octet-stream":
            assert response.status_code == 200
        else:
            assert_error(response, 502, "BAD_UPSTREAM", "replica")


@pytest.mark.fault(
    "a response is valid HTTP but not a Triton response: JSON of other types, shapes and"
)
def test_texts_in_a_json_response_are_read(served: tuple[httpx.Client, psutil.Process]) -> None:
    client, _ = served
    Replica.answers = {"m": {"model_version": "1", "outputs": [{**TEXT, "data": ["caf\u00e9"]}]}}
    assert infer(client, "m").json()["outputs"] == {"Y": ["caf\u00e9"]}
    assert infer(client, "m", "application/octet-stream").content == "caf\u00e9".encode()


@pytest.mark.fault(
    "a response is valid HTTP but not a Triton response: JSON of other types, shapes and"
)
@pytest.mark.parametrize("name", METADATAS)
@pytest.mark.parametrize("what", ["metadata", "config"])
def test_unreadable_metadata_or_config_is_502(
    served: tuple[httpx.Client, psutil.Process], what: str, name: str
) -> None:
    client, _ = served
    model = f"{what}-{name}".replace(" ", "-")
    document = METADATAS[name]
    if what == "config" and isinstance(document, dict):
        document = {"input": 1} if "none" in name else {"max_batch_size": name}
    Replica.answers = {f"{what} {model}": document}
    assert_error(client.get(f"/v1/models/{model}"), 502, "BAD_UPSTREAM", "replica")


@pytest.mark.fault("a response does not end, or is larger than the limit")
@pytest.mark.parametrize("what", ["metadata", "config", "inference"])
def test_endless_response_is_502_and_not_kept_in_memory(
    served: tuple[httpx.Client, psutil.Process], what: str
) -> None:
    client, process = served
    model = f"endless-{what}"
    Replica.answers = {model if what == "inference" else f"{what} {model}": ...}
    before = process.memory_info().rss
    response = infer(client, model)
    assert_error(response, 502, "BAD_UPSTREAM", "exceeds the limit of")
    assert process.memory_info().rss - before < 400 * MIB
    Replica.answers = {"m": {"outputs": [{**TEXT, "data": ["a"]}]}}
    assert infer(client, "m").status_code == 200


def list_ready(count: int) -> list[dict[str, str]]:
    return [{"name": f"model{at}", "version": "1", "state": "READY"} for at in range(count)]


@pytest.mark.fault("a replica lists more than 50,000 models")
def test_index_with_too_many_models_is_ignored(
    served: tuple[httpx.Client, psutil.Process],
) -> None:
    """An index of 350,000 entries took seconds of the event loop."""
    client, _ = served

    def read_replica() -> Any:
        (replica,) = client.get("/v1/replicas").json()["replicas"]
        return replica

    Replica.answers = {"index": list_ready(MAX_INDEX_ENTRIES + 1)}
    wait_until(lambda: "more than 50000 entries" in str(read_replica()))
    Replica.answers = {"index": list_ready(2000)}  # in a thread
    wait_until(lambda: read_replica()["models"].get("model1999") == "READY")
    assert read_replica()["state"] == "UP"
    Replica.answers = {"index": []}
    wait_until(lambda: not read_replica()["models"])


@pytest.mark.fault(
    "a response is valid HTTP but not a Triton response: JSON of other types, shapes and"
)
def test_unreadable_message_of_a_stream_is_502() -> None:
    with replica_with_invalid_messages() as url, gateway(url) as (client, _):
        answer = infer(client, "m", "text/event-stream")
        assert_error(answer, 502, "BAD_UPSTREAM", "the replica's inference response is invalid")
