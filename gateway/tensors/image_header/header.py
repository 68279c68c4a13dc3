"""The declared facts of an encoded image, and what the readers of the formats raise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Markers, chunks and their like in one file. Real files have a few dozen.
MAX_SEGMENTS: Final = 1024
# A scan of a progressive JPEG goes over all of the picture, but only decodes some bits of it: about four of
# them take as long as turning the picture into pixels.
SCANS_PER_PASS: Final = 4

Span = tuple[int, int]


class DamagedImage(Exception):
    """The file contradicts its format; the message is the reason."""


class ExcessiveImage(Exception):
    """The file is well-formed, but has more of something than is taken; the message says of what."""


@dataclass(frozen=True)
class ImageHeader:
    """What an encoded image declares about itself."""

    format: str  # as Pillow names it
    width: int
    height: int
    # Where the bytes are that decoding needs; what lies between is metadata.
    spans: tuple[Span, ...]
    prefix: bytes = b""
    orientation: int = 1  # as EXIF counts: 1 is upright
    scan_count: int = 1

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def decoding_cost(self) -> int:
        """The pixels of ordinary images that would take as long to decode."""
        return self.pixels + self.pixels * (self.scan_count - 1) // SCANS_PER_PASS


def merge_spans(spans: list[Span]) -> tuple[Span, ...]:
    """The same spans, neighbours made one."""
    joined: list[Span] = []
    for start, end in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return tuple(joined)
