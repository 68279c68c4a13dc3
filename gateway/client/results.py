"""The results of inferences, from the responses of the gateway."""

from __future__ import annotations

import base64
import html
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final
from zipfile import BadZipFile

from gateway.client.models import ModelInfo
from gateway.client.replies import Reply, decode_object, make_invalid_response_error
from gateway.media_types import IMAGE_SIGNATURES, NPZ, detect_media_type

# What zipfile and NumPy raise for a damaged archive, an encrypted one and a single array.
ARCHIVE_ERRORS: Final = (
    OSError,
    ValueError,
    EOFError,
    BadZipFile,
    zlib.error,
    RuntimeError,
    TypeError,
    AttributeError,
    MemoryError,
)


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
    except ARCHIVE_ERRORS as exc:
        raise make_invalid_response_error(reply, f"its response is no .npz file: {exc}") from None


def parse_result(document: Mapping[str, Any], reply: Reply, info: ModelInfo | None) -> InferResult:
    outputs = document.get("outputs")
    if not isinstance(outputs, dict):
        raise make_invalid_response_error(reply, "its response has no outputs")
    try:
        values = {name: decode_bytes(value) for name, value in outputs.items()}
    except (ValueError, RecursionError) as exc:
        raise make_invalid_response_error(reply, f"its outputs are invalid: {exc}") from None
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


# As HTML, for notebooks

MAX_SHOWN_VALUES: Final = 8
MAX_SHOWN_CHARS: Final = 2000


def render_outputs(outputs: Mapping[str, Any], caption: str) -> str:
    """Return a table of the outputs: pictures, bars of scores, texts, and the first values of arrays."""
    rows = (
        f"<tr><th>{html.escape(name)}</th><td>{render_value(value)}</td></tr>"
        for name, value in outputs.items()
    )
    return f"<table><caption>{html.escape(caption)}</caption>{''.join(rows)}</table>"


def render_value(value: Any) -> str:
    if isinstance(value, bytes):
        return render_bytes(value)
    if hasattr(value, "dtype"):
        return render_array(value)
    if scores := find_scores(value):
        return "".join(render_score(label, score) for label, score in scores)
    if isinstance(value, dict):
        rows = (f"{html.escape(str(key))}: {render_value(item)}" for key, item in value.items())
        return "<br>".join(rows)
    return f"<pre>{html.escape(shorten(value if isinstance(value, str) else repr(value)))}</pre>"


def shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def render_bytes(value: bytes) -> str:
    media_type = detect_media_type(value, IMAGE_SIGNATURES)
    if media_type not in IMAGE_SIGNATURES.values():
        return f"{len(value)} bytes"
    data = base64.b64encode(value).decode()
    return f'<img src="data:{media_type};base64,{data}" style="max-width:100%">'


def render_array(array: Any) -> str:
    shown = array.ravel()[:MAX_SHOWN_VALUES].tolist()
    more = ", …" if array.size > MAX_SHOWN_VALUES else ""
    values = ", ".join(
        f"{value:.5g}" if isinstance(value, float) else str(value) for value in shown
    )
    return html.escape(f"{array.dtype} {tuple(array.shape)}: [{values}{more}]")


def find_scores(value: Any) -> list[tuple[str, float]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        return []
    scores = []
    for item in value:
        shares = [part for part in item.values() if isinstance(part, float) and 0 <= part <= 1]
        labels = [part for part in item.values() if isinstance(part, str)]
        if len(shares) != 1:
            return []
        scores.append((labels[0] if labels else str(item.get("index", "")), shares[0]))
    return scores


def render_score(label: str, score: float) -> str:
    bar = f'<meter value="{score}" style="width:12em"></meter>'
    return f"<div>{html.escape(label)} {bar} {score:.1%}</div>"
