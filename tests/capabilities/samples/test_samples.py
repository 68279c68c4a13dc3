"""Samples of traffic before a real Triton: the events, and what they never contain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.capabilities.grpc_api.support.grpc_gateway import INFER as INFER_METHOD
from tests.capabilities.grpc_api.support.grpc_gateway import STREAM, call_bytes
from tests.capabilities.samples.support.sink import HttpSink, Received, http_sink
from tests.support.keys import ADMIN, INFER, bearer, entry, written
from tests.support.metrics import metric
from tests.support.model_folders import write_model_folder
from tests.support.servers import ROOT, Triton, free_ports, gateway
from tests.support.wait import wait_until

# Returns its text, and the number of its characters. Version 2 fails for some texts.
SOURCE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.version = args["model_version"]

    def execute(self, requests):
        answers = []
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
            if self.version == "2" and text.ravel()[0] == b"old":
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("too old")))
                continue
            length = np.array([len(text.ravel()[0])], np.int32)
            tensors = [pb_utils.Tensor("ECHO", text), pb_utils.Tensor("LENGTH", length)]
            answers.append(pb_utils.InferenceResponse(tensors))
        return answers
"""
CONFIG = """
backend: "python"
version_policy { all { } }
input [
  { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "SECRET" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [
  { name: "ECHO" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "LENGTH" data_type: TYPE_INT32 dims: [ 1 ] }
]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
# Returns its number as often as that says.
COUNTING_SOURCE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()
            sender = request.get_response_sender()
            for _ in range(int(count[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("NUMBER", count)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNTING_CONFIG = """
backend: "python"
input [ { name: "COUNT" data_type: TYPE_FP16 dims: [ 1 ] } ]
output [ { name: "NUMBER" data_type: TYPE_FP16 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
NEVER = 'parameters { key: "gateway.sample_rate" value { string_value: "0" } }'
MODEL, COUNTING = "echo", "counting"
V1, V2 = f"/v1/models/{MODEL}/infer", f"/v2/models/{MODEL}/versions/1/infer"
MIB = 1 << 20
METRICS_PAGE = ROOT / "docs/operate/metrics.md"
DROPPED = 'gateway_sample_events_dropped_total{reason="%s"}'


def v2_body(text: str) -> dict[str, Any]:
    return {"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": [text]}]}


def build_message(model: str, tensors: dict[str, tuple[str, bytes]], version: str = "") -> bytes:
    """Return a ModelInferRequest with tensors of one element."""
    request: Any = service_pb2.ModelInferRequest(model_name=model, model_version=version)
    for name, (datatype, data) in tensors.items():
        request.inputs.add(name=name, datatype=datatype, shape=[1])
        request.raw_input_contents.append(data)
    return bytes(request.SerializeToString())


def encode_text(text: bytes) -> tuple[str, bytes]:
    return "BYTES", len(text).to_bytes(4, "little") + text


def call(port: int, request_id: str, message: bytes, **metadata: str) -> bytes:
    """Call ModelInfer with the key of a caller. Raises `grpc.RpcError`."""
    pairs = {"x-request-id": request_id, "authorization": f"Bearer {INFER}"}
    pairs |= {name.replace("_", "-"): value for name, value in metadata.items()}
    return call_bytes(f"127.0.0.1:{port}", INFER_METHOD, message, metadata=[*pairs.items()])


def stream(port: int, request_id: str, message: bytes) -> list[Any]:
    """Return the responses to one request of a stream."""
    metadata = [("x-request-id", request_id), ("authorization", f"Bearer {INFER}")]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        responses = channel.stream_stream(STREAM)(iter([message]), metadata=metadata, timeout=60)
        return [service_pb2.ModelStreamInferResponse.FromString(each) for each in responses]


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    for version in (1, 2):
        write_model_folder(folder / MODEL, CONFIG, {f"{version}/model.py": SOURCE})
    write_model_folder(folder / "private", CONFIG + NEVER, {"1/model.py": SOURCE})
    write_model_folder(folder / COUNTING, COUNTING_CONFIG, {"1/model.py": COUNTING_SOURCE})
    with Triton(folder, MODEL, "private", COUNTING) as server:
        server.wait()
        yield server.options.url


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    entries = [entry(INFER, "infer", name="shop"), entry(ADMIN, "admin", name="ops")]
    return str(written(tmp_path_factory.mktemp("keys") / "keys.yaml", entries))


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def sampled(
    triton: str, keys: str, grpc_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[httpx.Client, HttpSink]]:
    """A gateway that samples all requests, and its sink."""
    settings = {"sample_rate": "1", "keys_file": keys, "samples_token": "sink-secret"}
    settings["grpc_port"] = str(grpc_port)
    settings["jobs"] = f"sqlite://{tmp_path_factory.mktemp('jobs')}"
    with http_sink() as sink, gateway(triton, samples=sink.url, **settings) as (client, _):
        client.headers.update(bearer(INFER))
        start_sampling(client)
        wait_until(lambda: sink.events)
        yield client, sink


