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

from gateway.errors import InputMismatch, MalformedRequest


class KeyLimits(NamedTuple):
    """The most keys of a request's JSON, and the most that follow one another in one object."""

    total: int
    consecutive: int


# tritonserver 2.51 needs 3 ns for each pair of keys of one object, and more for long ones: 2 ms for 1,000
# short keys, 150 ms for 10,000. `generate` reads "parameters" again for each time that it is named.
INFER_KEY_LIMITS: Final = KeyLimits(10_000, 1000)
GENERATE_KEY_LIMITS: Final = KeyLimits(256, 256)
MAX_KEY_BYTES: Final = 256
MAX_JSON_DEPTH: Final = 1024
MAX_SHAPE_BYTES: Final = 4096  # from the list's bracket to its end
MAX_EMPTY_SHAPE_PRODUCT: Final = 1 << 40
# As much as takes at most a few milliseconds, whatever it is.
GUARD_CHUNK_BYTES: Final = 32 * 1024

JSON_SPACE_PATTERN: Final = rb"[ \t\r\n]*"
JSON_WHITESPACE: Final = b" \t\r\n"
SHAPE_KEY: Final = b'"shape"'
CLASSIFICATION_NAME: Final = b'"classification"'
GUARDED_KEYS: Final = (SHAPE_KEY, CLASSIFICATION_NAME)
# They begin with the word itself, for which `re` looks quickly.
SHAPE_LIST: Final = re.compile(SHAPE_KEY + JSON_SPACE_PATTERN + rb":" + JSON_SPACE_PATTERN + rb"\[")
CLASSIFICATION_KEY: Final = re.compile(CLASSIFICATION_NAME + JSON_SPACE_PATTERN + rb":")
SHAPE_NUMBER: Final = re.compile(rb"[0-9]+")
# Nobody who writes JSON escapes the letters of these words but to be read in two ways.
ESCAPED_LETTER: Final = re.compile(rb"\\u00(?:6[13568CcEeFf9]|7[034])")
ESCAPE_FILLER: Final = b"\0\0"  # in place of an escape: no character of JSON
MAX_ESCAPE_BYTES: Final = len(rb"\u0000")
MAX_GUARDED_KEY_BYTES: Final = max(map(len, GUARDED_KEYS))

STRUCTURAL_BYTES: Final = b"[]{}:"
NON_STRUCTURAL_BYTES: Final = bytes(set(range(256)) - set(STRUCTURAL_BYTES))
DEPTH_CHANGES: Final = bytes.maketrans(b"[{:]}", b"\x01\x01\x00\xff\xff")  # as signed bytes
BRACE_TABLE: Final = bytes.maketrans(b"}", b"{")


