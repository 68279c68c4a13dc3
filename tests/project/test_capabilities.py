"""A capability is deleted with its folder and its lines in the list; the rest serves without it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.capabilities.grpc_api.settings import GrpcSettings
from gateway.capabilities.installed import INSTALLED, SETTINGS
from gateway.config.settings import describe_unknown_settings, list_variable_fields, read_settings
from gateway.messages import CommandError
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
    """Patterns of the public names of a capability.

    Its paths and metrics are deleted with it, as its settings, and the others may be.
    """

    paths: str = ""
    others: str = ""
    metrics: str = ""


OWN_NAMES = {
    "openai": OwnNames(
        r"POST /v1/(embeddings|rerank|chat/completions|completions)",
        r"setting GATEWAY_OPENAI_URLS|code \d+ NO_OPENAI_SERVER",
    ),
    "uploads": OwnNames(
        rf"(PUT|DELETE) {MODEL}|GET {MODEL}/files.*",
        r"setting GATEWAY_(REPOSITORY|MODEL_UPLOADS"
        r"|MAX_(MODEL_BYTES|REPOSITORY_BYTES|MODEL_INSTANCES|MODEL_WARMUPS|MODEL_SEQUENCES))"
        r"|code \d+ (DIGEST_MISMATCH|INVALID_MODEL_FILE|NO_REPOSITORY|REPOSITORY_\w+)"
        r"|(command|flag) triton-gateway (push|pull|rm)\b.*",
    ),
    "tf_serving": OwnNames(
        rf"POST {MODEL}:predict|POST /v1/models/\{{model\}}/labels/\{{version\}}:predict"
        rf"|GET {MODEL}/metadata"
    ),
    "torchserve": OwnNames(
        r"\w+ /(predictions/|models|ping).*",
        r"setting GATEWAY_DIALECTS",
    ),
    "versions": OwnNames(
        r"\w+ /v1/models/\{model\}/labels(/\{label\})?",
        r"code \d+ (LABEL|VERSION)_\w+"
        r"|(command|flag) triton-gateway label\b.*",
        r"gateway_(label|shadow)_.*",
    ),
    "on_demand": OwnNames(
        others=r"setting GATEWAY_(ON_DEMAND_MODELS|MAX_LOADED_MODELS|(DEFAULT_)?MODEL_MEMORY_MB"
        r"|IDLE_UNLOAD_S|HOLD_S)"
        r"|code \d+ (MODEL_LOADING|NO_ROOM)"
        r"|flag triton-gateway up --(on-demand|max-loaded-models)",
        metrics=r"gateway_(on_demand_.*|demand|requests_held"
        r"|replica_model_memory_bytes)",
    ),
    "grpc_api": OwnNames(others=r"setting GATEWAY_GRPC_\w+|code \d+ UNKNOWN_METHOD"),
    "identity": OwnNames(others=r"setting GATEWAY_OIDC_\w+|code \d+ ISSUER_UNAVAILABLE"),
    "samples": OwnNames(others=r"setting GATEWAY_SAMPLES?(_\w+)?"),
    "jobs": OwnNames(
        r"\w+ /v1/(jobs|models/{model}/jobs).*",
        r"setting GATEWAY_(JOBS?|MAX_JOBS|CALLBACK)\w*"
        r"|code \d+ (JOBS?_\w+|IDEMPOTENCY_\w+|RESULT_TOO_LARGE|CALLBACK_NOT_ALLOWED)"
        r"|(command|flag) triton-gateway jobs\b.*|flag triton-gateway infer --(async|callback)"
        r"|variable GATEWAY_CALLBACK_SECRET",
        r"gateway_jobs?_?.*",
    ),
    "page": OwnNames(r"GET /guide", r"setting GATEWAY_PAGE"),
}
# They exist with an issuer of tokens, with a keys file, and with a sink of samples.
NOT_SHOWN = r"metric \w+ gateway_(oidc_keys_age_seconds|key_expires_seconds|sample_\w+)"
KINDS = ("setting", "code", "path", "command", "flag", "variable", "metric")


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


def list_defaults(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the settings of these capabilities, with their defaults."""
    for capability in INSTALLED:
        if capability.name in names and capability.settings is not None:
            for name in list_variable_fields(capability.settings):
                yield f"GATEWAY_{name.upper()}", capability.settings.model_fields[name].default


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
        **{
            setting: "" if value in ((), None) else str(value)
            for setting, value in list_defaults(NAMES)
        },
        "GATEWAY_TRITON_URLS": "127.0.0.1:9",
        "GATEWAY_DIALECTS": "torchserve",
        "GATEWAY_JOBS": f"sqlite://{tmp_path}",
    }
    command = Command(
        *("serve", "--port", str(port)),
        environment=environment,
        program=(sys.executable, "-s", "-m", "gateway"),
        folder=folder,
    )
    with command, httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        command.wait_for("serving")
        unknown = re.findall(r"unknown setting (\w+)", command.output)
        settings = sorted(setting for setting, _ in list_defaults(names))
        # Kubernetes adds variables for ports, which are not warned about.
        assert unknown == [setting for setting in settings if not setting.endswith("_PORT")]
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
    recorded -= select(recorded, [NOT_SHOWN])
    assert found <= recorded
    gone = recorded - found
    own = [OWN_NAMES[name] for name in names]
    deleted = [rf"path ({each.paths})" for each in own if each.paths]
    deleted += [rf"metric \w+ ({each.metrics})" for each in own if each.metrics]
    assert select(recorded, deleted) <= gone
    assert gone == select(gone, [*deleted, *(each.others for each in own)])


def select(names: set[str], patterns: Sequence[str]) -> set[str]:
    return {name for name in names if any(re.fullmatch(each, name) for each in patterns)}


def copy_core(folder: Path) -> None:
    """Copy the package and the tests without the capabilities; the other files are links."""
    copy_without(NAMES, folder)
    left_out = shutil.ignore_patterns(
        "__pycache__", "node_modules", "attacks", "capabilities", "project"
    )
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


def test_settings_of_a_capability_are_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GATEWAY_GRPC_PORT", "9001")
    settings = read_settings(*SETTINGS, grpc_port=9002, drain_s=0)
    assert (settings.read(GrpcSettings).grpc_port, settings.drain_s) == (9002, 0)
    monkeypatch.setenv("GATEWAY_GRPC_PORT", "99999")
    with pytest.raises(CommandError, match=r"^GATEWAY_GRPC_PORT cannot be '99999': "):
        read_settings(*SETTINGS)
    assert describe_unknown_settings(["GATEWAY_HOLD_S", "GATEWAY_HOLDS"], *SETTINGS) == [
        "unknown setting GATEWAY_HOLDS; did you mean GATEWAY_HOLD_S?"
    ]


@pytest.mark.long
def test_gateway_without_capabilities_passes_the_type_checker(tmp_path: Path) -> None:
    folder = copy_without(NAMES, tmp_path)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    checked = subprocess.run(
        [*command, "-p", "gateway"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout


def test_only_light_modules_of_disabled_capabilities_are_imported() -> None:
    program = (
        "import sys; from gateway.app import create_app; from gateway.config.settings import Settings;"
        "create_app(Settings(state='memory:'));"
        "print(*(name.removeprefix('gateway.capabilities.') for name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    switched_off = ("grpc_api.", "identity.", "torchserve.")
    off = [name for name in done.stdout.split() if name.startswith(switched_off)]
    assert off == [
        *("grpc_api.settings", "grpc_api.capability"),
        *("identity.rules", "identity.settings", "identity.capability"),
        "torchserve.capability",
    ]
