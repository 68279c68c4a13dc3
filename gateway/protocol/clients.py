"""The clients of this process: counts, metrics and log of their connections, and the order of their work."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from ipaddress import IPv6Address
from typing import Any, Final

from prometheus_client import Counter, Gauge

from gateway.errors import GatewayError, TooManyConnections
from gateway.protocol.limits import ProtocolLimits

log = logging.getLogger(__name__)

REJECTION_LOG_INTERVAL_S: Final = 1.0
CHECKS_PER_PASS: Final = 4  # each takes up to 0.1 ms
RESPONSE_NOT_READ: Final = "answer_not_taken"
SocketName = tuple[str, int]  # host and port


class RefusedClients:
    """Starts one request of such clients in each pass of the event loop; other requests start at once.

    Otherwise a flood of rejected requests would delay every step of every other request by the whole flood.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_running = False

    def enqueue(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Return a future that is done when the request may start."""
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._is_running:
            self._is_running = True
            loop.call_soon(self._start_next, loop)
        return turn

    def _start_next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # not cancelled
                turn.set_result(None)
                loop.call_soon(self._start_next, loop)
                return
        self._is_running = False


class ClientRegistry:
    """Connection counts per client, rejections and pending timeout checks of this process."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._rejected_count = 0
        self._logged_at = -math.inf
        self._pending_checks: deque[Callable[[], None]] = deque()
        self.refused_clients = RefusedClients()

    def add_connection(self, client: str) -> int:
        count = self._counts[client] = self._counts.get(client, 0) + 1
        return count

    def remove_connection(self, client: str) -> None:
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client]

    def log_rejection(self, now: float, log_fields: dict[str, str]) -> None:
        # At most one line per interval, so that a flood of connections does not flood the log.
        self._rejected_count += 1
        if now - self._logged_at >= REJECTION_LOG_INTERVAL_S:
            log.warning("too many connections: %d rejected", self._rejected_count, extra=log_fields)
            self._rejected_count, self._logged_at = 0, now

    def schedule_check(self, loop: asyncio.AbstractEventLoop, check: Callable[[], None]) -> None:
        """Run the check soon, `CHECKS_PER_PASS` in each pass of the event loop.

        Hundreds of connections may be opened, and so become overdue, in the same millisecond.
        """
        self._pending_checks.append(check)
        if len(self._pending_checks) == 1:
            loop.call_soon(self._run_checks, loop)

    def _run_checks(self, loop: asyncio.AbstractEventLoop) -> None:
        checks = self._pending_checks
        for _ in range(min(CHECKS_PER_PASS, len(checks))):
            loop.call_soon(checks.popleft())
        if checks:
            loop.call_soon(self._run_checks, loop)


class ClientAccount:
    """One connection in the counts, metrics and log of this process."""

    def __init__(
        self, registry: ClientRegistry, address: SocketName | None, app_state: dict[str, Any]
    ) -> None:
        self._registry = registry
        self._host = "" if address is None else address[0]
        self._network = ""  # the client as it is counted
        # The lifespan of the application may yield these.
        self._connections_gauge: Gauge | None = app_state.get("connections")
        self._refusals_counter: Counter | None = app_state.get("refusals")

    def open(self, connection_count: int, limits: ProtocolLimits) -> int:
        """Count the connection; return by how many its limits are exceeded, in total or for this client."""
        if self._connections_gauge is not None:
            self._connections_gauge.inc()
        excess = connection_count - limits.max_connections
        per_client = limits.max_connections_per_client
        if per_client and self._host:
            self._network = client_network(self._host)
            excess = max(excess, self._registry.add_connection(self._network) - per_client)
        return excess

    def close(self) -> None:
        if self._connections_gauge is not None:
            self._connections_gauge.dec()
        if self._network:
            self._registry.remove_connection(self._network)

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
    """Return host and port; None for a Unix socket."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def client_network(host: str) -> str:
    """Return the IPv4 address, or the IPv6 /64 network, all of whose addresses one client may have."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))
