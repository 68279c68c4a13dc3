"""Tensors become an answer: JSON, NumPy's files, or one output raw, as `Accept` asks. Pure."""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import orjson

from gateway.errors import (
    BadUpstream,
    InputMismatch,
    MalformedRequest,
    ModelFault,
    NotAcceptable,
    UnrepresentableResponse,
)
from gateway.messages import quote_text
from gateway.tensors.dtypes import DatatypeKind
from gateway.tensors.media_type import parse_header_parameters
from gateway.tensors.payload import JSON, NPY, NPZ, OCTET_STREAM
from gateway.tensors.signature import Signature, TensorSpec

MAX_CLASS_INDEX_DIGITS = 18  # of a number of 64 bits
IMAGE_SIGNATURES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"RIFF": "image/webp",
    b"GIF8": "image/gif",
}


# Numbers that orjson writes in about a millisecond.
VALUES_PER_CHUNK = 16_384
# Browsers send some 150 characters.
MAX_ACCEPT_CHARS = 2048


@dataclass(frozen=True)
class InferResult:
    """What a model answered. The arrays of a batching model keep their batch dimension here."""

    signature: Signature
    arrays: Mapping[str, np.ndarray]
    is_batched: bool
    id: str = ""
    version: str = ""
    has_classifications: bool = False
    instance_count: int = 0  # of the request, where it wants an answer for each
    size_bytes: int = 0  # of Triton's answer

    @property
    def is_large(self) -> bool:
        """Whether writing it takes too long for the event loop."""
        return self.size_bytes > 4 * VALUES_PER_CHUNK

    def get_array(self, name: str) -> np.ndarray:
        """An output as the request asked for it: without a batch dimension if that had none."""
        array = self.arrays[name]
        if self.is_batched or not self.signature.supports_batching:
            return array
        return array[0] if array.shape[:1] == (1,) else array  # a model may answer no batch of one

    def get_tensor_spec(self, name: str) -> TensorSpec | None:
        return self.signature.outputs.get(name)


@dataclass(frozen=True)
class EncodedBody:
    body: bytes
    content_type: str


def concatenate_results(results: Sequence[InferResult]) -> InferResult:
    """The answers to the pieces of one batch, as one answer.

    Raises `DoesNotFit`: a model may pad to the longest item of a batch, and each piece has another.
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
            "the answers to the pieces of this batch have different shapes; "
            f"send at most {first.signature.max_batch_size} items at a time"
        ) from None
    return replace(
        first,
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


def dump_json(value: Any) -> bytes:
    """Return the JSON of a value, whose dictionaries have strings as keys.

    Large arrays and long lists are written in pieces: orjson holds the GIL for each call.
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
    pieces = (value[start : start + chunk_length] for start in range(0, len(value), chunk_length))
    return b"[" + b",".join(dump_json(piece)[1:-1] for piece in pieces) + b"]"


def output_to_json(result: InferResult, name: str) -> Any:
    """An output as orjson writes it. Of single values (shape [1]), a batch is a list."""
    array, tensor = result.get_array(name), result.get_tensor_spec(name)
    if result.signature.supports_batching and tensor is not None and tensor.shape == (1,):
        own = array.ndim - result.is_batched
        array = array.reshape(array.shape[:-1]) if own > 0 and array.shape[-1] == 1 else array
    if array.dtype.kind == "O":
        content_type = tensor.content_type if tensor is not None else ""
        if result.has_classifications and (tensor is None or tensor.can_classify):
            return map_nested(array, parse_classification)
        return map_nested(array, parse_json_output if content_type == JSON else bytes_to_json)
    return array_to_json(array)


def array_to_json(array: np.ndarray) -> Any:
    """Numbers as orjson writes them; what JSON has no number for, as protobuf's JSON mapping names it."""
    if array.dtype.kind not in "biuf":
        array = array.astype(np.float32)  # BF16, exactly
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        names = {np.inf: "Infinity", -np.inf: "-Infinity"}
        return map_nested(
            array, lambda value: value if np.isfinite(value) else names.get(value, "NaN")
        )
    return np.ascontiguousarray(array) if array.ndim else array.item()


def map_nested(array: np.ndarray, convert: Callable[[Any], Any]) -> Any:
    """Nested lists of the array's elements, each converted."""
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
    """An output that its model declares to be JSON is not quoted a second time."""
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return bytes_to_json(value)


def parse_classification(value: bytes) -> Any:
    """The classification extension's `value:index[:label]`."""
    try:
        score, index, *label = value.decode(errors="replace").split(":", 2)
        found = {"score": float(score), "index": int(index[:MAX_CLASS_INDEX_DIGITS])}
    except ValueError:
        return bytes_to_json(value)
    return {**found, **({"label": label[0]} if label else {})}


def get_single_output_name(result: InferResult) -> str:
    """The one that was asked for, which Triton lets a model leave out."""
    if not result.arrays:
        raise ModelFault("the model did not answer the output that was asked for")
    (name,) = result.arrays
    return name


