"""A real nginx before the server: both count the same requests, whatever a client sends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.framing import AMBIGUOUS, UNAMBIGUOUS
from tests.support.http_server import HOST, MIB, PATIENCE_S, Stage
from tests.support.nginx import run_nginx
from tests.support.servers import free_ports
from tests.support.wait import wait_until

# A request that does not come whole is given up soon, so that every connection comes to its end.
NGINX = """
access_log FOLDER/access.log combined buffer=1 flush=1s;
proxy_request_buffering off; underscores_in_headers on;
client_header_timeout 300ms; client_body_timeout 300ms;
upstream gateway {{ server 127.0.0.1:{upstream}; keepalive 4; }}
log_format statuses "$upstream_status";
access_log FOLDER/statuses.log statuses;
server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://gateway; proxy_http_version 1.1;
        proxy_set_header Connection ""; proxy_set_header Host $http_host; }}
}}
"""


@dataclass(frozen=True)
class Proxy:
    """An nginx before a server."""

    server: Stage
    port: int
    log: Path

    def converse(self, wire: bytes) -> bytes:
        """Return what is received on a new connection until nginx closes it."""
        received = b""
        address = HOST, self.port
        with suppress(ConnectionError), socket.create_connection(address, PATIENCE_S) as connection:
            connection.sendall(wire)
            while data := connection.recv(MIB):
                received += data
        return received

    def count_passed(self) -> int:
        """Return the number of requests that nginx passed and the server answered with 200."""
        return self.log.read_text().split().count("200")


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    (port,) = free_ports(1)
    with (
        Stage() as server,
        run_nginx(port, NGINX.format(port=port, upstream=server.port)) as folder,
    ):
        yield Proxy(server, port, folder / "statuses.log")


@pytest.mark.fault("request smuggling through nginx, in upgrades, in trailers")
@pytest.mark.parametrize("name", [*AMBIGUOUS, *UNAMBIGUOUS])
def test_nginx_and_the_server_count_the_same_requests(proxy: Proxy, name: str) -> None:
    """The server answers exactly the requests that nginx passed, however nginx read the bytes."""
    asked, before = proxy.server.asked, proxy.count_passed()
    asked.clear()
    last = b"GET /%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    proxy.converse({**AMBIGUOUS, **UNAMBIGUOUS}[name] + last % b"second")
    # Bytes left on a connection to the server would be taken for the response to this request.
    assert b"x-target: /third\r\n" in proxy.converse(last % b"third")
    paths = [each.path for each in asked]
    wait_until(lambda: proxy.count_passed() - before >= len(asked))
    assert proxy.count_passed() - before == len(asked)
    assert paths.count("/third") == 1
    assert set(paths) <= {"/", "/second", "/third"}
    assert "/smuggled" not in paths
