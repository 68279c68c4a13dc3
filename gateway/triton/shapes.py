"""The JSON of a V2 inference, looked through as it passes: Triton takes its word for every shape. Pure.

A shape of more elements than there can be makes tritonserver 2.51 allocate them, overflow, and die; so do
tens of thousands of levels, and classes of an output that has none; and a hundred thousand keys among the
parameters keep it busy for minutes. Nothing is decoded here: a quote inside
a JSON string is always escaped, so `"shape"` with its colon is a key wherever it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Final

from gateway.errors import DoesNotFit, Malformed
from gateway.triton.nesting import Nesting

MOST_KEYS: Final = 10_000
LARGEST: Final = 1 << 40
LONGEST: Final = 4096  # from the key to the end of the list
SPACE: Final = rb"[ \t\r\n]*"
KEY: Final = re.compile(rb'(?<!\\)"' + SPACE + rb":")
CLASSES: Final = re.compile(rb'"classification"' + SPACE + rb"(?::|\Z)")
# They begin with the word itself, for which `re` looks quickly; what an escape makes of it is seen after.
SHAPE: Final = re.compile(rb'"shape"' + SPACE + rb":" + SPACE + rb"\[([^\]]*)\]")
BEGUN: Final = re.compile(rb'"shape"' + SPACE + rb"(?:\Z|:" + SPACE + rb"(?:\Z|\[[^\]]*\Z))")
# Nobody who writes JSON escapes these letters but to be read in two ways.
DISGUISED: Final = re.compile(rb"(?<!\\)(?:\\\\)*\\u00(?:6[13568CcEeFf9]|7[034])")
NUMBER: Final = re.compile(rb"[0-9]+")
GAPS: Final = (b'" ', b'"\t', b'"\r', b'"\n')  # perhaps before a colon
BACKSLASH: Final = 0x5C
OVERLAP: Final = 16  # of two pieces, between which a word may be cut


class Shapes:
    """Of one request: `json_bytes` of it are JSON, or all; and it has room for so many elements.

    JSON that is not of `tensors` is looked at for its depth alone.
    """

    def __init__(self, most_elements: int, json_bytes: int | None, *, tensors: bool = True) -> None:
        self._most_elements = most_elements
        self._left = json_bytes
        self._tensors = tensors
        self._nesting = Nesting()
        self.asks_for_classes = False
        self._keys = 0
        self._held = b""

    def feed(self, data: bytes) -> None:
        """The next piece. Raises `DoesNotFit` or `Malformed`."""
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        if not data:
            return
        self._nesting.feed(data)
        if not self._tensors:
            return
        text = self._held + data
        self.asks_for_classes = self.asks_for_classes or CLASSES.search(text) is not None
        if b"\\" in text and DISGUISED.search(text):
            raise Malformed("the JSON writes plain letters as \\u escapes; write them as they are")
        end = 0
        for found in unescaped(SHAPE, text, 0):
            self._check(found[1])
            end = found.end()
        self._count(text, len(self._held))
        begun = next(unescaped(BEGUN, text, end), None)
        if begun is None:
            self._held = text[self._cut(text, max(end, len(text) - OVERLAP)) :]
        elif len(text) - begun.start() > LONGEST:
            raise Malformed("a shape in the JSON is longer than any can be")
        else:
            self._held = text[begun.start() :]

    def _cut(self, text: bytes, place: int) -> int:
        """Not within an escape: an odd number of backslashes before the place begins one."""
        before = text[:place]
        return place - (len(before) - len(before.rstrip(b"\\"))) % 2

    def _check(self, dims: bytes) -> None:
        sizes = [int(number[:20]) for number in NUMBER.findall(dims)]
        # With a 0 there is no element; the others still must not overflow when they are multiplied.
        most = LARGEST if 0 in sizes else self._most_elements
        if prod(size or 1 for size in sizes) > most:
            shown = dims[:100].decode("latin-1")
            raise DoesNotFit(f"the shape [{shown}] has more elements than the body has room for")

    def _count(self, text: bytes, seen: int) -> None:
        """What was held is not counted again."""
        if b"\\" in text or any(gap in text for gap in GAPS):
            self._keys += sum(1 for found in KEY.finditer(text) if found.end() > seen)
        else:
            self._keys += text.count(b'":', max(seen - 1, 0))
        if self._keys > MOST_KEYS:
            raise Malformed(f"the JSON has more than {MOST_KEYS} keys")


def unescaped(words: re.Pattern[bytes], text: bytes, start: int) -> Iterator[re.Match[bytes]]:
    for found in words.finditer(text, start):
        before = found.start() - 1
        if before < 0 or text[before] != BACKSLASH:
            yield found
