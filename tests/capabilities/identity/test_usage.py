"""Who used what: every edge before a real Triton, and gateways that share their state."""

from __future__ import annotations

import csv
import signal
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from gateway.embedded.supervisor import EmbeddedTriton
from tests.capabilities.grpc_api.support.grpc_gateway import GrpcGateway, fp32, grpc_gateway
from tests.support.documents import USAGE, assert_prints, examples
from tests.support.fake_triton import fake_triton, port_of
from tests.support.keys import ADMIN, INFER, METRICS, bearer, entry, written
from tests.support.metrics import metric
from tests.support.model_zoo.zoo import AS_WRITTEN, Zoo
from tests.support.redis_server import RedisServer
from tests.support.servers import Command, free_ports, gateway
from tests.support.wait import wait_until

MODEL = "vector_FP32"
ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
KEYS = [entry(INFER, "infer"), entry(METRICS, "metrics"), entry(ADMIN, "admin")]
NOTHING = {"requests": 0, "rows": 0, "inference_seconds": 0.0, "bytes_in": 0, "bytes_out": 0}


@pytest.fixture(scope="module")
def served(
    zoo_triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GrpcGateway]:
    folder = tmp_path_factory.mktemp("usage")
    settings = {
        "keys_file": str(written(folder / "keys.yaml", KEYS)),
        "state": f"file://{folder}/state.json",
        "usage": "true",
        "dialects": "torchserve",
    }
    with grpc_gateway(zoo_triton.options.url, **settings) as served:
        with httpx.Client(base_url=served.http.base_url, headers=bearer(ADMIN)) as administrator:
            Zoo(administrator, AS_WRITTEN).load(MODEL, "plain_FP32", "ticking", "vectors")
        served.http.headers.update(bearer(INFER))
        yield served


def own_usage(client: httpx.Client, model: str) -> Mapping[str, Any]:
    response = client.get("/v1/usage/me", params={"by": "model"})
    assert response.status_code == 200, response.text
    return next((row for row in response.json()["total"] if row["model"] == model), NOTHING)


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
    """Send two requests of three and one rows on one stream."""
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
    rows: int
    requests: int = 1
    model: str = MODEL


EDGES = {
    "/v1": Edge(post(f"/v1/models/{MODEL}/infer", {"inputs": {"X": ROWS}}), 3),
    "/v1 in pieces": Edge(post(f"/v1/models/{MODEL}/infer", {"inputs": {"X": ROWS * 4}}), 12),
    "/v1 stream": Edge(
        post(
            "/v1/models/ticking/infer",
            {"inputs": {"COUNT": [3], "SECONDS": [0.2]}},
            Accept="text/event-stream",
        ),
        1,
        model="ticking",
    ),
    "/v2": Edge(post(f"/v2/models/{MODEL}/infer", tensor(ROWS, [3, 2])), 3),
    "/v2 with a shape that Triton ignores": Edge(
        post(f"/v2/models/{MODEL}/infer", {"shape": [1], **tensor(ROWS, [3, 2])}), 3
    ),
    "/v2 binary": Edge(send_binary, 3),
    "/v2 without a batch dimension": Edge(
        post("/v2/models/plain_FP32/infer", tensor(ROWS, [3, 2])), 1, model="plain_FP32"
    ),
    "TensorFlow Serving": Edge(post(f"/v1/models/{MODEL}:predict", {"instances": ROWS}), 3),
    "OpenAI": Edge(
        post("/v1/embeddings", {"model": "vectors", "input": ["a", "b"]}), 2, model="vectors"
    ),
    "TorchServe": Edge(post(f"/predictions/{MODEL}", {"X": ROWS[0]}), 1),
    "gRPC": Edge(send_grpc, 3),
    "gRPC stream": Edge(send_grpc_stream, 4, requests=2),
}


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES.keys())
def test_requests_of_every_edge_are_counted(served: GrpcGateway, edge: Edge) -> None:
    before = own_usage(served.http, edge.model)
    edge.send(served)

    def read_difference() -> dict[str, Any]:
        after = own_usage(served.http, edge.model)
        return {name: after[name] - before[name] for name in NOTHING}

    wait_until(lambda: read_difference()["requests"] == edge.requests)
    difference = read_difference()
    assert difference["rows"] == edge.rows
    assert all(difference.values()), difference
    if edge.model == "ticking":
        assert difference["inference_seconds"] >= 0.1  # of the whole stream


def test_usage_is_in_the_metrics(served: GrpcGateway) -> None:
    send_binary(served)
    with httpx.Client(base_url=served.http.base_url, headers=bearer(METRICS)) as client:
        labels = f'caller="infer",model="{MODEL}"'
        wait_until(lambda: metric(client, f"gateway_caller_requests_total{{{labels}}}"))
        assert metric(client, f"gateway_caller_inference_seconds_total{{{labels}}}") > 0
        for direction in ("in", "out"):
            series = f'gateway_caller_bytes_total{{{labels},direction="{direction}"}}'
            assert metric(client, series) > 0


