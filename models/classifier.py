"""A generator of model repositories for image classifiers, based on the pipeline of `triton_repo/`.

The code is copied unchanged; only the lines of config.pbtxt that `changes` lists differ. The module
needs only the standard library.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "triton_repo"
CONFIG = "config.pbtxt"
# These files belong to the network of triton_repo or are Python caches.
NOT_COPIED = shutil.ignore_patterns("model.onnx", "labels.txt", "__pycache__")

TOP_K = 5


@dataclass(frozen=True)
class Recipe:
    """The preprocessing of the training images.

    The shorter side is resized to `resize` pixels, the centre is cropped to `size` × `size`, and
    values of 0..1 are normalised with `mean` and `std` per RGB channel.
    """

    resize: int
    size: int
    mean: Sequence[float]
    std: Sequence[float]


class ConfigError(Exception):
    """A config.pbtxt of triton_repo does not contain a line that this module replaces."""


def write(folder: Path, graph: bytes, labels: Sequence[str], recipe: Recipe) -> None:
    """Write the models preprocessing, core, postprocessing and ensemble.

    `graph` is an ONNX file with the input `INPUT__0` FP32 [batch, 3, size, size] and the output
    `OUTPUT__0` FP32 [batch, labels], with a dynamic batch dimension.
    """
    for model, values in changes(recipe, len(labels)):
        # Links are followed, so that the new repository does not depend on this one.
        shutil.copytree(SOURCE / model, folder / model, ignore=NOT_COPIED, dirs_exist_ok=True)
        config = folder / model / CONFIG
        config.write_text(changed(config.read_text(), values, f"{model}/{CONFIG}"))
    (folder / "core/1/model.onnx").write_bytes(graph)
    (folder / "postprocessing/labels.txt").write_text("\n".join(labels) + "\n", "utf-8")


def changes(recipe: Recipe, classes: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the replacements for the config of each model: the line for the digits, the new line."""
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
            raise ConfigError(f"triton_repo/{name} must contain {old!r} exactly once")
        config = config.replace(old, new)
    return config
