"""Encoding and decoding of inferences with tritonclient, without I/O; over HTTP with binary tensors."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import tritonclient.http
from tritonclient.http import InferenceServerClient, InferResult
from tritonclient.utils import InferenceServerException

from gateway.errors import BadUpstream, InputMismatch
from gateway.http_client.client import CompleteResponse
from gateway.http_client.connection import Headers
from gateway.messages import quote_text
from gateway.tensors import sequence
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.inputs import InferInputs
from gateway.tensors.signature import Signature
from gateway.triton.error_mapping import RequestTarget

T = TypeVar("T")
# The exceptions with which tritonclient fails on an invalid response.
TRITONCLIENT_DECODE_ERRORS = (
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
MAX_OUTPUTS: Final = 2048
INT64_RANGE: Final = range(-(1 << 63), 1 << 63)


class InferResponse(NamedTuple):
    """A response of a model."""

    outputs: dict[str, np.ndarray]
    version: str
    size_bytes: int  # as received


@dataclass(frozen=True)
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
    trace_headers: Headers = field(default_factory=list)

    @property
    def remaining_s(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()

    async def encode(self, build: Callable[[InferRequest, float], T]) -> T:
        """Return what `build` makes of the request and its remaining time, in a thread if it is large."""
        arrays = self.inputs.arrays.values()
        elements = sum(array.size for array in arrays if array.dtype.kind == "O")
        size_bytes = sum(array.nbytes for array in arrays)
        if elements > MAX_INLINE_REQUEST_ELEMENTS or size_bytes > MAX_INLINE_REQUEST_BYTES:
            return await asyncio.to_thread(build, self, self.remaining_s)
        return build(self, self.remaining_s)

    def build_arguments(self, client_module: ModuleType, remaining_s: float) -> dict[str, Any]:
        """Return arguments for `tritonclient.http` or `tritonclient.grpc`. Raises `InputMismatch`."""
        inputs = []
        for name, array in self.inputs.arrays.items():
            datatype = self.signature.inputs[name].datatype.name
            tensor = client_module.InferInput(name, list(array.shape), datatype)
            inputs.append(tensor.set_data_from_numpy(array))
        custom = {
            key: value
            for key, value in self.parameters.items()
            if key not in sequence.SEQUENCE_KEYS
        }
        class_count = parse_integer_parameter(
            "classification", custom.pop("classification", 0), "a non-negative integer"
        )
        output_names = self.outputs or (self.signature.outputs if class_count else ())
        excluded = find_outputs_without_classes(self.signature, self.outputs) if class_count else ()
        counts = {name: 0 if name in excluded else class_count for name in output_names}
        arguments = {
            "inputs": inputs,
            "outputs": [
                client_module.InferRequestedOutput(name, class_count=count)
                for name, count in counts.items()
            ]
            or None,
            "request_id": self.request_id,
            "timeout": parse_integer_parameter(
                "timeout",
                custom.pop("timeout", max(int(remaining_s * 1e6), 1)),
                "a positive number of microseconds",
                minimum=1,
            ),
            "priority": parse_integer_parameter(
                "priority", custom.pop("priority", 0), "a non-negative integer"
            ),
            "parameters": custom or None,
        }
        for key, value in custom.items():
            if isinstance(value, int) and value not in INT64_RANGE:
                raise InputMismatch(f"the parameter {quote_text(key)} does not fit into 64 bits")
        step = self.target.sequence_step
        if step is not None:
            values = (step.sequence_id, step.is_start, step.is_end)
            arguments |= zip(sequence.SEQUENCE_KEYS, values, strict=True)
        return arguments


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


def build_http_request(request: InferRequest, remaining_s: float) -> tuple[Headers, bytes]:
    """Return headers and body of `POST /v2/models/M/infer` (Binary Tensor Data Extension)."""
    try:
        body, header_length = InferenceServerClient.generate_request_body(
            **request.build_arguments(tritonclient.http, remaining_s)
        )
    except InferenceServerException as exc:
        raise map_tritonclient_error(exc) from exc
    headers = [
        (b"content-length", b"%d" % len(body)),
        (b"content-type", b"application/octet-stream"),
    ]
    if header_length is not None:
        headers.append((b"inference-header-content-length", b"%d" % header_length))
    return headers, body


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
        result = InferResult.from_response_body(
            reply.body, header_length=int(length) if length else None
        )
        response = result.get_response()
        outputs = response.get("outputs", ())
        if len(outputs) > MAX_OUTPUTS:  # tritonclient searches them linearly for each output
            raise ValueError("too many outputs")
        arrays = {entry["name"]: read_output_array(result, entry) for entry in outputs}
        version = str(response.get("model_version", ""))
        version.encode()
    except TRITONCLIENT_DECODE_ERRORS as exc:
        raise BadUpstream("the replica's inference response is invalid") from exc
    return InferResponse(arrays, version, len(reply.body))


def read_output_array(result: InferResult, entry: Mapping[str, Any]) -> np.ndarray:
    """Return an output, which should be binary; elements of BYTES in JSON are strings.

    Raises one of `TRITONCLIENT_DECODE_ERRORS`.
    """
    check_output_entry(entry["name"], entry["datatype"])
    array: np.ndarray = result.as_numpy(entry["name"])
    if array.dtype.kind != "O" or "data" not in entry:
        return array
    values = np.empty(array.size, object)
    values[:] = [text.encode() for text in array.flat]
    return values.reshape(array.shape)


def check_output_entry(name: Any, datatype: Any) -> None:
    """Raises `ValueError` for a name that is not text, and for an unknown datatype.

    tritonclient would decode an unknown datatype as numbers.
    """
    if not isinstance(name, str) or datatype not in DATATYPES:
        raise ValueError("an output has no valid name or datatype")
    name.encode()
