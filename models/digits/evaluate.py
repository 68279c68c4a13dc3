"""Measurement of the network's accuracy on images that were not used for training.

python -m models.digits.evaluate
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from .drawing import drawn_digits
from .samples import handwriting, picture, printed_digits, unseen_fonts
from .serving import MODEL, labels_of

DRAWN_SEED = 1
PRINTED_SEED = 2


def held_out_accuracy(model: Path = MODEL) -> float:
    digits = handwriting()
    labels = labels_of((picture(values) for values in digits.held_out), model)
    return float(np.mean(labels == digits.held_out_labels))


def drawn_accuracy(count: int = 2000, model: Path = MODEL) -> float:
    pictures, labels = drawn_digits(count, DRAWN_SEED)
    return float(np.mean(labels_of(pictures, model) == labels))


def printed_accuracies(model: Path = MODEL) -> dict[str, float]:
    """Return the accuracy by font, for fonts that were not used for training."""
    accuracies = {}
    for font in unseen_fonts():
        pictures, labels = printed_digits(font, PRINTED_SEED)
        accuracies[font.stem] = float(np.mean(labels_of(pictures, model) == labels))
    return accuracies


def main() -> None:
    measures: dict[str, Callable[[], float]] = {
        "held-out handwriting": held_out_accuracy,
        "2,000 drawn digits": drawn_accuracy,
    }
    for name, measure in measures.items():
        print(f"{name:<24}{measure():.2%}")
    for font, accuracy in printed_accuracies().items():
        print(f"{font:<24}{accuracy:.2%}")


if __name__ == "__main__":
    main()
