"""A capability is deleted with its folder and its lines in the list; the rest serves without it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from gateway.capabilities.installed import INSTALLED
from tests.interface.names import read_recorded_names
from tests.support.servers import ROOT, Command, free_ports

NAMES = [capability.name for capability in INSTALLED]
CORE_STATUSES = {
    "/livez": 200,
    "/v1/replicas": 200,
    "/metrics": 200,
    "/readyz": 503,
    "/nothing": 404,
}
MODEL = r"/v1/models/\{model\}(/versions/\{version\})?"


@dataclass(frozen=True)
class OwnNames:
    """Patterns of the public names of a capability: its paths are deleted with it, the others may be."""

    paths: str = ""
    others: str = ""


OWN_NAMES = {
    "openai": OwnNames(
        r"POST /v1/(embeddings|rerank|chat/completions|completions)",
        r"setting GATEWAY_OPENAI_URLS|code \d+ NO_OPENAI_SERVER",
    ),
    "uploads": OwnNames(
        rf"(PUT|DELETE) {MODEL}|GET {MODEL}/files.*",
        r"setting GATEWAY_(MODEL_UPLOADS|ALLOW_MODEL_UPLOAD"
        r"|MAX_(MODEL_BYTES|REPOSITORY_BYTES|MODEL_INSTANCES|MODEL_WARMUPS|MODEL_SEQUENCES))"
        r"|code \d+ (DIGEST_MISMATCH|INVALID_MODEL_FILE|NO_REPOSITORY|REPOSITORY_\w+)"
        r"|(command|flag) triton-gateway (push|pull|rm)\b.*",
    ),
    "torchserve": OwnNames(
        r"\w+ /(predictions/|models|ping).*",
        r"setting GATEWAY_DIALECTS|code \d+ SCALING_NOT_SUPPORTED",
    ),
    "versions": OwnNames(
        r"\w+ /v1/models/\{model\}/labels(/\{label\})?",
        r"setting GATEWAY_MAX_SHADOW_BYTES|code \d+ (LABEL|VERSION)_\w+"
        r"|metric \w+ gateway_(label|shadow)_.*|(command|flag) triton-gateway (label|rollout)\b.*",
    ),
    "on_demand": OwnNames(
        others=r"setting GATEWAY_(ON_DEMAND_MODELS|MAX_LOADED_MODELS|(DEFAULT_)?MODEL_MEMORY_MB"
        r"|EVICTION_PROTECTION_S|IDLE_UNLOAD_S|HOLD_S|SCALER_PORT)"
        r"|code \d+ (MODEL_LOADING|NO_ROOM)"
        r"|metric \w+ gateway_(on_demand_.*|hold_seconds|demand|requests_held"
        r"|replica_model_memory_bytes)"
        r"|flag triton-gateway up --(on-demand|max-loaded-models)",
    ),
    "grpc_api": OwnNames(others=r"setting GATEWAY_GRPC_\w+|code \d+ UNKNOWN_METHOD"),
    "page": OwnNames(others=r"setting GATEWAY_PAGE"),
}
KINDS = ("setting", "code", "path", "command", "flag", "metric")


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
        statuses = {path: client.get(path).status_code for path in CORE_STATUSES}
        assert statuses == CORE_STATUSES
        page = client.get("/metrics").text
    assert_only_own_names_are_gone(names, {*list_names(folder), *list_metrics(page)})


def list_names(folder: Path) -> list[str]:
    """Return the public names of a copy, but for its metrics."""
    listed = subprocess.run(
        [sys.executable, "-s", "-m", "tests.interface.package"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))},
        capture_output=True,
        text=True,
        check=True,
    )
    return listed.stdout.splitlines()


def list_metrics(page: str) -> Iterator[str]:
    for name, kind in re.findall(r"^# TYPE (gateway_\w+) (\w+)$", page, re.MULTILINE):
        yield f"metric {kind} {name}"


def assert_only_own_names_are_gone(names: Sequence[str], found: set[str]) -> None:
    # The pages of metrics lack the labels of metrics without values.
    recorded = {
        name.partition("{")[0] if "metric" in name else name for name in read_recorded_names()
    }
    recorded = {name for name in recorded if name.startswith(KINDS)}
    assert found <= recorded
    gone = recorded - found
    own = [OWN_NAMES[name] for name in names]
    paths = [rf"path ({each.paths})" for each in own if each.paths]
    assert select(recorded, paths) <= gone
    assert gone == select(gone, [*paths, *(each.others for each in own)])


def select(names: set[str], patterns: Sequence[str]) -> set[str]:
    return {name for name in names if any(re.fullmatch(each, name) for each in patterns)}


def copy_core(folder: Path) -> None:
    """Copy the package and the tests without the capabilities; the other files are links."""
    copy_without(NAMES, folder)
    left_out = shutil.ignore_patterns("__pycache__", "node_modules", "capabilities", "project")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=left_out)
    for path in ROOT.iterdir():
        if path.name not in ("gateway", "tests") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_core_without_capabilities_passes_its_unit_tests(tmp_path: Path) -> None:
    """All tests of the core are collected, and so imported; only those are run that start no process."""
    copy_core(tmp_path)
    others = [f"tests/core/{name}" for name in ("integration", "system", "faults")]
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"),
            *("-m", "not long and not soak", "tests/core"),
            *(f"--deselect={name}" for name in others),
        ],
        cwd=tmp_path,
        # The path of a Unix socket below a temporary folder within another one would be too long.
        env={**os.environ, "TMPDIR": str(Path(os.environ["TMPDIR"]).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert re.search(r"^\d{4,} passed", run.stdout, re.MULTILINE), run.stdout


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
