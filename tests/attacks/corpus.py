"""Valid requests of every kind, to be mutated."""

from __future__ import annotations

import base64
import gzip
import io
import json
import zipfile
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tests.support.load import post

BOUNDARY = "boundary"


@dataclass(frozen=True)
class Request:
    """A request that is valid: its body may be mutated."""

    path: str
    content_type: str
    body: bytes
    headers: tuple[str, ...] = ()

    @property
    def wire(self) -> bytes:
        return post(self.path, self.body, self.content_type, *self.headers)


def encode_image(form: str, size: tuple[int, int] = (40, 30), **options: object) -> bytes:
    file = io.BytesIO()
    rows = np.arange(size[0] * size[1] * 3, dtype=np.uint32) * 2654435761 >> 24
    pixels = rows.astype(np.uint8).reshape(size[1], size[0], 3)
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def encode_npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def encode_npz(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", encode_npy(array))
    return file.getvalue()


def encode_form(*fields: tuple[str, str, bytes]) -> bytes:
    """Return a multipart body of fields with a name, a content type and a value."""
    parts = [
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"; filename="f"\r\n'
        f"Content-Type: {content_type}\r\n\r\n".encode()
        + value
        + b"\r\n"
        for name, content_type, value in fields
    ]
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


FORM = f"multipart/form-data; boundary={BOUNDARY}"
IMAGES = {
    "image/jpeg": (
        encode_image("JPEG"),
        encode_image("JPEG", progressive=True),
        encode_image("JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"),
    ),
    "image/png": (encode_image("PNG"), encode_image("PNG", optimize=True)),
    "image/webp": (encode_image("WEBP"), encode_image("WEBP", lossless=True)),
}  # fmt: skip
NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3)
V2_BODY = json.dumps(
    {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1, 2], "data": [1, 2]}]}
).encode()


def valid_requests(images: str, numbers: str, texts: str) -> list[Request]:
    """Return requests of every kind for these models."""
    path = "/v1/models/{}/infer".format
    form = encode_form(("X", "image/png", IMAGES["image/png"][0]))
    b64 = base64.b64encode(IMAGES["image/jpeg"][0]).decode()
    requests = [
        Request(path(images), content_type, body)
        for content_type, bodies in IMAGES.items()
        for body in bodies
    ]
    requests += [
        Request(path(images), FORM, form),
        Request(path(images), "application/json", json.dumps({"inputs": {"b64": b64}}).encode()),
        Request(
            path(images),
            "application/json",
            json.dumps({"inputs": {"b64": f"data:image/jpeg;base64,{b64}"}}).encode(),
        ),
        Request(path(numbers), "application/json", b'{"inputs": [[1, 2.5], [3, 4]]}'),
        Request(path(numbers), "application/x-npy", encode_npy(NUMBERS)),
        Request(path(numbers), "application/x-npz", encode_npz(X=NUMBERS)),
        Request(
            path(numbers),
            "application/json",
            gzip.compress(b'{"inputs": [[1, 2.5], [3, 4]]}'),
            ("Content-Encoding: gzip",),
        ),
        Request(f"/v1/models/{numbers}:predict", "application/json", b'{"instances": [[[1, 2]]]}'),
        Request(path(texts), "text/plain; charset=utf-8", "a text, naïve".encode()),
        Request(path(texts), "application/json", b'{"inputs": ["a", "b\\u00e9"]}'),
        Request(f"/v2/models/{numbers}/infer", "application/json", V2_BODY),
        Request(
            f"/v2/models/{numbers}/infer",
            "application/octet-stream",
            gzip.compress(V2_BODY),
            ("Content-Encoding: gzip",),
        ),
        Request(f"/v2/models/{texts}/generate", "application/json", b'{"X": "a", "p": 1}'),
    ]
    return requests