def start_sampling(client: httpx.Client) -> None:
    """Let the gateway read the configs, without which it samples nothing."""
    for model in (MODEL, "private"):
        wait_until(lambda: client.get(f"/v1/models/{model}").status_code == 200)  # noqa: B023
        client.post(f"/v1/models/{model}/infer", content=b"first").raise_for_status()
    client.get(f"/v1/models/{COUNTING}").raise_for_status()


def send(client: httpx.Client, request_id: str, path: str, **options: Any) -> httpx.Response:
    more = options.pop("headers", {})
    headers = {"X-Request-ID": request_id, "Accept-Encoding": "identity", **more}
    return client.post(path, headers=headers, **options)


TEXT = {"inputs": {"TEXT": "text"}}
LONG = b"a" * 3 * MIB
# What is sent, its status, and whether it has events.
REQUESTS: tuple[tuple[str, str, dict[str, Any], int, bool], ...] = (
    ("v1", V1, {"json": {"inputs": {"TEXT": "häuser"}}}, 200, True),
    ("v2", V2, {"json": v2_body("text")}, 200, True),
    ("predict", f"/v1/models/{MODEL}:predict", {"json": TEXT}, 200, True),
    ("unfit", V1, {"json": {"inputs": {"TEXT": "text", "NOTHING": "text"}}}, 422, True),
    ("failed", V1, {"json": {"inputs": {"TEXT": "old"}}}, 500, True),
    ("long", V1, {"content": LONG, "headers": {"Content-Type": "text/plain"}}, 200, True),
    ("out", V1, {"json": TEXT, "headers": {"X-No-Sample": ""}}, 200, False),
    ("private", "/v1/models/private/infer", {"json": TEXT}, 200, False),
    ("key", V1, {"json": TEXT, "headers": bearer("wrong")}, 401, False),
    ("job", V1, {"json": TEXT, "headers": {"Prefer": "respond-async"}}, 202, False),
    ("absent", "/v1/models/absent/infer", {"json": TEXT}, 404, False),
    ("forbidden", f"/v2/repository/models/{MODEL}/load", {}, 403, False),
    ("load", f"/v2/repository/models/{MODEL}/load", {"headers": bearer(ADMIN)}, 200, False),
)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_requests_and_answers_that_may_be_sampled_are_cloudevents(
    sampled: tuple[httpx.Client, HttpSink], subtests: pytest.Subtests
) -> None:
    client, sink = sampled
    for request_id, path, options, status, is_sampled in REQUESTS:
        headers = {"traceparent": TRACE, **options.get("headers", {})}
        answer = send(client, request_id, path, **{**options, "headers": headers})
        with subtests.test(request_id):
            assert answer.status_code == status
            if is_sampled:
                wait_until(lambda: len(sink.find(request_id)) == 2)  # noqa: B023
                check_events(sink.find(request_id), answer)
    start_sampling(client)
    send(client, "last", V1, json=TEXT).raise_for_status()
    wait_until(lambda: len(sink.find("last")) == 2)
    seen = {event.attributes["requestid"] for event in sink.events}
    assert seen.isdisjoint(each[0] for each in REQUESTS if not each[4])
    assert len(sink.connections) <= 8


