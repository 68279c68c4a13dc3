"""The other end of a connection: its network, and on loopback its user, by the kernel (sock_diag(7))."""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

log = logging.getLogger(__name__)

NETLINK_SOCK_DIAG: Final = 4
SOCK_DIAG_BY_FAMILY: Final = 20
NLM_F_REQUEST: Final = 1
# A closing socket has no process, and its user reads as 0, which is root.
TCP_ESTABLISHED: Final = 1
ANY_STATE: Final = 0xFFFFFFFF
NETLINK_HEADER: Final = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
DIAG_REQUEST: Final = struct.Struct("=BBBBI")  # inet_diag_req_v2, up to its id
DIAG_PORTS: Final = struct.Struct("!HH")
NO_COOKIE: Final = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, any cookie
DIAG_RESPONSE: Final = struct.Struct("=BB62xI")  # inet_diag_msg: family, state, …, user
NETLINK_RECEIVE_BYTES: Final = 4096
NETLINK_TIMEOUT_S: Final = 1.0

SocketAddress = tuple[str, int]


def find_peer_uid(client: SocketAddress, server: SocketAddress) -> int | None:
    """Return the user of the process that holds the client's end of a TCP connection; None if unknown."""
    try:
        response = query_kernel(encode_diag_request(client, server))
    except OSError:
        return None
    kind = NETLINK_HEADER.unpack_from(response)[1]
    if kind != SOCK_DIAG_BY_FAMILY or len(response) < NETLINK_HEADER.size + DIAG_RESPONSE.size:
        return None
    _, state, user = DIAG_RESPONSE.unpack_from(response, NETLINK_HEADER.size)
    return int(user) if state == TCP_ESTABLISHED else None


def encode_diag_request(client: SocketAddress, server: SocketAddress) -> bytes:
    source = parse_ip_address(client[0])
    destination = parse_ip_address(server[0])
    family = socket.AF_INET if isinstance(source, IPv4Address) else socket.AF_INET6
    addresses = source.packed.ljust(16, b"\0") + destination.packed.ljust(16, b"\0")
    request = DIAG_REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, ANY_STATE)
    request += DIAG_PORTS.pack(client[1], server[1]) + addresses + NO_COOKIE
    size = NETLINK_HEADER.size + len(request)
    return NETLINK_HEADER.pack(size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + request


def query_kernel(request: bytes) -> bytes:
    if sys.platform != "linux":
        raise OSError("netlink is not available on this system")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(NETLINK_TIMEOUT_S)
        netlink.send(request)
        return netlink.recv(NETLINK_RECEIVE_BYTES)


def parse_ip_address(address: str) -> IPv4Address | IPv6Address:
    """Return the address; an IPv4-mapped IPv6 address, as dual-stack sockets report it, becomes IPv4."""
    parsed = ip_address(address)
    return getattr(parsed, "ipv4_mapped", None) or parsed


@lru_cache(256)
def client_network(host: str) -> str:
    """Return the IPv4 address, or the IPv6 /64 network, all of whose addresses one client may have."""
    if ":" not in host:
        return host
    address = IPv6Address(host.partition("%")[0])
    return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))


@lru_cache(1)
def can_identify_peers() -> bool:
    """Return whether the kernel reports the owner of a connection, which requires inet_diag."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), NETLINK_TIMEOUT_S) as client,
        ):
            supported = find_peer_uid(client.getsockname(), listener.getsockname()) == os.geteuid()
    except OSError:
        supported = False
    if not supported:
        log.warning(
            "this system does not report the owner of local connections: without a keys file, every user of "
            "this machine may administer"
        )
    return supported


class ClientCounts:
    """The number of connections or calls of each client: an IPv4 address, or an IPv6 /64 network."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, client: str) -> int:
        count = self._counts[client] = self._counts.get(client, 0) + 1
        return count

    def remove(self, client: str) -> None:
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client]
