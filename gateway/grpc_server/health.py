"""The standard health service, grpc.health.v1: the readiness of the fleet, as in `/readyz`."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from gateway.draining import Drain
from gateway.errors import NotFound
from gateway.grpc_server.call import IncomingCall, ShuttingDown
from gateway.grpc_server.models import EMPTY_MESSAGE
from gateway.grpc_server.wire import LENGTH_DELIMITED, iterate_fields
from gateway.keys import Right
from gateway.triton.grpc.byte_channel import GRPC_SERVICE

HEALTH_SERVICE: Final = "grpc.health.v1.Health"
# Messages of grpc/health/v1/health.proto: HealthCheckRequest.service, HealthCheckResponse.status.
SERVICE_FIELD: Final = 1
SERVING, NOT_SERVING, SERVICE_UNKNOWN = b"\x08\x01", b"\x08\x02", b"\x08\x03"
KNOWN_SERVICES: Final = ("", GRPC_SERVICE.removeprefix("/"), HEALTH_SERVICE)
WATCH_INTERVAL_S: Final = 0.5
READY, NOT_READY = SERVING, EMPTY_MESSAGE  # of ServerReadyResponse


class HealthService:
    """The readiness of this gateway."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    def is_ready(self, call: IncomingCall) -> bool:
        repository = call.services.repository
        return repository.check_readiness(is_draining=self._drain.is_draining).is_ready

    async def serve_server_ready(self, call: IncomingCall) -> bytes:
        """Answer for the fleet: with strict readiness, a replica is not ready during every load."""
        call.authorize(Right.infer)
        return READY if self.is_ready(call) else NOT_READY

    async def check(self, call: IncomingCall) -> bytes:
        message = await call.read_message(call.find_timeout_s())
        if read_service(message) not in KNOWN_SERVICES:
            raise NotFound("unknown service; the empty name stands for the whole gateway")
        return SERVING if self.is_ready(call) else NOT_SERVING

    async def watch(self, call: IncomingCall) -> None:
        """Send the status now and after each change, until the client ends the call."""
        message = await call.read_message(call.find_timeout_s())
        is_known = read_service(message) in KNOWN_SERVICES
        last: Any = None
        while not call.environment.stopping.is_set():
            status = SERVING if self.is_ready(call) else NOT_SERVING
            if not is_known:
                status = SERVICE_UNKNOWN
            if status != last:
                last = status
                await call.context.write(status)
                call.succeed(status)
            await asyncio.sleep(WATCH_INTERVAL_S)
        raise ShuttingDown


def read_service(message: bytes) -> str:
    """Return the service of a HealthCheckRequest. Raises `MalformedRequest`."""
    service = b""
    for field in iterate_fields(message, 0, len(message)):
        if field.number == SERVICE_FIELD and field.wire_type == LENGTH_DELIMITED:
            service = message[field.value_start : field.end]
    return service.decode(errors="replace")
