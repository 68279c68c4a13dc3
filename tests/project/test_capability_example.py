"""The capability of gateway/capabilities/README.md works as it is written there, and is short."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.model_zoo.zoo import MODELS, Names, write_repository
from tests.support.servers import ROOT, Command, free_ports, triton_on_free_ports
from tests.support.wait import wait_until

pytestmark = pytest.mark.long
NAME = "top_label"


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package with the capability."""
    folder = tmp_path_factory.mktemp("copy")
    text = (ROOT / "gateway/capabilities/README.md").read_text()
    capability, routes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    package = folder / "gateway"
    shutil.copytree(ROOT / "gateway", package, ignore=shutil.ignore_patterns("__pycache__"))
    written = package / "capabilities" / NAME
    written.mkdir()
    (written / "__init__.py").touch()
    (written / "capability.py").write_text(capability)
    (written / "routes.py").write_text(routes)
    (difference,) = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    imported, unchanged, entry = difference.splitlines()
    installed = package / "capabilities/installed.py"
    listed = installed.read_text()
    assert listed.count(unchanged[1:]) == 1
    listed = listed.replace(unchanged[1:], f"{imported[1:]}\n\n{unchanged[1:]}\n{entry[1:]}")
    installed.write_text(listed)
    return folder


def test_example_answers_with_the_label(copied: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    classes = next(model for model in MODELS if model.name == "classes")
    write_repository(tmp_path / "models", Names(), (classes,))
    with (
        triton_on_free_ports(tmp_path / "models", "classes") as triton,
        Command(
            *("serve", "--port", str(port)),
            environment={"PYTHONPATH": str(copied), "GATEWAY_TRITON_URLS": triton.options.url},
            program=(sys.executable, "-s", "-m", "gateway"),
            folder=copied,
        ),
        httpx.Client(base_url=f"http://127.0.0.1:{port}/v1/models") as client,
    ):
        wait_until(lambda: is_served(client))
        labels = [
            client.post("/classes/top-label", json={"inputs": {"X": scores}}).text
            for scores in ([3, 1, 2], [1, 2, 3])
        ]
        (tensor,) = classes.outputs
        assert labels == [tensor.labels[0], tensor.labels[2]]


def is_served(client: httpx.Client) -> bool:
    try:
        return client.get("/classes").is_success
    except httpx.HTTPError:
        return False


def test_example_passes_the_type_checker(copied: Path) -> None:
    module = f"gateway.capabilities.{NAME}.routes"
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "-m",
        module,
    ]
    checked = subprocess.run(command, cwd=copied, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
