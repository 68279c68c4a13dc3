"""The media types of bodies and files. `gateway.tensors.codecs` says how bodies are decoded."""

from __future__ import annotations

from typing import Final

JSON: Final = "application/json"
PROBLEM_JSON: Final = "application/problem+json"
NPY: Final = "application/x-npy"
NPZ: Final = "application/x-npz"
OCTET_STREAM: Final = "application/octet-stream"
TEXT: Final = "text/plain"
MULTIPART: Final = "multipart/form-data"
ANY_IMAGE: Final = "image/*"
EVENT_STREAM: Final = "text/event-stream"
# An event of a stream ends with this.
EVENT_END: Final = b"\n\n"
NDJSON: Final = "application/x-ndjson"
# JSON may contain these unescaped, and some readers of streams take them for the end of a line, as
# `str.splitlines` does. It never contains the others, which are control characters.
LINE_SEPARATORS: Final = {
    "\u0085".encode(): rb"\u0085",
    "\u2028".encode(): rb"\u2028",
    "\u2029".encode(): rb"\u2029",
}
UTF8_TEXT: Final = f"{TEXT}; charset=utf-8"

TYPES_BY_SUFFIX: Final = {
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".bmp": "image/bmp",
    ".tif": "image/tiff",
    ".tiff": "image/tiff",
    ".json": JSON,
    ".npy": NPY,
    ".npz": NPZ,
    ".txt": UTF8_TEXT,
    ".text": UTF8_TEXT,
    ".md": UTF8_TEXT,
}
# The first bytes of a file.
IMAGE_SIGNATURES: Final = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"RIFF": "image/webp",
    b"GIF8": "image/gif",
}
SIGNATURES: Final = {**IMAGE_SIGNATURES, b"\x93NUMPY": NPY}


def detect_media_type(data: bytes, signatures: dict[bytes, str] = SIGNATURES) -> str:
    kinds = (kind for signature, kind in signatures.items() if data.startswith(signature))
    return next(kinds, OCTET_STREAM)


def escape_line_separators(json: bytes) -> bytes:
    for separator, escape in LINE_SEPARATORS.items():
        json = json.replace(separator, escape)
    return json
