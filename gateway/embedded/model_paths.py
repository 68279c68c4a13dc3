"""Models that are given as files or folders, in a temporary repository of links; and those to load."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from gateway.embedded.options import (
    LOAD_ALL,
    CannotStart,
    ModelControl,
    TritonOptions,
    is_remote_repository,
)
from gateway.messages import quote_text

MODEL_FILE_SUFFIX: Final = ".onnx"
CONFIG_NAMES: Final = ("configs/embedded.pbtxt", "config.pbtxt")
UNSUITABLE_CHARACTERS: Final = re.compile(r"[^A-Za-z0-9_.-]+")


@contextmanager
def resolve_model_paths(paths: Sequence[Path | str]) -> Iterator[tuple[Path | str, ...]]:
    """Yield the repositories among the paths, and a temporary one with the models among them.

    Raises `CannotStart` for a file that is not an ONNX file, and for two models with the same name.
    """
    models: dict[str, Path] = {}
    repositories: list[Path | str] = []
    for place in paths:
        path = Path(place)
        if is_remote_repository(place) or not is_model(path):
            repositories.append(place)
            continue
        name = make_model_name(path)
        if name in models:
            raise CannotStart(
                f"{models[name]} and {path} would both be served as {name}; rename one of them"
            )
        models[name] = path
    if not models:
        yield tuple(repositories)
        return
    with TemporaryDirectory(prefix="triton-gateway-models-") as folder:
        for name, path in models.items():
            link_model(path, Path(folder, name))
        yield (*repositories, Path(folder))


def is_repository_folder(place: Path | str) -> bool:
    return not is_remote_repository(place) and Path(place).is_dir() and not is_model(Path(place))


def is_model(path: Path) -> bool:
    """Return whether the path is a model and not a repository. Raises `CannotStart` for other files."""
    if path.name.lower().endswith(MODEL_FILE_SUFFIX) and not path.is_dir():
        if not path.is_file():
            raise CannotStart(f"model file not found: {path}")
        return True
    if path.is_file():
        raise CannotStart(
            f"cannot serve {quote_text(str(path), 200)}: the embedded Triton runs {MODEL_FILE_SUFFIX} "
            "files, model folders and repositories; export the model to ONNX (PyTorch: "
            "torch.onnx.export, TensorFlow: tf2onnx), or serve it with the official Triton image"
        )
    versions = (file.parent.name for file in path.glob("*/model.*"))
    return any((path / name).is_file() for name in CONFIG_NAMES) or any(
        map(str.isdecimal, versions)
    )


def make_model_name(path: Path) -> str:
    name = path.name[: -len(MODEL_FILE_SUFFIX)] if path.is_file() else path.resolve().name
    return UNSUITABLE_CHARACTERS.sub("_", name).strip(".") or "model"


def link_model(path: Path, folder: Path) -> None:
    target = path.absolute()
    if path.is_dir():
        folder.symlink_to(target)
        return
    link = folder / "1" / "model.onnx"
    link.parent.mkdir(parents=True)
    link.symlink_to(target)


def exclude_startup_models(options: TritonOptions, patterns: Sequence[str]) -> TritonOptions:
    """Return the options without the startup models that match a pattern. Raises `CannotStart`."""
    if options.model_control is not ModelControl.explicit:
        raise CannotStart("--on-demand requires --model-control explicit")
    names: Sequence[str] = options.load_models
    if LOAD_ALL in names:
        names = () if LOAD_ALL in patterns else list_local_models(options.model_repositories)
    kept = [name for name in names if not any(fnmatchcase(name, each) for each in patterns)]
    return replace(options, load_models=tuple(kept))


def list_local_models(places: Sequence[Path | str]) -> list[str]:
    """Return the names of the models in local repositories. Raises `CannotStart` for a remote one."""
    if remote := next((place for place in places if is_remote_repository(place)), None):
        raise CannotStart(
            f"the models of {remote} are not known before Triton runs; name those to load at startup "
            "with --load, or use --on-demand '*'"
        )
    models = []
    for folder in map(Path, places):
        if is_model(folder):
            models.append(make_model_name(folder))
        elif folder.is_dir():
            models += sorted(path.name for path in folder.iterdir() if path.is_dir())
    return models
