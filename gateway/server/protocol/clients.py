"""The clients of this process: counts, metrics and log of their connections, and the order of their work."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from prometheus_client import Counter

from gateway.access.peers import ClientCounts, client_network
from gateway.errors import GatewayError, TooManyConnections
from gateway.server.protocol.deadlines import ConnectionLimits
from gateway.telemetry.metrics import OpenConnections

log = logging.getLogger(__name__)

REJECTION_LOG_INTERVAL_S: Final = 1.0
CHECKS_PER_PASS: Final = 4  # each takes up to 0.1 ms
RESPONSE_NOT_READ: Final = "answer_not_taken"
SocketName = tuple[str, int]  # host and port


class PacedCalls:
    """Makes calls soon, but only so many in each pass of the event loop, or in every nth pass.

    Otherwise a flood of them would delay every step of every request by the whole flood.
    """

    def __init__(self, per_pass: int, interval: int = 1) -> None:
        self._per_pass = per_pass
        self._interval = interval
        self._pass = 0
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._waiting.append(call)
        if len(self._waiting) == 1:
            loop.call_soon(self._run, loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        waiting = self._waiting
        self._pass = (self._pass + 1) % self._interval
        if not self._pass:
            for _ in range(min(self._per_pass, len(waiting))):
                loop.call_soon(waiting.popleft())
        if waiting:
            loop.call_soon(self._run, loop)


class ClientRegistry:
    """The connections of each client, rejections, and the work in which connections take turns."""

    def __init__(self) -> None:
        self.connections = ClientCounts()
        self._rejected_count = 0
        self._logged_at = -math.inf
        # Hundreds of connections may be opened, and so become overdue, in the same millisecond.
        self.checks = PacedCalls(CHECKS_PER_PASS)
        # Each read of a large body copies up to 256 KiB.
        self.large_reads = PacedCalls(1)
        # A request takes several passes. Between two that may be refused again, others get one.
        self._refused_requests = PacedCalls(1, interval=2)

    def log_rejection(self, now: float, log_fields: dict[str, str]) -> None:
        # At most one line per interval, so that a flood of connections does not flood the log.
        self._rejected_count += 1
        if now - self._logged_at >= REJECTION_LOG_INTERVAL_S:
            log.warning("too many connections: %d rejected", self._rejected_count, extra=log_fields)
            self._rejected_count = 0
            self._logged_at = now

    def enqueue_refused(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return a future that is done when a client whose last request was refused may start the next."""
        turn = loop.create_future()
        self._refused_requests.add(loop, partial(wake, turn))
        return turn


def wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class ClientAccount:
    """One connection in the counts, metrics and log of this process."""

    def __init__(
        self, registry: ClientRegistry, address: SocketName | None, app_state: dict[str, Any]
    ) -> None:
        self._registry = registry
        self._host = "" if address is None else address[0]
        self._network = ""  # the client as it is counted
        # The lifespan of the application may yield these.
        self._connections: OpenConnections | None = app_state.get("connections")
        self._refusals_counter: Counter | None = app_state.get("refusals")

    def open(self, connection_count: int, limits: ConnectionLimits) -> int:
        """Count the connection; return by how many its limits are exceeded, in total or for this client."""
        if self._connections is not None:
            self._connections.open(limits.max_connections)
        excess = connection_count - limits.max_connections
        per_client = limits.max_connections_per_client
        if per_client and self._host:
            self._network = client_network(self._host)
            excess = max(excess, self._registry.connections.add(self._network) - per_client)
        return excess

    def close(self) -> None:
        if self._connections is not None:
            self._connections.close()
        if self._network:
            self._registry.connections.remove(self._network)

    def record_refusal(self, error: GatewayError, request_id: str, now: float) -> None:
        self._count_refusal(error.code.lower())
        if isinstance(error, TooManyConnections):
            self._registry.log_rejection(now, {"client": self._host})
        else:
            extra = {"status": error.status, "request_id": request_id, "client": self._host}
            log.info("rejected: %s", error.detail, extra=extra)

    def record_unread_response(self) -> None:
        self._count_refusal(RESPONSE_NOT_READ)
        extra = {"client": self._host}
        log.info("disconnected: the client does not read its response", extra=extra)

    def _count_refusal(self, reason: str) -> None:
        if self._refusals_counter is not None:
            self._refusals_counter.labels(reason).inc()


def parse_socket_name(name: Any) -> SocketName | None:
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None
