"""An external scaler for KEDA over gRPC: reports whether the fleet is needed, and the demand for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from gateway.capabilities.on_demand.models import ModelUsage
from gateway.messages import CommandError
from gateway.tasks import TaskSet, cancel_tasks, repeat

log = logging.getLogger(__name__)

METRIC_NAME: Final = "demand"
ACTIVITY_POLL_S: Final = 0.02
CLOSE_TIMEOUT_S: Final = 1.0
# The port is open to the cluster, and KEDA's operator has one connection and a stream for each scaled object.
SERVER_OPTIONS: Final = (
    # Otherwise a second process could listen on the port as well, and get a part of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 16 << 10),
    ("grpc.max_metadata_size", 8 << 10),
    ("grpc.absolute_max_metadata_size", 8 << 10),
    ("grpc.max_concurrent_streams", 100),
    ("grpc.max_allowed_incoming_connections", 100),
)
# Defaults of the metadata of a trigger.
TARGET_KEY = "targetValue"
DEFAULT_TARGET = 8.0
LINGER_KEY = "lingerSeconds"
DEFAULT_LINGER_S = 30.0
MAX_METADATA_VALUE: Final = 1e6
SERVICE: Final = "externalscaler.ExternalScaler"
# Of KEDA 2. A map<string, string> such as scalerMetadata is encoded as its entries.
DESCRIPTOR: Final = """
name: "externalscaler.proto" package: "externalscaler" syntax: "proto3"
message_type { name: "MetadataEntry"
  field { name: "key" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type: TYPE_STRING } }
message_type { name: "ScaledObjectRef"
  field { name: "name" number: 1 type: TYPE_STRING }
  field { name: "namespace" number: 2 type: TYPE_STRING }
  field { name: "scalerMetadata" number: 3 label: LABEL_REPEATED type_name: "MetadataEntry" } }
message_type { name: "IsActiveResponse"
  field { name: "result" number: 1 type: TYPE_BOOL } }
message_type { name: "MetricSpec"
  field { name: "metricName" number: 1 type: TYPE_STRING }
  field { name: "targetSize" number: 2 type: TYPE_INT64 }
  field { name: "targetSizeFloat" number: 3 type: TYPE_DOUBLE } }
message_type { name: "GetMetricSpecResponse"
  field { name: "metricSpecs" number: 1 label: LABEL_REPEATED type_name: "MetricSpec" } }
message_type { name: "GetMetricsRequest"
  field { name: "scaledObjectRef" number: 1 type_name: "ScaledObjectRef" }
  field { name: "metricName" number: 2 type: TYPE_STRING } }
message_type { name: "MetricValue"
  field { name: "metricName" number: 1 type: TYPE_STRING }
  field { name: "metricValue" number: 2 type: TYPE_INT64 }
  field { name: "metricValueFloat" number: 3 type: TYPE_DOUBLE } }
message_type { name: "GetMetricsResponse"
  field { name: "metricValues" number: 1 label: LABEL_REPEATED type_name: "MetricValue" } }
"""
POOL: Final = descriptor_pool.DescriptorPool()
POOL.Add(text_format.Parse(DESCRIPTOR, descriptor_pb2.FileDescriptorProto()))
CLASSES: Final = message_factory.GetMessageClassesForFiles(("externalscaler.proto",), POOL)


class ActivityWatch:
    """One stream that reports whether the fleet is needed."""

    def __init__(self, linger_s: float, is_active: bool) -> None:
        self.linger_s = linger_s
        self.is_active = is_active
        self.changed = asyncio.Event()

    def update(self, is_active: bool) -> None:
        if is_active is not self.is_active:
            self.is_active = is_active
            self.changed.set()


class FleetScaler:
    """The service `externalscaler.ExternalScaler`. As a context manager it listens on its port."""

    def __init__(
        self, usage: ModelUsage, port: int, waiting_work: Sequence[Callable[[], int]] = ()
    ) -> None:
        self._usage = usage
        self._waiting_work = waiting_work
        self._port = port
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._tasks = TaskSet()
        self._watches: set[ActivityWatch] = set()

    async def __aenter__(self) -> FleetScaler:
        unary = grpc.unary_unary_rpc_method_handler
        handlers = {
            "IsActive": unary(self._answer_active),
            "StreamIsActive": grpc.unary_stream_rpc_method_handler(self._stream_activity),
            "GetMetricSpec": unary(self._describe_metric),
            "GetMetrics": unary(self._read_metric),
        }
        handler = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers((handler,))
        try:
            self._server.add_insecure_port(f"[::]:{self._port}")
        except RuntimeError:
            raise CommandError(f"GATEWAY_SCALER_PORT: port {self._port} is in use") from None
        await self._server.start()
        self._tasks.start(repeat("scaler", self._poll_activity))
        log.info("the external scaler of KEDA listens on port %d", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks(self._tasks)
        await self._server.stop(0)
        await self._server.wait_for_termination(CLOSE_TIMEOUT_S)

    def is_active(self, linger_s: float) -> bool:
        return self._count_demand() > 0 or self._usage.idle_s < linger_s

    def _count_demand(self) -> int:
        return self._usage.count_demand() + sum(count() for count in self._waiting_work)

    async def _poll_activity(self) -> None:
        if self._watches:
            demand = self._count_demand()
            idle_s = self._usage.idle_s
            for watch in self._watches:
                watch.update(demand > 0 or idle_s < watch.linger_s)
        await asyncio.sleep(ACTIVITY_POLL_S)

    async def _answer_active(self, raw: bytes, context: Any) -> bytes:
        linger_s = await decode_metadata(raw, context, LINGER_KEY, DEFAULT_LINGER_S)
        return encode_message("IsActiveResponse", result=self.is_active(linger_s))

    async def _stream_activity(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        linger_s = await decode_metadata(raw, context, LINGER_KEY, DEFAULT_LINGER_S)
        watch = ActivityWatch(linger_s, self.is_active(linger_s))
        self._watches.add(watch)
        try:
            while True:
                watch.changed.clear()
                yield encode_message("IsActiveResponse", result=watch.is_active)
                await watch.changed.wait()
        finally:
            self._watches.discard(watch)

    async def _describe_metric(self, raw: bytes, context: Any) -> bytes:
        target = await decode_metadata(raw, context, TARGET_KEY, DEFAULT_TARGET)
        spec = {
            "metricName": METRIC_NAME,
            "targetSize": max(round(target), 1),
            "targetSizeFloat": target,
        }
        return encode_message("GetMetricSpecResponse", metricSpecs=[spec])

    async def _read_metric(self, _: bytes, __: Any) -> bytes:
        demand = self._count_demand()
        value = {
            "metricName": METRIC_NAME,
            "metricValue": demand,
            "metricValueFloat": float(demand),
        }
        return encode_message("GetMetricsResponse", metricValues=[value])


async def decode_metadata(raw: bytes, context: Any, key: str, default: float) -> float:
    try:
        reference = decode_message("ScaledObjectRef", raw)
    except DecodeError:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT, "the message is not a ScaledObjectRef"
        )
    written = {entry.key: entry.value for entry in reference.scalerMetadata}.get(key, "")
    try:
        value = float(written)
    except ValueError:
        return default
    return value if 0 < value < MAX_METADATA_VALUE else default


def encode_message(name: str, /, **fields: Any) -> bytes:
    raw: bytes = CLASSES[f"externalscaler.{name}"](**fields).SerializeToString()
    return raw


def decode_message(name: str, raw: bytes) -> Any:
    return CLASSES[f"externalscaler.{name}"].FromString(raw)
