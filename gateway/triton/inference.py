"""Inference requests to one Triton: their parameters, and their encoding with binary tensors. Does no I/O.

The encoding is that of the Binary Tensor Data Extension. `tritonclient.http` needs more passes and copies for
it.
"""

from __future__ import annotations

import asyncio
import io
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import orjson
from tritonclient.utils import TRITON_RESERVED_REQUEST_PARAMS, TRITON_RESERVED_REQUEST_PARAMS_PREFIX

from gateway.errors import BadUpstream, InputMismatch
from gateway.http_client.client import CompleteResponse
from gateway.http_client.connection import Buffer
from gateway.http_client.response import Headers
from gateway.messages import quote_text
from gateway.tensors.dtypes import BYTES, DATATYPES, build_bytes_array
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
MAX_INLINE_RESPONSE_BYTES: Final = 64 << 10  # BYTES can take four bytes per element
MAX_JOINED_BYTES: Final = 64 << 10  # larger requests are sent without being copied
INT64_RANGE: Final = range(-(1 << 63), 1 << 63)
LENGTH: Final = struct.Struct("<I")  # precedes each element of BYTES
# So few elements of BYTES are sent without being copied into one buffer.
MAX_SEPARATE_ELEMENTS: Final = 64
# Copying this takes a millisecond or less, so that no copy holds the GIL, or the event loop, for long.
MAX_PIECE_BYTES: Final = 1 << 20


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
    parameters = {**options.custom, "timeout": options.timeout_us}
    if options.priority:
        parameters["priority"] = options.priority
    step = request.target.sequence_step
    if step is not None:
        parameters |= zip(sequence.SEQUENCE_KEYS, step.values, strict=True)
    datatypes = request.signature.inputs
    inputs = [
        BinaryInput(name, array, datatypes[name].datatype.name)
        for name, array in request.inputs.arrays.items()
    ]
    document = build_request_document(inputs, options.class_counts, parameters, request.request_id)
    head = orjson.dumps(document)
    buffers: list[Buffer] = [head]
    for each in inputs:
        buffers += each.buffers
    length = sum(map(len, buffers))
    headers = [
        (b"content-length", b"%d" % length),
        (b"content-type", b"application/octet-stream"),
        (b"inference-header-content-length", b"%d" % len(head)),
    ]
    return headers, b"".join(buffers) if length <= MAX_JOINED_BYTES else buffers


class BinaryInput:
    """An input whose data is not copied; `buffers` are what Triton receives."""

    __slots__ = ("_datatype", "_name", "_shape", "buffers")

    def __init__(self, name: str, array: np.ndarray, datatype: str) -> None:
        self._name = name
        self._shape = array.shape
        self._datatype = datatype
        self.buffers: Sequence[Buffer]
        if datatype == BYTES.name:
            self.buffers = encode_bytes_elements(array.ravel().tolist())
        else:
            # Not every dtype supports the buffer protocol: BF16 does not.
            self.buffers = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data]

    def describe(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "shape": self._shape,
            "datatype": self._datatype,
            "parameters": {"binary_data_size": sum(map(len, self.buffers))},
        }


def encode_bytes_elements(values: Sequence[bytes]) -> list[Buffer]:
    buffers: list[Buffer] = []
    for value in values:
        buffers += (LENGTH.pack(len(value)), value)
    return buffers if len(values) <= MAX_SEPARATE_ELEMENTS else [b"".join(buffers)]


def build_request_document(
    inputs: Sequence[BinaryInput],
    class_counts: Mapping[str, int],
    parameters: Mapping[str, Any],
    request_id: str,
) -> dict[str, Any]:
    """Return the JSON that precedes the data of the inputs. `class_counts` are those of `RequestOptions`."""
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
    return document


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


def decode_infer_response(
    body: bytes, header_length: int | None
) -> tuple[str, dict[str, np.ndarray]]:
    """Return the model's version and its outputs. Raises one of `DECODE_ERRORS` for an invalid response."""
    document = orjson.loads(body if header_length is None else memoryview(body)[:header_length])
    position = len(body) if header_length is None else header_length
    arrays: dict[str, np.ndarray] = {}
    for entry in document.get("outputs", ()):
        name = entry["name"]
        if name in arrays:
            raise ValueError("two outputs have the same name")
        dtype = find_output_dtype(name, entry["datatype"])
        size = (entry.get("parameters") or {}).get("binary_data_size")
        if size is None:
            array = decode_json_data(entry["data"], entry["shape"], dtype)
        elif 0 <= size <= len(body) - position:
            array = decode_binary_data(body, position, size, dtype).reshape(entry["shape"])
            position += size
        else:
            raise ValueError("an output is not complete")
        arrays[name] = array
    return str(document.get("model_version", "")), arrays


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
    view = memoryview(body)
    while start < end:
        first = start + LENGTH.size
        start = first + LENGTH.unpack_from(body, start)[0]
        is_large = start - first > MAX_PIECE_BYTES
        values.append(copy_in_pieces(view[first:start]) if is_large else body[first:start])
    if start != end:
        raise ValueError("an output has a part of an element")
    return values


def copy_in_pieces(view: memoryview) -> bytes:
    """Return the data as bytes. Other threads can run between its pieces."""
    file = io.BytesIO()
    for start in range(0, len(view), MAX_PIECE_BYTES):
        file.write(view[start : start + MAX_PIECE_BYTES])
    return file.getvalue()  # this makes no copy
