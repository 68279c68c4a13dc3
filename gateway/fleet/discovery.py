"""The addresses of the replicas: those that are configured, and those that are looked up."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import anyio

from gateway.fleet.replica import BadAddress, ReplicaAddress, parse_replica_url

log = logging.getLogger(__name__)

Resolver = Callable[[str], Awaitable[Iterable[str]]]
DNS_PREFIX = "dns+"


class AddressLookup(Protocol):
    """An entry of `GATEWAY_TRITON_URLS` for several replicas, which can change. `str()` is its name."""

    @property
    def tls(self) -> bool:
        """Return whether any of the replicas can require TLS."""

    async def find_addresses(self) -> Iterable[ReplicaAddress]:
        """Raises `OSError`, `UnicodeError` or `BadAddress`."""


ReplicaSource = ReplicaAddress | AddressLookup


async def resolve_host(name: str) -> list[str]:
    """Return the addresses of a DNS name. Raises `OSError`."""
    entries = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in entries})


@dataclass(frozen=True)
class DnsName:
    """A DNS name, which stands for a replica on each of its addresses."""

    address: ReplicaAddress  # with the name as its host
    resolver: Resolver = field(default=resolve_host, compare=False)

    def __str__(self) -> str:
        return self.address.host

    @property
    def tls(self) -> bool:
        return self.address.tls

    async def find_addresses(self) -> Iterable[ReplicaAddress]:
        name = self.address.host
        hosts = await self.resolver(name)
        return (replace(self.address, host=host, server_name=name) for host in hosts)


def parse_replica_source(url: str) -> ReplicaSource:
    """Parse an entry of `GATEWAY_TRITON_URLS`. Raises `BadAddress`."""
    if url.lower().startswith(DNS_PREFIX):
        return DnsName(parse_replica_url(url[len(DNS_PREFIX) :]))
    return parse_replica_url(url)


@dataclass(eq=False, repr=False)
class ReplicaDiscovery:
    """The current addresses of the replicas. `on_change` is called after each successful lookup."""

    _sources: Sequence[ReplicaSource]
    _on_change: Callable[[], None]
    _interval_s: float

    def __post_init__(self) -> None:
        fixed = [source for source in self._sources if isinstance(source, ReplicaAddress)]
        self._lookups = [each for each in self._sources if not isinstance(each, ReplicaAddress)]
        self._failures: dict[AddressLookup, str] = {}  # the last one of each lookup
        self._addresses: dict[ReplicaSource, frozenset[ReplicaAddress]] = {
            address: frozenset((address,)) for address in fixed
        }

    @property
    def addresses(self) -> set[ReplicaAddress]:
        return {address for addresses in self._addresses.values() for address in addresses}

    async def look_up_all(self) -> None:
        await asyncio.gather(*map(self._look_up, self._lookups))

    async def run(self) -> None:
        await asyncio.gather(*map(self._look_up_periodically, self._lookups))

    async def _look_up_periodically(self, lookup: AddressLookup) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._look_up(lookup)

    async def _look_up(self, lookup: AddressLookup) -> None:
        """Look the addresses up. If that fails, the last known ones stay in use."""
        try:
            with anyio.fail_after(self._interval_s):
                addresses = frozenset(await lookup.find_addresses())
        except (OSError, UnicodeError, BadAddress) as exc:
            self._record_failure(lookup, str(exc) or "timeout")
            return
        if not addresses:
            self._record_failure(lookup, "it has no addresses")
            return
        self._failures.pop(lookup, None)
        self._addresses[lookup] = addresses
        self._on_change()

    def _record_failure(self, lookup: AddressLookup, reason: str) -> None:
        if self._failures.get(lookup) != reason:
            log.warning("cannot resolve %s: %s", lookup, reason)
        self._failures[lookup] = reason
