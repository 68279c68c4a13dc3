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

LEAST_LOOK_S: Final = 0.25
TOLD_EVERY_S: Final = 1.0
LOOKS_AT_A_TIME: Final = 4  # each takes up to 0.1 ms


@dataclass(frozen=True)
class Limits:
    """What a client may send, in what time, and how many may come; as in `gateway.settings`."""

    header_bytes: int = 64 << 10
    header_fields: int = 100
    url_bytes: int = 8 << 10
    body_bytes: int = 64 << 20
    pipelined: int = 16
    header_timeout_s: float = 10.0
    body_stall_s: float = 10.0
    write_timeout_s: float = 30.0
    least_bytes_per_s: int = 1 << 10
    connections: int = 4096
    connections_per_client: int = 1024  # 0: any number


class Credit(NamedTuple):
    """For how long who must keep up with a rate may still do nothing."""

    left_s: float
    at: float

    def after(self, now: float, moved: int, rate: int, most_s: float) -> Credit:
        return Credit(min(self.left_s - (now - self.at) + moved / rate, most_s), now)

    @property
    def next_look(self) -> float:
        return self.at + max(self.left_s, LEAST_LOOK_S)


class Crowd:
    """How many connections each client has to this process, who was sent away, and whose turn it is."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._sent_away = 0
        self._told_at = -math.inf
        self._turns: deque[Callable[[], None]] = deque()
        self.refused = RefusedClients()

    def enter(self, client: str) -> int:
        count = self._of[client] = self._of.get(client, 0) + 1
        return count

    def leave(self, client: str) -> None:
        self._of[client] -= 1
        if not self._of[client]:
            del self._of[client]

    def send_away(self, now: float, whose: dict[str, str]) -> None:
        """Who floods the gateway is not to flood its log."""
        self._sent_away += 1
        if now - self._told_at >= TOLD_EVERY_S:
            log.warning("too many connections: %d sent away", self._sent_away, extra=whose)
            self._sent_away, self._told_at = 0, now

    def look(self, loop: asyncio.AbstractEventLoop, look: Callable[[], None]) -> None:
        """Hundreds that came in the same millisecond are overdue in the same one: nobody is to wait until
        each of them was told."""
        self._turns.append(look)
        if len(self._turns) == 1:
            loop.call_soon(self._take_turns, loop)

    def _take_turns(self, loop: asyncio.AbstractEventLoop) -> None:
        turns = self._turns
        for _ in range(min(LOOKS_AT_A_TIME, len(turns))):
            loop.call_soon(turns.popleft())
        if turns:
            loop.call_soon(self._take_turns, loop)


def address_of(name: Any) -> tuple[str, int] | None:
    """Host and port; a socket file has none."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def network_of(host: str) -> str:
    """What a client is counted by: who has an address of IPv6 has 2⁶⁴ of them."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))
