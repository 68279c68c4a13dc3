"""The gRPC server itself: TLS, workers, ports, several replicas."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc
import trustme
from tritonclient.grpc import service_pb2

from gateway.triton.grpc.byte_channel import SAFE_CANCEL_VERSION
from tests.capabilities.grpc_api.support.grpc_gateway import (
    INFER,
    STREAM,
    call_bytes,
    failure,
    fp32,
    grpc_gateway,
)
from tests.capabilities.grpc_api.support.http2 import SETTINGS, Http2Connection
from tests.support.certificates import write_pair
from tests.support.fleet import BODY, fleet_of, url_of, write_echo
from tests.support.keys import ADMIN, entry, written
from tests.support.keys import INFER as INFER_KEY
from tests.support.measurements import assert_number
from tests.support.servers import Command, Triton, free_ports, gateway_before
from tests.support.trace_collector import collecting
from tests.support.up import Up
from tests.support.wait import TIMEOUT_S, wait_until

HOST = "127.0.0.1"


def echo_request(*values: float) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="echo")
    request.inputs.add(name="X", datatype="FP32", shape=[2])
    request.raw_input_contents.append(np.array(values, np.float32).tobytes())
    return bytes(request.SerializeToString())


REQUEST = echo_request(1, 2)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    folder = tmp_path_factory.mktemp("grpc-server")
    write_echo(folder, "echo")
    with Triton(folder, "echo") as triton:
        triton.wait()
        yield triton


class Serving(Command):
    """`serve` before one Triton, with gRPC."""

    def __init__(self, triton: Triton, *arguments: str, **settings: str) -> None:
        port, self.grpc_port = free_ports(2)
        environment = {f"GATEWAY_{name.upper()}": value for name, value in settings.items()}
        environment["GATEWAY_TRITON_URLS"] = url_of(triton)
        environment.setdefault("GATEWAY_GRPC_PORT", str(self.grpc_port))
        super().__init__("serve", "--port", str(port), *arguments, environment=environment)
        self.http_port = port
        self.address = f"{HOST}:{self.grpc_port}"


def authority_pem(authority: trustme.CA) -> bytes:
    return bytes(authority.cert_pem.bytes())


def infer_over_tls(address: str, credentials: grpc.ChannelCredentials) -> bytes:
    with grpc.secure_channel(address, credentials) as channel:
        return bytes(channel.unary_unary(INFER)(REQUEST, timeout=TIMEOUT_S))


def served_certificate(port: int) -> str:
    return ssl.get_server_certificate((HOST, port))


def test_grpc_uses_the_certificate_of_https_and_its_replacement(
    triton: Triton, tmp_path: Path
) -> None:
    authority = trustme.CA()
    write_pair(authority, tmp_path)
    files = {"tls_cert_file": str(tmp_path / "cert.pem"), "tls_key_file": str(tmp_path / "key.pem")}
    with Serving(triton, **files) as command:
        command.wait_for("serving")
        credentials = grpc.ssl_channel_credentials(authority_pem(authority))
        assert infer_over_tls(command.address, credentials)
        with pytest.raises(grpc.RpcError):
            call_bytes(command.address, INFER, REQUEST)
        before = served_certificate(command.grpc_port)
        write_pair(authority, tmp_path)
        wait_until(lambda: served_certificate(command.grpc_port) != before)
        assert infer_over_tls(command.address, credentials)
        now = served_certificate(command.grpc_port)
        (tmp_path / "key.pem").write_text("not a key")
        assert served_certificate(command.grpc_port) == now
        assert infer_over_tls(command.address, credentials)


def test_both_apis_require_a_client_certificate(triton: Triton, tmp_path: Path) -> None:
    authority = trustme.CA()
    clients = trustme.CA()
    write_pair(authority, tmp_path)
    (tmp_path / "clients.pem").write_bytes(authority_pem(clients))
    files = {
        "tls_cert_file": str(tmp_path / "cert.pem"),
        "tls_key_file": str(tmp_path / "key.pem"),
        "tls_client_ca_file": str(tmp_path / "clients.pem"),
    }
    pair = clients.issue_cert("client.example")
    key = pair.private_key_pem.bytes()
    chain = pair.cert_chain_pems[0].bytes()
    with Serving(triton, **files) as command:
        command.wait_for("serving")
        root = authority_pem(authority)
        assert infer_over_tls(command.address, grpc.ssl_channel_credentials(root, key, chain))
        code, _ = failure(infer_over_tls, command.address, grpc.ssl_channel_credentials(root))
        assert code == "UNAVAILABLE"
        context = ssl.create_default_context(cadata=root.decode())
        url = f"https://{HOST}:{command.http_port}/livez"
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=context, timeout=TIMEOUT_S)
        (tmp_path / "pair.pem").write_bytes(key + chain)
        context.load_cert_chain(tmp_path / "pair.pem")
        assert httpx.get(url, verify=context, timeout=TIMEOUT_S).status_code == 200


@pytest.mark.long
def test_workers_share_the_grpc_port(triton: Triton) -> None:
    with Serving(triton, "--workers", "2", log_format="json") as command:
        command.wait_for("serving")
        wait_until(lambda: len(workers_on(command)) == 2)
        assert all(len(call_bytes(command.address, INFER, REQUEST)) for _ in range(20))
        victim = psutil.Process(min(workers_on(command)))
        victim.kill()
        command.wait_for("replaces it")
        wait_until(lambda: len(workers_on(command) - {victim.pid}) == 2)
        assert all(len(call_bytes(command.address, INFER, REQUEST)) for _ in range(20))


def workers_on(command: Serving) -> set[int]:
    """The processes that listen on the gRPC port."""
    return {
        process.pid
        for process in psutil.Process(command.pid).children(recursive=True)
        for each in process.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == command.grpc_port
    }


def test_unusable_grpc_port_ends_the_start_with_its_number(triton: Triton) -> None:
    taken = str(triton.options.grpc_port)
    with Serving(triton, grpc_port=taken) as command:
        assert command.end() == 1
        line = f"port {taken} cannot be used (address already in use)"
        assert f"{line}; choose another with GATEWAY_GRPC_PORT" in command.output
    (port,) = free_ports(1)
    with Serving(triton, "--port", str(port), grpc_port=str(port)) as command:
        assert command.end() == 1
        assert f"--port and GATEWAY_GRPC_PORT both use port {port}" in command.output


def test_budget_without_room_for_a_message_ends_the_start(triton: Triton) -> None:
    with Serving(triton, max_body_bytes="5000000", max_bytes_in_flight="4000000") as command:
        assert command.end() == 1
        assert "gRPC needs 5000000 bytes for a message of GATEWAY_MAX_BODY_BYTES" in command.output


def test_up_serves_grpc(tmp_path: Path) -> None:
    write_echo(tmp_path, "echo")
    (port,) = free_ports(1)
    with Up(tmp_path, "--grpc-port", str(port)) as up:
        line = up.wait_for("ready after")
        assert f"and gRPC port {port}" in line
        with triton_grpc.InferenceServerClient(f"{HOST}:{port}") as client:
            result = client.infer("echo", [fp32(1.5, 2.5)])
            assert result.as_numpy("Y").tolist() == [1.5, 2.5]


def test_replica_without_grpc_gets_no_calls(tmp_path: Path) -> None:
    """Its HTTP works, so that it stays in the fleet."""
    port, closed = free_ports(2)
    with fleet_of(tmp_path, 2) as fleet:
        without, complete = fleet.tritons
        url = f"http://{without.address}?grpc={closed}"
        with gateway_before(url, url_of(complete), grpc_port=str(port)) as client:
            wait_until(lambda: ready_replicas(client) == 2)
            before = fleet.served()
            for _ in range(100):
                assert call_bytes(f"{HOST}:{port}", INFER, REQUEST)
            # Triton counts an inference after it has answered it.
            expected = {**before, complete.address: before[complete.address] + 100}
            wait_until(lambda: fleet.served() == expected)
            assert ready_replicas(client) == 2
            with triton_grpc.InferenceServerClient(f"{HOST}:{port}") as grpc_client:
                (statistics,) = grpc_client.get_inference_statistics("echo").model_stats
            assert statistics.inference_stats.success.count == sum(expected.values())
            assert statistics.last_inference > 0


def test_streams_avoid_a_replica_without_grpc_after_the_first(tmp_path: Path) -> None:
    (closed,) = free_ports(1)
    with fleet_of(tmp_path, 2) as fleet:
        without, complete = fleet.tritons
        url = f"http://{without.address}?grpc={closed}"
        with gateway_before(url, url_of(complete)) as client:
            wait_until(lambda: ready_replicas(client) == 2)
            for _ in range(20):
                headers = {"Accept": "text/event-stream"}
                response = client.post("/v1/models/echo/infer", json=BODY, headers=headers)
                assert response.status_code == 200, response.text
            page = client.get("/metrics").text
            refused = f'attempts_total{{replica="{without.address}",outcome="refused"}} 1.0'
            assert refused in page or 'outcome="refused"' not in page


def ready_replicas(client: httpx.Client) -> int:
    replicas = client.get("/v1/replicas").json()["replicas"]
    return sum(each["models"].get("echo") == "READY" for each in replicas)


def test_full_queue_is_resource_exhausted_with_a_retry_delay(triton: Triton) -> None:
    limits = {"max_inflight": "1", "max_model_inflight": "1", "max_queue": "1"}
    with Serving(triton, **limits) as command:
        command.wait_for("serving")
        with grpc.insecure_channel(command.address) as channel:
            infer = channel.unary_unary(INFER)
            slow = echo_request(-2, 0)
            calls = [infer.future(slow, timeout=TIMEOUT_S) for _ in range(4)]
            codes = sorted(call.code().name for call in calls)
            assert codes == ["OK", "OK", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]
            (full, *_) = (call for call in calls if call.code().name == "RESOURCE_EXHAUSTED")
            assert dict(full.trailing_metadata())["grpc-retry-pushback-ms"] == "1000"


def test_revoked_key_ends_a_stream_after_the_answers_in_progress(
    triton: Triton, tmp_path: Path
) -> None:
    path = written(tmp_path / "keys.yaml", [entry(INFER_KEY, "infer"), entry(ADMIN, "admin")])
    with Serving(triton, keys_file=str(path)) as command:
        command.wait_for("serving")
        outcomes: Queue[tuple[Any, Any]] = Queue()
        with triton_grpc.InferenceServerClient(command.address) as client:
            headers = {"authorization": f"Bearer {INFER_KEY}"}
            client.start_stream(
                lambda result, error: outcomes.put((result, error)), headers=headers
            )
            client.async_stream_infer("echo", [fp32(1, 2)])
            assert outcomes.get(timeout=TIMEOUT_S)[1] is None
            client.async_stream_infer("echo", [fp32(-2, 2)])  # takes two seconds
            written(path, [entry(ADMIN, "admin")])
            command.wait_for("changed and was reloaded")
            client.async_stream_infer("echo", [fp32(1, 2)])
            assert outcomes.get(timeout=TIMEOUT_S)[1] is None
            assert "unknown key" in str(outcomes.get(timeout=TIMEOUT_S)[1])


class MetadataRecorder(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers every call with an empty message, and records the metadata of inferences."""

    def __init__(self) -> None:
        self.metadata: Queue[dict[str, Any]] = Queue()

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        if handler_call_details.method == INFER:
            self.metadata.put(dict(handler_call_details.invocation_metadata))
        return grpc.unary_unary_rpc_method_handler(lambda _message, _context: b"")


