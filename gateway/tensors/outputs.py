"""Encoders of output tensors as JSON, .npy, .npz or raw bytes. Pure."""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from gateway.errors import (
    BadUpstream,
    InputMismatch,
    ModelFault,
    NotAcceptable,
    UnrepresentableResponse,
)
from gateway.headers import choose_media_type
from gateway.media_types import IMAGE_SIGNATURES, JSON, NPY, NPZ, OCTET_STREAM, detect_media_type
from gateway.messages import quote_text
from gateway.tensors.dtypes import DatatypeKind
from gateway.tensors.signature import Signature

MAX_CLASS_INDEX_DIGITS = 18  # fits into 64 bits
# orjson serializes this many numbers in about a millisecond.
VALUES_PER_CHUNK = 16_384
# Serializing more numbers would block the event loop for too long.
MAX_INLINE_RESULT_BYTES = 4 * VALUES_PER_CHUNK
JSON_ACCEPT_VALUES = ("", "*/*", JSON)  # those of nearly all clients


class InferResult(NamedTuple):
    """The response of a model. `arrays` keep the batch dimension of a model that supports batching."""

    signature: Signature
    arrays: Mapping[str, np.ndarray]
    is_batched: bool
    id: str = ""
    version: str = ""
    has_classifications: bool = False
    instance_count: int = 0  # more than 0 if the client expects one result per instance
    size_bytes: int = 0  # the size of Triton's response

    @property
    def is_large(self) -> bool:
        return self.size_bytes > MAX_INLINE_RESULT_BYTES

    def get_array(self, name: str) -> np.ndarray:
        """Return an output, without the batch dimension if the request had none."""
        array = self.arrays[name]
        if self.is_batched or not self.signature.supports_batching:
            return array
        # A model may return another batch size.
        return array.reshape(array.shape[1:]) if array.shape[:1] == (1,) else array


class EncodedBody(NamedTuple):
    body: bytes
    content_type: str


def concatenate_results(results: Sequence[InferResult]) -> InferResult:
    """Join the results of the sub-batches of one request.

    Raises `InputMismatch` if their shapes differ: a model may pad to the longest item of each sub-batch.
    """
    first = results[0]
    if len(results) == 1:
        return first
    try:
        arrays = {
            name: np.concatenate([result.arrays[name] for result in results])
            for name in first.arrays
        }
    except (KeyError, ValueError):
        raise InputMismatch(
            "the responses to the parts of this batch have different shapes; "
            f"send at most {first.signature.max_batch_size} items at a time"
        ) from None
    return first._replace(
        arrays=arrays,
        is_batched=True,
        instance_count=sum(result.instance_count for result in results),
        size_bytes=sum(result.size_bytes for result in results),
    )


def encode_json_result(result: InferResult) -> EncodedBody:
    document = {
        "id": result.id,
        "model": result.signature.model,
        "version": result.version,
        "outputs": {name: output_to_json(result, name) for name in result.arrays},
    }
    if result.is_large:
        return EncodedBody(dump_json(document), JSON)
    return EncodedBody(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), JSON)


def are_large(results: Sequence[InferResult]) -> bool:
    return sum(result.size_bytes for result in results) > MAX_INLINE_RESULT_BYTES


def dump_json(value: Any) -> bytes:
    """Return the JSON of a value; the keys of dictionaries must be strings.

    Large arrays and long lists are serialized in chunks, because orjson holds the GIL during a call.
    """
    if isinstance(value, np.ndarray) and value.size > VALUES_PER_CHUNK:
        rows = VALUES_PER_CHUNK * len(value) // value.size
        return (
            dump_json_chunks(value, rows)
            if rows
            else b"[" + b",".join(map(dump_json, value)) + b"]"
        )
    if isinstance(value, list) and len(value) > VALUES_PER_CHUNK:
        return dump_json_chunks(value, VALUES_PER_CHUNK)
    if isinstance(value, dict):
        items = (orjson.dumps(key) + b":" + dump_json(item) for key, item in value.items())
        return b"{" + b",".join(items) + b"}"
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def dump_json_chunks(value: np.ndarray | list[Any], chunk_length: int) -> bytes:
    chunks = (value[start : start + chunk_length] for start in range(0, len(value), chunk_length))
    return b"[" + b",".join(dump_json(chunk)[1:-1] for chunk in chunks) + b"]"


def output_to_json(result: InferResult, name: str) -> Any:
    """Return an output as a value for orjson. A batch of single values (shape [1]) is a flat list."""
    array = result.arrays[name]
    tensor = result.signature.outputs.get(name)
    shape = find_json_shape(result.signature, name, array.shape, is_batched=result.is_batched)
    if shape != array.shape:
        array = array.reshape(shape)
    if array.dtype.kind == "O":
        content_type = tensor.content_type if tensor is not None else ""
        if result.has_classifications and (tensor is None or tensor.can_classify):
            return map_nested(array, parse_classification)
        return map_nested(array, parse_json_output if content_type == JSON else bytes_to_json)
    return array_to_json(array)


