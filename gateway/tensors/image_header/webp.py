"""A header reader for WebP (RFC 9649). Only the first frame of an animation is used."""

from __future__ import annotations

import struct
from typing import Final

from gateway.tensors.image_header.exif import UPRIGHT_ORIENTATION, read_orientation
from gateway.tensors.image_header.header import (
    MAX_SEGMENTS,
    Chunk,
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
LOSSY: Final = b"VP8 "
LOSSLESS: Final = b"VP8L"
EXTENDED: Final = b"VP8X"
WEBP_EXIF: Final = b"EXIF"
# The chunks of an extended file that decoding needs; only the first of each type counts.
NEEDED_WEBP_CHUNKS: Final = frozenset({b"ANIM", b"ANMF", b"ALPH", LOSSY, LOSSLESS})
FRAME_START: Final = b"\x9d\x01\x2a"
LOSSLESS_START: Final = 0x2F
MAX_WEBP_EXIF_BYTES: Final = 64 << 10


def read_webp(data: bytes) -> ImageHeader:
    """Return the header of a WebP image.

    Raises `DamagedImage` or `ExcessiveImage`, and `struct.error` for truncated data.
    """
    end = RIFF_HEADER.unpack_from(data)[1] + RIFF_CHUNK_HEADER.size
    if end > len(data):
        raise DamagedImage("its RIFF header declares more bytes than the file has")
    first = read_webp_chunk(data, RIFF_HEADER.size, end)
    if first.kind not in SIZE_READERS:
        raise DamagedImage("it does not begin with a VP8, VP8L or VP8X chunk")
    width, height = SIZE_READERS[first.kind](data, first.start)
    spans: list[Span] = [(RIFF_HEADER.size, first.end)]
    orientation = UPRIGHT_ORIENTATION
    if first.kind == EXTENDED:
        orientation = read_extended_chunks(data, first.end, end, spans)
    size = sum(stop - begin for begin, stop in spans)
    prefix = RIFF_HEADER.pack(RIFF_SIGNATURE, len(WEBP_FORM_TYPE) + size, WEBP_FORM_TYPE)
    return ImageHeader("WEBP", width, height, merge_spans(spans), prefix, orientation)


def read_extended_chunks(data: bytes, position: int, end: int, spans: list[Span]) -> int:
    """Return the orientation, and append the chunks that decoding needs to `spans`."""
    orientation = UPRIGHT_ORIENTATION
    seen: set[bytes] = set()
    for _ in range(MAX_SEGMENTS):
        if position >= end:
            return orientation
        chunk = read_webp_chunk(data, position, end)
        if chunk.kind not in seen:
            if chunk.kind in NEEDED_WEBP_CHUNKS:
                spans.append((position, chunk.end))
            elif chunk.kind == WEBP_EXIF:
                end_of_exif = min(chunk.end, chunk.start + MAX_WEBP_EXIF_BYTES)
                orientation = read_orientation(data[chunk.start : end_of_exif])
        seen.add(chunk.kind)
        position = chunk.end
    raise ExcessiveImage(f"more than {MAX_SEGMENTS} chunks")


def read_webp_chunk(data: bytes, position: int, end: int) -> Chunk:
    kind, length = RIFF_CHUNK_HEADER.unpack_from(data, position)
    start = position + RIFF_CHUNK_HEADER.size
    stop = start + length + length % 2
    if stop > end:
        raise DamagedImage("a chunk is longer than the file")
    return Chunk(kind, start, stop)


def read_lossy_size(data: bytes, start: int) -> tuple[int, int]:
    # The frame header of a VP8 key frame (RFC 6386, section 9.1).
    frame_start, width, height = struct.unpack_from("<3x3sHH", data, start)
    if frame_start != FRAME_START:
        raise DamagedImage("its frame header is invalid")
    return width & 0x3FFF, height & 0x3FFF


def read_lossless_size(data: bytes, start: int) -> tuple[int, int]:
    first, bits = struct.unpack_from("<BL", data, start)
    if first != LOSSLESS_START:
        raise DamagedImage("its frame header is invalid")
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1


def read_extended_size(data: bytes, start: int) -> tuple[int, int]:
    # The canvas size has 24 bits per side.
    low_width, high_width, low_height, high_height = struct.unpack_from("<4xHBHB", data, start)
    return (high_width << 16 | low_width) + 1, (high_height << 16 | low_height) + 1


SIZE_READERS = {LOSSY: read_lossy_size, LOSSLESS: read_lossless_size, EXTENDED: read_extended_size}
