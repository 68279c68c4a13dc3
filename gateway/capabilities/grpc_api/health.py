"""The standard health service, grpc.health.v1: the readiness of the fleet, as in `/readyz`.

Like Triton's, it answers for every service name alike. So its messages are not read: a client needs no key,
and compressed bytes can become a message of any size.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Final

from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from tritonclient.grpc import service_pb2

from gateway.callers import Right
from gateway.capabilities.grpc_api.call import IncomingCall, ShuttingDown
from gateway.errors import Overloaded
from gateway.process_exit import Drain

HEALTH_SERVICE: Final[str] = health.SERVICE_NAME


def encode_status(status: int) -> bytes:
    return bytes(HealthCheckResponse(status=status).SerializeToString())


SERVING: Final = encode_status(HealthCheckResponse.SERVING)
NOT_SERVING: Final = encode_status(HealthCheckResponse.NOT_SERVING)
WATCH_INTERVAL_S: Final = 0.5
MAX_WATCHES: Final = 1024


class HealthService:
    """The readiness of this gateway."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain
        self._watch_count = 0
        self._watched_status = NOT_SERVING
        self._next_reading = 0.0

    def is_ready(self, call: IncomingCall) -> bool:
        repository = call.services.repository
        return repository.readiness.evaluate(is_draining=self._drain.is_draining).is_ready

    async def serve_server_ready(self, call: IncomingCall) -> bytes:
        """Answer for the fleet: with strict readiness, a replica is not ready during every load."""
        call.authorize(Right.infer)
        response = service_pb2.ServerReadyResponse(ready=self.is_ready(call))
        return bytes(response.SerializeToString())

    async def check(self, call: IncomingCall) -> bytes:
        return SERVING if self.is_ready(call) else NOT_SERVING

    async def watch(self, call: IncomingCall) -> None:
        """Send the status now and after each change, until the client ends the call."""
        if self._watch_count >= MAX_WATCHES:
            raise Overloaded(f"{MAX_WATCHES} calls watch the health of this gateway already")
        self._watch_count += 1
        try:
            await self._report_changes(call)
        finally:
            self._watch_count -= 1

    async def _report_changes(self, call: IncomingCall) -> None:
        last = b""
        while not call.environment.stopping.is_set():
            status = self._read_status(call)
            if status != last:
                last = status
                await call.write(status)
                call.succeed(status)
            await asyncio.sleep(WATCH_INTERVAL_S)
        raise ShuttingDown

    def _read_status(self, call: IncomingCall) -> bytes:
        now = monotonic()
        if now >= self._next_reading:
            self._next_reading = now + WATCH_INTERVAL_S / 2
            self._watched_status = SERVING if self.is_ready(call) else NOT_SERVING
        return self._watched_status