def test_trace_continues_in_the_gateway_and_its_replica(triton: Triton) -> None:
    trace = "0123456789abcdef" * 2
    parent = "0123456789abcdef"
    metadata = [("traceparent", f"00-{trace}-{parent}-01"), ("tracestate", "vendor=1")]
    recorder = MetadataRecorder()
    replica = grpc.server(ThreadPoolExecutor(1), handlers=[recorder])
    url = f"http://{triton.address}?grpc={replica.add_insecure_port(f'{HOST}:0')}"
    replica.start()
    try:
        with (
            collecting() as collector,
            grpc_gateway(url, otlp_endpoint=collector.url, log_format="json") as served,
        ):
            call_bytes(served.address, INFER, REQUEST, metadata=metadata)
            assert json.loads(served.command.wait_for("ModelInfer 200"))["trace_id"] == trace
            wait_until(lambda: len(collector.of(trace)) == 2)
            spans = collector.of(trace)
    finally:
        replica.stop(None).wait()
    assert spans["triton"].parent_span_id == spans[f"POST {INFER}"].span_id
    received = recorder.metadata.get(timeout=TIMEOUT_S)
    assert received["traceparent"] == f"00-{trace}-{spans['triton'].span_id.hex()}-01"
    assert received["tracestate"] == "vendor=1"


class EndlessInferences(grpc.GenericRpcHandler):  # type: ignore[misc]
    """A Triton of the first version that survives any cancellation, whose inferences never complete.

    Records when an inference began, and when it was cancelled.
    """

    def __init__(self) -> None:
        self.started: Queue[str] = Queue()
        self.cancelled: Queue[float] = Queue()
        self._metadata = service_pb2.ServerMetadataResponse(
            version=".".join(map(str, (*SAFE_CANCEL_VERSION, 0)))
        ).SerializeToString()

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler:
        if handler_call_details.method == INFER:
            return grpc.unary_unary_rpc_method_handler(
                lambda _, context: self._wait(INFER, context)
            )
        if handler_call_details.method == STREAM:
            return grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.unary_unary_rpc_method_handler(lambda _message, _context: self._metadata)

    def _stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        yield self._wait(STREAM, context)

    def _wait(self, method: str, context: grpc.ServicerContext) -> bytes:
        ended = threading.Event()

        def record_cancellation() -> None:
            self.cancelled.put(time.monotonic())
            ended.set()

        if context.add_callback(record_cancellation):
            self.started.put(method)
            ended.wait(2 * TIMEOUT_S)
        return b""


def test_call_is_cancelled_at_once_if_triton_survives_it(triton: Triton) -> None:
    endless = EndlessInferences()
    replica = grpc.server(ThreadPoolExecutor(4), handlers=[endless])
    url = f"http://{triton.address}?grpc={replica.add_insecure_port(f'{HOST}:0')}"
    replica.start()
    try:
        with grpc_gateway(url) as served, grpc.insecure_channel(served.address) as channel:
            for method in (INFER, STREAM):
                delays_s = [cancel_inference(channel, method, endless) for _ in range(10)]
                assert_number(f"cancellation of {method}", 1000 * max(delays_s), "ms", at_most=50)
    finally:
        replica.stop(None).wait()


def cancel_inference(channel: grpc.Channel, method: str, endless: EndlessInferences) -> float:
    """Begin an inference and cancel it; the seconds until Triton knew."""
    call: Any
    if method == INFER:
        call = channel.unary_unary(method).future(REQUEST, timeout=TIMEOUT_S)
    else:
        call = channel.stream_stream(method)(iter([REQUEST]), timeout=TIMEOUT_S)
    assert endless.started.get(timeout=TIMEOUT_S) == method
    began = time.monotonic()
    call.cancel()
    return endless.cancelled.get(timeout=TIMEOUT_S) - began


def test_connection_above_the_limit_is_refused(triton: Triton) -> None:
    with Serving(triton, max_connections="3") as command:
        command.wait_for("serving")
        with ExitStack() as stack:
            for _ in range(3):
                held = stack.enter_context(Http2Connection(command.address))
                held.wait_for(SETTINGS)
            refused = stack.enter_context(Http2Connection(command.address))
            assert refused.read_frame() is None
        wait_until(lambda: is_served(command))


def is_served(command: Serving) -> bool:
    try:
        return bool(call_bytes(command.address, INFER, REQUEST))
    except grpc.RpcError:
        return False
