"""The last step of an embedding: how many of its dimensions are kept, and at what length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

FLAGS = {"true": True, "false": False}


class ParameterError(ValueError):
    """The config makes no sense; the text is one sentence for whoever loads the model."""


@dataclass(frozen=True)
class Finish:
    """Keeps the first `size` dimensions and, if `normalize` is set, brings each row to length 1."""

    size: int
    normalize: bool

    def __call__(self, vectors: Vectors) -> Vectors:
        kept = vectors[:, : self.size]
        if not self.normalize:
            return np.ascontiguousarray(kept)
        lengths = np.linalg.norm(kept, axis=1, keepdims=True)
        scaled: Vectors = kept / np.maximum(lengths, np.finfo(np.float32).tiny)
        return scaled


def finish_of(model_config: Mapping[str, Any]) -> Finish:
    given = int(model_config["input"][0]["dims"][0])
    size = int(model_config["output"][0]["dims"][0])
    if not 0 < size <= given:
        raise ParameterError(
            f"the output has {size} dimensions, and must have between 1 and the input's {given}"
        )
    return Finish(size, normalize_flag(model_config.get("parameters", {})))


def normalize_flag(parameters: Mapping[str, Any]) -> bool:
    """The one parameter; others have a dot (the gateway's) or are in capitals (Triton's)."""
    for name in parameters:
        if "." not in name and not name.isupper() and name != "normalize":
            raise ParameterError(f"the parameter {name} is unknown; known is normalize")
    text = parameters.get("normalize", {}).get("string_value", "true")
    if text not in FLAGS:
        raise ParameterError(f"normalize must be true or false, not {text!r}")
    return FLAGS[text]
