"""The check that the build of the GPU image runs, with a real Triton of the oldest release."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.embedded.installation import Installation, install_triton
from tests.support.servers import ROOT

CHECK = ROOT / "deploy" / "image" / "check_python_model.py"


def run_check(folder: Path, version: str, *, with_packages: bool) -> tuple[int, str]:
    """Run the check as in the image: tritonserver and the python3 of the models are found by PATH."""
    installation: Installation = install_triton(print)
    server = folder / "tritonserver"
    server.write_text(
        f'#!/bin/sh\nexec {installation.server} --backend-directory={installation.backends} "$@"\n'
    )
    server.chmod(0o755)
    environment = {**installation.environment(), "TRITON_SERVER_VERSION": version}
    if not with_packages:
        del environment["VIRTUAL_ENV"]
        # Triton 24.10 does not pass it on to the models, so that it does not help.
        packages = next(installation.models_bin.parent.glob("lib/python3*/site-packages"))
        environment |= {"PYTHONPATH": str(packages), "PATH": os.defpath}
    environment["PATH"] = f"{folder}:{environment['PATH']}"
    ended = subprocess.run(
        [sys.executable, "-S", str(CHECK), str(ROOT / "triton_repo"), "text_preprocessing"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return ended.returncode, ended.stdout


@pytest.mark.long
def test_build_needs_python_models_that_find_their_packages(tmp_path: Path) -> None:
    status, output = run_check(tmp_path, "2.51.0", with_packages=True)
    assert status == 0, output
    status, output = run_check(tmp_path, "2.51.0", with_packages=False)
    assert status != 0
    assert "Triton cannot load the Python model text_preprocessing: the reason is above" in output
    assert "No module named" in output


def test_build_refuses_a_release_that_is_too_old(tmp_path: Path) -> None:
    status, output = run_check(tmp_path, "2.50.0", with_packages=True)
    assert (status, output) == (
        1,
        "Triton 2.50.0 is too old: build the image with 2.51 (24.10) or newer\n",
    )
