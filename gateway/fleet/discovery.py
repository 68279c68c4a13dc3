"""The addresses of the replicas, which are configured or looked up."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import anyio

from gateway.config.settings import Settings
from gateway.fleet.replica import BadAddress, ReplicaAddress, parse_replica_url
from gateway.tasks import repeat

log = logging.getLogger(__name__)

Resolver = Callable[[str], Awaitable[Iterable[str]]]
AddressLookup = Callable[[], Awaitable[Iterable[ReplicaAddress]]]
DNS_PREFIX = "dns+"
PREFER_PARAMETER = "prefer="
HOST_NAME = re.compile("[A-Za-z0-9._-]+")
# The name does not exist, or has no addresses; other errors say that the DNS does not work.
NO_ADDRESSES = (socket.EAI_NONAME, socket.EAI_NODATA)


async def resolve_host(name: str) -> list[str]:
    entries = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in entries})


@dataclass(frozen=True)
class DnsName:
    """A DNS name, which stands for a replica on each of its addresses.

    A second name may lead to some of them: those are preferred. In Kubernetes, the first one is a Service
    that publishes every pod, and the second one a Service of the ready pods. A pod leaves it when it is
    deleted, and serves for as long as its preStop hook runs.
    """

    address: ReplicaAddress  # its host is the name
    preferred_name: str = ""
    resolver: Resolver = field(default=resolve_host, compare=False)

    def __str__(self) -> str:
        return self.address.host

    @property
    def tls(self) -> bool:
        return self.address.tls

    async def find_addresses(self) -> list[ReplicaAddress]:
        return await self._resolve(self.address.host)

    async def find_preferred_addresses(self) -> list[ReplicaAddress]:
        return await self._resolve(self.preferred_name)

    async def _resolve(self, name: str) -> list[ReplicaAddress]:
        hosts = await self.resolver(name)
        return [replace(self.address, host=host, server_name=self.address.host) for host in hosts]


ReplicaSource = ReplicaAddress | DnsName


def create_tls_context(
    settings: Settings, addresses: Sequence[ReplicaSource]
) -> ssl.SSLContext | None:
    if not any(address.tls for address in addresses):
        return None
    context = ssl.create_default_context(cafile=settings.triton_ca_file)
    if settings.triton_cert_file is not None:
        context.load_cert_chain(settings.triton_cert_file, settings.triton_key_file)
    return context


def parse_replica_source(url: str) -> ReplicaSource:
    """Parse an entry of `GATEWAY_TRITON_URLS`. Raises `BadAddress`."""
    if not url.lower().startswith(DNS_PREFIX):
        return parse_replica_url(url)
    base, _, query = url[len(DNS_PREFIX) :].partition("?")
    parameters = query.split("&")
    names = [each for each in parameters if each.startswith(PREFER_PARAMETER)]
    others = [each for each in parameters if each not in names]
    address = parse_replica_url("?".join(filter(None, (base, "&".join(others)))))
    if not names:
        return DnsName(address)
    preferred_name = names[0].removeprefix(PREFER_PARAMETER)
    if len(names) > 1 or not HOST_NAME.fullmatch(preferred_name):
        raise BadAddress(f"{url!r} has an invalid parameter; write prefer=NAME with one DNS name")
    return DnsName(address, preferred_name)


class ReplicaDiscovery:
    """The current addresses of the replicas. `on_change` is called after each successful lookup."""

    def __init__(
        self, sources: Sequence[ReplicaSource], on_change: Callable[[], None], interval_s: float
    ) -> None:
        self._on_change = on_change
        self._interval_s = interval_s
        self._names = [source for source in sources if isinstance(source, DnsName)]
        self._failures: dict[str, str] = {}  # the reason of each name's last failure
        self._addresses: dict[ReplicaSource, frozenset[ReplicaAddress]] = {
            source: frozenset((source,)) for source in sources if isinstance(source, ReplicaAddress)
        }
        self._preferred: dict[DnsName, frozenset[ReplicaAddress]] = {}

    @property
    def addresses(self) -> set[ReplicaAddress]:
        return {address for addresses in self._addresses.values() for address in addresses}

    @property
    def avoided_addresses(self) -> frozenset[ReplicaAddress]:
        """The addresses of names that prefer others; none of a name whose preferred ones are unknown."""
        return frozenset(
            address
            for name, preferred in self._preferred.items()
            if preferred
            for address in self._addresses.get(name, frozenset()) - preferred
        )

    def describe_lookups(self) -> list[str]:
        """Return each DNS name with the number of its addresses, and why its last lookup failed."""
        described = []
        for name in self._names:
            reason = self._failures.get(str(name), "")
            count = len(self._addresses.get(name, ()))
            described.append(f"{name} (DNS: {count} addresses{reason and f', {reason}'})")
        return described

    async def look_up_all(self) -> None:
        await asyncio.gather(*map(self._look_up, self._names))

    async def run(self) -> None:
        await asyncio.gather(*map(self._look_up_periodically, self._names))

    async def _look_up_periodically(self, name: DnsName) -> None:
        async def look_up() -> None:
            await asyncio.sleep(self._interval_s)
            await self._look_up(name)

        await repeat("discovery", look_up)

    async def _look_up(self, name: DnsName) -> None:
        """Look the addresses up. If that fails, the last known ones stay in use."""
        addresses, preferred = await asyncio.gather(
            self._find(str(name), name.find_addresses),
            self._find(name.preferred_name, name.find_preferred_addresses),
        )
        if addresses:
            self._addresses[name] = addresses
        if preferred is not None:
            # While no pod is ready, none is preferred: the last one that was may be about to end.
            self._preferred[name] = preferred
        if addresses is not None or preferred is not None:
            self._on_change()

    async def _find(self, name: str, find: AddressLookup) -> frozenset[ReplicaAddress] | None:
        """Return the addresses of the name; None if the lookup fails, or there is no name."""
        if not name:
            return None
        try:
            with anyio.fail_after(self._interval_s):
                addresses = frozenset(await find())
        except (OSError, UnicodeError) as exc:
            self._record_failure(name, str(exc) or "timeout")
            is_empty = isinstance(exc, socket.gaierror) and exc.errno in NO_ADDRESSES
            return frozenset() if is_empty else None
        if addresses:
            self._failures.pop(name, None)
        else:
            self._record_failure(name, "it has no addresses")
        return addresses

    def _record_failure(self, name: str, reason: str) -> None:
        if self._failures.get(name) != reason:
            log.warning("cannot resolve %s: %s", name, reason)
        self._failures[name] = reason
