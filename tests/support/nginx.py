"""A real nginx."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.missing import find_program
from tests.support.servers import free_ports
from tests.support.wait import TIMEOUT_S, wait_until

CONFIG = """
worker_processes 1; daemon off; pid FOLDER/nginx.pid; error_log FOLDER/error.log;
events { worker_connections 256; }
http {
    client_body_temp_path FOLDER/body; proxy_temp_path FOLDER/proxy; fastcgi_temp_path FOLDER/f;
    uwsgi_temp_path FOLDER/u; scgi_temp_path FOLDER/s;
    HTTP
}
"""

PREFIX = "/some/prefix"
# A proxy that ends TLS for its clients, and serves the gateway below a prefix and nothing else.
PREFIX_SERVER = """
    server {
        listen 127.0.0.1:PORT;
        location PREFIX/ {
            proxy_pass UPSTREAM/; proxy_http_version 1.1; proxy_set_header Host $http_host;
            proxy_set_header X-Forwarded-Proto https;
        }
    }
"""


@contextmanager
def serve_below_prefix(url: str) -> Iterator[str]:
    """Run an nginx before the gateway at this address; return the address of its prefix."""
    (port,) = free_ports(1)
    http = PREFIX_SERVER.replace("PORT", str(port)).replace("PREFIX", PREFIX)
    with run_nginx(port, http.replace("UPSTREAM", url)):
        yield f"http://127.0.0.1:{port}{PREFIX}"


@contextmanager
def run_nginx(port: int, http: str) -> Iterator[Path]:
    """Run an nginx with these directives, in which FOLDER means its folder; return the folder."""
    binary = find_program("nginx")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "nginx.conf"
        config.write_text(CONFIG.replace("HTTP", http).replace("FOLDER", name))
        with (
            (folder / "start.log").open("wb") as log,
            subprocess.Popen([binary, "-p", folder, "-c", config], stderr=log) as running,
        ):
            try:
                wait_until(lambda: connects(port))
                yield folder
            finally:
                running.terminate()


def connects(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), TIMEOUT_S):
        return True
    return False
