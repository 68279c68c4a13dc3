"""A header reader for JPEG (ITU-T T.81, annex B) that also counts the scans.

Decoding needs the tables, the frame header and the two application segments that define the colour space
(JFIF and Adobe). A regular expression searches the entropy-coded data for markers, at the speed of C.
"""

from __future__ import annotations

import re
from typing import Final

from gateway.tensors.image_header.exif import EXIF_PREFIX, UPRIGHT_ORIENTATION, read_orientation
from gateway.tensors.image_header.header import (
    MAX_SEGMENTS,
    DamagedImage,
    ExcessiveImage,
    ImageHeader,
    Span,
    merge_spans,
)

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