def find_json_shape(
    signature: Signature, name: str, shape: tuple[int, ...], *, is_batched: bool
) -> tuple[int, ...]:
    """Return the shape without the batch dimension if the request had none, and without a last one of 1."""
    if not signature.supports_batching:
        return shape
    if not is_batched and shape[:1] == (1,):  # a model may return another batch size
        shape = shape[1:]
    tensor = signature.outputs.get(name)
    is_single_value = tensor is not None and tensor.shape == (1,)
    if is_single_value and len(shape) > is_batched and shape[-1] == 1:
        return shape[:-1]
    return shape


def array_to_json(array: np.ndarray) -> Any:
    """Return numbers as a value for orjson, with NaN and infinities as in protobuf's JSON mapping."""
    if array.dtype.kind not in "biuf":
        array = array.astype(np.float32)  # BF16 converts exactly
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        names = {np.inf: "Infinity", -np.inf: "-Infinity"}
        return map_nested(
            array, lambda value: value if np.isfinite(value) else names.get(value, "NaN")
        )
    return np.ascontiguousarray(array) if array.ndim else array.item()


def map_nested(array: np.ndarray, convert: Callable[[Any], Any]) -> Any:
    if array.ndim == 0:
        return convert(array.item())
    return [
        map_nested(row, convert) if isinstance(row, np.ndarray) else convert(row) for row in array
    ]


def bytes_to_json(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def parse_json_output(value: bytes) -> Any:
    # An output that the model declares as JSON is embedded instead of quoted.
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return bytes_to_json(value)


def parse_classification(value: bytes) -> Any:
    # The format of Triton's classification extension is `value:index[:label]`.
    try:
        score, index, *label = value.decode(errors="replace").split(":", 2)
        entry = {"score": float(score), "index": int(index[:MAX_CLASS_INDEX_DIGITS])}
    except ValueError:
        return bytes_to_json(value)
    return {**entry, **({"label": label[0]} if label else {})}


def get_single_output_name(result: InferResult) -> str:
    if not result.arrays:  # Triton does not check that a model returns the requested outputs
        raise ModelFault("the model did not return the requested output")
    (name,) = result.arrays
    return name


def encode_npy_result(result: InferResult) -> EncodedBody:
    name = get_single_output_name(result)
    file = io.BytesIO()
    np.save(file, to_npy_array(result.get_array(name)), allow_pickle=False)
    return EncodedBody(file.getvalue(), NPY)


def encode_npz_result(result: InferResult) -> EncodedBody:
    # `np.savez` is not used, because it cannot store arrays with the names of its own parameters.
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in result.arrays:
            array = to_npy_array(result.get_array(name))
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return EncodedBody(file.getvalue(), NPZ)


def to_npy_array(array: np.ndarray) -> np.ndarray:
    """Convert BYTES to NumPy's fixed-width bytes. BF16 stays as it is: NumPy stores its two raw bytes."""
    if array.dtype.kind != "O":
        return array
    if any(value[-1:] == b"\0" for value in array.flat):
        raise UnrepresentableResponse("bytes that end in NUL, which a NumPy file cannot store")
    width = max((len(value) for value in array.flat), default=0)
    return array.astype(f"S{max(width, 1)}")


def encode_raw_result(result: InferResult, content_type: str) -> EncodedBody:
    name = get_single_output_name(result)
    array = result.get_array(name)
    if array.size != 1:
        raise UnrepresentableResponse(f"{array.size} values, but a raw body holds exactly one")
    value = array.item()
    if not isinstance(value, bytes):
        raise BadUpstream(f"the replica returned numbers for the string output {quote_text(name)}")
    return EncodedBody(
        value, detect_media_type(value, IMAGE_SIGNATURES) if "*" in content_type else content_type
    )


def choose_result_encoder(
    accept: str, signature: Signature, outputs: Sequence[str]
) -> Callable[[InferResult], EncodedBody]:
    """Return the encoder that `Accept` prefers for these outputs (RFC 9110, section 12.5.1).

    Raises `NotAcceptable`, so it is called before the inference.
    """
    if accept in JSON_ACCEPT_VALUES:
        return encode_json_result
    encoders: dict[str, Callable[[InferResult], EncodedBody]] = {
        JSON: encode_json_result,
        NPZ: encode_npz_result,
    }
    if len(outputs) == 1:
        encoders[NPY] = encode_npy_result
        tensor = signature.outputs.get(outputs[0])
        if tensor is not None and tensor.datatype.kind is DatatypeKind.BYTES:
            encoders[OCTET_STREAM] = lambda result: encode_raw_result(
                result, tensor.content_type or OCTET_STREAM
            )
            if tensor.content_type and tensor.content_type != JSON:
                encoders[tensor.content_type] = encoders[OCTET_STREAM]
    media_type = choose_media_type(accept, tuple(encoders))
    if not media_type:
        raise NotAcceptable(accept, encoders)
    return encoders[media_type]
