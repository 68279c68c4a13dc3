"""Traces of OpenTelemetry's own SDK, with a collector that keeps the spans."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.fake_triton import Fake, fake_triton
from tests.support.servers import ROOT, Command, gateway
from tests.support.trace_collector import Collector, collecting
from tests.support.wait import TIMEOUT_S, wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CARRIED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}


@pytest.fixture(scope="module", autouse=True)
def prompt_export() -> Iterator[None]:
    """OpenTelemetry's SDK, in what the tests start, sends spans after 50 ms instead of 5 s."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield


@pytest.fixture(scope="module")
def traced_and_logged(
    demo_triton: EmbeddedTriton,
) -> Iterator[tuple[httpx.Client, Collector, Command]]:
    with (
        collecting() as collector,
        gateway(demo_triton.options.url, otlp_endpoint=collector.url, log_format="json") as pair,
    ):
        yield pair[0], collector, pair[1]


@pytest.fixture
def traced(
    traced_and_logged: tuple[httpx.Client, Collector, Command],
) -> tuple[httpx.Client, Collector]:
    return traced_and_logged[:2]


def attributes(span: Span) -> dict[str, str | int]:
    return {item.key: item.value.string_value or item.value.int_value for item in span.attributes}


def test_request_is_a_span_of_the_trace_of_its_caller(
    traced: tuple[httpx.Client, Collector],
) -> None:
    client, collector = traced
    answer = client.post(
        "/v1/models/ensemble/infer",
        content=(ROOT / "docs/images/seven.png").read_bytes(),
        headers={"Content-Type": "image/png", **CARRIED},
    )
    assert answer.status_code == 200
    wait_until(lambda: len(collector.of(TRACE)) >= 2)
    spans = collector.of(TRACE)
    server, triton = spans["POST /v1/models/{model}/infer"], spans["triton"]
    assert server.parent_span_id.hex() == PARENT
    assert triton.parent_span_id == server.span_id
    assert (server.kind, triton.kind) == (2, 3)  # SERVER, CLIENT
    fields = attributes(server)
    assert fields["triton.model"] == "ensemble"
    assert fields["http.response.status_code"] == 200
    assert fields["request.id"] == answer.headers["x-request-id"]
    assert attributes(triton)["http.response.status_code"] == 200
    assert server.start_time_unix_nano <= triton.start_time_unix_nano
    assert triton.end_time_unix_nano <= server.end_time_unix_nano


def test_request_over_grpc_has_a_span_of_its_upstream_call(
    traced: tuple[httpx.Client, Collector], demo_triton: EmbeddedTriton
) -> None:
    client, collector = traced
    trace = "11" * 16
    answer = client.post(
        "/v1/models/ensemble/infer",
        content=(ROOT / "docs/images/seven.png").read_bytes(),
        headers={
            "Content-Type": "image/png",
            "Accept": "text/event-stream",
            "traceparent": f"00-{trace}-{PARENT}-01",
        },
    )
    assert answer.status_code == 200
    wait_until(lambda: len(collector.of(trace)) >= 2)
    spans = collector.of(trace)
    assert spans["triton"].parent_span_id == spans["POST /v1/models/{model}/infer"].span_id
    fields = attributes(spans["triton"])
    assert fields["server.address"] == "127.0.0.1"
    assert fields["server.port"] == demo_triton.options.grpc_port


def test_request_without_a_trace_starts_one(
    traced: tuple[httpx.Client, Collector],
) -> None:
    client, collector = traced
    before = len(collector.spans)
    assert client.get("/v2/models/nobody").status_code == 404

    def found() -> list[Span]:
        name = "GET /v2/models/{model}"
        return [span for span in collector.spans[before:] if span.name == name]

    wait_until(found)
    (server,) = found()
    assert not server.parent_span_id
    assert attributes(server)["http.route"] == "/v2/models/{model}"
    assert "nobody" in str(attributes(server)["url.path"])
    assert "triton.model" not in attributes(server)


def test_spans_have_the_attributes_of_the_semantic_conventions(
    traced: tuple[httpx.Client, Collector], demo_triton: EmbeddedTriton
) -> None:
    client, collector = traced
    trace = "22" * 16
    tensor = {"name": "image", "shape": [1, 1], "datatype": "BYTES", "data": ["no image"]}
    answer = client.post(
        "/v2/models/ensemble/versions/1/infer",
        json={"inputs": [tensor]},
        headers={"traceparent": f"00-{trace}-{PARENT}-01"},
    )
    assert answer.is_error
    route = "/v2/models/{model}/versions/{version}/infer"
    wait_until(lambda: len(collector.of(trace)) >= 2)
    spans = collector.of(trace)
    server, triton = attributes(spans[f"POST {route}"]), attributes(spans["triton"])
    assert (server["http.route"], server["http.request.method"]) == (route, "POST")
    assert (server["server.address"], server["server.port"]) == ("127.0.0.1", client.base_url.port)
    assert (server["url.scheme"], server["client.address"]) == ("http", "127.0.0.1")
    assert triton["http.request.method"] == "POST"
    options = demo_triton.options
    assert (triton["server.address"], triton["server.port"]) == ("127.0.0.1", options.http_port)
    assert triton["triton.replica"] == options.address
    assert triton["error.type"] == str(triton["http.response.status_code"])
    assert spans["triton"].status.code == 2  # ERROR
    assert ("error.type" in server) == (answer.status_code >= 500)


