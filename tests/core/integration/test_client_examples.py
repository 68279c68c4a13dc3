"""The calls of Triton's own example programs, in their order: Triton and the gateway pass alike.

Each function is named after the program of github.com/triton-inference-server/client whose calls it makes,
or after the test of the server's `qa` folder. Both are used to check that a deployment works.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.model_zoo.zoo import Model, Names, T, identity, write_repository
from tests.support.servers import gateway_before, triton_with

pytestmark = pytest.mark.long


SHAPE = (1, 16)


def sum_and_difference(name: str, datatype: str) -> Model:
    inputs = tuple(T(f"INPUT{number}", datatype, (16,)) for number in range(2))
    outputs = tuple(T(f"OUTPUT{number}", datatype, (16,)) for number in range(2))
    return Model(name, "sum_and_difference", inputs, outputs, 8)


MODELS = (
    sum_and_difference("simple", "INT32"),
    sum_and_difference("simple_string", "BYTES"),
    identity("never_loaded", "INT32", (-1,)),
)
LOADED = ("simple", "simple_string")
QUERY = {"test_1": 1, "test_2": 2}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    folder = tmp_path_factory.mktemp("examples")
    write_repository(folder, Names(), MODELS)
    with triton_with((folder,), LOADED) as triton:
        yield triton


@pytest.fixture(scope="module")
def gateway(triton: EmbeddedTriton) -> Iterator[httpx.Client]:
    with gateway_before(triton.options.url, model_uploads="code") as client:
        yield client


@pytest.fixture(params=["triton", "gateway"])
def address(request: pytest.FixtureRequest, triton: EmbeddedTriton, gateway: httpx.Client) -> str:
    """The address of the real Triton, where the calls must pass as well, and of the gateway before it."""
    return (
        triton.options.address
        if request.param == "triton"
        else f"127.0.0.1:{gateway.base_url.port}"
    )


@pytest.fixture
def client(address: str) -> Iterator[triton_http.InferenceServerClient]:
    with triton_http.InferenceServerClient(address) as client:
        yield client


FIRST = np.arange(16, dtype=np.int32).reshape(SHAPE)
SECOND = np.full(SHAPE, -1, dtype=np.int32)


def tensors(first: np.ndarray, second: np.ndarray, datatype: str) -> list[triton_http.InferInput]:
    inputs = [triton_http.InferInput(name, SHAPE, datatype) for name in ("INPUT0", "INPUT1")]
    inputs[0].set_data_from_numpy(first, binary_data=False)
    inputs[1].set_data_from_numpy(second, binary_data=True)
    return inputs


def outputs() -> list[triton_http.InferRequestedOutput]:
    return [
        triton_http.InferRequestedOutput("OUTPUT0", binary_data=True),
        triton_http.InferRequestedOutput("OUTPUT1", binary_data=False),
    ]


def request(model: str = "simple", **more: Any) -> dict[str, Any]:
    inputs = tensors(FIRST, SECOND, "INT32")
    return {"model_name": model, "inputs": inputs, "query_params": QUERY, **more}


def assert_sum_and_difference(result: triton_http.InferResult) -> None:
    assert (result.as_numpy("OUTPUT0") == FIRST + SECOND).all()
    assert (result.as_numpy("OUTPUT1") == FIRST - SECOND).all()


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_simple_http_infer_client(
    client: triton_http.InferenceServerClient, compression: str | None
) -> None:
    compressed: dict[str, Any] = {
        "request_compression_algorithm": compression,
        "response_compression_algorithm": compression,
    }
    assert_sum_and_difference(client.infer(**request(outputs=outputs(), **compressed)))
    statistics = client.get_inference_statistics(model_name="simple")
    assert len(statistics["model_stats"]) == 1
    assert_sum_and_difference(client.infer(**request(outputs=None, **compressed)))
    with pytest.raises(InferenceServerException) as caught:
        client.infer(**request("wrong_model_name", outputs=outputs()))
    assert caught.value.message().startswith("Request for unknown model")


async def test_simple_http_aio_infer_client(address: str) -> None:
    async with triton_aio.InferenceServerClient(address) as client:
        assert_sum_and_difference(await client.infer(**request(outputs=outputs())))
        statistics = await client.get_inference_statistics(model_name="simple")
        assert len(statistics["model_stats"]) == 1
        assert_sum_and_difference(await client.infer(**request(outputs=None)))
        with pytest.raises(InferenceServerException) as caught:
            await client.infer(**request("wrong_model_name", outputs=outputs()))
        assert caught.value.message().startswith("Request for unknown model")
        both = (client.infer(**request(outputs=outputs())), client.infer(**request()))
        for result in await asyncio.gather(*both):
            assert_sum_and_difference(result)


def test_simple_http_async_infer_client(address: str) -> None:
    with triton_http.InferenceServerClient(address, concurrency=2) as client:
        started = [client.async_infer(**request(outputs=outputs())) for _ in range(2)]
        for result in started:
            assert_sum_and_difference(result.get_result())


def test_simple_http_string_infer_client(client: triton_http.InferenceServerClient) -> None:
    first, second = (np.char.encode(each.astype(str)).astype(object) for each in (FIRST, SECOND))
    result = client.infer("simple_string", tensors(first, second, "BYTES"), outputs=outputs())
    assert (result.as_numpy("OUTPUT0").astype(int) == FIRST + SECOND).all()
    assert (result.as_numpy("OUTPUT1").astype(int) == FIRST - SECOND).all()


def test_simple_http_health_metadata(client: triton_http.InferenceServerClient) -> None:
    assert client.is_server_live(query_params=QUERY)
    assert client.is_server_ready()
    assert client.is_model_ready("simple")
    assert client.get_server_metadata()["name"] == "triton"
    assert client.get_model_metadata("simple", query_params=QUERY)["name"] == "simple"
    with pytest.raises(InferenceServerException) as caught:
        client.get_model_metadata("wrong_model_name")
    assert "Request for unknown model" in caught.value.message()


def test_simple_http_model_control(client: triton_http.InferenceServerClient) -> None:
    assert len(client.get_model_repository_index()) == len(MODELS)
    client.load_model("simple")
    assert client.is_model_ready("simple")
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("simple", config='"parameters": {"config": {{"max_batch_size": "16"}}}')
    assert "failed to load" in caught.value.message()
    # The program sends the changed value alone: the backend of its model fills in the others.
    config = {**client.get_model_config("simple"), "max_batch_size": 16}
    client.load_model("simple", config=json.dumps(config))
    assert client.get_model_config("simple")["max_batch_size"] == 16
    client.unload_model("simple")
    assert not client.is_model_ready("simple")
    with pytest.raises(InferenceServerException) as caught:
        client.load_model("wrong_model_name")
    assert "failed to load" in caught.value.message()
    client.load_model("simple")  # for the next test


def test_trace_endpoint_test(client: triton_http.InferenceServerClient) -> None:
    assert client.get_trace_settings(model_name="simple") == client.get_trace_settings()
    for call in (client.get_trace_settings, client.update_trace_settings):
        with pytest.raises(InferenceServerException) as caught:
            call(model_name="does-not-exist")
        assert "Request for unknown model : does-not-exist" in caught.value.message()


def test_reuse_infer_objects_client(client: triton_http.InferenceServerClient) -> None:
    """But for the inferences with shared memory, which is refused through the gateway."""
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    assert client.get_system_shared_memory_status() == []
    assert client.get_cuda_shared_memory_status() == []
    for inputs in (tensors(FIRST, SECOND, "INT32"),) * 2:  # the very same objects
        assert_sum_and_difference(client.infer("simple", inputs, outputs=outputs()))
    client.unregister_system_shared_memory()


@pytest.mark.parametrize("path", ["", "/config", "/versions/1", "/trace/setting", "/stats"])
def test_model_that_is_not_loaded_is_503_and_an_unknown_one_404(
    gateway: httpx.Client, path: str
) -> None:
    answer = gateway.get(f"/v2/models/never_loaded{path}")
    assert (answer.status_code, answer.json()["code"]) == (503, "MODEL_NOT_READY")
    assert "unknown" not in answer.text
    assert "never_loaded' is not ready" in answer.json()["error"]
    unknown = gateway.get(f"/v2/models/nobody{path}")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "MODEL_NOT_FOUND")
    assert unknown.json()["error"].startswith("Request for unknown model")


def test_unknown_version_of_a_loaded_model_is_404(gateway: httpx.Client) -> None:
    answer = gateway.get("/v2/models/simple/versions/9")
    assert answer.json()["code"] == "MODEL_NOT_FOUND"
    words = "Request for unknown model: 'simple' version 9 is not found"
    assert answer.json()["error"].startswith(words)
