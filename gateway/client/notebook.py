"""Results as HTML, for notebooks."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from typing import Any, Final

MAX_SHOWN_VALUES: Final = 8
MAX_SHOWN_CHARS: Final = 2000
IMAGE_SIGNATURES: Final = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


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
    for signature, media_type in IMAGE_SIGNATURES.items():
        if value.startswith(signature):
            data = base64.b64encode(value).decode()
            return f'<img src="data:{media_type};base64,{data}" style="max-width:100%">'
    return f"{len(value)} bytes"


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
