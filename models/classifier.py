"""A classifier of pictures as a model repository: the image pipeline of `triton_repo/`, other values.

No code changes from one network to the next, and no line of a config.pbtxt but those named here.
Only the standard library is needed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "triton_repo"
CONFIGS = ("config.pbtxt", "configs/embedded.pbtxt")
# What belongs to the network of triton_repo, and what Python leaves behind.
NOT_COPIED = shutil.ignore_patterns("model.onnx", "labels.txt", "__pycache__")

TOP_K = 5


@dataclass(frozen=True)
class Recipe:
    """How the network's pictures were made when it was trained.

    The shorter side becomes `resize` pixels, the centre of `size` × `size` is taken, and a value of
    0..1 has `mean` subtracted and is divided by `std`, per channel of RGB.
    """

    resize: int
    size: int
    mean: Sequence[float]
    std: Sequence[float]


class ConfigError(Exception):
    """A config.pbtxt of triton_repo is not what this module changes; the text is one sentence."""


def write(folder: Path, graph: bytes, labels: Sequence[str], recipe: Recipe) -> None:
    """Writes preprocessing, core, postprocessing and ensemble.

    `graph` is an ONNX file of `INPUT__0` FP32 [batch, 3, size, size] to `OUTPUT__0` FP32
    [batch, labels]; its first dimension is free.
    """
    for model, values in changes(recipe, len(labels)):
        # Links are followed: a repository may be carried away without this one.
        shutil.copytree(SOURCE / model, folder / model, ignore=NOT_COPIED, dirs_exist_ok=True)
        for name in CONFIGS:
            config = folder / model / name
            config.write_text(changed(config.read_text(), values, f"{model}/{name}"))
    (folder / "core/1/model.onnx").write_bytes(graph)
    (folder / "postprocessing/labels.txt").write_text("\n".join(labels) + "\n", "utf-8")


def changes(recipe: Recipe, classes: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Of each model: what its config says for the digits, and what it shall say."""
    picture = {"dims: [ 1, 16, 16 ]": f"dims: [ 3, {recipe.size}, {recipe.size} ]"}
    scores = {"dims: [ 10 ]": f"dims: [ {classes} ]"}
    photo = {
        "transform": "photo",
        "fit": "crop",
        "resize": str(recipe.resize),
        "width": str(recipe.size),
        "height": str(recipe.size),
        "color": "RGB",
        "scale": "1/255",
        "mean": ",".join(map(str, recipe.mean)),
        "std": ",".join(map(str, recipe.std)),
        "layout": "NCHW",
    }
    ink = lines({"transform": "ink", "size": "16"})
    yield "preprocessing", {**picture, ink: lines(photo)}
    yield "core", {**picture, **scores}
    yield "postprocessing", {**scores, lines({"top_k": "3"}): lines({"top_k": str(TOP_K)})}
    yield "ensemble", {}


def lines(parameters: dict[str, str]) -> str:
    return "\n".join(
        f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
        for name, value in parameters.items()
    )


def changed(config: str, values: dict[str, str], name: str) -> str:
    for old, new in values.items():
        if config.count(old) != 1:
            raise ConfigError(f"triton_repo/{name} does not say {old!r} once")
        config = config.replace(old, new)
    return config
