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
    DoesNotFit,
    Malformed,
    ModelFault,
    NotAcceptable,
    Unrepresentable,
)
from gateway.tensors.dtypes import Kind
from gateway.tensors.media_type import split_parameters
from gateway.tensors.payload import JSON, NPY, NPZ, OCTETS
from gateway.tensors.signature import Signature, Tensor
from gateway.words import quoted

MOST_DIGITS = 18  # of a number of 64 bits
MAGIC = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"RIFF": "image/webp",
    b"GIF8": "image/gif",
}


# Numbers that orjson writes in about a millisecond.
PIECE_SIZE = 16_384
# Browsers send some 150 characters.
MAX_ACCEPT = 2048


@dataclass(frozen=True)
class Result:
    """What a model answered. The arrays of a batching model keep their batch dimension here."""

    signature: Signature
    arrays: Mapping[str, np.ndarray]
    batched: bool
    id: str = ""
    version: str = ""
    classified: bool = False
    rows: int = 0  # of the request, where it wants an answer for each
    size_bytes: int = 0  # of Triton's answer

    @property
    def is_large(self) -> bool:
        """Whether writing it takes too long for the event loop."""
        return self.size_bytes > 4 * PIECE_SIZE

    def array(self, name: str) -> np.ndarray:
        """An output as the request asked for it: without a batch dimension if that had none."""
        array = self.arrays[name]
        if self.batched or not self.signature.batching:
            return array
        return array[0] if array.shape[:1] == (1,) else array  # a model may answer no batch of one

    def tensor(self, name: str) -> Tensor | None:
        return self.signature.outputs.get(name)


@dataclass(frozen=True)
class Rendered:
    body: bytes
    content_type: str


def joined(results: Sequence[Result]) -> Result:
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
        raise DoesNotFit(
            "the answers to the pieces of this batch have different shapes; "
            f"send at most {first.signature.max_batch_size} items at a time"
        ) from None
    return replace(
        first,
        arrays=arrays,
        batched=True,
        rows=sum(result.rows for result in results),
        size_bytes=sum(result.size_bytes for result in results),
    )


def as_json(result: Result) -> Rendered:
    document = {
        "id": result.id,
        "model": result.signature.model,
        "version": result.version,
        "outputs": {name: value_of(result, name) for name in result.arrays},
    }
    if result.is_large:
        return Rendered(dump(document), JSON)
    return Rendered(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY), JSON)


def dump(value: Any) -> bytes:
    """Return the JSON of a value, whose dictionaries have strings as keys.

    Large arrays and long lists are written in pieces: orjson holds the GIL for each call.
    """
    if isinstance(value, np.ndarray) and value.size > PIECE_SIZE:
        rows = PIECE_SIZE * len(value) // value.size
        return joined_pieces(value, rows) if rows else b"[" + b",".join(map(dump, value)) + b"]"
    if isinstance(value, list) and len(value) > PIECE_SIZE:
        return joined_pieces(value, PIECE_SIZE)
    if isinstance(value, dict):
        items = (orjson.dumps(key) + b":" + dump(item) for key, item in value.items())
        return b"{" + b",".join(items) + b"}"
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def joined_pieces(value: np.ndarray | list[Any], length: int) -> bytes:
    pieces = (value[start : start + length] for start in range(0, len(value), length))
    return b"[" + b",".join(dump(piece)[1:-1] for piece in pieces) + b"]"


def value_of(result: Result, name: str) -> Any:
    """An output as orjson writes it. Of single values (shape [1]), a batch is a list."""
    array, tensor = result.array(name), result.tensor(name)
    if result.signature.batching and tensor is not None and tensor.shape == (1,):
        own = array.ndim - result.batched
        array = array.reshape(array.shape[:-1]) if own > 0 and array.shape[-1] == 1 else array
    if array.dtype.kind == "O":
        content_type = tensor.content_type if tensor is not None else ""
        if result.classified and (tensor is None or tensor.has_classes):
            return nested(array, class_of)
        return nested(array, parsed_json if content_type == JSON else text_or_base64)
    return jsonable(array)


def jsonable(array: np.ndarray) -> Any:
    """Numbers as orjson writes them; what JSON has no number for, as protobuf's JSON mapping names it."""
    if array.dtype.kind not in "biuf":
        array = array.astype(np.float32)  # BF16, exactly
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        names = {np.inf: "Infinity", -np.inf: "-Infinity"}
        return nested(array, lambda value: value if np.isfinite(value) else names.get(value, "NaN"))
    return np.ascontiguousarray(array) if array.ndim else array.item()


def nested(array: np.ndarray, convert: Callable[[Any], Any]) -> Any:
    """Nested lists of the array's elements, each converted."""
    if array.ndim == 0:
        return convert(array.item())
    return [nested(row, convert) if isinstance(row, np.ndarray) else convert(row) for row in array]


def text_or_base64(value: bytes) -> Any:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(value).decode()}