def check_events(events: list[Received], answer: httpx.Response) -> None:
    sent = answer.request
    bodies = (sent.content, answer.content)
    for event, body, side in zip(events, bodies, ("request", "response"), strict=True):
        attributes = dict(event.attributes)
        assert attributes.pop("time").endswith("Z")
        assert attributes.pop("source").partition("#")[0] == f"/models/{MODEL}"
        expected = {
            "specversion": "1.0",
            "id": events[0].attributes["id"],
            "type": f"org.kubeflow.serving.inference.{side}",
            "inferenceservicename": MODEL,
            "model": MODEL,
            "statuscode": str(answer.status_code),
            "requestid": sent.headers["X-Request-ID"],
            "caller": "shop",
            "traceparent": TRACE,
            "path": sent.url.path,
        }
        if len(body) > MIB:
            expected["datalength"] = str(len(body))
        assert {name: attributes[name] for name in expected} == expected
        assert attributes.keys() - expected.keys() <= {"modelversion", "accept"}
        assert event.headers["authorization"] == "Bearer sink-secret"
        assert event.data == (b"" if len(body) > MIB else body)
        assert INFER not in str(event)
    assert events[0].headers["content-type"] == sent.headers["content-type"]
    assert events[0].attributes["source"] != events[1].attributes["source"]


def find_by_path(sink: HttpSink, path: str) -> list[Received]:
    events = [event for event in list(sink.events) if event.attributes["path"] == path]
    return sorted(events, key=lambda event: not event.is_request)


def test_events_of_calls_over_grpc_have_their_messages(
    sampled: tuple[httpx.Client, HttpSink], grpc_port: int
) -> None:
    _, sink = sampled
    message = build_message(MODEL, {"TEXT": encode_text(b"\xff")}, "1")
    response = call(grpc_port, "grpc", message)
    wait_until(lambda: len(sink.find("grpc")) == 2)
    expected = {"model": MODEL, "modelversion": "1", "statuscode": "200", "caller": "shop"}
    for event, data in zip(sink.find("grpc"), (message, response), strict=True):
        assert event.attributes.items() >= {**expected, "path": INFER_METHOD}.items()
        assert event.headers["content-type"] == "application/x-protobuf"
        assert event.data == data
        assert INFER not in str(event)
    # The responses of a stream are one message.
    three = b"\x00\x42"
    message = build_message(COUNTING, {"COUNT": ("FP16", three)})
    assert len(stream(grpc_port, "", message)) == 3
    wait_until(lambda: len(find_by_path(sink, STREAM)) == 2)
    request, answer = find_by_path(sink, STREAM)
    assert request.attributes["id"] == answer.attributes["id"]
    assert request.data == message
    responses = service_pb2.ModelStreamInferResponse.FromString(answer.data).infer_response
    assert [each.name for each in responses.outputs] == 3 * ["NUMBER"]
    assert list(responses.raw_output_contents) == 3 * [three]


def test_calls_over_grpc_have_the_limits_of_requests_over_http(
    sampled: tuple[httpx.Client, HttpSink], grpc_port: int
) -> None:
    _, sink = sampled
    call(grpc_port, "grpc-out", build_message(MODEL, {"TEXT": encode_text(b"a")}), x_no_sample="")
    call(grpc_port, "grpc-private", build_message("private", {"TEXT": encode_text(b"a")}))
    with pytest.raises(grpc.RpcError):
        call(grpc_port, "grpc-old", build_message(MODEL, {"TEXT": encode_text(b"old")}))
    large = build_message(MODEL, {"TEXT": encode_text(b"a" * 2 * MIB)})
    call(grpc_port, "grpc-large", large)
    for request_id in ("grpc-old", "grpc-large"):
        wait_until(lambda: len(sink.find(request_id)) == 2)  # noqa: B023
    failed = sink.find("grpc-old")[1]
    assert failed.data == b""
    assert failed.attributes.items() >= {"statuscode": "500", "incomplete": "true"}.items()
    request, _ = sink.find("grpc-large")
    assert request.data == b""
    assert request.attributes["datalength"] == str(len(large))
    seen = {event.attributes["requestid"] for event in sink.events}
    assert seen.isdisjoint({"grpc-out", "grpc-private"})


