"""The user of the other end of a connection on this machine."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from gateway.access.peers import can_identify_peers, find_peer_uid

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked by netlink")


@pytest.mark.parametrize(
    ("family", "listen", "connect"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1"),
        (socket.AF_INET6, "::", "127.0.0.1"),  # seen as ::ffff:127.0.0.1
    ],
)
def test_peer_of_an_open_connection_has_its_user_and_a_closed_one_none(
    family: socket.AddressFamily, listen: str, connect: str
) -> None:
    assert can_identify_peers()
    both = family == socket.AF_INET6 and listen == "::"
    with socket.create_server((listen, 0), family=family, dualstack_ipv6=both) as listening:
        client = socket.create_connection((connect, listening.getsockname()[1]))
        accepted, _ = listening.accept()
        with accepted:
            ends = accepted.getpeername()[:2], accepted.getsockname()[:2]
            assert find_peer_uid(*ends) == os.geteuid()
            client.close()  # a socket without a process reads as root's
            assert find_peer_uid(*ends) is None
    assert find_peer_uid(*ends) is None
    assert find_peer_uid(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
