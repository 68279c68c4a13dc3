"""KEDA's external scaler: a small autoscaler that speaks its protocol starts the first Triton."""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.capabilities.on_demand.scaler import SERVICE, decode_message, encode_message
from tests.capabilities.grpc_api.support.grpc_gateway import failure
from tests.capabilities.grpc_api.support.http2 import DATA, Http2Connection
from tests.capabilities.on_demand.support.from_zero import send_request, sleeping_fleet
from tests.support.metrics import metric
from tests.support.servers import Command, free_ports
from tests.support.wait import TIMEOUT_S, wait_until

COUNT = 100
MAX_STREAMS = 100
ACTIVITY = f"/{SERVICE}/StreamIsActive"
LINGER_S = 1.0


class ScalerClient:
    """The part of KEDA that calls an external scaler."""

    def __init__(self, channel: grpc.Channel, **metadata: str) -> None:
        self._channel = channel
        entries = [{"key": key, "value": value} for key, value in metadata.items()]
        self.reference = {"name": "triton", "namespace": "test", "scalerMetadata": entries}

    def _call(self, method: str, request: str, response: str, **fields: Any) -> Any:
        call = self._channel.unary_unary(f"/{SERVICE}/{method}")
        raw = call(encode_message(request, **fields), timeout=TIMEOUT_S)
        return decode_message(response, raw)

    def call_bytes(self, method: str, message: bytes) -> list[bytes]:
        """The responses to a message as it is. Raises `grpc.RpcError`."""
        call = self._channel.unary_stream(f"/{SERVICE}/{method}")
        return list(call(message, timeout=TIMEOUT_S))

    def is_active(self) -> bool:
        found = self._call("IsActive", "ScaledObjectRef", "IsActiveResponse", **self.reference)
        return bool(found.result)

    def stream_activity(self) -> Iterator[bool]:
        call = self._channel.unary_stream(f"/{SERVICE}/StreamIsActive")
        for raw in call(encode_message("ScaledObjectRef", **self.reference)):
            yield decode_message("IsActiveResponse", raw).result

    def describe_metric(self) -> Any:
        found = self._call(
            "GetMetricSpec", "ScaledObjectRef", "GetMetricSpecResponse", **self.reference
        )
        (spec,) = found.metricSpecs
        return spec

    def read_demand(self) -> int:
        fields = {
            "scaledObjectRef": self.reference,
            "metricName": self.describe_metric().metricName,
        }
        found = self._call("GetMetrics", "GetMetricsRequest", "GetMetricsResponse", **fields)
        (value,) = found.metricValues
        return int(value.metricValue)


@contextmanager
def scaler_client(port: int, **metadata: str) -> Iterator[ScalerClient]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield ScalerClient(channel, **metadata)


@pytest.mark.long
def test_autoscaler_starts_the_first_replica_and_all_requests_are_answered(
    tmp_path: Path,
) -> None:
    (port,) = free_ports(1)
    events: list[tuple[float, bool]] = []
    with (
        sleeping_fleet(tmp_path, scaler_port=str(port)) as fleet,
        scaler_client(port, lingerSeconds=str(LINGER_S), targetValue="5") as scaler,
        ThreadPoolExecutor(COUNT) as pool,
    ):
        assert not scaler.is_active()
        assert scaler.read_demand() == 0
        assert (scaler.describe_metric().targetSize, scaler.describe_metric().targetSizeFloat) == (
            5,
            5.0,
        )

        def scale() -> None:
            for is_active in scaler.stream_activity():
                events.append((time.monotonic(), is_active))
                if is_active:
                    wait_until(lambda: scaler.read_demand() == COUNT)
                    fleet.triton.start()
                elif len(events) > 1:
                    return

        autoscaler = threading.Thread(target=scale)
        autoscaler.start()
        wait_until(lambda: events)
        url = str(fleet.client.base_url).rstrip("/")
        answers = [pool.submit(send_request, url, 0)]
        wait_until(lambda: len(events) == 2)
        answers += [pool.submit(send_request, url, number) for number in range(1, COUNT)]
        statuses = Counter(answer.result().status_code for answer in answers)
        assert statuses == {200: COUNT}
        ended = time.monotonic()
        autoscaler.join(TIMEOUT_S)
        assert [is_active for _, is_active in events] == [False, True, False]
        assert events[2][0] - ended > LINGER_S / 2
        assert scaler.read_demand() == 0


