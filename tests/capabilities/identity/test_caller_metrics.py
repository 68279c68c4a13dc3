"""Requests, inference time and bytes by caller, at every edge before a real Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from gateway.embedded.supervisor import EmbeddedTriton
from tests.capabilities.grpc_api.support.grpc_gateway import GrpcGateway, fp32, grpc_gateway
from tests.support.fake_triton import port_of
from tests.support.keys import ADMIN, INFER, METRICS, bearer, entry, written
from tests.support.metrics import metric
from tests.support.model_zoo.zoo import AS_WRITTEN, Zoo
from tests.support.wait import wait_until

MODEL = "vector_FP32"
ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
KEYS = [entry(INFER, "infer"), entry(METRICS, "metrics"), entry(ADMIN, "admin")]


@pytest.fixture(scope="module")
def served(
    zoo_triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GrpcGateway]:
    keys_file = written(tmp_path_factory.mktemp("callers") / "keys.yaml", KEYS)
    settings = {"keys_file": str(keys_file), "dialects": "torchserve"}
    with grpc_gateway(zoo_triton.options.url, **settings) as served:
        with httpx.Client(base_url=served.http.base_url, headers=bearer(ADMIN)) as administrator:
            Zoo(administrator, AS_WRITTEN).load(MODEL, "ticking", "vectors")
        served.http.headers.update(bearer(INFER))
        yield served


def post(path: str, document: Any, **headers: str) -> Callable[[GrpcGateway], None]:
    def send(served: GrpcGateway) -> None:
        response = served.http.post(path, json=document, headers=headers)
        assert response.status_code == 200, response.text

    return send


def send_binary(served: GrpcGateway) -> None:
    tensor = triton_http.InferInput("X", [3, 2], "FP32")
    tensor.set_data_from_numpy(np.array(ROWS, np.float32))
    with triton_http.InferenceServerClient(f"127.0.0.1:{port_of(served.http)}") as client:
        client.infer(MODEL, [tensor], headers=bearer(INFER))


def send_grpc(served: GrpcGateway) -> None:
    with triton_grpc.InferenceServerClient(served.address) as client:
        client.infer(MODEL, [fp32(*np.ravel(ROWS), shape=(3, 2))], headers=grpc_key())


def send_grpc_stream(served: GrpcGateway) -> None:
    """Send two requests on one stream."""
    errors: list[Any] = []
    with triton_grpc.InferenceServerClient(served.address) as client:
        client.start_stream(lambda result, error: errors.append(error), headers=grpc_key())
        client.async_stream_infer(MODEL, [fp32(*np.ravel(ROWS), shape=(3, 2))])
        client.async_stream_infer(MODEL, [fp32(1, 2, shape=(1, 2))])
        wait_until(lambda: len(errors) == 2)
    assert errors == [None, None]


def grpc_key() -> dict[str, str]:
    return {"authorization": f"Bearer {INFER}"}


def tensor(values: Any, shape: list[int]) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "datatype": "FP32", "shape": shape, "data": values}]}


class Edge(NamedTuple):
    send: Callable[[GrpcGateway], None]
    requests: int = 1
    model: str = MODEL


EDGES = {
    "/v1": Edge(post(f"/v1/models/{MODEL}/infer", {"inputs": {"X": ROWS}})),
    "/v1 in pieces": Edge(post(f"/v1/models/{MODEL}/infer", {"inputs": {"X": ROWS * 4}})),
    "/v1 stream": Edge(
        post(
            "/v1/models/ticking/infer",
            {"inputs": {"COUNT": [3], "SECONDS": [0.2]}},
            Accept="text/event-stream",
        ),
        model="ticking",
    ),
    "/v2": Edge(post(f"/v2/models/{MODEL}/infer", tensor(ROWS, [3, 2]))),
    "/v2 binary": Edge(send_binary),
    "TensorFlow Serving": Edge(post(f"/v1/models/{MODEL}:predict", {"instances": ROWS})),
    "OpenAI": Edge(
        post("/v1/embeddings", {"model": "vectors", "input": ["a", "b"]}), model="vectors"
    ),
    "TorchServe": Edge(post(f"/predictions/{MODEL}", {"X": ROWS[0]})),
    "gRPC": Edge(send_grpc),
    "gRPC stream": Edge(send_grpc_stream, requests=2),
}


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES.keys())
def test_requests_of_every_edge_are_counted(served: GrpcGateway, edge: Edge) -> None:
    labels = f'caller="infer",model="{edge.model}"'
    series = (
        f"gateway_caller_requests_total{{{labels}}}",
        f"gateway_caller_inference_seconds_total{{{labels}}}",
        f'gateway_caller_bytes_total{{{labels},direction="in"}}',
        f'gateway_caller_bytes_total{{{labels},direction="out"}}',
    )
    with httpx.Client(base_url=served.http.base_url, headers=bearer(METRICS)) as observer:

        def read() -> list[float]:
            return [metric(observer, each) for each in series]

        before = read()
        edge.send(served)
        wait_until(lambda: read()[0] - before[0] == edge.requests)
        requests, inference_s, *sizes = (
            after - first for after, first in zip(read(), before, strict=True)
        )
        assert requests == edge.requests
        assert min(sizes) > 0
        # Of a stream, until its end.
        assert inference_s >= (0.1 if edge.model == "ticking" else 1e-6)