def test_usage_of_all_is_for_the_roles_metrics_and_admin(served: GrpcGateway) -> None:
    def read(path: str, key: str, **headers: str) -> httpx.Response:
        return httpx.get(served.http.base_url.join(path), headers={**bearer(key), **headers})

    post(f"/v1/models/{MODEL}:predict", {"instances": ROWS})(served)
    for key, status in ((INFER, 403), (METRICS, 200), (ADMIN, 200), ("", 401)):
        assert read("/v1/usage", key).status_code == status
    document = read("/v1/usage", METRICS).json()
    assert {row["caller"] for row in document["total"]} >= {"admin", "infer"}
    own = read("/v1/usage/me", INFER).json()
    assert {row["caller"] for row in own["usage"]} == {"infer"}
    assert own["by"] == ["caller", "model"]
    first, last = (datetime.fromisoformat(own[name]).date() for name in ("from", "to"))
    assert last - first == timedelta(29)
    assert all(own["from"] <= row["day"] <= own["to"] for row in own["usage"])
    (total,) = read("/v1/usage?by=", METRICS).json()["total"]
    assert total["requests"] >= sum(row["requests"] for row in document["total"])

    table = read("/v1/usage?by=caller", METRICS, Accept="text/csv")
    assert table.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(table.text.splitlines()))
    assert list(rows[0]) == ["day", "caller", *NOTHING]
    assert {row["caller"] for row in rows} >= {"admin", "infer"}
    assert read("/v1/usage", METRICS, Accept="image/png").status_code == 406


def test_examples_of_the_document_print_what_it_says(served: GrpcGateway) -> None:
    post(f"/v1/models/{MODEL}:predict", {"instances": ROWS})(served)
    found = list(examples([USAGE]))
    assert len(found) == 3
    for _, command, answer in found:
        # Of another year.
        assert_prints(served.http, command.replace("tgw_…", ADMIN), answer.replace("2026", "…"))


# A query, and what the answer says: an error, or the days.
QUERIES = {
    "from=yesterday": "from 'yesterday' is not a day; use one such as 2026-01-31",
    "to=2026-02-30": "to '2026-02-30' is not a day",
    "to=20260131": "to '20260131' is not a day",
    "from=2026-02-01&to=2026-01-31": "from 2026-02-01 is after to 2026-01-31",
    "by=model,key": "by 'key' is unknown; use by=caller,model",
}


@pytest.mark.parametrize(("query", "words"), QUERIES.items(), ids=QUERIES.keys())
def test_query_that_is_invalid_is_refused(served: GrpcGateway, query: str, words: str) -> None:
    response = served.http.get(f"/v1/usage/me?{query}")
    assert response.status_code == 400
    assert words in response.json()["error"]


def test_days_without_usage_are_empty(served: GrpcGateway) -> None:
    for query in ("from=0001-01-01&to=0001-01-02", "from=9999-12-30&to=9999-12-31"):
        document = served.http.get(f"/v1/usage/me?{query}").json()
        assert document["usage"] == document["total"] == []
    days = "from=0001-01-01&to=9999-12-31"
    assert served.http.get(f"/v1/usage/me?{days}").json()["total"]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


BODY = b'{"ready": false}'


def send_body(url: httpx.URL | str) -> None:
    """Send a body on a connection of its own."""
    url = f"{url}/v2/repository/index"
    httpx.post(url, headers=bearer(ADMIN), content=BODY, timeout=60).raise_for_status()


def count_bodies(url: httpx.URL | str) -> float:
    """Return the number of bodies by their bytes: requests for the usage have none."""
    response = httpx.get(f"{url}/v1/usage?by=", headers=bearer(ADMIN), timeout=60)
    return float(sum(row["bytes_in"] for row in response.json()["total"]) / len(BODY))


def wait_for_bodies(url: httpx.URL | str, count: int) -> None:
    wait_until(lambda: count_bodies(url) == count)


@pytest.mark.parametrize("kind", ["redis", pytest.param("file", marks=pytest.mark.long)])
@pytest.mark.fault("a gateway is killed that counts")
def test_gateways_add_up_and_a_killed_one_has_written(
    redis: RedisServer, tmp_path: Path, kind: str
) -> None:
    settings = {
        "keys_file": str(written(tmp_path / "keys.yaml", KEYS)),
        "state": redis.url() if kind == "redis" else f"file://{tmp_path}/state.json",
        "usage": "true",
    }
    with fake_triton() as triton:
        triton_url = f"http://127.0.0.1:{triton.port}"
        with (
            gateway(triton_url, **settings) as (first, command),
            gateway(triton_url, **settings) as (second, _),
        ):
            for client in (first, first, second):
                send_body(client.base_url)
            for client in (first, second):
                wait_for_bodies(client.base_url, 3)
            command.process.send_signal(signal.SIGKILL)
            command.process.wait()
            assert count_bodies(second.base_url) == 3
            send_body(second.base_url)
        # The second one has ended regularly, and has written its last counts then.
        with gateway(triton_url, **settings) as (third, _):
            assert count_bodies(third.base_url) == 4


@pytest.mark.long
def test_workers_add_up(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with fake_triton() as triton:
        environment = {
            "GATEWAY_TRITON_URLS": f"http://127.0.0.1:{triton.port}",
            "GATEWAY_KEYS_FILE": str(written(tmp_path / "keys.yaml", KEYS)),
            "GATEWAY_STATE": f"file://{tmp_path}/state.json",
            "GATEWAY_USAGE": "true",
        }
        serve = ("serve", "--port", str(port), "--workers", "2")
        with Command(*serve, environment=environment) as command:
            command.wait_for("serving")
            for _ in range(20):  # so that both workers get some
                send_body(url)
            for _ in range(4):  # whichever answers
                wait_for_bodies(url, 20)
