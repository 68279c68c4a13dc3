"""Ranking of a network's scores as labels with probabilities."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from .parameters import ParameterError, require

Floats = npt.NDArray[np.floating]
DIGITS_KEPT = 6


class ScoresError(ValueError):
    """The network's scores cannot be ranked."""


@dataclass(frozen=True)
class Ranking:
    """The `top_k` most probable labels; the result is doubtful if the first is below `doubt_below`.

    `activation` converts scores to probabilities; `none` is for networks that return probabilities.
    """

    top_k: int = 3
    activation: Literal["softmax", "none"] = "softmax"
    doubt_below: float = 0.5

    def __post_init__(self) -> None:
        require(self.top_k >= 1, f"top_k must be at least 1, not {self.top_k}")
        require(
            0 <= self.doubt_below <= 1,
            f"doubt_below must be between 0 and 1, not {self.doubt_below}",
        )

    def __call__(self, scores: Floats, labels: Sequence[str]) -> bytes:
        """Return JSON for the scores of one item, shape [labels]; raise ScoresError."""
        if scores.shape != (len(labels),):
            raise ScoresError(f"got {scores.size} scores for {len(labels)} labels")
        if not np.isfinite(scores).all():
            raise ScoresError("the network's scores are not finite numbers")
        values = _softmax(scores) if self.activation == "softmax" else scores
        best = np.argsort(-values, kind="stable")[: self.top_k]
        predictions = [
            {"label": labels[index], "probability": round(float(values[index]), DIGITS_KEPT)}
            for index in best
        ]
        doubtful = bool(values[best[0]] < self.doubt_below)
        result = {"predictions": predictions, "doubtful": doubtful}
        return json.dumps(result, ensure_ascii=False).encode()


def _softmax(scores: Floats) -> Floats:
    # The shift by the largest score prevents an overflow.
    powers = np.exp(scores.astype(np.float64) - scores.max())
    shares: Floats = powers / powers.sum()
    return shares


def read_labels(path: Path) -> list[str]:
    """Return one label per line, in the order of the scores; raise ParameterError."""
    try:
        labels = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise ParameterError(f"cannot read the label file {path.name}") from None
    require(bool(labels), f"the label file {path.name} is empty")
    require(all(map(str.strip, labels)), f"the label file {path.name} has an empty line")
    return [label.strip() for label in labels]
