"""A real TorchServe with handlers that answer as the models of the tests do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.support.missing import format_reason
from tests.support.servers import ROOT, free_ports
from tests.support.wait import wait_until

COMMAND = ROOT / ".venv-torchserve" / "bin" / "torchserve"
MISSING = format_reason(
    "TorchServe",
    "python3 -m venv .venv-torchserve && "
    ".venv-torchserve/bin/pip install torchserve==0.12.0 torch numpy",
)
# Each is a class with one method, as TorchServe's documents show them; `row` is what one request sent.
HANDLER = """
class Handler:
    def initialize(self, context):
        pass

    def handle(self, rows, context):
        return [self.answer(row.get("data") or row.get("body")) for row in rows]

    def answer(self, value):
        {answer}
"""
ANSWERS = {
    "text": "return value if isinstance(value, str) else bytes(value)",
    "numbers": "return value['data'] if isinstance(value, dict) else value",
    "classes": (
        "return dict(sorted(zip(('cat', 'dog', 'a bird'), value['data']), key=lambda each: -each[1]))"
    ),
}
CONFIG = """
inference_address=http://127.0.0.1:{}
management_address=http://127.0.0.1:{}
metrics_address=http://127.0.0.1:{}
grpc_inference_port={}
grpc_management_port={}
disable_token_authorization=true
enable_model_api=true
"""


class Addresses(NamedTuple):
    """The base URLs of the two APIs."""

    inference: str
    management: str


def write_archive(folder: Path, file: str, model: str, version: str) -> None:
    """Write an archive as torch-model-archiver does."""
    described = {"modelName": model, "handler": "handler.py", "modelVersion": version}
    manifest = {"runtime": "python", "model": described, "archiverVersion": "0.12.0"}
    with zipfile.ZipFile(folder / file, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        archive.writestr("handler.py", HANDLER.format(answer=ANSWERS[model]))


@contextmanager
def torchserve(folder: Path) -> Iterator[Addresses]:
    for model in ANSWERS:
        write_archive(folder, f"{model}.mar", model, "1.0")
    write_archive(folder, "text-2.mar", "text", "2.0")
    ports = free_ports(5)
    (folder / "config.properties").write_text(CONFIG.format(*ports))
    options = ["--start", "--foreground", "--ncs", "--model-store", str(folder)]
    options += ["--ts-config", str(folder / "config.properties")]
    # Its process id is in a file of the folder for temporary files: one TorchServe per folder.
    paths = f"{COMMAND.parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": paths, "TMPDIR": str(folder)}
    with (
        (folder / "output").open("wb") as output,
        subprocess.Popen(
            [COMMAND, *options],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as process,
    ):
        addresses = Addresses(*(f"http://127.0.0.1:{port}" for port in ports[:2]))
        try:
            wait_until(lambda: is_up(addresses.inference))
            yield addresses
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def is_up(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ping").status_code == httpx.codes.OK
    return False
