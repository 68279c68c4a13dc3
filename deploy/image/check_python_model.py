"""Check that Triton loads a Python model; the Dockerfile runs it in NVIDIA's image: REPOSITORY MODEL.

It uses only the standard library, and runs with the Python of that image.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request

OLDEST_VERSION = (2, 51)
OLDEST_RELEASE = "24.10"
TIMEOUT_S = 300


def check_version(version: str) -> None:
    """Exit if Triton is older than the oldest release that the gateway is tested with."""
    if tuple(int(number) for number in version.split(".")[:2]) < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        sys.exit(
            f"Triton {version} is too old: build the image with {oldest} ({OLDEST_RELEASE}) or newer"
        )


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):  # noqa: S310 # an address of this machine
            return True
    except OSError:
        return False


def check_model(repository: str, model: str) -> None:
    """Exit if Triton does not load the model; the output of Triton says why."""
    port = find_free_port()
    command = [
        "tritonserver",
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        f"--load-model={model}",
        "--http-address=127.0.0.1",
        f"--http-port={port}",
        "--allow-grpc=false",
        "--allow-metrics=false",
    ]
    with subprocess.Popen(command) as server:
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not is_ready(f"http://127.0.0.1:{port}/v2/models/{model}/ready"):
                if server.poll() is not None:
                    sys.exit(f"Triton cannot load the Python model {model}: the reason is above")
                if time.monotonic() > deadline:
                    sys.exit(f"Triton has not loaded the Python model {model} in {TIMEOUT_S} s")
                time.sleep(0.2)
        finally:
            server.terminate()


if __name__ == "__main__":
    check_version(os.environ["TRITON_SERVER_VERSION"])
    check_model(*sys.argv[1:])
