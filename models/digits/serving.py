"""Access to the serving code and model file, which training and tests share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "triton_repo" / "core" / "1" / "model.onnx"


def serving_module(name: str) -> Any:
    """Import a module of the model repository, such as `preprocessing.1.transforms`."""
    # An import statement cannot contain a version folder, because its name is a number.
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module(f"triton_repo.{name}")


ink = serving_module("preprocessing.1.ink").Ink()
tensor_of = serving_module("preprocessing.1.transforms").preprocessing({"transform": "ink"})


def encoded(picture: Image.Image, image_format: str = "PNG") -> bytes:
    buffer = BytesIO()
    picture.save(buffer, image_format, compress_level=1)  # only PNG uses the level
    return buffer.getvalue()


def labels_of(pictures: Iterable[Image.Image], model: Path = MODEL) -> IntArray:
    """Return the network's label for each image, encoded as a client sends it."""
    import onnxruntime  # noqa: PLC0415 - training does not need it

    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    tensors = np.stack([tensor_of(encoded(picture)) for picture in pictures])
    (scores,) = session.run(["OUTPUT__0"], {"INPUT__0": tensors})
    best: IntArray = np.asarray(scores).argmax(axis=1)
    return best
