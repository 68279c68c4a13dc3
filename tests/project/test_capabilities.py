"""A capability is deleted with its folder and its lines in the list; the rest serves without it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from gateway.capabilities.installed import INSTALLED
from tests.support.servers import ROOT, Command, free_ports

NAMES = [capability.name for capability in INSTALLED]
# The beginnings of the paths of each capability in the API description.
PATHS = {
    "openai": ("/v1/embeddings", "/v1/rerank", "/v1/chat/completions", "/v1/completions"),
    "uploads": ("/v1/models/{model}/files", "/v1/models/{model}/versions/{version}/files"),
    "torchserve": ("/predictions/", "/models", "/ping"),
    "versions": ("/v1/models/{model}/labels/{label}",),
    "on_demand": (),
    "grpc_api": (),
    "page": (),
}
STATUSES = {"/livez": 200, "/v1/replicas": 200, "/metrics": 200, "/readyz": 503, "/nothing": 404}


def copy_without(names: Sequence[str], folder: Path) -> Path:
    """Copy the package without these capabilities."""
    package = folder / "gateway"
    shutil.copytree(ROOT / "gateway", package, ignore=shutil.ignore_patterns("__pycache__"))
    listed = package / "capabilities/installed.py"
    text = listed.read_text()
    for name in names:
        shutil.rmtree(package / "capabilities" / name)
        text = re.sub(rf"^(from .*| +){name.upper()}\b.*\n", "", text, flags=re.MULTILINE)
    listed.write_text(text)
    return folder


@pytest.mark.parametrize(
    "names",
    [
        *(pytest.param([name], id=name, marks=pytest.mark.long) for name in NAMES),
        pytest.param(NAMES, id="all"),
    ],
)
def test_gateway_without_a_capability_serves_the_others(
    names: Sequence[str], tmp_path: Path
) -> None:
    folder = copy_without(names, tmp_path)
    (port,) = free_ports(1)
    environment = {
        "PYTHONPATH": str(folder),
        "GATEWAY_TRITON_URLS": "127.0.0.1:9",
        "GATEWAY_DIALECTS": "torchserve",
    }
    command = Command(
        *("serve", "--port", str(port)),
        environment=environment,
        program=(sys.executable, "-s", "-m", "gateway"),
        folder=folder,
    )
    with command, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        command.wait_for("serving")
        assert {path: client.get(path).status_code for path in STATUSES} == STATUSES
        described = client.get("/openapi.json").json()["paths"]
        for name in NAMES:
            for path in PATHS[name]:
                is_described = any(each.startswith(path) for each in described)
                assert is_described is (name not in names), path


@pytest.mark.long
def test_gateway_without_capabilities_passes_the_type_checker(tmp_path: Path) -> None:
    folder = copy_without(NAMES, tmp_path)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    checked = subprocess.run(
        [*command, "-p", "gateway"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_capabilities_that_are_switched_off_are_not_imported() -> None:
    program = (
        "import sys; from gateway.app import create_app; from gateway.settings import Settings;"
        "create_app(Settings(state='memory:'));"
        "off = ('grpc_api', 'torchserve');"
        "print([name for name in sys.modules"
        " if name.startswith('gateway.capabilities.') and name.split('.')[2] in off])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    imported = [
        f"gateway.capabilities.{name}{module}"
        for name in ("grpc_api", "torchserve")
        for module in ("", ".capability")
    ]
    assert json.loads(done.stdout.replace(b"'", b'"')) == imported
