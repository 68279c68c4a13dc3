"""The header of a WebP (RFC 9649): its chunks, and the size in the first of them.

Of an animation the first frame is taken.
"""

from __future__ import annotations

import struct
from typing import Final

from gateway.tensors.image_header.exif import UPRIGHT_ORIENTATION, read_orientation
from gateway.tensors.image_header.header import (
    MAX_SEGMENTS,
    DamagedImage,
    ExcessiveImage,
    ImageHeader,
    Span,
    merge_spans,
)

RIFF_SIGNATURE: Final = b"RIFF"
WEBP_FORM_TYPE: Final = b"WEBP"
RIFF_HEADER: Final = struct.Struct("<4sL4s")
RIFF_CHUNK_HEADER: Final = struct.Struct("<4sL")
LOSSY, LOSSLESS, EXTENDED, WEBP_EXIF = b"VP8 ", b"VP8L", b"VP8X", b"EXIF"
# Chunks of an extended file that decoding needs: the first of each.
NEEDED_WEBP_CHUNKS: Final = frozenset({b"ANIM", b"ANMF", b"ALPH", LOSSY, LOSSLESS})
FRAME_START: Final = b"\x9d\x01\x2a"
LOSSLESS_START: Final = 0x2F
MAX_WEBP_EXIF_BYTES: Final = 64 << 10


def read_webp(data: bytes) -> ImageHeader:
    """Raises `DamagedImage` and `ExcessiveImage`, and `struct.error` where the data ends."""
    end = RIFF_HEADER.unpack_from(data)[1] + RIFF_CHUNK_HEADER.size
    if end > len(data):
        raise DamagedImage("it is longer than the file")
    kind, start, position = read_webp_chunk(data, RIFF_HEADER.size, end)
    if kind not in SIZE_READERS:
        raise DamagedImage("it does not begin with its size")
    width, height = SIZE_READERS[kind](data, start)
    spans: list[Span] = [(RIFF_HEADER.size, position)]
    orientation = UPRIGHT_ORIENTATION
    if kind == EXTENDED:
        orientation = read_extended_chunks(data, position, end, spans)
    size = sum(stop - begin for begin, stop in spans)
    prefix = RIFF_HEADER.pack(RIFF_SIGNATURE, len(WEBP_FORM_TYPE) + size, WEBP_FORM_TYPE)
    return ImageHeader("WEBP", width, height, merge_spans(spans), prefix, orientation)


def read_extended_chunks(data: bytes, position: int, end: int, spans: list[Span]) -> int:
    """The orientation; where the needed chunks are is added to `spans`."""
    orientation, seen = UPRIGHT_ORIENTATION, set[bytes]()
    for _ in range(MAX_SEGMENTS):
        if position >= end:
            return orientation
        kind, start, stop = read_webp_chunk(data, position, end)
        if kind in NEEDED_WEBP_CHUNKS and kind not in seen:
            spans.append((position, stop))
        elif kind == WEBP_EXIF and kind not in seen:
            orientation = read_orientation(data[start : min(stop, start + MAX_WEBP_EXIF_BYTES)])
        seen.add(kind)
        position = stop
    raise ExcessiveImage(f"more than {MAX_SEGMENTS} chunks")


def read_webp_chunk(data: bytes, position: int, end: int) -> tuple[bytes, int, int]:
    """The chunk's type, and where its content begins and the next chunk."""
    kind, length = RIFF_CHUNK_HEADER.unpack_from(data, position)
    start = position + RIFF_CHUNK_HEADER.size
    stop = start + length + length % 2
    if stop > end:
        raise DamagedImage("a chunk is longer than the file")
    return kind, start, stop


def read_lossy_size(data: bytes, start: int) -> tuple[int, int]:
    """Of a key frame of VP8 (RFC 6386, section 9.1)."""
    frame_start, width, height = struct.unpack_from("<3x3sHH", data, start)
    if frame_start != FRAME_START:
        raise DamagedImage("it does not begin with a frame")
    return width & 0x3FFF, height & 0x3FFF


def read_lossless_size(data: bytes, start: int) -> tuple[int, int]:
    first, bits = struct.unpack_from("<BL", data, start)
    if first != LOSSLESS_START:
        raise DamagedImage("it does not begin with a frame")
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1


def read_extended_size(data: bytes, start: int) -> tuple[int, int]:
    """Of the canvas, in numbers of 24 bits."""
    low_width, high_width, low_height, high_height = struct.unpack_from("<4xHBHB", data, start)
    return (high_width << 16 | low_width) + 1, (high_height << 16 | low_height) + 1


SIZE_READERS: Final = {
    LOSSY: read_lossy_size,
    LOSSLESS: read_lossless_size,
    EXTENDED: read_extended_size,
}