def test_span_of_a_failed_request_has_the_type_of_the_error(
    traced: tuple[httpx.Client, Collector],
) -> None:
    client, collector = traced
    trace = "33" * 16
    text = "The ship left the harbour at dawn. " * 40
    answer = client.post(
        "/v1/models/text_ensemble/infer",
        json={"inputs": [text] * 32},
        headers={"X-Request-Timeout": "0.001", "traceparent": f"00-{trace}-{PARENT}-01"},
    )
    assert answer.status_code == 504
    name = "POST /v1/models/{model}/infer"
    wait_until(lambda: name in collector.of(trace))
    assert attributes(collector.of(trace)[name])["error.type"] == "504"
    trace = "66" * 16
    image = (ROOT / "docs/images/seven.png").read_bytes()
    answer = client.post(
        "/v1/models/core/infer",
        content=image[:60] + bytes(40) + image[100:],
        headers={"Content-Type": "image/png", "traceparent": f"00-{trace}-{PARENT}-01"},
    )
    assert answer.json()["code"] == "BAD_IMAGE"
    wait_until(lambda: "decode" in collector.of(trace))
    assert attributes(collector.of(trace)["decode"])["error.type"] == "BAD_IMAGE"


def test_probes_are_not_traced(traced: tuple[httpx.Client, Collector]) -> None:
    client, collector = traced
    probes = ("/livez", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready")
    traces = {path: secrets.token_hex(16) for path in (*probes, "/v2")}
    for path, trace in traces.items():
        headers = {"traceparent": f"00-{trace}-{PARENT}-01"}
        assert client.get(path, headers=headers).status_code == 200
    wait_until(lambda: "GET /v2" in collector.of(traces["/v2"]))  # spans are sent in their order
    assert not any(collector.of(traces[path]) for path in probes)


def test_log_lines_have_the_ids_of_their_trace(
    traced_and_logged: tuple[httpx.Client, Collector, Command],
) -> None:
    client, collector, command = traced_and_logged
    trace = "44" * 16
    headers = {
        "Content-Type": "image/png",
        "X-Request-ID": "traced-1.",
        "traceparent": f"00-{trace}-{PARENT}-01",
    }
    client.post("/v1/models/ensemble/infer", content=b"no image", headers=headers)
    wait_until(lambda: sum("traced-1." in line for line in list(command.lines)) >= 2)
    lines = [json.loads(line) for line in list(command.lines) if "traced-1." in line]
    assert {line["level"] for line in lines} == {"warning", "info"}
    name = "POST /v1/models/{model}/infer"
    wait_until(lambda: name in collector.of(trace))
    span = collector.of(trace)[name].span_id.hex()
    assert {(line["trace_id"], line["span_id"]) for line in lines} == {(trace, span)}


def test_triton_receives_the_trace_with_the_attempt_as_parent() -> None:
    def read_head(fake: Fake) -> str:
        head, _ = fake.requests.get(timeout=TIMEOUT_S)
        return head.decode().lower()

    with fake_triton() as fake, collecting() as collector:
        url = f"http://127.0.0.1:{fake.port}"
        with gateway(url, otlp_endpoint=collector.url) as (client, _):
            client.get("/v2", headers=CARRIED)
            head = read_head(fake)
            wait_until(lambda: "triton" in collector.of(TRACE))
            attempt = collector.of(TRACE)["triton"].span_id.hex()
        assert f"traceparent: 00-{TRACE}-{attempt}-01" in head
        assert "tracestate: vendor=1" in head
        with gateway(url) as (client, _):  # without traces of its own it hands on the caller's
            client.get("/v2", headers=CARRIED)
            assert f"traceparent: 00-{TRACE}-{PARENT}-01" in read_head(fake)


@pytest.mark.long
@pytest.mark.parametrize("silent", [False, True], ids=["away", "silent"])
def test_collector_that_is_unavailable_delays_neither_requests_nor_shutdown(
    demo_triton: EmbeddedTriton, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """Nor does the gateway wait for it at its end, however patient OpenTelemetry is."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1] if silent else 9}"
        with gateway(demo_triton.options.url, otlp_endpoint=url) as (client, command):
            for _ in range(20):
                assert client.get("/v2/models/core").status_code == 200
            assert command.process.poll() is None
            os.kill(command.pid, signal.SIGTERM)
            assert command.end(TIMEOUT_S) == 0


def test_opentelemetry_sdk_is_not_imported_without_an_endpoint() -> None:
    look = (
        "import sys, gateway.app as app; from gateway.config.settings import Settings; "
        "app.create_app(Settings(state='memory:')); "
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )
    found = subprocess.run(
        [sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert found.stdout.strip() == "[]", found.stderr
