"""Inference requests to one Triton: their parameters, and their encoding with binary tensors. Does no I/O.

The encoding is that of the Binary Tensor Data Extension, by `tritonclient.http`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import orjson
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import (
    TRITON_RESERVED_REQUEST_PARAMS,
    TRITON_RESERVED_REQUEST_PARAMS_PREFIX,
    deserialize_bytes_tensor,
    serialize_byte_tensor,
)

from gateway.errors import BadUpstream, InputMismatch
from gateway.http_client.client import CompleteResponse
from gateway.http_client.connection import Buffer
from gateway.http_client.response import Headers
from gateway.messages import quote_text
from gateway.tensors.dtypes import DATATYPES, build_bytes_array
from gateway.tensors.inputs import InferInputs
from gateway.tensors.outputs import InferResult
from gateway.tensors.signature import Signature
from gateway.triton import sequence
from gateway.triton.request_target import RequestTarget

T = TypeVar("T")
# The exceptions of an invalid response.
DECODE_ERRORS: Final = (
    RecursionError,
    ValueError,
    OverflowError,
    KeyError,
    TypeError,
    AttributeError,
    struct.error,
)
# Limits up to which data is encoded and decoded on the event loop; above, a thread does it.
# Python processes the elements of BYTES one by one.
MAX_INLINE_REQUEST_ELEMENTS: Final = 4096
MAX_INLINE_REQUEST_BYTES: Final = 1 << 20
MAX_JOINED_BYTES: Final = 64 << 10  # larger requests are sent without being copied
MAX_INLINE_RESPONSE_BYTES: Final = 64 << 10  # BYTES can take four bytes per element
INT64_RANGE: Final = range(-(1 << 63), 1 << 63)


class InferResponse(NamedTuple):
    outputs: dict[str, np.ndarray]
    version: str
    size_bytes: int  # as received


class RequestOptions(NamedTuple):
    # The number of classes to return by requested output; 0 for its values. Empty means all outputs.
    class_counts: Mapping[str, int]
    timeout_us: int
    priority: int
    custom: dict[str, Any]


@dataclass(slots=True)
class InferRequest:
    """A request to a model, from the handler that decoded it to the transport that encodes it.

    The parameter `classification` is the number of classes to return for each output; `timeout` and
    `priority` are Triton's own.
    """

    target: RequestTarget
    signature: Signature
    inputs: InferInputs
    outputs: tuple[str, ...]  # empty means all
    parameters: Mapping[str, Any]
    request_id: str
    deadline: float  # on the event loop's clock
    trace_headers: Headers

    @property
    def remaining_s(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()

    async def encode(self, build: Callable[[InferRequest, float], T]) -> T:
        """Return what `build` makes of the request and its remaining time, in a thread if it is large."""
        elements = size_bytes = 0
        for array in self.inputs.arrays.values():
            size_bytes += array.nbytes
            if array.dtype.kind == "O":
                elements += array.size
        if elements > MAX_INLINE_REQUEST_ELEMENTS or size_bytes > MAX_INLINE_REQUEST_BYTES:
            return await asyncio.to_thread(build, self, self.remaining_s)
        return build(self, self.remaining_s)

    @property
    def has_classifications(self) -> bool:
        counts = self.signature.default_class_counts
        return bool(self.parameters.get("classification", counts))

    def build_result(self, response: InferResponse) -> InferResult:
        return InferResult(
            self.signature,
            response.outputs,
            self.inputs.is_batched,
            self.request_id,
            response.version,
            has_classifications=self.has_classifications,
            instance_count=self.inputs.instance_count,
            size_bytes=response.size_bytes,
        )

    def build_options(self, remaining_s: float) -> RequestOptions:
        """Return the options. Raises `InputMismatch` for parameters that Triton would reject or misread."""
        default_timeout_us = max(int(remaining_s * 1e6), 1)
        default_counts = self.signature.default_class_counts
        if not self.parameters and not default_counts:
            return RequestOptions(dict.fromkeys(self.outputs, 0), default_timeout_us, 0, {})
        custom = {
            key: value
            for key, value in self.parameters.items()
            if key not in sequence.SEQUENCE_KEYS
        }
        class_count = pop_integer(custom, "classification", 0)
        unit = "a positive number of microseconds"
        timeout_us = pop_integer(custom, "timeout", default_timeout_us, unit, minimum=1)
        priority = pop_integer(custom, "priority", 0)
        for key, value in custom.items():
            if key in TRITON_RESERVED_REQUEST_PARAMS or key.startswith(
                TRITON_RESERVED_REQUEST_PARAMS_PREFIX
            ):
                raise InputMismatch(f"the parameter {quote_text(key)} is reserved by Triton")
            if isinstance(value, int) and value not in INT64_RANGE:
                raise InputMismatch(f"the parameter {quote_text(key)} does not fit into 64 bits")
        names = self.outputs or self.signature.outputs
        if default_counts and "classification" not in self.parameters:
            counts = {name: default_counts.get(name, 0) for name in names}
        elif class_count:
            excluded = find_outputs_without_classes(self.signature, self.outputs)
            counts = {name: 0 if name in excluded else class_count for name in names}
        else:
            counts = dict.fromkeys(self.outputs, 0)
        return RequestOptions(counts, timeout_us, priority, custom)


def find_outputs_without_classes(signature: Signature, output_names: Collection[str]) -> list[str]:
    """Return the outputs that cannot be classified.

    Raises `InputMismatch` if one of them was requested by name, or if no other output remains.
    """
    requested = {
        name: tensor
        for name, tensor in signature.outputs.items()
        if name in (output_names or {name})
    }
    excluded = [tensor for tensor in requested.values() if not tensor.can_classify]
    if excluded and (output_names or len(excluded) == len(requested)):
        tensor = excluded[0]
        dims = ",".join(map(str, tensor.shape))
        raise InputMismatch(
            f"classification requires numeric outputs of fixed shape; the output "
            f"{quote_text(tensor.name)} is {tensor.datatype.name} [{dims}]"
        )
    return [tensor.name for tensor in excluded]


def pop_integer(
    parameters: dict[str, Any],
    key: str,
    default: int,
    unit: str = "a non-negative integer",
    minimum: int = 0,
) -> int:
    """Remove a parameter, and return its value or the default. Raises `InputMismatch`."""
    value = parameters.pop(key, default)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and minimum <= value < INT64_RANGE.stop:
        return int(value)
    raise InputMismatch(f"the parameter '{key}' must be {unit}, not {quote_text(str(value))}")


def build_http_request(
    request: InferRequest, remaining_s: float
) -> tuple[Headers, bytes | list[Buffer]]:
    """Return headers and body of `POST /v2/models/M/infer` (Binary Tensor Data Extension)."""
    options = request.build_options(remaining_s)
    step = request.target.sequence_step
    sequence_id, starts, ends = (0, False, False) if step is None else step.values
    datatypes = request.signature.inputs
    inputs = [
        SeparateInput(name, array, datatypes[name].datatype.name)
        for name, array in request.inputs.arrays.items()
    ]
    head, _ = InferenceServerClient.generate_request_body(
        inputs,
        [
            InferRequestedOutput(name, binary_data=True, class_count=count)
            for name, count in options.class_counts.items()
        ],
        request.request_id,
        sequence_id,
        starts,
        ends,
        options.priority,
        options.timeout_us,
        options.custom,
    )
    buffers = [head, *(each.data for each in inputs)]
    length = sum(map(len, buffers))
    headers = [
        (b"content-length", b"%d" % length),
        (b"content-type", b"application/octet-stream"),
        (b"inference-header-content-length", b"%d" % len(head)),
    ]
    return headers, b"".join(buffers) if length <= MAX_JOINED_BYTES else buffers


class SeparateInput(InferInput):  # type: ignore[misc]  # tritonclient has no types
    """An input whose data is not a part of the body that tritonclient makes.

    It follows that body without being copied: two copies would add an eighth to a request with a `.npy` file.
    """

    def __init__(self, name: str, array: np.ndarray, datatype: str) -> None:
        super().__init__(name, array.shape, datatype)
        self.data = encode_tensor(array)

    def _get_binary_data(self) -> bytes:
        return b""

    def _get_tensor(self) -> dict[str, Any]:
        return {
            "name": self.name(),
            "shape": self.shape(),
            "datatype": self.datatype(),
            "parameters": {"binary_data_size": len(self.data)},
        }


def encode_tensor(array: np.ndarray) -> Buffer:
    """Return the elements as Triton has them: those of BYTES with their lengths before them."""
    if array.dtype.kind == "O":
        return bytes(serialize_byte_tensor(array).item()) if array.size else b""
    # Not every dtype supports the buffer protocol: BF16 does not.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


async def decode_http_response(reply: CompleteResponse) -> InferResponse:
    """Return the response, decoded in a thread if it is large. Raises `BadUpstream`."""
    if len(reply.body) > MAX_INLINE_RESPONSE_BYTES:
        return await asyncio.to_thread(parse_http_response, reply)
    return parse_http_response(reply)


def parse_http_response(reply: CompleteResponse) -> InferResponse:
    """Return the decoded response. Raises `BadUpstream`."""
    length = reply.header(b"inference-header-content-length")
    try:
        version, arrays = decode_infer_response(reply.body, int(length) if length else None)
    except DECODE_ERRORS as exc:
        raise BadUpstream("the replica's inference response is invalid") from exc
    return InferResponse(arrays, version, len(reply.body))


def decode_infer_response(body: bytes, head_bytes: int | None) -> tuple[str, dict[str, np.ndarray]]:
    """Return the model's version and its outputs. Raises one of `DECODE_ERRORS` for an invalid response.

    tritonclient's `InferResult` searches all outputs for each one, and trusts what the head says of the data.
    """
    start = len(body) if head_bytes is None else head_bytes
    if not 0 < start <= len(body):
        raise ValueError("the head has no possible length")
    view = memoryview(body)
    document = orjson.loads(view[:start])
    arrays: dict[str, np.ndarray] = {}
    for entry in document.get("outputs", ()):
        name = entry["name"]
        if name in arrays:
            raise ValueError("two outputs have the same name")
        dtype = find_output_dtype(name, entry["datatype"])
        size = (entry.get("parameters") or {}).get("binary_data_size")
        if size is None:
            arrays[name] = decode_json_data(entry["data"], entry["shape"], dtype)
            continue
        if not 0 <= size <= len(body) - start:
            raise ValueError("an output is not complete")
        arrays[name] = decode_tensor(view[start : start + size], dtype).reshape(entry["shape"])
        start += size
    return str(document.get("model_version", "")), arrays


def decode_tensor(data: Buffer, dtype: np.dtype) -> np.ndarray:
    """Return the elements that `encode_tensor` has encoded; numbers share the memory of the data."""
    if dtype.kind == "O":
        elements: np.ndarray = deserialize_bytes_tensor(data)
        return elements
    array = np.frombuffer(data, dtype) if len(data) else np.empty(0, dtype)
    return array if array.flags.aligned else array.copy()


def find_output_dtype(name: Any, datatype: Any) -> np.dtype:
    """Return the type of an output. Raises `ValueError` for a name or datatype that is none."""
    known = DATATYPES.get(datatype)
    if known is None or not isinstance(name, str):
        raise ValueError("an output has no valid name or datatype")
    return known.numpy_dtype


def decode_json_data(data: Any, shape: Any, dtype: np.dtype) -> np.ndarray:
    array: np.ndarray = np.array(data, dtype).reshape(shape)
    if dtype.kind != "O":
        return array
    values = build_bytes_array([text.encode() for text in array.flat])
    return values.reshape(array.shape)