def parsed_json(value: bytes) -> Any:
    """An output that its model declares to be JSON is not quoted a second time."""
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return text_or_base64(value)


def class_of(value: bytes) -> Any:
    """The classification extension's `value:index[:label]`."""
    try:
        score, index, *label = value.decode(errors="replace").split(":", 2)
        found = {"score": float(score), "index": int(index[:MOST_DIGITS])}
    except ValueError:
        return text_or_base64(value)
    return {**found, **({"label": label[0]} if label else {})}


def only_output(result: Result) -> str:
    """The one that was asked for, which Triton lets a model leave out."""
    if not result.arrays:
        raise ModelFault("the model did not answer the output that was asked for")
    (name,) = result.arrays
    return name


def as_npy(result: Result) -> Rendered:
    name = only_output(result)
    file = io.BytesIO()
    np.save(file, storable(result.array(name)), allow_pickle=False)
    return Rendered(file.getvalue(), NPY)


def as_npz(result: Result) -> Rendered:
    """As `np.savez` writes it, which takes some names for its own parameters."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in result.arrays:
            array = storable(result.array(name))
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return Rendered(file.getvalue(), NPZ)


def storable(array: np.ndarray) -> np.ndarray:
    """BYTES as NumPy's fixed-width bytes; BF16 as its two raw bytes, which is how NumPy stores it."""
    if array.dtype.kind != "O":
        return array
    if any(value[-1:] == b"\0" for value in array.flat):
        raise Unrepresentable("bytes that end in NUL, which a NumPy file would lose", [JSON])
    width = max((len(value) for value in array.flat), default=0)
    return array.astype(f"S{max(width, 1)}")


def as_raw(result: Result, content_type: str) -> Rendered:
    """The only element of the only output."""
    name = only_output(result)
    array = result.array(name)
    if array.size != 1:
        raise Unrepresentable(f"{array.size} values, and one body holds one", [JSON])
    value = array.item()
    if not isinstance(value, bytes):
        raise BadUpstream(f"the replica answered numbers for the output {quoted(name)} of texts")
    return Rendered(value, sniffed(value) if "*" in content_type else content_type)


def sniffed(value: bytes) -> str:
    """The type of an image by its first bytes."""
    return next((kind for magic, kind in MAGIC.items() if value.startswith(magic)), OCTETS)


def renderer(
    accept: str, signature: Signature, outputs: Sequence[str]
) -> Callable[[Result], Rendered]:
    """What `Accept` chooses among the forms that these outputs have (RFC 9110, section 12.5.1).

    Raises `NotAcceptable` before anything is sent to the model.
    """
    forms: dict[str, Callable[[Result], Rendered]] = {JSON: as_json, NPZ: as_npz}
    if len(outputs) == 1:
        forms[NPY] = as_npy
        tensor = signature.outputs.get(outputs[0])
        if tensor is not None and tensor.datatype.kind is Kind.BYTES:
            forms[OCTETS] = lambda result: as_raw(result, tensor.content_type or OCTETS)
            if tensor.content_type and tensor.content_type != JSON:
                forms[tensor.content_type] = forms[OCTETS]
    ranges = media_ranges(accept)
    ranked = [(rank, form) for form in forms if (rank := rank_of(form, ranges))]
    if not ranked:
        raise NotAcceptable(accept, forms)
    return forms[max(ranked, key=itemgetter(0))[1]]  # the first of equals


class Range(NamedTuple):
    """A media range of an `Accept` header."""

    quality: float
    position: int
    name: str


def media_ranges(accept: str) -> list[Range]:
    """As they stand in the header; one that names nothing is as good as none. Raises `Malformed`."""
    if len(accept) > MAX_ACCEPT:
        raise Malformed(
            f"the Accept header is longer than {MAX_ACCEPT} characters; name fewer media types"
        )
    ranges = []
    for position, entry in enumerate(accept.split(",")):
        name, parameters = split_parameters(entry)
        try:
            quality = float(parameters.get("q", "1"))
        except ValueError:
            quality = 1.0
        if name:
            ranges.append(Range(quality, -position, name))
    return ranges or [Range(1.0, 0, "*/*")]


def rank_of(form: str, ranges: Sequence[Range]) -> tuple[float, int] | None:
    """By the most specific range that matches, and where that stands; None where it is not wanted."""
    found = [each for each in ranges if matches(each.name, form)]
    best = max(found, key=lambda each: (-each.name.count("*"), each.quality), default=None)
    return best[:2] if best is not None and best.quality > 0 else None


def preferences(accept: str) -> list[str]:
    """The media ranges of an `Accept` header that are wanted, best first."""
    wanted = (each for each in media_ranges(accept) if each.quality > 0)
    return [each.name for each in sorted(wanted, reverse=True)]


def matches(wanted: str, form: str) -> bool:
    if wanted in ("*/*", form):
        return True
    kind, _, subtype = wanted.partition("/")
    form_kind, _, form_subtype = form.partition("/")
    return kind == form_kind and "*" in (subtype, form_subtype)
