"""Files that say little and would cost much, or that contradict themselves; some are made from real ones."""

from __future__ import annotations

import base64
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from PIL import Image

from gateway.tensors.multipart import Form, PartReader
from gateway.tensors.payload import Payload, PayloadLimits
from tests.support.images import encoded

MIB = 1 << 20
BOUNDARY = "b"
FORM_TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def noise(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)


# JPEG.


def jpeg(width: int = 16, height: int = 16, **options: Any) -> bytes:
    return encoded(noise(width, height), "JPEG", **options)


def segment(marker: int, content: bytes = b"") -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content


def after_start(image: bytes, inserted: bytes) -> bytes:
    """The JPEG with these bytes behind its first marker."""
    return image[:2] + inserted + image[2:]


def with_exif(image: bytes, block: bytes) -> bytes:
    return after_start(image, segment(0xE1, b"Exif\0\0" + block))


def padded_jpeg(count: int) -> bytes:
    return after_start(jpeg(), b"\xff" * count)


def padded_data(count: int) -> bytes:
    return jpeg()[:-2] + b"\xff" * count + b"\xff\xd9"


def jpeg_of_scans(scans: int, side: int = 16) -> bytes:
    """A progressive JPEG of one grey: its last scan comes again and again, each without a bit to decode."""
    image = encoded(Image.new("L", (side, side), 99), "JPEG", progressive=True)
    last = image.rfind(b"\xff\xda")
    end = image.rfind(b"\xff\xd9")
    more = scans - image.count(b"\xff\xda")
    return image[:end] + image[last:end] * more + image[end:]


# PNG.


def png(width: int = 16, height: int = 16, **options: Any) -> bytes:
    return encoded(noise(width, height), **options)


def chunk(kind: bytes, content: bytes = b"") -> bytes:
    checksum = zlib.crc32(kind + content).to_bytes(4, "big")
    return len(content).to_bytes(4, "big") + kind + content + checksum


def after_size(image: bytes, inserted: bytes) -> bytes:
    """The PNG with these chunks behind its first one."""
    return image[:33] + inserted + image[33:]


def png_of_chunks(count: int) -> bytes:
    return after_size(png(), chunk(b"abCd") * count)


def png_without_palette() -> bytes:
    image = encoded(Image.new("P", (16, 16)))
    return image[:33] + image[image.index(b"IDAT") - 4 :]


# TIFF, which is what EXIF is.


def exif(*entries: tuple[int, int, int, bytes], order: str = "<") -> bytes:
    """A block of these entries: tag, datatype, count and four bytes of value."""
    start = struct.pack(f"{order}2sHL", b"II" if order == "<" else b"MM", 42, 8)
    packed = b"".join(struct.pack(f"{order}HHL4s", *entry) for entry in entries)
    return start + struct.pack(f"{order}H", len(entries)) + packed + bytes(4)


# NumPy.


def npy(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version)
    return file.getvalue()


def npy_of(shape: str, descr: str = "'<f4'", data: bytes = b"", version: int = 1) -> bytes:
    """A .npy file with a header of this shape and datatype, as they are written."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    return npy_with(header.encode(), data, version)


def npy_with(header: bytes, data: bytes = b"", version: int = 1) -> bytes:
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + header + data


# Some of these raise other errors than NumPy's own in its reader.
NPY_HEADERS = {
    "nested": npy_of("(" * 5000),
    "unclosed": npy_with(b"{'descr': '<f4', 'shape': (1,"),
    "a dimension of 2^70": npy_of("(0, 1180591620717411303424)"),
    "a power": npy_of("(0, 2**70)"),
    "65 dimensions": npy_of("(" + "1, " * 65 + ")", data=bytes(4)),
    "a boolean for a dimension": npy_of("(True,)", data=bytes(4)),
    "empty texts": npy_of("(100000000000,)", "'S0'"),
    "empty characters": npy_of("(100000000000,)", "'U0'"),
    "a structure": npy_of("(1,)", "[('a', '<f4')]", bytes(4)),
    "half a character": npy_of("(1,)", "'<U1'", b"\0\xd8\0\0"),
    "no character": npy_of("(1,)", "'<U1'", b"\xff\xff\xff\xff"),
    "objects": npy_of("(1,)", "'|O'", bytes(8)),
    "of 60 KB": npy_of(" " * 60_000 + "(1,)", data=bytes(4)),
    "an empty array of 2^62": npy_of("(0, 4611686018427387904)"),
    "not ASCII": npy_of("(²,)", data=bytes(8), version=3),
}


def archive(members: Iterable[tuple[str, bytes]], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as written:
        for name, content in members:
            written.writestr(name, content)
    return file.getvalue()


def claiming_size(archived: bytes, size: int) -> bytes:
    """The archive, whose directory says that its last file inflates to this size."""
    entry = archived.rindex(b"PK\1\2")
    return archived[: entry + 24] + size.to_bytes(4, "little") + archived[entry + 28 :]


def overlapping(archived: bytes, count: int) -> bytes:
    """The archive of one file, with a directory that names it `count` times."""
    start = archived.rindex(b"PK\1\2")
    end = archived.rindex(b"PK\5\6")
    entry = archived[start:end]
    entries = b"".join(
        entry.replace(b"x.npy", b"%x.npy" % number) for number in range(count)
    )  # of names of one digit
    counts = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(entries), start, 0)
    return archived[:start] + entries + counts


# JSON and forms.


def json_of(value: object) -> bytes:
    return json.dumps({"inputs": value}).encode()


def b64(content: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(content).decode()}


def form(*parts: bytes) -> bytes:
    """A multipart body of parts that have their headers."""
    lines = [b"--b\r\n" + part + b"\r\n" for part in parts]
    return b"".join([*lines, b"--b--\r\n"])


def field(content: bytes, name: str = "X", headers: Sequence[str] = ()) -> bytes:
    lines = [f'Content-Disposition: form-data; name="{name}"', *headers]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + content


def read_form(body: bytes, content_type: str = FORM_TYPE) -> Payload:
    """The payload of a form, which is read as it arrives."""
    limits = PayloadLimits()
    reader = PartReader(content_type, limits.max_parts)
    parts = reader.feed(body)
    reader.finish()
    return Form(parts).build_payload(limits)
