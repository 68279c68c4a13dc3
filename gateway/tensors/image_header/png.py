"""The header of a PNG (W3C, Portable Network Graphics, third edition): its chunks.

Of these the size, the palette, the transparency and the data are needed to decode. The frames of an animation
are not: the picture is the one that a reader without animations sees.
"""

from __future__ import annotations

import struct
from typing import Final

from gateway.tensors.image_header.exif import UPRIGHT, read_orientation
from gateway.tensors.image_header.header import (
    MAX_SEGMENTS,
    DamagedImage,
    ExcessiveImage,
    ImageHeader,
    Span,
    join_spans,
)

SIGNATURE: Final = b"\x89PNG\r\n\x1a\n"
# libpng cuts the data into chunks of 8 KiB: a large file may have more than `MAX_SEGMENTS`.
BYTES_PER_CHUNK: Final = 2048
HEAD: Final = struct.Struct(">L4s")
CHECKSUM_BYTES: Final = 4
SIZE, PALETTE, DATA, END, EXIF = b"IHDR", b"PLTE", b"IDAT", b"IEND", b"eXIf"
SIZE_FIELDS: Final = struct.Struct(">LLBBBBB")
INDEXED: Final = 3
# By colour type: the bits per sample.
BITS: Final = {0: (1, 2, 4, 8, 16), 2: (8, 16), INDEXED: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
# Chunks that decoding needs, and the longest that there is a use for.
NEEDED: Final = {PALETTE: 3 * 256, b"tRNS": 256, DATA: 1 << 31, END: 1 << 31}
AFTER_DATA: Final = frozenset({DATA, END})
LONGEST_EXIF: Final = 64 << 10


def read_png(data: bytes) -> ImageHeader:
    """Raises `DamagedImage` and `ExcessiveImage`, and `struct.error` where the data ends."""
    width, height, needed, position = read_size(data)
    spans: list[Span] = [(0, position)]
    orientation, seen = UPRIGHT, set[bytes]()
    for _ in range(MAX_SEGMENTS + len(data) // BYTES_PER_CHUNK):
        if position == len(data) or END in seen:
            break  # without an end: decoders judge whether it is enough
        kind, start, end = read_chunk(data, position)
        if kind == SIZE:
            raise DamagedImage("it declares its size twice")
        if kind == EXIF:
            orientation = read_orientation(data[start : min(end, start + LONGEST_EXIF)])
        elif kind in NEEDED and (kind in AFTER_DATA or DATA not in seen):
            if end - start - CHECKSUM_BYTES > NEEDED[kind]:
                raise DamagedImage("a chunk is too long")
            spans.append((position, end))
        seen.add(kind)
        position = end
    else:
        raise ExcessiveImage("more chunks than its size explains")
    if not needed <= seen:
        raise DamagedImage("it has no data or no palette")
    return ImageHeader("PNG", width, height, join_spans(spans), orientation=orientation)


def read_chunk(data: bytes, position: int) -> tuple[bytes, int, int]:
    """The chunk's type, where its content begins, and where the chunk ends with its checksum."""
    length, kind = HEAD.unpack_from(data, position)
    start = position + HEAD.size
    end = start + length + CHECKSUM_BYTES
    if end > len(data):
        raise DamagedImage("a chunk is longer than the file")
    if not kind.isalpha():
        raise DamagedImage("a chunk has no type")
    return kind, start, end


def read_size(data: bytes) -> tuple[int, int, set[bytes], int]:
    """Width, height, the chunks that must follow, and where they begin."""
    kind, start, end = read_chunk(data, len(SIGNATURE))
    if kind != SIZE or end - start != SIZE_FIELDS.size + CHECKSUM_BYTES:
        raise DamagedImage("it does not begin with its size")
    width, height, bits, colour_type, *methods, interlacing = SIZE_FIELDS.unpack_from(data, start)
    if bits not in BITS.get(colour_type, ()) or any(methods) or interlacing > 1:
        raise DamagedImage("its colours are stored in an unknown way")
    return width, height, {DATA, PALETTE} if colour_type == INDEXED else {DATA}, end
