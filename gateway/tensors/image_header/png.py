"""A header reader for PNG (W3C, Portable Network Graphics, third edition).

Decoding needs the chunks of the size, palette, transparency and data. The frames of an animation are skipped:
the result is the default image, as in a reader without support for animations.
"""

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

PNG_SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
# libpng splits the data into chunks of 8 KiB, so a large file may have more chunks than `MAX_SEGMENTS`.
BYTES_PER_CHUNK: Final = 2048
PNG_CHUNK_HEADER: Final = struct.Struct(">L4s")
CHECKSUM_BYTES: Final = 4
IHDR: Final = b"IHDR"
PLTE: Final = b"PLTE"
IDAT: Final = b"IDAT"
IEND: Final = b"IEND"
PNG_EXIF: Final = b"eXIf"
IHDR_FIELDS: Final = struct.Struct(">LLBBBBB")
INDEXED: Final = 3
# The valid bits per sample by colour type.
BIT_DEPTHS: Final = {0: (1, 2, 4, 8, 16), 2: (8, 16), INDEXED: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
# The chunks that decoding needs, with their greatest useful length.
NEEDED_CHUNK_LIMITS: Final = {PLTE: 3 * 256, b"tRNS": 256, IDAT: 1 << 31, IEND: 1 << 31}
ALLOWED_AFTER_DATA: Final = frozenset({IDAT, IEND})
MAX_PNG_EXIF_BYTES: Final = 64 << 10


def read_png(data: bytes) -> ImageHeader:
    """Return the header of a PNG.

    Raises `DamagedImage` or `ExcessiveImage`, and `struct.error` for truncated data.
    """
    width, height, needed, position = read_png_size(data)
    spans: list[Span] = [(0, position)]
    orientation = UPRIGHT_ORIENTATION
    seen: set[bytes] = set()
    for _ in range(MAX_SEGMENTS + len(data) // BYTES_PER_CHUNK):
        if position == len(data) or IEND in seen:
            break  # a missing IEND chunk is left to the decoder
        chunk = read_png_chunk(data, position)
        kind = chunk.kind
        if kind == IHDR:
            raise DamagedImage("it has two IHDR chunks")
        if kind == PNG_EXIF:
            orientation = read_orientation(
                data[chunk.start : min(chunk.end, chunk.start + MAX_PNG_EXIF_BYTES)]
            )
        elif kind in NEEDED_CHUNK_LIMITS and (kind in ALLOWED_AFTER_DATA or IDAT not in seen):
            if chunk.end - chunk.start - CHECKSUM_BYTES > NEEDED_CHUNK_LIMITS[kind]:
                raise DamagedImage("a chunk is too long")
            spans.append((position, chunk.end))
        seen.add(kind)
        position = chunk.end
    else:
        raise ExcessiveImage("too many chunks for its file size")
    if not needed <= seen:
        raise DamagedImage("its data or palette is missing")
    return ImageHeader("PNG", width, height, merge_spans(spans), orientation=orientation)


def read_png_chunk(data: bytes, position: int) -> Chunk:
    length, kind = PNG_CHUNK_HEADER.unpack_from(data, position)
    start = position + PNG_CHUNK_HEADER.size
    end = start + length + CHECKSUM_BYTES
    if end > len(data):
        raise DamagedImage("a chunk is longer than the file")
    if not kind.isalpha():
        raise DamagedImage("a chunk has an invalid type")
    return Chunk(kind, start, end)


def read_png_size(data: bytes) -> tuple[int, int, set[bytes], int]:
    """Return the width, the height, the types of the chunks that must follow, and their start."""
    chunk = read_png_chunk(data, len(PNG_SIGNATURE))
    if chunk.kind != IHDR or chunk.end - chunk.start != IHDR_FIELDS.size + CHECKSUM_BYTES:
        raise DamagedImage("it does not begin with an IHDR chunk")
    fields = IHDR_FIELDS.unpack_from(data, chunk.start)
    width, height, bits, colour_type, *methods, interlacing = fields
    if bits not in BIT_DEPTHS.get(colour_type, ()) or any(methods) or interlacing > 1:
        raise DamagedImage("its IHDR chunk has an invalid field")
    return width, height, {IDAT, PLTE} if colour_type == INDEXED else {IDAT}, chunk.end
