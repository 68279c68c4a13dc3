"""Readers for the headers of encoded images, which do not decode the image.

Image libraries parse a file's metadata in Python and decode whatever it declares. `read_image_header` checks
the same bytes first, at linear cost and with bounded results, and `strip_metadata` removes the metadata.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.errors import BadImage, TooLarge
from gateway.messages import quote_text

# The limit for the segments or chunks of one file. Real files have a few dozen.
MAX_SEGMENTS: Final = 1024
# A scan of a progressive JPEG covers the whole image, but decodes only some bits of each value: about four
# scans take as long as the conversion to pixels.
SCANS_PER_PASS: Final = 4

Span = tuple[int, int]


class DamagedImage(Exception):
    """The file violates its format; the message gives the reason."""


class ExcessiveImage(Exception):
    """The file is well-formed, but exceeds a limit, which the message names."""


@dataclass(frozen=True)
class Chunk:
    """A chunk of a file: its type, the start of its content and its end, a checksum or padding included."""

    kind: bytes
    start: int
    end: int


@dataclass(frozen=True)
class ImageHeader:
    """The properties that an encoded image declares."""

    format: str  # the name that Pillow uses
    width: int
    height: int
    # The bytes that decoding needs; the bytes between the spans are metadata.
    spans: tuple[Span, ...]
    prefix: bytes = b""
    orientation: int = 1  # the EXIF value; 1 is upright
    scan_count: int = 1

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def decoding_cost(self) -> int:
        """The cost of decoding, as the pixels of a baseline image that takes as long."""
        return self.pixels + self.pixels * (self.scan_count - 1) // SCANS_PER_PASS


def merge_spans(spans: list[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for start, end in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return tuple(merged)


# The orientation in EXIF metadata, which is a TIFF file without an image (Exif 3.0, 4.5.2)

EXIF_PREFIX: Final = b"Exif\0\0"
BYTE_ORDERS: Final = {b"II*\0": "<", b"MM\0*": ">"}
ORIENTATION_TAG: Final = 0x0112
# The first directory of a real file has about twenty entries.
MAX_EXIF_ENTRIES: Final = 512
MAX_EXIF_BYTES: Final = 64 << 10  # the limit of a JPEG segment
# The struct formats of the integer datatypes; the value starts at the first of the entry's four bytes.
INTEGER_FORMATS: Final = {1: "B", 3: "H", 4: "L"}
UPRIGHT_ORIENTATION: Final = 1


def read_orientation(block: bytes) -> int:
    """Return the orientation, 1 to 8; 1 if the block is damaged or has no valid orientation."""
    try:
        return find_orientation(block.removeprefix(EXIF_PREFIX))
    except struct.error:
        return UPRIGHT_ORIENTATION


def find_orientation(tiff: bytes) -> int:
    order = BYTE_ORDERS.get(tiff[:4])
    if order is None:
        return UPRIGHT_ORIENTATION
    (directory,) = struct.unpack_from(f"{order}L", tiff, 4)
    (count,) = struct.unpack_from(f"{order}H", tiff, directory)
    entry = struct.Struct(f"{order}HHL4s")
    for number in range(min(count, MAX_EXIF_ENTRIES)):
        tag, datatype, values, value = entry.unpack_from(tiff, directory + 2 + entry.size * number)
        if tag == ORIENTATION_TAG:
            if datatype not in INTEGER_FORMATS or values != 1:
                return UPRIGHT_ORIENTATION
            (orientation,) = struct.unpack_from(order + INTEGER_FORMATS[datatype], value)
            return orientation if 1 <= orientation <= 8 else UPRIGHT_ORIENTATION
    return UPRIGHT_ORIENTATION


# JPEG (ITU-T T.81, annex B)
#
# Decoding needs the tables, the frame header and the two application segments that define the colour space
# (JFIF and Adobe). A regular expression searches the entropy-coded data for markers, at the speed of C.

JPEG_SIGNATURE: Final = b"\xff\xd8\xff"
# Each scan costs a pass over the image, even if it has few bytes. Encoders write about ten.
MAX_SCANS: Final = 64
MAX_FILL_BYTES: Final = 16  # the padding before a marker
SEARCH_CHUNK_BYTES: Final = 64 << 10  # small, because a search holds the GIL

SOI: Final = 0xD8
EOI: Final = 0xD9
SOS: Final = 0xDA
JFIF: Final = 0xE0
EXIF_MARKER: Final = 0xE1
ADOBE: Final = 0xEE
FRAME_MARKERS: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
# The longest useful table segment by marker.
MAX_TABLE_BYTES: Final = {
    0xDB: 2 + 4 * (1 + 2 * 64),  # quantization
    0xC4: 2 + 8 * (1 + 16 + 256),  # Huffman
    0xCC: 2 + 32 * 2,  # arithmetic conditioning
    0xDD: 4,  # restart interval
}
# The application segments that decoders read, with their identifier and minimum length.
COLOUR_SEGMENTS: Final = {JFIF: (b"JFIF\0", 16), ADOBE: (b"Adobe", 14)}
MAX_COLOUR_SEGMENT_BYTES: Final = 256
STANDALONE_MARKERS: Final = frozenset({0x00, 0x01, SOI, *range(0xD0, 0xD8)})
# Reserved markers, and those of hierarchical JPEG, which encoders do not write.
UNSUPPORTED_MARKERS: Final = frozenset({*range(0x02, 0xC0), 0xC8, 0xDE, 0xDF, *range(0xF0, 0xFE)})

# A marker in entropy-coded data other than a restart marker, or too much padding.
ENTROPY_DATA_MARKER: Final = re.compile(b"\xff(?:[\xc0-\xcf\xd8-\xfe]|\xff{%d})" % MAX_FILL_BYTES)


def read_jpeg(data: bytes) -> ImageHeader:
    """Return the header of a JPEG.

    Raises `DamagedImage` or `ExcessiveImage`, and `IndexError` or `ValueError` for truncated data.
    """
    spans: list[Span] = [(0, 2)]
    frames: list[tuple[int, int]] = []
    orientation = UPRIGHT_ORIENTATION
    position = 2
    for _ in range(MAX_SEGMENTS):
        start, marker = find_marker(data, position)
        position = start + 2
        if marker in STANDALONE_MARKERS:
            continue
        if marker in UNSUPPORTED_MARKERS or marker == EOI:
            raise DamagedImage("it has an unknown segment before the image data")
        end = find_segment_end(data, position)
        if marker == SOS:
            scan_count, data_end = read_scans(data, end)
            if len(frames) != 1:
                raise DamagedImage(f"it has {len(frames)} frames instead of one")
            spans.append((start, data_end))
            return ImageHeader("JPEG", *frames[0], merge_spans(spans), b"", orientation, scan_count)
        if marker in FRAME_MARKERS:
            frames.append(read_frame(data, position, end))
        is_exif = marker == EXIF_MARKER and data.startswith(EXIF_PREFIX, position + 2)
        if is_exif and orientation == UPRIGHT_ORIENTATION:
            orientation = read_orientation(data[position + 2 : end])
        if is_needed_segment(data, marker, position, end):
            spans.append((start, end))
        position = end
    raise ExcessiveImage(f"more than {MAX_SEGMENTS} segments")


def find_marker(data: bytes, position: int) -> tuple[int, int]:
    """Return the position and code of the next marker. Bytes between segments are skipped."""
    first = data.index(0xFF, position)
    for start in range(first, first + MAX_FILL_BYTES):
        if data[start + 1] != 0xFF:
            return start, data[start + 1]
    raise ExcessiveImage(f"more than {MAX_FILL_BYTES} bytes of padding before a marker")


def find_segment_end(data: bytes, position: int) -> int:
    # The segment begins with its length.
    end = position + (data[position] << 8 | data[position + 1])
    if end < position + 2 or end > len(data):
        raise DamagedImage("a segment is longer than the file")
    return end


def read_frame(data: bytes, start: int, end: int) -> tuple[int, int]:
    components = data[start + 7]
    if end - start != 8 + 3 * components:
        raise DamagedImage("its frame header is damaged")
    height, width = (data[start + offset] << 8 | data[start + offset + 1] for offset in (3, 5))
    return width, height


def is_needed_segment(data: bytes, marker: int, start: int, end: int) -> bool:
    if marker in COLOUR_SEGMENTS:
        name, length = COLOUR_SEGMENTS[marker]
        is_plausible = length <= end - start <= MAX_COLOUR_SEGMENT_BYTES
        return is_plausible and data.startswith(name, start + 2)
    if marker not in MAX_TABLE_BYTES:
        return marker in FRAME_MARKERS
    if end - start > MAX_TABLE_BYTES[marker]:
        raise DamagedImage("a table segment is too long")
    return True


def read_scans(data: bytes, position: int) -> tuple[int, int]:
    """Return the number of scans, of which the first begins before `position`, and the end of the last."""
    scans = 1
    for _ in range(MAX_SEGMENTS):
        position = find_entropy_marker(data, position)
        if position > len(data):
            return scans, len(data)  # a missing end marker is left to the decoder
        marker = data[position - 1]
        if marker == 0xFF:
            raise ExcessiveImage(f"more than {MAX_FILL_BYTES} bytes of padding in the image data")
        if marker == EOI:
            return scans, position
        if marker == SOI or marker in FRAME_MARKERS or marker in UNSUPPORTED_MARKERS:
            raise DamagedImage("it has an unknown segment in the image data")
        scans += marker == SOS
        if scans > MAX_SCANS:
            raise ExcessiveImage(f"more than {MAX_SCANS} scans; save it as a baseline JPEG")
        position = find_segment_end(data, position)
    raise ExcessiveImage(f"more than {MAX_SEGMENTS} segments")


def find_entropy_marker(data: bytes, position: int) -> int:
    """Return the end of the next marker, or a position after the end of the data if there is none."""
    while position < len(data):
        end = position + SEARCH_CHUNK_BYTES
        if match := ENTROPY_DATA_MARKER.search(data, position, end + MAX_FILL_BYTES):
            return match.end()
        position = end
    return len(data) + 1


# PNG (W3C, Portable Network Graphics, third edition)
#
# Decoding needs the chunks of the size, palette, transparency and data. The frames of an animation are
# skipped: the result is the default image, as in a reader without support for animations.

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
                data[chunk.start : min(chunk.end, chunk.start + MAX_EXIF_BYTES)]
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


# WebP (RFC 9649). Only the first frame of an animation is used.

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
                end_of_exif = min(chunk.end, chunk.start + MAX_EXIF_BYTES)
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


# All formats

HeaderReader = Callable[[bytes], ImageHeader]
HEADER_READERS: Final[dict[bytes, HeaderReader]] = {
    JPEG_SIGNATURE: read_jpeg,
    PNG_SIGNATURE: read_png,
    RIFF_SIGNATURE: read_webp,
}


def read_image_header(data: bytes, input_name: str) -> ImageHeader:
    """Return the header of a JPEG, PNG or WebP image. Raises `BadImage`, or `TooLarge` for too many parts."""
    if not data:
        raise BadImage(f"the image for input {quote_text(input_name)} is empty")
    reader = find_header_reader(data)
    if reader is None:
        raise BadImage(
            f"the value for input {quote_text(input_name)} is not a JPEG, PNG or WebP image"
        )
    try:
        header = reader(data)
        if not header.pixels:
            raise DamagedImage("its width or height is zero")
    except DamagedImage as exc:
        raise build_damage_error(input_name, str(exc)) from None
    except ExcessiveImage as exc:
        raise TooLarge(f"the image for input {quote_text(input_name)} has {exc}") from None
    except (IndexError, ValueError, struct.error):
        raise build_damage_error(input_name, "it ends within its header") from None
    return header


def build_damage_error(input_name: str, reason: str) -> BadImage:
    return BadImage(
        f"the image for input {quote_text(input_name)} is truncated or damaged: {reason}"
    )


def find_header_reader(data: bytes) -> HeaderReader | None:
    reader = next((read for start, read in HEADER_READERS.items() if data.startswith(start)), None)
    if reader is read_webp and data[8:12] != WEBP_FORM_TYPE:
        return None
    return reader


def strip_metadata(data: bytes, header: ImageHeader) -> bytes:
    size_bytes = sum(end - start for start, end in header.spans) + len(header.prefix)
    if size_bytes == len(data):
        return data
    view = memoryview(data)
    return b"".join([header.prefix, *(view[start:end] for start, end in header.spans)])
