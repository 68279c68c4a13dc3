"""Screen the JSON of a request as it passes, before Triton parses it. Pure.

What the supported Tritons die of, or are busy with for minutes, although the JSON is well-formed:

* some 50,000 levels: the stack of tritonserver 2.51 overflows;
* a shape of more elements than the body has room for: it allocates them, and overflows;
* classes of an output that has none: it divides by 0 (which outputs, the caller looks up);
* many keys in one object: it looks up each of them from the first one on.

Nothing is decoded. Escapes are blanked out first; then every quote left opens or closes a string, for
as long as the text is JSON, and Triton reads no further than that. Each step runs in C over a whole piece,
and a piece is looked at once: the cost is linear in the bytes, whatever they are and however they are cut.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np

from gateway.errors import DoesNotFit, Malformed


class KeyLimits(NamedTuple):
    """The most keys of a request's JSON, and the most that follow one another in one object."""

    total: int
    in_a_row: int


# tritonserver 2.51 needs 3 ns for each pair of keys of one object, and more for long ones: 2 ms for 1,000
# short keys, 150 ms for 10,000. `generate` reads "parameters" again for each time that it is named.
INFER_KEYS: Final = KeyLimits(10_000, 1000)
GENERATE_KEYS: Final = KeyLimits(256, 256)
MOST_KEY_BYTES: Final = 256
MOST_DEPTH: Final = 1024
MOST_SHAPE_BYTES: Final = 4096  # from the list's bracket to its end
MOST_ELEMENTS_BESIDE_0: Final = 1 << 40
# As much as takes at most a few milliseconds, whatever it is.
PIECE_BYTES: Final = 32 * 1024

SPACE: Final = rb"[ \t\r\n]*"
WHITESPACE: Final = b" \t\r\n"
SHAPE: Final = b'"shape"'
CLASSIFICATION: Final = b'"classification"'
WORDS: Final = (SHAPE, CLASSIFICATION)
# They begin with the word itself, for which `re` looks quickly.
SHAPE_LIST: Final = re.compile(SHAPE + SPACE + rb":" + SPACE + rb"\[")
CLASSIFICATION_KEY: Final = re.compile(CLASSIFICATION + SPACE + rb":")
AT_END: Final = re.compile(SPACE + rb"(:?)" + SPACE + rb"\Z")
NUMBER: Final = re.compile(rb"[0-9]+")
# Nobody who writes JSON escapes the letters of these words but to be read in two ways.
DISGUISED: Final = re.compile(rb"\\u00(?:6[13568CcEeFf9]|7[034])")
BLANK: Final = b"\0\0"  # in place of an escape: no character of JSON
LONGEST_ESCAPE: Final = len(rb"\u0000")
LONGEST_WORD: Final = max(map(len, WORDS))

MARKS: Final = b"[]{}:"
NO_MARKS: Final = bytes(set(range(256)) - set(MARKS))
LEVELS: Final = bytes.maketrans(b"[{:]}", b"\x01\x01\x00\xff\xff")  # as signed bytes
BRACES: Final = bytes.maketrans(b"}", b"{")


