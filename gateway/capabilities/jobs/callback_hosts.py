"""The hosts to which callbacks may be sent, by the operator's list, and the addresses that they may have."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final
from urllib.parse import SplitResult, urlsplit

from gateway.access.auth import is_loopback
from gateway.errors import Forbidden, MalformedRequest
from gateway.messages import quote_text

MAX_URL_CHARS: Final = 2048
DEFAULT_PORTS: Final = {"https": 443, "http": 80}
GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
# The special-purpose registries of IANA (RFC 6890), of which `is_global` of older Pythons has gaps. Of IPv6,
# only what lies in 2000::/3: mapped addresses, NAT64, unique local, link-local and multicast ones do not.
SPECIAL_NETWORKS: Final = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",
            "100.64.0.0/10",  # carrier-grade NAT, and the metadata of Alibaba Cloud
            "127.0.0.0/8",
            "168.63.129.16/32",  # the platform of Azure, on a public address
            "169.254.0.0/16",  # link-local, and the metadata of most clouds
            "172.16.0.0/12",
            "192.0.0.0/24",  # protocol assignments, and the metadata of Oracle Cloud
            "192.0.2.0/24",  # documentation, as 198.51.100.0/24 and 203.0.113.0/24
            "192.31.196.0/24",  # AS112, as 192.175.48.0/24
            "192.52.193.0/24",  # automatic multicast tunnels
            "192.88.99.0/24",  # relays of 6to4
            "192.168.0.0/16",
            "192.175.48.0/24",
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",  # multicast, reserved and broadcast
            "2001::/23",  # Teredo, ORCHID and other protocol assignments
            "2001:db8::/32",  # documentation, as 3fff::/20
            "2002::/16",  # 6to4, whose addresses contain any IPv4 address
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",
        ),
    )
)

Address = IPv4Address | IPv6Address


class CallbackNotAllowed(Forbidden):
    code = "CALLBACK_NOT_ALLOWED"


class CannotResolve(Exception):
    """A name has no address, or one that is not allowed."""


@dataclass(frozen=True)
class Origin:
    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass(frozen=True)
class CallbackUrl:
    origin: Origin
    target: str  # the path and the query


class CallbackHosts:
    """The entries of `GATEWAY_CALLBACK_HOSTS`. Raises `ValueError` for an entry that is invalid."""

    def __init__(self, entries: Iterable[str]) -> None:
        networks = []
        origins: set[Origin] = set()
        for entry in entries:
            if "/" in entry and "://" not in entry:
                networks.append(parse_network(entry))
            else:
                origins.update(parse_origins(entry))
        self.origins = frozenset(origins)
        self._networks = tuple(networks)

    def check_url(self, text: str) -> CallbackUrl:
        """Return the parts of a URL that may be called. Raises `CallbackNotAllowed` or `MalformedRequest`."""
        parts = split_url(text)
        if parts is None:
            raise MalformedRequest("the callback URL is not valid; use https://HOST/PATH")
        if "@" in parts.netloc:
            raise CallbackNotAllowed("a callback URL with a user name or a password is not allowed")
        origin = build_origin(parts)
        if origin not in self.origins:
            place = quote_text(f"{origin.scheme}://{origin.authority}")
            raise CallbackNotAllowed(
                f"callbacks to {place} are not allowed: GATEWAY_CALLBACK_HOSTS lists the hosts that are"
            )
        query = f"?{parts.query}" if parts.query else ""
        return CallbackUrl(origin, f"{parts.path or '/'}{query}")

    async def resolve(self, origin: Origin) -> list[Address]:
        """Return the addresses of the host, all of which are allowed. Raises `CannotResolve`."""
        loop = asyncio.get_running_loop()
        try:
            entries = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(ip_address(entry[4][0]) for entry in entries))
        except (OSError, ValueError):
            raise CannotResolve(f"{origin.host} cannot be resolved") from None
        if not all(self._permits(origin.host, address) for address in addresses):
            raise CannotResolve(f"{origin.host} resolves to an address that is not public")
        return addresses

    def _permits(self, host: str, address: Address) -> bool:
        is_listed = host == str(address) or any(address in each for each in self._networks)
        return is_listed or is_public(address) or (address.is_loopback and is_loopback(host))


def is_public(address: Address) -> bool:
    """Return whether an address is one of the Internet, and contains no other address."""
    if isinstance(address, IPv6Address) and address not in GLOBAL_UNICAST:
        return False
    return not any(address in network for network in SPECIAL_NETWORKS)


def split_url(text: str) -> SplitResult | None:
    """Return the parts of a URL of http or https without a fragment; None if it is invalid."""
    if len(text) > MAX_URL_CHARS or not (text.isascii() and text.isprintable()) or " " in text:
        return None
    try:
        parts = urlsplit(text)
        is_valid = parts.scheme in DEFAULT_PORTS and parts.hostname and parts.port != 0
    except ValueError:
        return None
    return parts if is_valid and "#" not in text else None


def build_origin(parts: SplitResult) -> Origin:
    port = parts.port or DEFAULT_PORTS[parts.scheme]
    return Origin(parts.scheme, parts.hostname or "", port)


def parse_origins(entry: str) -> Iterator[Origin]:
    """Yield what `host`, `host:port` or a URL without a path stands for. Raises `ValueError`."""
    parts = split_url(entry if "://" in entry else f"https://{entry}")
    if parts is None or parts.path or parts.query or {"@", "*"} & set(parts.netloc):
        raise ValueError(
            f"{entry!r} is not HOST, HOST:PORT, http://HOST:PORT or a network such as 10.0.0.0/8"
        )
    yield build_origin(parts)
    # What never leaves the machine needs no encryption.
    if "://" not in entry and is_loopback(parts.hostname or ""):
        yield build_origin(parts._replace(scheme="http"))


def parse_network(entry: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(entry)
    except ValueError as exc:
        raise ValueError(f"{entry!r} is not a network: {exc}") from None
