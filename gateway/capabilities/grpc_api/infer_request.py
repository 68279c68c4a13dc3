"""The parts of a `ModelInferRequest` that the gateway reads, and the checks that protect Triton. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2

from gateway.capabilities.grpc_api.wire import invalid_message, remove_fields
from gateway.errors import Forbidden, InputMismatch, MalformedRequest
from gateway.routes.passthrough.rules import NO_SHARED_MEMORY
from gateway.tensors.payload import MAX_PARAMETERS, TooManyParameters, check_parameter_limits
from gateway.triton.grpc.messages import set_version
from gateway.triton.json_guard import MAX_EMPTY_SHAPE_PRODUCT
from gateway.triton.sequence import SEQUENCE_KEYS, SequenceStep, parse_sequence_parameters

# Smaller messages are decoded as a whole, which costs less than the search for their tensors.
MAX_DECODED_BYTES: Final = 32 << 10
# What is not a tensor is decoded on the event loop, and takes up to eight times its size.
MAX_HEAD_BYTES: Final = 256 << 10
RAW_CONTENTS: Final = frozenset((service_pb2.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,))
TYPED_CONTENTS: Final = {
    service_pb2.ModelInferRequest.INPUTS_FIELD_NUMBER: frozenset(
        (service_pb2.ModelInferRequest.InferInputTensor.CONTENTS_FIELD_NUMBER,)
    )
}
MAX_TENSORS: Final = 1000
# The dimensions of all inputs together.
MAX_DIMS: Final = 4096
SHARED_MEMORY_PREFIX: Final = "shared_memory_"
CLASSIFICATION: Final = "classification"
UINT64_COUNT: Final = 1 << 64


class InferHead(NamedTuple):
    """The parts of an inference request that decide where it goes."""

    model: str
    version: str
    request_id: str
    step: SequenceStep | None
    class_outputs: tuple[str, ...]  # the outputs that are to be classified


def read_infer_request(message: bytes) -> InferHead:
    """Return the head of a request, and check the rest.

    Raises `MalformedRequest`, `InputMismatch` or `Forbidden` for a request that Triton must not receive.
    """
    head = message
    if len(message) > MAX_DECODED_BYTES:
        head = remove_fields(message, RAW_CONTENTS, TYPED_CONTENTS, MAX_HEAD_BYTES)
    try:
        request = service_pb2.ModelInferRequest.FromString(head)
    except DecodeError:
        raise invalid_message() from None
    check_message(request, len(message))
    step = read_sequence_step(request.parameters) if request.parameters else None
    class_outputs = tuple(
        output.name for output in request.outputs if CLASSIFICATION in output.parameters
    )
    return InferHead(
        request.model_name,
        request.model_version,
        request.id,
        step,
        class_outputs,
    )


def change_version(message: bytes, requested: str, version: str) -> bytes:
    return message if version == requested else set_version(message, version)


def check_message(request: Any, body_bytes: int) -> None:
    inputs = request.inputs
    outputs = request.outputs
    if len(inputs) > MAX_TENSORS or len(outputs) > MAX_TENSORS:
        raise MalformedRequest(f"a request can have at most {MAX_TENSORS} inputs and outputs")
    check_parameter_limits(request.parameters)
    count = 0
    for tensor in inputs:
        dims = list(tensor.shape)
        count += len(dims)
        if count > MAX_DIMS:
            raise MalformedRequest(f"the inputs can have at most {MAX_DIMS} dimensions together")
        check_shape(dims, body_bytes)
    count = 0
    for tensor in (*inputs, *outputs):
        if parameters := tensor.parameters:
            count += len(parameters)
            if count > MAX_PARAMETERS:
                raise TooManyParameters
            check_parameter_limits(parameters)
            if any(name.startswith(SHARED_MEMORY_PREFIX) for name in parameters):
                raise Forbidden(NO_SHARED_MEMORY.message)


def check_shape(dims: list[int], body_bytes: int) -> None:
    """Check a shape whose product Triton computes. Every element takes at least a byte of the body."""
    # An empty tensor takes none, but the product of its other dimensions must not overflow either.
    limit = MAX_EMPTY_SHAPE_PRODUCT if 0 in dims else body_bytes
    elements = 1
    for size in dims:
        if size < 0:
            raise InputMismatch(f"the shape {format_dims(dims)} has a negative dimension")
        elements *= size or 1
        if elements > limit:  # a product of thousands of numbers would take long
            raise InputMismatch(
                f"the shape {format_dims(dims)} has more elements than the message can hold"
            )


def read_sequence_step(parameters: Mapping[str, Any]) -> SequenceStep | None:
    """Return the step of a sequence, or None if it is absent or invalid, which Triton reports."""
    values = {key: read_parameter(parameters[key]) for key in SEQUENCE_KEYS if key in parameters}
    if not values:
        return None
    try:
        return parse_sequence_parameters(values)
    except InputMismatch:
        return None


def read_parameter(parameter: Any) -> Any:
    """Return the value of an `InferParameter`. Triton reads signed sequence ids as unsigned ones."""
    choice = parameter.WhichOneof("parameter_choice")
    if choice is None:
        return None
    value = getattr(parameter, choice)
    return value + UINT64_COUNT if choice == "int64_param" and value < 0 else value


def format_dims(dims: list[int]) -> str:
    return f"[{','.join(map(str, dims[:20]))}]"
