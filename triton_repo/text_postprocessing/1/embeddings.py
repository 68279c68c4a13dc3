"""Truncation and normalisation of embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

FLAGS = {"true": True, "false": False}


class ParameterError(ValueError):
    """The config is invalid; the message is for the user who loads the model."""


@dataclass(frozen=True)
class Finish:
    """Truncate to `size` dimensions and, if `normalize` is set, scale each row to length 1."""

    size: int
    normalize: bool

    def __call__(self, vectors: Vectors) -> Vectors:
        truncated = vectors[:, : self.size]
        if not self.normalize:
            return np.ascontiguousarray(truncated)
        lengths = np.linalg.norm(truncated, axis=1, keepdims=True)
        scaled: Vectors = truncated / np.maximum(lengths, np.finfo(np.float32).tiny)
        return scaled


def finish_of(model_config: Mapping[str, Any]) -> Finish:
    input_size = int(model_config["input"][0]["dims"][0])
    size = int(model_config["output"][0]["dims"][0])
    if not 0 < size <= input_size:
        raise ParameterError(
            f"the output must have between 1 and {input_size} dimensions like the input, not {size}"
        )
    return Finish(size, normalize_flag(model_config.get("parameters", {})))


def normalize_flag(parameters: Mapping[str, Any]) -> bool:
    # The gateway's parameters contain a dot, and Triton's are upper case.
    for name in parameters:
        if "." not in name and not name.isupper() and name != "normalize":
            raise ParameterError(f"unknown parameter {name}; the only parameter is normalize")
    text = parameters.get("normalize", {}).get("string_value", "true")
    if text not in FLAGS:
        raise ParameterError(f"normalize must be true or false, not {text!r}")
    return FLAGS[text]