class JsonScreening:
    """Screen one request, in pieces: `json_bytes` of it are JSON, or all of it.

    The shapes of `tensors` may have no more elements than there is `room` for: the body's length, or the
    most that it can have; then `end` checks them against the length that it had.
    """

    def __init__(
        self,
        room: int,
        json_bytes: int | None = None,
        *,
        tensors: bool = True,
        keys: KeyLimits = INFER_KEYS,
    ) -> None:
        self.asks_for_classes = False
        self.json_bytes = json_bytes
        self._room = room
        self._json_left = json_bytes
        self._tensors = tensors
        self._limits = keys
        self._bytes = 0
        # Of the structure.
        self._escape = b""  # the beginning of one that is not whole yet
        self._in_string = 0  # or 1: which of the parts between quotes is outside of strings
        self._depth = 0
        self._keys = 0
        self._in_a_row = 0
        self._string_bytes = 0  # of the string that is open, or that may be a key yet
        # Of the shapes.
        self._held = b""  # of a word, a key or a list that is not whole yet
        self._elements = 0
        self._largest = b""

    def feed(self, data: bytes) -> None:
        """Screen the next piece, of at most `PIECE_BYTES` where time counts.

        Raises `DoesNotFit` or `Malformed`.
        """
        self._bytes += len(data)
        if self._json_left is not None:
            data = data[: self._json_left]
            self._json_left -= len(data)
        text = self._escape + data
        if b"\\" in text:
            text = self._without_escapes(text)
        if text:
            self._read_structure(text)
            if self._tensors:
                self._read_words(self._held + text)

    @property
    def is_past_json(self) -> bool:
        """All of the JSON was fed: what follows is binary."""
        return self._json_left == 0

    def skip(self, length: int) -> None:
        """Count bytes that follow the JSON."""
        self._bytes += length

    def end(self) -> None:
        """Check what only the whole body's length can tell. Raises `DoesNotFit`."""
        if self._elements > self._bytes:
            raise no_room(self._largest)

    def _without_escapes(self, text: bytes) -> bytes:
        text = text.replace(b"\\\\", BLANK)
        start = text.rfind(b"\\", 1 - LONGEST_ESCAPE)
        is_begun = start >= 0 and text[start + 1 : start + 2] in (b"", b"u")
        self._escape = text[start:] if is_begun else b""
        if is_begun:
            text = text[:start]
        if DISGUISED.search(text):
            raise Malformed("the JSON writes plain letters as \\u escapes; write them as they are")
        return text.replace(b'\\"', BLANK)

    # The structure: depth, and keys.

    def _read_structure(self, text: bytes) -> None:
        parts = text.split(b'"')
        first = self._in_string
        marks = b"".join(parts[first::2]).translate(None, NO_MARKS)
        keys = marks.count(b":")
        self._check_depth(marks, keys)
        if marks:
            self._count_keys(marks, keys)
        if self._string_bytes + len(text) > MOST_KEY_BYTES:
            self._check_key_lengths(parts, first)
        self._in_string = (first + len(parts) - 1) % 2
        self._string_bytes = self._string_at_end(parts, first)

    def _check_depth(self, marks: bytes, keys: int) -> None:
        opened = marks.count(b"[") + marks.count(b"{")
        if self._depth + opened > MOST_DEPTH:
            levels = np.frombuffer(marks.translate(LEVELS), np.int8)
            if self._depth + int(np.cumsum(levels, dtype=np.int64).max()) > MOST_DEPTH:
                raise Malformed(f"the JSON is nested deeper than {MOST_DEPTH} levels")
        self._depth += 2 * opened - (len(marks) - keys)

    def _count_keys(self, marks: bytes, keys: int) -> None:
        limits = self._limits
        self._keys += keys
        if self._keys > limits.total:
            raise Malformed(f"the JSON has more than {limits.total} keys")
        if self._keys > limits.in_a_row:
            rows = marks.translate(BRACES, b"[]").split(b"{")
            if max(len(rows[0]) + self._in_a_row, *map(len, rows)) > limits.in_a_row:
                raise Malformed(f"an object of the JSON has more than {limits.in_a_row} keys")
        brace = max(marks.rfind(b"{"), marks.rfind(b"}"))
        self._in_a_row = self._in_a_row + keys if brace < 0 else marks.count(b":", brace)

    def _check_key_lengths(self, parts: list[bytes], first: int) -> None:
        """A key is a string that a colon follows; that may be the first thing in these parts."""
        strings = parts[1 - first :: 2]
        before = self._string_bytes
        if before + max(map(len, strings), default=0) <= MOST_KEY_BYTES:
            return
        follow = parts[first::2]
        if first:
            strings[0] += bytes(min(before, MOST_KEY_BYTES + 1))  # what of it came before
        else:
            strings.insert(0, bytes(min(before, MOST_KEY_BYTES + 1)))
        for string, rest in zip(strings, follow, strict=False):
            if len(string) > MOST_KEY_BYTES and rest.lstrip(WHITESPACE).startswith(b":"):
                raise Malformed(f"a key of the JSON is longer than {MOST_KEY_BYTES} bytes")

    def _string_at_end(self, parts: list[bytes], first: int) -> int:
        """The bytes of the string that is open at the end, or that only whitespace followed yet."""
        if (first + len(parts)) % 2:  # it ends outside of strings
            if parts[-1].strip(WHITESPACE):
                return 0
            parts = parts[:-1]
            if not parts:
                return self._string_bytes
        begun_before = self._string_bytes if first and len(parts) == 1 else 0
        return begun_before + len(parts[-1])

    # The shapes, and the wish for classes.

    def _read_words(self, text: bytes) -> None:
        if CLASSIFICATION in text and CLASSIFICATION_KEY.search(text):
            self.asks_for_classes = True
        if SHAPE in text:
            for found in SHAPE_LIST.finditer(text):
                start = found.end()
                end = text.find(b"]", start, start + MOST_SHAPE_BYTES)
                if end >= 0:
                    self._check_shape(text[start:end])
                elif len(text) - start < MOST_SHAPE_BYTES:
                    self._held = SHAPE + b":[" + text[start:]
                    return
                else:
                    raise Malformed("a shape in the JSON is longer than any can be")
        self._held = unfinished_word(text)

    def _check_shape(self, dims: bytes) -> None:
        sizes = [int(number[:20]) for number in NUMBER.findall(dims)]
        # With a 0 there is no element; the others still must not overflow when they are multiplied.
        empty = 0 in sizes
        most = MOST_ELEMENTS_BESIDE_0 if empty else self._room
        elements = 1
        for size in sizes:
            elements *= size or 1
            if elements > most:
                raise no_room(dims)
        if elements > self._elements and not empty:
            self._elements, self._largest = elements, dims


def unfinished_word(text: bytes) -> bytes:
    """What the text ends with of a key that is looked for, without the whitespace in it."""
    begun = text.rstrip(WHITESPACE)
    is_key = begun.endswith(b":")
    if is_key:
        begun = begun[:-1].rstrip(WHITESPACE)
    for word in WORDS:
        if begun.endswith(word):
            return word + b":" * is_key
    if len(begun) < len(text):
        return b""
    start = text.rfind(b'"', 1 - LONGEST_WORD)
    tail = text[start:] if start >= 0 else b""
    return tail if any(word.startswith(tail) for word in WORDS) else b""


def no_room(dims: bytes) -> DoesNotFit:
    shown = dims[:100].decode("latin-1")
    return DoesNotFit(f"the shape [{shown}] has more elements than the body has room for")
