"""The description of a request's tensors, for `dry_run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from gateway.tensors.inputs import InferInputs
from gateway.tensors.outputs import array_to_json, bytes_to_json
from gateway.tensors.signature import Signature

FIRST_VALUES_COUNT: Final = 8
MAX_VALUE_BYTES: Final = 200


def build_dry_run_description(signature: Signature, inputs: InferInputs) -> Mapping[str, Any]:
    return {
        "model": signature.model,
        "version": signature.version,
        "inputs": [
            {
                "name": name,
                "datatype": signature.inputs[name].datatype.name,
                "shape": list(array.shape),
                "bytes": encoded_size_bytes(array),
                "first_values": first_values(array),
            }
            for name, array in inputs.arrays.items()
        ],
    }


def encoded_size_bytes(array: np.ndarray) -> int:
    # On the wire, each element of BYTES is preceded by its length in 4 bytes.
    return sum(4 + len(value) for value in array.flat) if array.dtype.kind == "O" else array.nbytes


def first_values(array: np.ndarray) -> Sequence[Any]:
    first = array.ravel()[:FIRST_VALUES_COUNT]
    if array.dtype.kind == "O":
        return [bytes_to_json(value[:MAX_VALUE_BYTES]) for value in first]
    values = array_to_json(first)
    return list(values.tolist() if isinstance(values, np.ndarray) else values)
