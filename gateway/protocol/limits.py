"""Limits for clients: sizes, timeouts, rates and connections."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address
from typing import Any, Final, NamedTuple

from gateway.protocol.backoff import RefusedClients

log = logging.getLogger(__name__)

MIN_CHECK_INTERVAL_S: Final = 0.25
REJECTION_LOG_INTERVAL_S: Final = 1.0
CHECKS_PER_PASS: Final = 4  # each takes up to 0.1 ms


@dataclass(frozen=True)
class ProtocolLimits:
    """The settings of the same names; see `gateway.settings`."""

    max_header_bytes: int = 64 << 10
    max_header_fields: int = 100
    max_url_bytes: int = 8 << 10
    max_body_bytes: int = 64 << 20
    max_pipelined: int = 16
    header_timeout_s: float = 10.0
    body_stall_s: float = 10.0
    write_timeout_s: float = 30.0
    min_bytes_per_s: int = 1 << 10
    max_connections: int = 4096
    max_connections_per_client: int = 1024  # 0: unlimited


class RateCredit(NamedTuple):
    """The time for which a client that must keep a minimum rate may still be idle."""

    remaining_s: float
    updated_at: float

    def advance(self, now: float, moved_bytes: int, bytes_per_s: int, max_s: float) -> RateCredit:
        return RateCredit(
            min(self.remaining_s - (now - self.updated_at) + moved_bytes / bytes_per_s, max_s), now
        )

    @property
    def next_check_at(self) -> float:
        return self.updated_at + max(self.remaining_s, MIN_CHECK_INTERVAL_S)


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


def parse_socket_name(name: Any) -> tuple[str, int] | None:
    """Return host and port; None for a Unix socket."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def client_network(host: str) -> str:
    """Return the IPv4 address, or the IPv6 /64 network, all of whose addresses one client may have."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))