class JsonGuard:
    """Screen one request, in pieces: `json_bytes` of it are JSON, or all of it.

    The shapes of `tensors` may have no more elements than there is `room` for: the body's length, or the
    most that it can have; then `end` checks them against the length that it had.
    """

    def __init__(
        self,
        max_elements: int,
        json_bytes: int | None = None,
        *,
        has_tensors: bool = True,
        key_limits: KeyLimits = INFER_KEY_LIMITS,
    ) -> None:
        self.has_classification = False
        self.json_bytes = json_bytes
        self._max_elements = max_elements
        self._remaining_json_bytes = json_bytes
        self._has_tensors = has_tensors
        self._key_limits = key_limits
        self._body_bytes = 0
        # Of the structure.
        self._partial_escape = b""  # the beginning of one that is not whole yet
        self._in_string = 0  # or 1: which of the parts between quotes is outside of strings
        self._depth = 0
        self._key_count = 0
        self._consecutive_keys = 0
        self._open_string_bytes = 0  # of the string that is open, or that may be a key yet
        # Of the shapes.
        self._pending = b""  # of a word, a key or a list that is not whole yet
        self._largest_elements = 0
        self._largest_shape = b""

    def feed(self, data: bytes) -> None:
        """Screen the next piece, of at most `PIECE_BYTES` where time counts.

        Raises `DoesNotFit` or `Malformed`.
        """
        self._body_bytes += len(data)
        if self._remaining_json_bytes is not None:
            data = data[: self._remaining_json_bytes]
            self._remaining_json_bytes -= len(data)
        text = self._partial_escape + data
        if b"\\" in text:
            text = self._remove_escapes(text)
        if text:
            self._check_structure(text)
            if self._has_tensors:
                self._check_guarded_keys(self._pending + text)

    @property
    def is_past_json(self) -> bool:
        """All of the JSON was fed: what follows is binary."""
        return self._remaining_json_bytes == 0

    def skip(self, length: int) -> None:
        """Count bytes that follow the JSON."""
        self._body_bytes += length

    def finish(self) -> None:
        """Check what only the whole body's length can tell. Raises `DoesNotFit`."""
        if self._largest_elements > self._body_bytes:
            raise make_shape_error(self._largest_shape)

    def _remove_escapes(self, text: bytes) -> bytes:
        text = text.replace(b"\\\\", ESCAPE_FILLER)
        start = text.rfind(b"\\", 1 - MAX_ESCAPE_BYTES)
        is_begun = start >= 0 and text[start + 1 : start + 2] in (b"", b"u")
        self._partial_escape = text[start:] if is_begun else b""
        if is_begun:
            text = text[:start]
        if ESCAPED_LETTER.search(text):
            raise MalformedRequest(
                "the JSON writes plain letters as \\u escapes; write them as they are"
            )
        return text.replace(b'\\"', ESCAPE_FILLER)

    # The structure: depth, and keys.

    def _check_structure(self, text: bytes) -> None:
        parts = text.split(b'"')
        first = self._in_string
        marks = b"".join(parts[first::2]).translate(None, NON_STRUCTURAL_BYTES)
        keys = marks.count(b":")
        self._check_depth(marks, keys)
        if marks:
            self._count_keys(marks, keys)
        if self._open_string_bytes + len(text) > MAX_KEY_BYTES:
            self._check_key_lengths(parts, first)
        self._in_string = (first + len(parts) - 1) % 2
        self._open_string_bytes = self._measure_open_string(parts, first)

    def _check_depth(self, marks: bytes, key_count: int) -> None:
        opened = marks.count(b"[") + marks.count(b"{")
        if self._depth + opened > MAX_JSON_DEPTH:
            levels = np.frombuffer(marks.translate(DEPTH_CHANGES), np.int8)
            if self._depth + int(np.cumsum(levels, dtype=np.int64).max()) > MAX_JSON_DEPTH:
                raise MalformedRequest(f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels")
        self._depth += 2 * opened - (len(marks) - key_count)

    def _count_keys(self, marks: bytes, key_count: int) -> None:
        limits = self._key_limits
        self._key_count += key_count
        if self._key_count > limits.total:
            raise MalformedRequest(f"the JSON has more than {limits.total} keys")
        if self._key_count > limits.consecutive:
            rows = marks.translate(BRACE_TABLE, b"[]").split(b"{")
            if max(len(rows[0]) + self._consecutive_keys, *map(len, rows)) > limits.consecutive:
                raise MalformedRequest(
                    f"an object of the JSON has more than {limits.consecutive} keys"
                )
        brace = max(marks.rfind(b"{"), marks.rfind(b"}"))
        self._consecutive_keys = (
            self._consecutive_keys + key_count if brace < 0 else marks.count(b":", brace)
        )

    def _check_key_lengths(self, parts: list[bytes], first: int) -> None:
        """A key is a string that a colon follows; that may be the first thing in these parts."""
        strings = parts[1 - first :: 2]
        before = self._open_string_bytes
        if before + max(map(len, strings), default=0) <= MAX_KEY_BYTES:
            return
        follow = parts[first::2]
        if first:
            strings[0] += bytes(min(before, MAX_KEY_BYTES + 1))  # what of it came before
        else:
            strings.insert(0, bytes(min(before, MAX_KEY_BYTES + 1)))
        for string, rest in zip(strings, follow, strict=False):
            if len(string) > MAX_KEY_BYTES and rest.lstrip(JSON_WHITESPACE).startswith(b":"):
                raise MalformedRequest(f"a key of the JSON is longer than {MAX_KEY_BYTES} bytes")

    def _measure_open_string(self, parts: list[bytes], first: int) -> int:
        """The bytes of the string that is open at the end, or that only whitespace followed yet."""
        if (first + len(parts)) % 2:  # it ends outside of strings
            if parts[-1].strip(JSON_WHITESPACE):
                return 0
            parts = parts[:-1]
            if not parts:
                return self._open_string_bytes
        begun_before = self._open_string_bytes if first and len(parts) == 1 else 0
        return begun_before + len(parts[-1])

    # The shapes, and the wish for classes.

    def _check_guarded_keys(self, text: bytes) -> None:
        if CLASSIFICATION_NAME in text and CLASSIFICATION_KEY.search(text):
            self.has_classification = True
        if SHAPE_KEY in text:
            for found in SHAPE_LIST.finditer(text):
                start = found.end()
                end = text.find(b"]", start, start + MAX_SHAPE_BYTES)
                if end >= 0:
                    self._check_shape(text[start:end])
                elif len(text) - start < MAX_SHAPE_BYTES:
                    self._pending = SHAPE_KEY + b":[" + text[start:]
                    return
                else:
                    raise MalformedRequest("a shape in the JSON is longer than any can be")
        self._pending = find_partial_key(text)

    def _check_shape(self, dims: bytes) -> None:
        sizes = [int(number[:20]) for number in SHAPE_NUMBER.findall(dims)]
        # With a 0 there is no element; the others still must not overflow when they are multiplied.
        empty = 0 in sizes
        most = MAX_EMPTY_SHAPE_PRODUCT if empty else self._max_elements
        elements = 1
        for size in sizes:
            elements *= size or 1
            if elements > most:
                raise make_shape_error(dims)
        if elements > self._largest_elements and not empty:
            self._largest_elements, self._largest_shape = elements, dims


def find_partial_key(text: bytes) -> bytes:
    """What the text ends with of a key that is looked for, without the whitespace in it."""
    begun = text.rstrip(JSON_WHITESPACE)
    is_key = begun.endswith(b":")
    if is_key:
        begun = begun[:-1].rstrip(JSON_WHITESPACE)
    for word in GUARDED_KEYS:
        if begun.endswith(word):
            return word + b":" * is_key
    if len(begun) < len(text):
        return b""
    start = text.rfind(b'"', 1 - MAX_GUARDED_KEY_BYTES)
    tail = text[start:] if start >= 0 else b""
    return tail if any(word.startswith(tail) for word in GUARDED_KEYS) else b""


def make_shape_error(dims: bytes) -> InputMismatch:
    shown = dims[:100].decode("latin-1")
    return InputMismatch(f"the shape [{shown}] has more elements than the body has room for")
