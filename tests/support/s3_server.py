"""A real S3 server, that of moto, as a process that a test starts and stops."""

from __future__ import annotations

import sys

import httpx

from tests.support.guards import GuardedServer
from tests.support.line_tracing import untraced_environment
from tests.support.servers import free_ports

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "y",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "models"


class S3Server(GuardedServer):
    """An S3 server with one bucket, in memory."""

    def __init__(self) -> None:
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        super().__init__(port, command, untraced_environment())
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
