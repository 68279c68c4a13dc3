"""The addresses on which servers listen. `::` stands for all addresses, of both families."""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack
from typing import Any, Final

ALL_ADDRESSES: Final = "::"
ALL_IPV4_ADDRESSES: Final = "0.0.0.0"  # noqa: S104 - the user asks for it
WILDCARD_HOSTS: Final = (ALL_ADDRESSES, ALL_IPV4_ADDRESSES)
# Without this limit the kernel buffers megabytes of a response for a client that reads nothing, which costs
# memory and hides how slowly the client reads.
MAX_UNSENT_BYTES: Final = 256 * 1024
# The kernel does not have the family, or the machine no such address of it.
NO_FAMILY_ERRORS: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def join_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Return sockets that are bound to each address of the host, and do not listen yet.

    An address of a family that this machine does not have is left out if there is another one.
    Raises `OSError`.
    """
    name = None if host == ALL_ADDRESSES else host
    places = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    listeners: list[socket.socket] = []
    failure = OSError()
    with ExitStack() as stack:
        for family, _, _, _, address in sorted(places):
            try:
                listener = open_listener(family, address)
            except OSError as exc:
                if exc.errno not in NO_FAMILY_ERRORS:
                    raise
                failure = exc
            else:
                listeners.append(stack.enter_context(listener))
        if not listeners:
            raise failure
        stack.pop_all()
    return listeners


def open_listener(family: socket.AddressFamily, address: Any) -> socket.socket:
    """Return a socket of one family, so that the addresses of IPv4 clients are IPv4 addresses."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it (tcp(7)).
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener
