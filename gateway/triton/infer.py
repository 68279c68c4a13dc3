"""An inference as tritonclient encodes it for either wire; for HTTP in the binary extension, without I/O."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import tritonclient.http
from tritonclient.http import InferenceServerClient, InferResult
from tritonclient.utils import InferenceServerException

from gateway.errors import BadUpstream, DoesNotFit
from gateway.tensors import sequence
from gateway.tensors.dtypes import DATATYPES
from gateway.tensors.sequence import Step
from gateway.tensors.signature import Signature
from gateway.triton.http import Reply
from gateway.triton.wire import Headers
from gateway.words import quoted

# What tritonclient lets escape when an answer is not one.
UNREADABLE = (
    RecursionError,
    ValueError,
    OverflowError,
    KeyError,
    TypeError,
    AttributeError,
    struct.error,
    InferenceServerException,
)
# What is encoded or decoded on the event loop; more takes a thread.
MAX_INLINE_ELEMENTS: Final = 4096  # of BYTES, each of which is a step in Python
MAX_INLINE_BYTES: Final = 1 << 20
MAX_INLINE_ANSWER_BYTES: Final = 64 << 10  # which may be of BYTES, four bytes an element
MOST_OUTPUTS: Final = 2048
INT64: Final = range(-(1 << 63), 1 << 63)


class Answer(NamedTuple):
    """What a model answered."""

    outputs: dict[str, np.ndarray]
    version: str
    size_bytes: int  # as it came


@dataclass(frozen=True)
class Inference:
    """What is asked of a model. `classification` among the parameters asks for that many classes of each
    output; `timeout` and `priority` are Triton's own."""

    signature: Signature
    arrays: Mapping[str, np.ndarray]
    outputs: Sequence[str]
    parameters: Mapping[str, Any]
    request_id: str
    timeout_us: int
    step: Step | None = None

    @property
    def is_large(self) -> bool:
        """Whether encoding it takes too long for the event loop."""
        arrays = self.arrays.values()
        elements = sum(array.size for array in arrays if array.dtype.kind == "O")
        return elements > MAX_INLINE_ELEMENTS or sum(a.nbytes for a in arrays) > MAX_INLINE_BYTES

    def arguments(self, wire: ModuleType) -> dict[str, Any]:
        """As `tritonclient.http` or `tritonclient.grpc` take it. Raises `DoesNotFit`."""
        inputs = []
        for name, array in self.arrays.items():
            datatype = self.signature.inputs[name].datatype.name
            tensor = wire.InferInput(name, list(array.shape), datatype)
            inputs.append(tensor.set_data_from_numpy(array))
        custom = {key: value for key, value in self.parameters.items() if key not in sequence.KEYS}
        classes = whole("classification", custom.pop("classification", 0), "a count")
        named = self.outputs or (self.signature.outputs if classes else ())
        none = without_classes(self.signature, self.outputs) if classes else ()
        counts = {name: 0 if name in none else classes for name in named}
        arguments = {
            "inputs": inputs,
            "outputs": [
                wire.InferRequestedOutput(name, class_count=count) for name, count in counts.items()
            ]
            or None,
            "request_id": self.request_id,
            "timeout": whole(
                "timeout", custom.pop("timeout", self.timeout_us), "microseconds", least=1
            ),
            "priority": whole("priority", custom.pop("priority", 0), "a level"),
            "parameters": custom or None,
        }
        for key, value in custom.items():
            if isinstance(value, int) and value not in INT64:
                raise DoesNotFit(f"the parameter {quoted(key)} does not fit into 64 bits")
        if self.step is not None:
            values = self.step.sequence_id, self.step.start, self.step.end
            arguments |= zip(sequence.KEYS, values, strict=True)
        return arguments


def without_classes(signature: Signature, named: Collection[str]) -> list[str]:
    """The outputs of which there are no classes. Raises `DoesNotFit` for one that is asked for by name, or
    when that leaves none."""
    every = {
        name: tensor for name, tensor in signature.outputs.items() if name in (named or {name})
    }
    none = [tensor for tensor in every.values() if not tensor.has_classes]
    if none and (named or len(none) == len(every)):
        tensor = none[0]
        dims = ",".join(map(str, tensor.shape))
        raise DoesNotFit(
            f"classification is of numbers, as many as the model's config says; the output "
            f"{quoted(tensor.name)} is {tensor.datatype.name} [{dims}]"
        )
    return [tensor.name for tensor in none]


async def encode(inference: Inference) -> tuple[Headers, bytes]:
    """Return headers and body of an inference over HTTP, encoded in a thread if it is large."""
    if inference.is_large:
        return await asyncio.to_thread(encoded, inference)
    return encoded(inference)


async def decode(reply: Reply) -> Answer:
    """Return the answer, decoded in a thread if it is large. Raises `BadUpstream`."""
    if len(reply.body) > MAX_INLINE_ANSWER_BYTES:
        return await asyncio.to_thread(decoded, reply)
    return decoded(reply)


def encoded(inference: Inference) -> tuple[Headers, bytes]:
    """Headers and body of `POST /v2/models/M/infer` (Binary Tensor Data Extension)."""
    try:
        body, header_length = InferenceServerClient.generate_request_body(
            **inference.arguments(tritonclient.http)
        )
    except InferenceServerException as exc:
        raise misfit(exc) from exc
    headers = [
        (b"content-length", b"%d" % len(body)),
        (b"content-type", b"application/octet-stream"),
    ]
    if header_length is not None:
        headers.append((b"inference-header-content-length", b"%d" % header_length))
    return headers, body


def misfit(exc: InferenceServerException) -> DoesNotFit:
    """What tritonclient itself refuses, before it sends."""
    return DoesNotFit(f"the parameters do not fit: {exc.message()}")


def whole(key: str, value: Any, what: str, least: int = 0) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < INT64.stop:
        return value
    raise DoesNotFit(f"the parameter '{key}' takes {what}, not {quoted(str(value))}")


def decoded(reply: Reply) -> Answer:
    """Raises `BadUpstream`."""
    length = reply.header(b"inference-header-content-length")
    try:
        result = InferResult.from_response_body(
            reply.body, header_length=int(length) if length else None
        )
        response = result.get_response()
        outputs = response.get("outputs", ())
        if len(outputs) > MOST_OUTPUTS:  # tritonclient looks for each of them from the first one on
            raise ValueError("too many outputs")
        arrays = {entry["name"]: array_of(result, entry) for entry in outputs}
        version = str(response.get("model_version", ""))
        version.encode()
    except UNREADABLE as exc:
        raise BadUpstream("the replica's answer to an inference cannot be read") from exc
    return Answer(arrays, version, len(reply.body))


def array_of(result: InferResult, entry: Mapping[str, Any]) -> np.ndarray:
    """An output. Triton was asked for binary tensors; in JSON the elements of BYTES are texts.

    Raises one of `UNREADABLE`.
    """
    check_entry(entry["name"], entry["datatype"])
    array: np.ndarray = result.as_numpy(entry["name"])
    if array.dtype.kind != "O" or "data" not in entry:
        return array
    values = np.empty(array.size, object)
    values[:] = [text.encode() for text in array.flat]
    return values.reshape(array.shape)


def check_entry(name: Any, datatype: Any) -> None:
    """Raises `ValueError` for a name that is no text, and for an unknown datatype, of which tritonclient
    would make some numbers."""
    if not isinstance(name, str) or datatype not in DATATYPES:
        raise ValueError("an output without a name, or of no datatype of Triton's")
    name.encode()
