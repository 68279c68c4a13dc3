"""The wheel and the sdist: their content, reproducible builds, and an installed wheel that serves."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

import fastapi
import httpx
import pytest

from gateway import __version__
from tests.support.documents import examples, matches
from tests.support.servers import ROOT, Command, free_ports
from tests.support.wait import TIMEOUT_S

pytestmark = pytest.mark.long

FLAGS = ("--triton-http-port", "--triton-grpc-port", "--triton-metrics-port", "--port")
WHEEL = f"triton_gateway-{__version__}-py3-none-any.whl"
SDIST = f"triton_gateway-{__version__}.tar.gz"


def build(source: Path, target: Path, *words: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target), *words]
    environment = dict(os.environ)
    subprocess.run(
        command, cwd=source, env=environment, check=True, capture_output=True, timeout=TIMEOUT_S
    )
    return target


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tracked(*folders: str) -> set[str]:
    command = ["git", "ls-files", "-z", "--", *folders]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


def test_wheel_has_its_metadata_and_the_demonstration(built: Path) -> None:
    with zipfile.ZipFile(built / WHEEL) as wheel:
        names = set(wheel.namelist())
        folder = f"triton_gateway-{__version__}.dist-info"
        metadata = message_from_bytes(wheel.read(f"{folder}/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("triton-gateway", __version__)
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) >= {"redis", "otel"}
    assert {name.partition("/")[0] for name in names} == {"gateway", folder}
    packaged = {
        name.removeprefix("gateway/demonstration/")
        for name in names
        if name.startswith("gateway/demonstration/")
    }
    locks = {"requirements/sentences.txt", "requirements/sentences-weights.txt"}
    assert packaged == tracked("triton_repo", "models/sentences") | locks
    # Every module and file of the package, and nothing that was generated.
    assert {name for name in names if name.startswith("gateway/")} >= tracked("gateway")
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_build_is_reproducible_and_equals_that_of_the_sdist(built: Path, tmp_path: Path) -> None:
    again = build(ROOT, tmp_path / "again")
    assert [digest(again / name) for name in (WHEEL, SDIST)] == [
        digest(built / name) for name in (WHEEL, SDIST)
    ]
    with tarfile.open(built / SDIST) as sdist:
        sdist.extractall(tmp_path, filter="data")
    from_sdist = build(tmp_path / SDIST.removesuffix(".tar.gz"), tmp_path / "third", "-t", "wheel")
    assert digest(from_sdist / WHEEL) == digest(built / WHEEL)


@pytest.fixture
def installed(built: Path, tmp_path: Path) -> Iterator[Command]:
    """`up` of the installed wheel, in an environment and a folder that know nothing of this checkout."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    install += ["--no-deps", "--no-index", "--disable-pip-version-check", str(built / WHEEL)]
    subprocess.run(install, check=True, timeout=TIMEOUT_S)
    # The dependencies, without the editable installation beside them.
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{Path(fastapi.__file__).parents[1]}\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    ports = list(map(str, free_ports(4)))
    flags = [word for pair in zip(FLAGS, ports, strict=True) for word in pair]
    program = (str(python.with_name("triton-gateway")),)
    environment = {"PYTHONPATH": ""}
    with Command("up", *flags, environment=environment, program=program, folder=empty) as command:
        command.wait_for("ready after")
        where = "import gateway; print(gateway.__file__)"
        found = subprocess.run(
            [python, "-c", where],
            cwd=empty,
            env={**os.environ, "PYTHONPATH": ""},
            check=True,
            capture_output=True,
            text=True,
        )
        assert Path(found.stdout.strip()).is_relative_to(tmp_path)
        yield command
        assert not list(empty.iterdir())


def test_installed_wheel_serves_without_a_checkout(installed: Command) -> None:
    line = next(line for line in installed.lines if "ready after" in line)
    url = line.partition("on ")[2].split()[0]
    for document in ("use/page.md", "page.png"):
        assert httpx.get(f"{url}/guide/{document}").is_success
    commands = [each for each in examples([ROOT / "README.md"]) if each[1].startswith("curl ")]
    assert len(commands) >= 5
    for _, command, answer in commands:
        ended = subprocess.run(
            command.replace("localhost:8080", url.removeprefix("http://")),
            shell=True,
            cwd=ROOT,  # for docs/images
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert matches(answer, ended.stdout.strip()), (command, ended.stdout)
    # The copy of the models can be written, unlike the installed package.
    assert httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).json()["models"]
