"""A real S3 server, that of moto, as a process that a test starts and stops."""

from __future__ import annotations

import os
import sys

import httpx

from tests.support.guards import GuardedServer
from tests.support.servers import free_ports

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "y",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "models"
# moto finds out the service of each request, and closes its connection: most of the CPU time of a small one.
PROGRAM = """
import sys
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

class Handler(MotoRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, *args):
        pass

app = create_backend_app("s3")
server = make_server("127.0.0.1", int(sys.argv[1]), app, threaded=True, request_handler=Handler)
server.serve_forever()
"""


class S3Server(GuardedServer):
    """An S3 server with one bucket, in memory."""

    def __init__(self) -> None:
        (port,) = free_ports(1)
        super().__init__(port, [sys.executable, "-c", PROGRAM, str(port)], dict(os.environ))
        self.url = f"http://127.0.0.1:{port}/{BUCKET}"

    def start(self) -> None:
        super().start()
        httpx.put(self.url).raise_for_status()

    def repository(self, prefix: str) -> str:
        """The URL of a prefix, as Triton spells it."""
        return f"s3://127.0.0.1:{self.port}/{BUCKET}/{prefix}"

    def keys(self, prefix: str) -> list[str]:
        """The keys below a prefix."""
        listed = httpx.get(self.url, params={"list-type": "2", "prefix": f"{prefix}/"}).text
        keys = [part.partition("</Key>")[0] for part in listed.split("<Key>")[1:]]
        return [key.removeprefix(f"{prefix}/") for key in keys]

    def unfinished_uploads(self) -> int:
        """The multipart uploads that were neither completed nor aborted."""
        return httpx.get(f"{self.url}?uploads").text.count("<UploadId>")
