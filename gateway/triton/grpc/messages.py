"""Inference requests and responses as messages of Triton's gRPC API."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, Final

import numpy as np
import orjson
from google.protobuf.message import DecodeError, EncodeError
from tritonclient.grpc import service_pb2

from gateway.errors import BadUpstream, TooLarge
from gateway.http_client.response import Headers
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.outputs import encode_json_result, find_json_shape
from gateway.triton.grpc.byte_channel import Metadata
from gateway.triton.inference import (
    DECODE_ERRORS,
    INT64_RANGE,
    MAX_INLINE_RESPONSE_BYTES,
    InferRequest,
    InferResponse,
    decode_tensor,
    encode_tensor,
    find_output_dtype,
)
from gateway.triton.sequence import SEQUENCE_KEYS

LENGTH: Final = struct.Struct("<I")  # precedes each element of BYTES
INVALID_RESPONSE: Final = "the replica's inference response is invalid"
# The kinds of NumPy's types whose values orjson writes as JSON has them.
PLAIN_DTYPE_KINDS: Final = "biuf"
PARAMETER_FIELDS: Final = {
    bool: "bool_param",
    int: "int64_param",
    float: "double_param",
    str: "string_param",
}


def encode_grpc_request(request: InferRequest, remaining_s: float) -> bytes:
    """Return a ModelInferRequest. Raises `InputMismatch`, or `TooLarge` for more than a message can hold."""
    options = request.build_options(remaining_s)
    target = request.target
    message = service_pb2.ModelInferRequest(
        model_name=target.model, model_version=target.version, id=request.request_id
    )
    for name, array in request.inputs.arrays.items():
        datatype = request.signature.inputs[name].datatype.name
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(bytes(encode_tensor(array)))
    for name, count in options.class_counts.items():
        output = message.outputs.add(name=name)
        if count:
            output.parameters["classification"].int64_param = count
    parameters: dict[str, Any] = {**options.custom, "timeout": options.timeout_us}
    if target.sequence_step is not None:
        parameters |= zip(SEQUENCE_KEYS, target.sequence_step.values, strict=True)
        sequence_id = target.sequence_step.sequence_id
        if isinstance(sequence_id, int) and sequence_id not in INT64_RANGE:
            # The field is signed, but Triton reads it as unsigned.
            parameters["sequence_id"] = sequence_id - (1 << 64)
    for key, value in parameters.items():
        setattr(message.parameters[key], PARAMETER_FIELDS[type(value)], value)
    if options.priority:
        message.parameters["priority"].uint64_param = options.priority
    try:
        return bytes(message.SerializeToString())
    except (EncodeError, ValueError) as exc:
        raise TooLarge("the request exceeds the size of a gRPC message (2 GiB)") from exc


def build_grpc_metadata(headers: Headers) -> Metadata:
    # gRPC rejects metadata other than printable ASCII, so such headers are omitted.
    texts = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
    return tuple(pair for pair in texts if pair[1].isascii() and pair[1].isprintable())


def build_http_headers(metadata: Metadata) -> Headers:
    """Return the metadata as headers, without the authority, which gRPC does not report."""
    return [
        (name.encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in metadata
    ]


def set_version(message: bytes, version: str) -> bytes:
    """Return a request to another version: the last of several values of a field counts."""
    added: bytes = service_pb2.ModelInferRequest(model_version=version).SerializeToString()
    return message + added


async def decode_grpc_response(message: bytes) -> InferResponse:
    """Return a ModelInferResponse, decoded in a thread if it is large. Raises `BadUpstream`."""
    if len(message) > MAX_INLINE_RESPONSE_BYTES:
        return await asyncio.to_thread(parse_grpc_response, message)
    return parse_grpc_response(message)


def parse_grpc_response(message: bytes) -> InferResponse:
    try:
        response = service_pb2.ModelInferResponse.FromString(message)
        return decode_grpc_outputs(response, len(message))
    except (DecodeError, *DECODE_ERRORS) as exc:
        raise BadUpstream(INVALID_RESPONSE) from exc


def decode_grpc_outputs(response: Any, size_bytes: int) -> InferResponse:
    """Return the outputs as arrays. Raises one of `DECODE_ERRORS`."""
    contents = zip(response.outputs, response.raw_output_contents, strict=True)
    arrays = {output.name: decode_grpc_output(output, data) for output, data in contents}
    if len(arrays) < len(response.outputs):
        raise ValueError("two outputs have the same name")
    return InferResponse(arrays, str(response.model_version), size_bytes)


def decode_grpc_output(output: Any, data: bytes) -> np.ndarray:
    dtype = find_output_dtype(output.name, output.datatype)
    return decode_tensor(data, dtype).reshape(tuple(output.shape))


async def render_streamed_result(request: InferRequest, message: bytes) -> bytes:
    """Return the JSON of a ModelStreamInferResponse, made in a thread if it is large.

    Raises `BadUpstream`.
    """
    if len(message) > MAX_INLINE_RESPONSE_BYTES:
        return await asyncio.to_thread(render_any_result, request, message)
    return render_small_result(request, message) or render_any_result(request, message)


def render_any_result(request: InferRequest, message: bytes) -> bytes:
    try:
        response = service_pb2.ModelStreamInferResponse.FromString(message).infer_response
        decoded = decode_grpc_outputs(response, len(message))
    except (DecodeError, *DECODE_ERRORS) as exc:
        raise BadUpstream(INVALID_RESPONSE) from exc
    return encode_json_result(request.build_result(decoded)).body


def render_small_result(request: InferRequest, message: bytes) -> bytes | None:
    """Decode and render a result of numbers and single texts in one pass, as `encode_json_result` does.

    Return None for what needs the general way: other values, NaN and infinities, an invalid message.
    """
    signature = request.signature
    is_batched = request.inputs.is_batched
    values: dict[str, Any] = {}
    try:
        response = service_pb2.ModelStreamInferResponse.FromString(message).infer_response
        contents = zip(response.outputs, response.raw_output_contents, strict=True)
        for output, data in contents:
            if min(output.shape, default=0) < 0:
                return None
            name = output.name
            shape = find_json_shape(signature, name, tuple(output.shape), is_batched=is_batched)
            dtype = DATATYPES[output.datatype].numpy_dtype
            if dtype.kind == "O":
                values[name] = render_text(request, name, shape, data)
            elif dtype.kind in PLAIN_DTYPE_KINDS:
                array = np.frombuffer(data, dtype).reshape(shape)
                values[name] = array if shape else array.item()
            else:
                return None
    except (DecodeError, *DECODE_ERRORS):
        return None
    if len(values) < len(response.outputs):
        return None  # two outputs have the same name
    document = {
        "id": request.request_id,
        "model": signature.model,
        "version": response.model_version,
        "outputs": values,
    }
    body = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    # orjson writes NaN and infinities as null.
    return None if b"null" in body else body


def render_text(request: InferRequest, name: str, shape: tuple[int, ...], data: bytes) -> Any:
    """Return a single text. Raises `ValueError` for other values."""
    tensor = request.signature.outputs.get(name)
    has_content_type = tensor is not None and tensor.content_type
    is_single = len(data) - LENGTH.size == LENGTH.unpack_from(data)[0]
    is_plain = not has_content_type and not request.has_classifications
    if not is_single or not is_plain or shape not in ((), (1,)):
        raise ValueError("an output is not a single text")
    text = data[LENGTH.size :].decode()
    return [text] if shape == (1,) else text
