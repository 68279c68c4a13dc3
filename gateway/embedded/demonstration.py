"""The demonstration models of an installed package, copied to where Triton and uploads can write."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from gateway.embedded.installation import (
    CannotInstall,
    build_once,
    cache_folder,
    find_lock_file,
    hash_files,
)
from gateway.embedded.options import TritonOptions

DEFAULT_REPOSITORY: Final = "triton_repo"
# The wheel has the same layout there as a checkout: triton_repo, models/sentences, requirements.
PACKAGED: Final = Path(__file__).resolve().parents[1] / "demonstration"


def with_demonstration(options: TritonOptions, on_message: Callable[[str], None]) -> TritonOptions:
    """Return the options with the packaged models if there is no default repository in the working directory.

    Raises `CannotInstall` if these cannot be built.
    """
    is_default = list(options.model_repositories) == [DEFAULT_REPOSITORY]
    is_packaged = (PACKAGED / DEFAULT_REPOSITORY).is_dir()
    if not (is_default and is_packaged) or Path(DEFAULT_REPOSITORY).is_dir():
        return options
    return replace(options, model_repositories=(prepare_demonstration(PACKAGED, on_message),))


def prepare_demonstration(source: Path, on_message: Callable[[str], None]) -> Path:
    cache = cache_folder()
    files = (path for path in sorted(source.rglob("*")) if path.is_file() and path.suffix != ".pyc")
    with build_once(cache / f"demonstration-{hash_files(files)}") as (folder, needed):
        if needed:
            on_message("fetching and building the demonstration models, 130 MB (first start only)")
            shutil.copytree(source, folder)
            shutil.copy(find_lock_file("install.py"), folder / "requirements")
            build_models(folder)
    return folder / DEFAULT_REPOSITORY


def build_models(folder: Path) -> None:
    """Convert the weights of the sentence model, in a process that imports nothing of the gateway."""
    command = [sys.executable, "-m", "models.sentences"]
    ended = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["its build failed"]
        raise CannotInstall(f"the demonstration is incomplete: {lines[-1].removeprefix('error: ')}")
