"""The results of inferences, from the responses of the gateway."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from zipfile import BadZipFile

from gateway.client.models import ModelInfo
from gateway.client.replies import Reply, make_error, make_wrong_server_error
from gateway.media_types import NPZ

# What a document of another shape raises, and zipfile and NumPy for a damaged or encrypted archive.
DECODING_ERRORS: Final = (
    OSError, ValueError, LookupError, EOFError, BadZipFile, zlib.error, RuntimeError, TypeError,
    AttributeError, MemoryError,
)  # fmt: skip


@dataclass(frozen=True, eq=False)  # equal to any mapping of the same outputs
class InferResult(Mapping[str, Any]):
    """The outputs of an inference, by name.

    Numbers are NumPy arrays if NumPy is installed, else lists. Texts are `str`, other BYTES are `bytes`, and
    outputs that the model declares as JSON are what they contain. `version` is the version that answered,
    and `elapsed_s` the time until the response was complete, with all retries.
    """

    outputs: Mapping[str, Any]
    model: str = ""
    version: str = ""
    id: str = ""
    elapsed_s: float = 0.0

    def __getitem__(self, name: str) -> Any:
        return self.outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def text(self) -> str:
        """The only text among the outputs. Raises `ValueError` if there is none, or another one."""
        values = (unwrap(value) for value in self.outputs.values())
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) != 1:
            names = ", ".join(self.outputs)
            raise ValueError(f"{len(texts)} outputs are texts; choose one of {names}")
        return texts[0]


def decode_result(reply: Reply, info: ModelInfo | None, elapsed_s: float = 0.0) -> InferResult:
    """Return the result of a response, or of a line of a stream. Raises `GatewayError` if it is none.

    With `info`, numbers are arrays of the output's datatype.
    """
    try:
        if reply.content_type == NPZ:
            return decode_archive(reply, info, elapsed_s)
        document = json.loads(reply.content)
        if "error" not in document:
            return parse_result(document, info, elapsed_s)
    except DECODING_ERRORS as exc:
        raise make_wrong_server_error(reply.url, f"its response is no result: {exc}") from None
    raise make_error(reply)


def decode_archive(reply: Reply, info: ModelInfo | None, elapsed_s: float) -> InferResult:
    from gateway.client.arrays import decode_npz

    return InferResult(
        decode_npz(reply.content, {} if info is None else info.datatypes),
        "" if info is None else info.name,
        reply.headers.get("x-model-version", ""),
        reply.headers.get("x-request-id", ""),
        elapsed_s,
    )


def parse_result(
    document: Mapping[str, Any], info: ModelInfo | None, elapsed_s: float = 0.0
) -> InferResult:
    """Return the result of a JSON document. Raises one of `DECODING_ERRORS` if it is none."""
    values = {name: decode_bytes(value) for name, value in document["outputs"].items()}
    if info is not None:
        from gateway.client.arrays import to_array

        datatypes = info.datatypes
        values = {name: to_array(value, datatypes.get(name, "")) for name, value in values.items()}
    return InferResult(
        values,
        str(document.get("model", "")),
        str(document.get("version", "")),
        str(document.get("id", "")),
        elapsed_s,
    )


def unwrap(value: Any) -> Any:
    """Return the only element of a list, in lists of any depth; other values as they are."""
    return unwrap(value[0]) if isinstance(value, list) and len(value) == 1 else value


def decode_bytes(value: Any) -> Any:
    """Return a value with `bytes` in place of `{"b64": "…"}`, in lists of any depth."""
    if isinstance(value, dict) and value.keys() == {"b64"} and isinstance(value["b64"], str):
        return base64.b64decode(value["b64"])
    if isinstance(value, list) and value and not isinstance(value[0], (int, float)):
        return [decode_bytes(item) for item in value]
    return value