def encode_npy_result(result: InferResult) -> EncodedBody:
    name = get_single_output_name(result)
    file = io.BytesIO()
    np.save(file, to_npy_array(result.get_array(name)), allow_pickle=False)
    return EncodedBody(file.getvalue(), NPY)


def encode_npz_result(result: InferResult) -> EncodedBody:
    """As `np.savez` writes it, which takes some names for its own parameters."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in result.arrays:
            array = to_npy_array(result.get_array(name))
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return EncodedBody(file.getvalue(), NPZ)


def to_npy_array(array: np.ndarray) -> np.ndarray:
    """BYTES as NumPy's fixed-width bytes; BF16 as its two raw bytes, which is how NumPy stores it."""
    if array.dtype.kind != "O":
        return array
    if any(value[-1:] == b"\0" for value in array.flat):
        raise UnrepresentableResponse(
            "bytes that end in NUL, which a NumPy file would lose", [JSON]
        )
    width = max((len(value) for value in array.flat), default=0)
    return array.astype(f"S{max(width, 1)}")


def encode_raw_result(result: InferResult, content_type: str) -> EncodedBody:
    """The only element of the only output."""
    name = get_single_output_name(result)
    array = result.get_array(name)
    if array.size != 1:
        raise UnrepresentableResponse(f"{array.size} values, and one body holds one", [JSON])
    value = array.item()
    if not isinstance(value, bytes):
        raise BadUpstream(
            f"the replica answered numbers for the output {quote_text(name)} of texts"
        )
    return EncodedBody(value, detect_image_type(value) if "*" in content_type else content_type)


def detect_image_type(value: bytes) -> str:
    """The type of an image by its first bytes."""
    return next(
        (kind for magic, kind in IMAGE_SIGNATURES.items() if value.startswith(magic)), OCTET_STREAM
    )


def choose_result_encoder(
    accept: str, signature: Signature, outputs: Sequence[str]
) -> Callable[[InferResult], EncodedBody]:
    """What `Accept` chooses among the forms that these outputs have (RFC 9110, section 12.5.1).

    Raises `NotAcceptable` before anything is sent to the model.
    """
    forms: dict[str, Callable[[InferResult], EncodedBody]] = {
        JSON: encode_json_result,
        NPZ: encode_npz_result,
    }
    if len(outputs) == 1:
        forms[NPY] = encode_npy_result
        tensor = signature.outputs.get(outputs[0])
        if tensor is not None and tensor.datatype.kind is DatatypeKind.BYTES:
            forms[OCTET_STREAM] = lambda result: encode_raw_result(
                result, tensor.content_type or OCTET_STREAM
            )
            if tensor.content_type and tensor.content_type != JSON:
                forms[tensor.content_type] = forms[OCTET_STREAM]
    ranges = parse_accept(accept)
    ranked = [(rank, form) for form in forms if (rank := rank_media_type(form, ranges))]
    if not ranked:
        raise NotAcceptable(accept, forms)
    return forms[max(ranked, key=itemgetter(0))[1]]  # the first of equals


class MediaRange(NamedTuple):
    """A media range of an `Accept` header."""

    quality: float
    position: int
    name: str


def parse_accept(accept: str) -> list[MediaRange]:
    """As they stand in the header; one that names nothing is as good as none. Raises `Malformed`."""
    if len(accept) > MAX_ACCEPT_CHARS:
        raise MalformedRequest(
            f"the Accept header is longer than {MAX_ACCEPT_CHARS} characters; name fewer media types"
        )
    ranges = []
    for position, entry in enumerate(accept.split(",")):
        name, parameters = parse_header_parameters(entry)
        try:
            quality = float(parameters.get("q", "1"))
        except ValueError:
            quality = 1.0
        if name:
            ranges.append(MediaRange(quality, -position, name))
    return ranges or [MediaRange(1.0, 0, "*/*")]


def rank_media_type(media_type: str, ranges: Sequence[MediaRange]) -> tuple[float, int] | None:
    """By the most specific range that matches, and where that stands; None where it is not wanted."""
    found = [each for each in ranges if is_in_media_range(each.name, media_type)]
    best = max(found, key=lambda each: (-each.name.count("*"), each.quality), default=None)
    return best[:2] if best is not None and best.quality > 0 else None


def list_accepted_types(accept: str) -> list[str]:
    """The media ranges of an `Accept` header that are wanted, best first."""
    wanted = (each for each in parse_accept(accept) if each.quality > 0)
    return [each.name for each in sorted(wanted, reverse=True)]


def is_in_media_range(media_range: str, media_type: str) -> bool:
    if media_range in ("*/*", media_type):
        return True
    kind, _, subtype = media_range.partition("/")
    form_kind, _, form_subtype = media_type.partition("/")
    return kind == form_kind and "*" in (subtype, form_subtype)
