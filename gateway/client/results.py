"""The results of inferences, from the responses of the gateway."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any
from zipfile import BadZipFile

from gateway.client.models import ModelInfo
from gateway.client.replies import Reply, decode_object, make_invalid_response_error
from gateway.media_types import NPZ


class InferResult(Mapping[str, Any]):
    """The outputs of an inference, by name.

    Numbers are NumPy arrays if NumPy is installed, else lists. Texts are `str`, other BYTES are `bytes`, and
    outputs that the model declares as JSON are what they contain. `version` is the version that answered,
    and `elapsed_s` the time until the response was complete, with all retries.
    """

    def __init__(
        self,
        outputs: Mapping[str, Any],
        *,
        model: str = "",
        version: str = "",
        request_id: str = "",
        elapsed_s: float = 0.0,
    ) -> None:
        self._outputs = outputs
        self.model = model
        self.version = version
        self.id = request_id
        self.elapsed_s = elapsed_s

    def __getitem__(self, name: str) -> Any:
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __repr__(self) -> str:
        return (
            f"InferResult({dict(self._outputs)!r}, model={self.model!r}, version={self.version!r})"
        )

    @property
    def text(self) -> str:
        """The only text among the outputs. Raises `ValueError` if there is none, or another one."""
        values = (unwrap(value) for value in self._outputs.values())
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) != 1:
            names = ", ".join(self._outputs)
            raise ValueError(f"{len(texts)} outputs are texts; choose one of {names}")
        return texts[0]

    def _repr_html_(self) -> str:
        from gateway.client.notebook import render_outputs

        took_ms = self.elapsed_s * 1000
        return render_outputs(self, f"{self.model} version {self.version}, {took_ms:.0f} ms")


def decode_result(reply: Reply, info: ModelInfo | None) -> InferResult:
    """Return the result of a response. Raises `GatewayError` if it is none.

    With `info`, numbers are arrays of the output's datatype.
    """
    if reply.content_type == NPZ:
        return InferResult(
            decode_arrays(reply, info),
            model=info.name if info is not None else "",
            version=reply.headers.get("x-model-version", ""),
            request_id=reply.request_id,
            elapsed_s=reply.elapsed_s,
        )
    return parse_result(decode_object(reply), reply, info)


def decode_arrays(reply: Reply, info: ModelInfo | None) -> dict[str, Any]:
    from gateway.client.arrays import decode_npz

    try:
        return decode_npz(reply.content, info.datatypes if info is not None else {})
    except (OSError, ValueError, EOFError, BadZipFile) as exc:
        raise make_invalid_response_error(reply, f"its response is no .npz file: {exc}") from None


def parse_result(document: Mapping[str, Any], reply: Reply, info: ModelInfo | None) -> InferResult:
    outputs = document.get("outputs")
    if not isinstance(outputs, dict):
        raise make_invalid_response_error(reply, "its response has no outputs")
    try:
        values = {name: decode_bytes(value) for name, value in outputs.items()}
    except ValueError as exc:
        raise make_invalid_response_error(reply, f"its base64 is invalid: {exc}") from None
    if info is not None:
        from gateway.client.arrays import to_array

        datatypes = info.datatypes
        values = {name: to_array(value, datatypes.get(name, "")) for name, value in values.items()}
    return InferResult(
        values,
        model=str(document.get("model", "")),
        version=str(document.get("version", "")),
        request_id=str(document.get("id", "")),
        elapsed_s=reply.elapsed_s,
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
