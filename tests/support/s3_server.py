"""A real S3 server, that of moto, as a process that a test starts and stops."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

from gateway.embedded import reaper
from tests.support.line_tracing import untraced_environment
from tests.support.servers import free_ports
from tests.support.wait import wait_until

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "y",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "models"


class S3Server:
    """An S3 server with one bucket, in memory, under a guard, so that it never outlives the tests."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}/{BUCKET}"
        command = [
            *(sys.executable, "-I", "-S", reaper.__file__, "1", f"none{os.getpid()}"),
            *(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)),
        ]
        self._guard = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=untraced_environment(),
            start_new_session=True,
        )
        wait_until(self._creates_bucket)

    def _creates_bucket(self) -> bool:
        assert self._guard.poll() is None, "the S3 server ended"
        with suppress(httpx.TransportError):
            return httpx.put(self.url).is_success
        return False

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

    def end(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server
    finally:
        server.end()
