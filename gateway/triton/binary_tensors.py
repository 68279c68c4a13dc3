"""Inference requests and responses with binary tensors (Binary Tensor Data Extension), in one pass. Pure.

`tritonclient.http` does the same in more passes and copies; a test compares the two for every datatype.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson
from tritonclient.http import InferInput

from gateway.http_client.connection import Buffer
from gateway.tensors.dtypes import BYTES, DATATYPES

LENGTH: Final = struct.Struct("<I")  # precedes each element of BYTES
MAX_SEPARATE_ELEMENTS: Final = 64  # of BYTES that are sent without being copied into one buffer


class BinaryInput(InferInput):  # type: ignore[misc]
    """An input whose data is not copied; `buffers` are what Triton receives."""

    def __init__(self, name: str, array: np.ndarray, datatype: str) -> None:
        super().__init__(name, list(array.shape), datatype)
        self.buffers: Sequence[Buffer]
        if datatype == BYTES.name:
            self.buffers = encode_bytes_elements(array.ravel().tolist())
        else:
            # Not every dtype supports the buffer protocol: BF16 does not.
            self.buffers = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name(),
            "shape": self.shape(),
            "datatype": self.datatype(),
            "parameters": {"binary_data_size": sum(map(len, self.buffers))},
        }


def encode_bytes_elements(values: Sequence[bytes]) -> list[Buffer]:
    buffers: list[Buffer] = []
    for value in values:
        buffers += (LENGTH.pack(len(value)), value)
    return buffers if len(values) <= MAX_SEPARATE_ELEMENTS else [b"".join(buffers)]


def encode_infer_request(
    inputs: Sequence[BinaryInput],
    class_counts: Mapping[str, int],
    parameters: Mapping[str, Any],
    request_id: str,
) -> tuple[int, list[Buffer]]:
    """Return the length of the JSON, and the body: the JSON, and the data of the inputs.

    `class_counts` has the requested outputs, each with 0 or the number of classes to return; empty means all.
    """
    document: dict[str, Any] = {"id": request_id, "inputs": [each.describe() for each in inputs]}
    if class_counts:
        document["outputs"] = [
            {
                "name": name,
                "parameters": {"binary_data": True, **({"classification": count} if count else {})},
            }
            for name, count in class_counts.items()
        ]
        document["parameters"] = parameters
    else:
        document["parameters"] = {**parameters, "binary_data_output": True}
    header = orjson.dumps(document)
    return len(header), [header, *(buffer for each in inputs for buffer in each.buffers)]


def decode_infer_response(
    body: bytes, header_length: int | None
) -> tuple[str, dict[str, np.ndarray]]:
    """Return the model's version and its outputs.

    An invalid response raises one of `ValueError`, `KeyError`, `TypeError`, `AttributeError`, `OverflowError`
    and `RecursionError`.
    """
    document = orjson.loads(body if header_length is None else memoryview(body)[:header_length])
    position = len(body) if header_length is None else header_length
    arrays: dict[str, np.ndarray] = {}
    for entry in document.get("outputs", ()):
        check_output_entry(entry["name"], entry["datatype"])
        dtype = DATATYPES[entry["datatype"]].numpy_dtype
        size = (entry.get("parameters") or {}).get("binary_data_size")
        if size is None:
            array = decode_json_data(entry["data"], entry["shape"], dtype)
        elif 0 <= size <= len(body) - position:
            array = decode_binary_data(body, position, size, dtype).reshape(entry["shape"])
            position += size
        else:
            raise ValueError("an output is not complete")
        arrays[entry["name"]] = array
    return str(document.get("model_version", "")), arrays


def check_output_entry(name: Any, datatype: Any) -> None:
    """Raises `ValueError` for a name that is not text, and for an unknown datatype."""
    if not isinstance(name, str) or datatype not in DATATYPES:
        raise ValueError("an output has no valid name or datatype")


def decode_json_data(data: Any, shape: Any, dtype: np.dtype) -> np.ndarray:
    array: np.ndarray = np.array(data, dtype).reshape(shape)
    if dtype.kind != "O":
        return array
    values = build_bytes_array([text.encode() for text in array.flat])
    return values.reshape(array.shape)


def decode_binary_data(body: bytes, start: int, size: int, dtype: np.dtype) -> np.ndarray:
    """Return a flat array, which shares the memory of `body` where its alignment allows it."""
    if dtype.kind == "O":
        return build_bytes_array(decode_bytes_elements(body, start, start + size))
    count, rest = divmod(size, dtype.itemsize)
    if rest:
        raise ValueError("an output has a part of an element")
    array = np.frombuffer(body, dtype, count, start) if count else np.empty(0, dtype)
    return array if array.flags.aligned else array.copy()


def decode_bytes_elements(body: bytes, start: int, end: int) -> list[bytes]:
    values = []
    while start < end:
        first = start + LENGTH.size
        start = first + LENGTH.unpack_from(body, start)[0]
        values.append(body[first:start])
    if start != end:
        raise ValueError("an output has a part of an element")
    return values


def build_bytes_array(values: list[bytes]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array
