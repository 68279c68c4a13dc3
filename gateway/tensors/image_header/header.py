"""The header of an encoded image, and the exceptions of the format readers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
