"""What becomes of bodies and tensors, where no Triton is needed to judge it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gateway.errors import DoesNotFit
from gateway.tensors.outputs import Result, joined
from gateway.tensors.signature import Signature, signature


def model(
    inputs: dict[str, tuple[str, list[int]]],
    outputs: dict[str, tuple[str, list[int]]],
    batch: int = 0,
    optional: bool = False,
    **hints: str,
) -> Signature:
    """A signature as it is read from Triton; the shapes are the model's own."""

    def told(tensors: dict[str, tuple[str, list[int]]]) -> list[dict[str, Any]]:
        first = [-1] if batch else []
        return [
            {"name": name, "datatype": datatype, "shape": first + shape}
            for name, (datatype, shape) in tensors.items()
        ]

    config = {
        "max_batch_size": batch,
        "input": [{"name": name, "optional": optional} for name in inputs],
        "parameters": {key: {"string_value": value} for key, value in hints.items()},
    }
    return signature({"name": "m", "inputs": told(inputs), "outputs": told(outputs)}, config)


def result(model: Signature, batched: bool = True, **arrays: np.ndarray) -> Result:
    return Result(model, arrays, batched)


WORDS = model({"TEXT": ("BYTES", [1])}, {"IDS": ("INT32", [-1])}, batch=32)


def test_answers_of_different_widths_are_no_batch_and_the_sentence_says_what_is() -> None:
    same = [result(WORDS, IDS=np.ones((2, 3))), result(WORDS, IDS=np.zeros((1, 3)))]
    assert joined(same).arrays["IDS"].tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    short, scalar = np.ones((2, 2)), np.array(1)
    for other in ({"IDS": short}, {"IDS": scalar}, {}):
        with pytest.raises(DoesNotFit, match="different shapes; send at most 32 items at a time"):
            joined([same[0], result(WORDS, **other)])
