"""Inference requests to one Triton: their parameters, and their encoding for HTTP. Does no I/O."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from tritonclient.utils import (
    TRITON_RESERVED_REQUEST_PARAMS,
    TRITON_RESERVED_REQUEST_PARAMS_PREFIX,
    InferenceServerException,
)

from gateway.errors import BadUpstream, InputMismatch
from gateway.http_client.client import CompleteResponse
from gateway.http_client.connection import Buffer, Headers
from gateway.messages import quote_text
from gateway.tensors import sequence
from gateway.tensors.inputs import InferInputs
from gateway.tensors.signature import Signature
from gateway.triton.binary_tensors import (
    BinaryInput,
    decode_infer_response,
    encode_infer_request,
)
from gateway.triton.error_mapping import RequestTarget

T = TypeVar("T")
# The exceptions of an invalid response, those of tritonclient included.
DECODE_ERRORS: Final = (
    RecursionError,
    ValueError,
    OverflowError,
    KeyError,
    TypeError,
    AttributeError,
    struct.error,
    InferenceServerException,
)
# Limits up to which data is encoded and decoded on the event loop; above, a thread does it.
MAX_INLINE_REQUEST_ELEMENTS: Final = 4096  # of BYTES, which Python processes one by one
MAX_INLINE_REQUEST_BYTES: Final = 1 << 20
MAX_INLINE_RESPONSE_BYTES: Final = 64 << 10  # BYTES can take four bytes per element
MAX_JOINED_BYTES: Final = 64 << 10  # larger requests are sent without being copied
INT64_RANGE: Final = range(-(1 << 63), 1 << 63)


class InferResponse(NamedTuple):
    """A response of a model."""

    outputs: dict[str, np.ndarray]
    version: str
    size_bytes: int  # as received


class RequestOptions(NamedTuple):
    """The checked parameters of a request."""

    # The number of classes to return by requested output; 0 for its values. Empty means all outputs.
    class_counts: Mapping[str, int]
    timeout_us: int
    priority: int
    custom: dict[str, Any]


class InferRequest(NamedTuple):
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

    def build_options(self, remaining_s: float) -> RequestOptions:
        """Raises `InputMismatch` for parameters that Triton would reject or misread."""
        default_timeout_us = max(int(remaining_s * 1e6), 1)
        default_counts = self.signature.default_class_counts
        if not self.parameters and not default_counts:
            return RequestOptions(dict.fromkeys(self.outputs, 0), default_timeout_us, 0, {})
        custom = {
            key: value
            for key, value in self.parameters.items()
            if key not in sequence.SEQUENCE_KEYS
        }
        class_count = parse_integer_parameter(
            "classification", custom.pop("classification", 0), "a non-negative integer"
        )
        timeout_us = parse_integer_parameter(
            "timeout",
            custom.pop("timeout", default_timeout_us),
            "a positive number of microseconds",
            minimum=1,
        )
        priority = parse_integer_parameter(
            "priority", custom.pop("priority", 0), "a non-negative integer"
        )
        for key, value in custom.items():
            if key in TRITON_RESERVED_REQUEST_PARAMS or key.startswith(
                TRITON_RESERVED_REQUEST_PARAMS_PREFIX
            ):
                raise InputMismatch(f"the parameter {quote_text(key)} is reserved by Triton")
            if isinstance(value, int) and value not in INT64_RANGE:
                raise InputMismatch(f"the parameter {quote_text(key)} does not fit into 64 bits")
        if default_counts and "classification" not in self.parameters:
            names = self.outputs or self.signature.outputs
            counts = {name: default_counts.get(name, 0) for name in names}
            return RequestOptions(counts, timeout_us, priority, custom)
        if not class_count:
            return RequestOptions(dict.fromkeys(self.outputs, 0), timeout_us, priority, custom)
        excluded = find_outputs_without_classes(self.signature, self.outputs)
        counts = {
            name: 0 if name in excluded else class_count
            for name in self.outputs or self.signature.outputs
        }
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


async def decode_http_response(reply: CompleteResponse) -> InferResponse:
    """Return the response, decoded in a thread if it is large. Raises `BadUpstream`."""
    if len(reply.body) > MAX_INLINE_RESPONSE_BYTES:
        return await asyncio.to_thread(parse_http_response, reply)
    return parse_http_response(reply)


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
    header_length, buffers = encode_infer_request(
        inputs, options.class_counts, parameters, request.request_id
    )
    length = sum(map(len, buffers))
    headers = [
        (b"content-length", b"%d" % length),
        (b"content-type", b"application/octet-stream"),
        (b"inference-header-content-length", b"%d" % header_length),
    ]
    return headers, b"".join(buffers) if length <= MAX_JOINED_BYTES else buffers


def map_tritonclient_error(exc: InferenceServerException) -> InputMismatch:
    # tritonclient rejects these arguments itself, before it sends them.
    return InputMismatch(f"invalid parameters: {exc.message()}")


def parse_integer_parameter(key: str, value: Any, unit: str, minimum: int = 0) -> int:
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and minimum <= value < INT64_RANGE.stop
    ):
        return value
    raise InputMismatch(f"the parameter '{key}' must be {unit}, not {quote_text(str(value))}")


def parse_http_response(reply: CompleteResponse) -> InferResponse:
    """Raises `BadUpstream`."""
    length = reply.header(b"inference-header-content-length")
    try:
        version, arrays = decode_infer_response(reply.body, int(length) if length else None)
    except DECODE_ERRORS as exc:
        raise BadUpstream("the replica's inference response is invalid") from exc
    return InferResponse(arrays, version, len(reply.body))
