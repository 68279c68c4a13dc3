"""The addresses of the replicas: those that are configured, and those of DNS names."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import anyio

from gateway.fleet.replica import ReplicaAddress, ReplicaSource

log = logging.getLogger(__name__)

Resolver = Callable[[str], Awaitable[Iterable[str]]]


async def resolve_host(name: str) -> list[str]:
    """Return the addresses of a DNS name. Raises `OSError`."""
    entries = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in entries})


@dataclass(eq=False, repr=False)
class ReplicaDiscovery:
    """The current addresses of the replicas. `on_change` is called after each successful lookup."""

    _sources: Sequence[ReplicaSource]
    _on_change: Callable[[], None]
    _interval_s: float
    _resolver: Resolver

    def __post_init__(self) -> None:
        self._dns_sources = [source for source in self._sources if source.is_dns_name]
        fixed = (source for source in self._sources if not source.is_dns_name)
        self._addresses = {source: frozenset((source.address,)) for source in fixed}

    @property
    def addresses(self) -> set[ReplicaAddress]:
        return {address for addresses in self._addresses.values() for address in addresses}

    async def look_up_all(self) -> None:
        await asyncio.gather(*map(self._look_up, self._dns_sources))

    async def run(self) -> None:
        await asyncio.gather(*map(self._look_up_periodically, self._dns_sources))

    async def _look_up_periodically(self, source: ReplicaSource) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._look_up(source)

    async def _look_up(self, source: ReplicaSource) -> None:
        """Look the DNS name up. If that fails, its last known addresses stay in use."""
        name = source.address.host
        try:
            with anyio.fail_after(self._interval_s):
                hosts = list(await self._resolver(name))
        except (OSError, UnicodeError) as exc:
            log.warning("cannot resolve %s: %s", name, exc or "timeout")
            return
        if not hosts:
            log.warning("cannot resolve %s: the name has no addresses", name)
            return
        self._addresses[source] = frozenset(
            replace(source.address, host=host, server_name=name) for host in hosts
        )
        self._on_change()
