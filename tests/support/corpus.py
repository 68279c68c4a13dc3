"""Bodies that no well-meaning client sends, with valid ones beside them to be mutated."""

from __future__ import annotations

import base64
import gzip
import io
import json
import zipfile
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tests.support.hostile_files import jpeg_of_scans
from tests.support.load import post

KIB, MIB = 1 << 10, 1 << 20
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


def zip_bomb(size: int) -> bytes:
    """Return an archive whose one array claims, and inflates to, so many bytes."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", bytes(size))
    return file.getvalue()


def png_of_empty_chunks(count: int) -> bytes:
    head, tail = IMAGES["image/png"][0][:33], IMAGES["image/png"][0][33:]
    return head + b"\0\0\0\0teSt\xc7\x9f\xee\xc9" * count + tail


def hostile_requests(images: str, numbers: str, texts: str) -> dict[str, Request]:
    """Return requests that once cost far more than their bytes, by what they are."""
    v1, v2 = "/v1/models/{}/infer".format, "/v2/models/{}/infer".format
    jpeg = IMAGES["image/jpeg"][1]
    shapes = b'"' + b'"shape":[' * 6800
    keys = b"{" + b",".join(b'"k%d":1' % number for number in range(100_000)) + b"}"
    npy_head = (
        b"\x93NUMPY\x01\x00\x76\x00{'descr': '|S0', 'fortran_order': False, 'shape': (%d,), }"
    )
    return {
        "unfinished shapes": Request(v2("nobody"), "application/json", shapes),
        "unfinished shapes, compressed": Request(
            v2("nobody"), "application/json", gzip.compress(shapes), ("Content-Encoding: gzip",)
        ),
        "an archive that inflates": Request(v1(numbers), "application/x-npz", zip_bomb(64 * MIB)),
        "a JPEG of fill bytes": Request(
            v1(images), "image/jpeg", jpeg[:2] + b"\xff" * MIB + jpeg[2:]
        ),
        "a PNG of empty chunks": Request(
            v1(images), "image/png", png_of_empty_chunks(MIB // 12)
        ),
        "a progressive JPEG of many scans": Request(
            v1(images), "image/jpeg", jpeg_of_scans(2000, side=2000)
        ),
        "keys of generate": Request(f"/v2/models/{texts}/generate", "application/json", keys),
        "a long content type": Request(v1(texts), "text/plain" + ';a=";' * 12_000, b"a text"),
        "lists of nothing": Request(
            v1(numbers), "application/json", b'{"inputs": [' + b"[]," * MIB + b"1]}"
        ),
        "a data URI of semicolons": Request(
            v1(texts), "application/json",
            b'{"inputs": {"b64": "data:' + b";" * (2 * MIB) + b'"}}',
        ),
        "a NumPy file of nothing": Request(
            v1(numbers), "application/x-npy", (npy_head % 10**15).ljust(127) + b"\n"
        ),
        "a nested NumPy header": Request(
            v1(numbers), "application/x-npy",
            b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65_535,
        ),
    }  # fmt: skip
