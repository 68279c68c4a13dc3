"""The user of the program at the other end of a loopback connection, by the kernel (sock_diag(7))."""

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
# A socket that is being closed has no process any more, and its user reads as 0, which is root.
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
    """Return the user id of the process that holds the client's end of a TCP connection.

    None where there is no such socket, where it is not open any more, or the system does not tell.
    """
    try:
        answer = query_kernel(encode_diag_request(client, server))
    except OSError:
        return None
    kind = NETLINK_HEADER.unpack_from(answer)[1]
    if kind != SOCK_DIAG_BY_FAMILY or len(answer) < NETLINK_HEADER.size + DIAG_RESPONSE.size:
        return None
    _, state, user = DIAG_RESPONSE.unpack_from(answer, NETLINK_HEADER.size)
    return int(user) if state == TCP_ESTABLISHED else None


def encode_diag_request(client: SocketAddress, server: SocketAddress) -> bytes:
    """Return a request for the one socket that has these two ends."""
    here, there = parse_ip_address(client[0]), parse_ip_address(server[0])
    family = socket.AF_INET if isinstance(here, IPv4Address) else socket.AF_INET6
    ends = here.packed.ljust(16, b"\0") + there.packed.ljust(16, b"\0")
    asked = DIAG_REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, ANY_STATE)
    asked += DIAG_PORTS.pack(client[1], server[1]) + ends + NO_COOKIE
    size = NETLINK_HEADER.size + len(asked)
    return NETLINK_HEADER.pack(size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + asked


def query_kernel(request: bytes) -> bytes:
    """Return the kernel's answer. Raises `OSError`."""
    if sys.platform != "linux":
        raise OSError("this system has no netlink")
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(NETLINK_TIMEOUT_S)
        netlink.send(request)
        return netlink.recv(NETLINK_RECEIVE_BYTES)


def parse_ip_address(address: str) -> IPv4Address | IPv6Address:
    """The address; of one of IPv4 within IPv6, which a socket for both shows, that of IPv4."""
    found = ip_address(address)
    return getattr(found, "ipv4_mapped", None) or found


@lru_cache(1)
def can_identify_peers() -> bool:
    """Whether the system tells whose a connection is: a kernel without inet_diag finds none at all."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listening,
            socket.create_connection(listening.getsockname(), NETLINK_TIMEOUT_S) as client,
        ):
            known = find_peer_uid(client.getsockname(), listening.getsockname()) == os.geteuid()
    except OSError:
        known = False
    if not known:
        log.warning(
            "this system does not tell whose a local connection is: without a keys file administration is "
            "open to every user of this machine"
        )
    return known
