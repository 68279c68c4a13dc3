"""What clients are held to: sizes, times, and how many of them there may be."""

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
    """What a client may send, in what time, and how many may come; as in `gateway.settings`."""

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
    max_connections_per_client: int = 1024  # 0: any number


class RateCredit(NamedTuple):
    """For how long who must keep up with a rate may still do nothing."""

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
    """How many connections each client has to this process, who was sent away, and whose turn it is."""

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
        """Who floods the gateway is not to flood its log."""
        self._rejected_count += 1
        if now - self._logged_at >= REJECTION_LOG_INTERVAL_S:
            log.warning(
                "too many connections: %d sent away", self._rejected_count, extra=log_fields
            )
            self._rejected_count, self._logged_at = 0, now

    def schedule_check(self, loop: asyncio.AbstractEventLoop, check: Callable[[], None]) -> None:
        """Hundreds that came in the same millisecond are overdue in the same one: nobody is to wait until
        each of them was told."""
        self._pending_checks.append(check)
        if len(self._pending_checks) == 1:
            loop.call_soon(self._run_checks, loop)

    def _run_checks(self, loop: asyncio.AbstractEventLoop) -> None:
        turns = self._pending_checks
        for _ in range(min(CHECKS_PER_PASS, len(turns))):
            loop.call_soon(turns.popleft())
        if turns:
            loop.call_soon(self._run_checks, loop)


def parse_socket_name(name: Any) -> tuple[str, int] | None:
    """Host and port; a socket file has none."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def client_network(host: str) -> str:
    """What a client is counted by: who has an address of IPv6 has 2⁶⁴ of them."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))