@pytest.mark.fault("the sink of samples stops, is slow or refuses them")
def test_sink_that_stops_costs_bounded_memory_and_no_request(triton: str) -> None:
    with http_sink() as sink, gateway(triton, samples=sink.url, sample_rate="1") as (client, _):
        start_sampling(client)
        wait_until(lambda: sink.events)
        sink.answers.clear()
        for number in range(20):
            answer = send(client, str(number), V1, content=b"a" * (MIB - 1000))
            assert answer.status_code == 200
            assert metric(client, "gateway_sample_queue_bytes") <= 16 * MIB
        count = metric(client, DROPPED % "queue_full")
        assert count > 0
        sink.answers.set()
        wait_until(lambda: metric(client, "gateway_sample_queue_events") == 0)
        assert metric(client, "gateway_sample_queue_bytes") == 0
        received = {event.attributes["requestid"] for event in sink.events}
        assert len(received.intersection(map(str, range(20)))) == 20 - count / 2
        distinct = {(each.attributes["id"], each.is_request) for each in sink.events}
        # Of a machine so slow that these timed out.
        late = metric(client, DROPPED % "unavailable")
        assert metric(client, "gateway_sample_events_sent_total") + late == len(distinct)
        page = client.get("/metrics").text
    rows = re.findall(
        r"^\| `(gateway_sample_\w+)` \| (\w+) \| \w* \| (.*) \|$", METRICS_PAGE.read_text(), re.M
    )
    shown = re.findall(r"^# HELP (gateway_sample_\w+) (.*)\n# TYPE \w+ (\w+)$", page, re.M)
    assert [(name, text, kind) for name, kind, text in rows] == shown


@pytest.mark.fault("the sink of samples stops, is slow or refuses them")
def test_events_that_the_sink_does_not_accept_are_dropped(triton: str) -> None:
    with (
        http_sink() as sink,
        gateway(triton, samples=sink.url, sample_rate="1") as (client, command),
    ):
        sink.status = 403
        start_sampling(client)
        wait_until(lambda: metric(client, DROPPED % "refused") >= 2)
        command.wait_for("the sink answered with status 403")
        sink.status = 200
        send(client, "accepted", V1, content=b"text").raise_for_status()
        wait_until(lambda: len(sink.find("accepted")) == 2)
    (port,) = free_ports(1)
    settings = {"samples": f"http://127.0.0.1:{port}", "sample_rate": "1"}
    with gateway(triton, **settings) as (client, command):
        start_sampling(client)
        wait_until(lambda: metric(client, DROPPED % "unavailable") >= 2)
        command.wait_for("samples are not delivered")
        wait_until(lambda: metric(client, "gateway_sample_queue_bytes") == 0)


@pytest.mark.parametrize(
    ("names", "hidden"),
    [
        ("ELSEWHERE", set()),
        (f"ELSEWHERE,{MODEL}", {"request", "response", "stream", "failed"}),
        ("SECRET", {"request", "stream", "failed"}),
        ("ECHO", {"response", "stream", "failed"}),
    ],
)
def test_messages_of_listed_tensors_and_models_have_no_body(
    triton: str, names: str, hidden: set[str]
) -> None:
    """An input without a name, an error or a stream can have the values as well."""
    bodies = {}
    with (
        http_sink() as sink,
        gateway(triton, samples=sink.url, sample_rate="1", samples_redact=names) as (client, _),
    ):
        start_sampling(client)
        for request_id, path, options in (
            ("text", V1, {"content": b"hidden"}),
            ("stream", V1, {"content": b"hidden", "headers": {"Accept": "application/x-ndjson"}}),
            ("failed", V1, {"json": {"inputs": {"TEXT": "hidden", "hidden": ""}}}),
        ):
            send(client, request_id, path, **options)
            wait_until(lambda: len(sink.find(request_id)) == 2)  # noqa: B023
        bodies["request"], bodies["response"] = sink.find("text")
        bodies["stream"] = sink.find("stream")[1]
        request, bodies["failed"] = sink.find("failed")
    for event in sink.events:
        assert bool(event.data) is ("redacted" not in event.attributes)
        assert bool(event.data) is ("datalength" not in event.attributes)
    assert {name for name, event in bodies.items() if not event.data} == hidden
    assert bool(request.data) is bool(bodies["failed"].data)