@pytest.mark.long
def test_first_request_is_pushed_to_the_autoscaler_within_100_ms(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    arrivals: queue.Queue[tuple[float, bool]] = queue.Queue()
    with (
        sleeping_fleet(tmp_path, scaler_port=str(port)) as fleet,
        scaler_client(port, lingerSeconds="0.1") as scaler,
    ):
        fleet.triton.start()
        url = str(fleet.client.base_url).rstrip("/")
        assert send_request(url, 0).status_code == 200

        def listen() -> None:
            with suppress(grpc.RpcError):  # the channel is closed at the end
                for is_active in scaler.stream_activity():
                    arrivals.put((time.monotonic(), is_active))

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        wait_until(lambda: not arrivals.empty())
        while arrivals.get(timeout=TIMEOUT_S)[1]:
            pass
        delays_s = []
        for _ in range(20):
            began = time.monotonic()
            assert send_request(url, 0).status_code == 200
            arrived_at, is_active = arrivals.get(timeout=TIMEOUT_S)
            assert is_active
            delays_s.append(arrived_at - began)
            assert arrivals.get(timeout=TIMEOUT_S)[1] is False
        # A busy machine delays some, but not most of them.
        assert statistics.median(delays_s) < 0.1, delays_s
    listener.join(TIMEOUT_S)


@pytest.mark.long
def test_metrics_have_the_demand_of_the_scaler(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with (
        sleeping_fleet(tmp_path, scaler_port=str(port)) as fleet,
        ThreadPoolExecutor(3) as pool,
    ):
        url = str(fleet.client.base_url).rstrip("/")
        answers = [pool.submit(send_request, url, number) for number in range(3)]
        wait_until(lambda: metric(fleet.client, "gateway_demand") == 3)
        fleet.triton.start()
        assert {answer.result().status_code for answer in answers} == {200}
        wait_until(lambda: metric(fleet.client, "gateway_demand") == 0)


@pytest.mark.fault(
    "messages above 16 KiB, invalid ones and hundreds of streams at the external scaler"
)
def test_invalid_messages_and_too_many_streams_at_the_scaler_are_refused(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    large = encode_message("ScaledObjectRef", name="n" * (32 << 10))
    with sleeping_fleet(tmp_path, scaler_port=str(port)), scaler_client(port) as scaler:
        for method in ("IsActive", "StreamIsActive", "GetMetricSpec"):
            for message, code in ((b"\xff\xff", "INVALID_ARGUMENT"), (large, "RESOURCE_EXHAUSTED")):
                assert failure(scaler.call_bytes, method, message)[0] == code
        reference = encode_message("ScaledObjectRef", name="triton")
        with Http2Connection(f"127.0.0.1:{port}") as flood:
            flood.send(*(flood.call(ACTIVITY, reference) for _ in range(2 * MAX_STREAMS)))
            for _ in range(MAX_STREAMS):
                assert flood.wait_for(DATA).payload
            with pytest.raises(TimeoutError):
                flood.wait_for(DATA, timeout_s=1)
            assert not scaler.is_active()


def test_scaler_port_in_use_or_several_workers_end_the_start(tmp_path: Path) -> None:
    (port, other) = free_ports(2)
    with sleeping_fleet(tmp_path, scaler_port=str(port)):
        environment = {"GATEWAY_SCALER_PORT": str(port)}
        with Command("serve", "--port", str(other), environment=environment) as second:
            second.wait_for(f"port {port} is in use")
            assert second.end() != 0
        with Command(
            "serve", "--port", str(other), "--workers", "2", environment=environment
        ) as several:
            several.wait_for("requires a single worker")
            assert several.end() != 0
