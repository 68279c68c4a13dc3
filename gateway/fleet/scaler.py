"""An external scaler for KEDA over gRPC: reports whether the fleet is needed, and the demand for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from gateway.fleet.on_demand_models import ModelUsage
from gateway.fleet.scaler_messages import SERVICE, decode_message, encode_message
from gateway.messages import CommandError

log = logging.getLogger(__name__)

METRIC_NAME: Final = "demand"
ACTIVITY_POLL_S: Final = 0.02
CLOSE_TIMEOUT_S: Final = 1.0
# Defaults of the metadata of a trigger.
TARGET_KEY, DEFAULT_TARGET = "targetValue", 8.0
LINGER_KEY, DEFAULT_LINGER_S = "lingerSeconds", 30.0
MAX_METADATA_VALUE: Final = 1e6


@dataclass(eq=False, repr=False)
class FleetScaler:
    """The service `externalscaler.ExternalScaler`. As a context manager it listens on its port."""

    _usage: ModelUsage
    _port: int
    _server: grpc.aio.Server = field(init=False)

    async def __aenter__(self) -> FleetScaler:
        # Otherwise a second process could listen on the port as well, and get a part of the calls.
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        unary = grpc.unary_unary_rpc_method_handler
        handlers = {
            "IsActive": unary(self._check_active),
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
        log.info("the external scaler of KEDA listens on port %d", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)
        await self._server.wait_for_termination(CLOSE_TIMEOUT_S)

    def is_active(self, linger_s: float) -> bool:
        """Return whether requests run or wait, or did until a short time ago."""
        return self._usage.count_demand() > 0 or self._usage.idle_s < linger_s

    async def _check_active(self, raw: bytes, _: Any) -> bytes:
        linger_s = read_metadata(raw, LINGER_KEY, DEFAULT_LINGER_S)
        return encode_message("IsActiveResponse", result=self.is_active(linger_s))

    async def _stream_activity(self, raw: bytes, _: Any) -> AsyncIterator[bytes]:
        """Yield the state now, and at once when it changes."""
        linger_s = read_metadata(raw, LINGER_KEY, DEFAULT_LINGER_S)
        last: bool | None = None
        while True:
            active = self.is_active(linger_s)
            if active is not last:
                last = active
                yield encode_message("IsActiveResponse", result=active)
            await asyncio.sleep(ACTIVITY_POLL_S)

    async def _describe_metric(self, raw: bytes, _: Any) -> bytes:
        target = read_metadata(raw, TARGET_KEY, DEFAULT_TARGET)
        spec = {
            "metricName": METRIC_NAME,
            "targetSize": max(round(target), 1),
            "targetSizeFloat": target,
        }
        return encode_message("GetMetricSpecResponse", metricSpecs=[spec])

    async def _read_metric(self, _: bytes, __: Any) -> bytes:
        demand = self._usage.count_demand()
        value = {
            "metricName": METRIC_NAME,
            "metricValue": demand,
            "metricValueFloat": float(demand),
        }
        return encode_message("GetMetricsResponse", metricValues=[value])


def read_metadata(raw: bytes, key: str, default: float) -> float:
    """Return a number of the trigger's metadata, or the default if it is missing or invalid."""
    reference = decode_message("ScaledObjectRef", raw)
    written = {entry.key: entry.value for entry in reference.scalerMetadata}.get(key, "")
    try:
        value = float(written)
    except ValueError:
        return default
    return value if 0 < value < MAX_METADATA_VALUE else default
