"""A streaming check of request JSON, before Triton parses it. No I/O.

Some well-formed JSON crashes the supported Tritons or keeps them busy for minutes:

* about 50,000 levels: the stack of tritonserver 2.51 overflows;
* a shape with more elements than the body can hold: Triton allocates them, and overflows;
* classes of an output that has none: Triton divides by 0 (the caller checks which outputs);
* many keys in one object: Triton searches them linearly for each lookup.

Nothing is decoded. Escapes are blanked out first; then every remaining quote starts or ends a string, as
long as the text is JSON, and Triton reads no further than that. Each step runs in C over a whole chunk,
and each chunk is scanned once, so the cost is linear in the bytes, whatever they are and however they are
split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from gateway.errors import InputMismatch, MalformedRequest


class JsonRules(NamedTuple):
    """The maximum number of keys in a request's JSON, and of consecutive keys in one object."""

    total_keys: int
    consecutive_keys: int
    has_tensors: bool = True  # it has shapes, and can have a classification and a sequence


# tritonserver 2.51 needs 3 ns for each pair of keys of one object, and more for long ones: 2 ms for 1,000
# short keys, 150 ms for 10,000. `generate` reads "parameters" again each time that the key occurs.
INFER_RULES: Final = JsonRules(10_000, 1000)
GENERATE_RULES: Final = JsonRules(256, 256, has_tensors=False)
MAX_KEY_BYTES: Final = 256
MAX_JSON_DEPTH: Final = 1024
# The length of a list of dimensions, with its brackets.
MAX_SHAPE_BYTES: Final = 4096
MAX_EMPTY_SHAPE_PRODUCT: Final = 1 << 40
# Checking a chunk of this size takes at most a few milliseconds, whatever it contains.
GUARD_CHUNK_BYTES: Final = 32 * 1024
MAX_CACHED_JSON_BYTES: Final = 1024

JSON_SPACE_PATTERN: Final = rb"[ \t\r\n]*"
JSON_WHITESPACE: Final = b" \t\r\n"
SHAPE_KEY: Final = b'"shape"'
CLASSIFICATION_NAME: Final = b'"classification"'
SEQUENCE_ID_KEY: Final = b'"sequence_id"'
GUARDED_KEYS: Final = (SHAPE_KEY, CLASSIFICATION_NAME, SEQUENCE_ID_KEY)
# The patterns start with a literal word, which `re` finds quickly.
SHAPE_LIST: Final = re.compile(SHAPE_KEY + JSON_SPACE_PATTERN + rb":" + JSON_SPACE_PATTERN + rb"\[")
CLASSIFICATION_KEY: Final = re.compile(CLASSIFICATION_NAME + JSON_SPACE_PATTERN + rb":")
SHAPE_NUMBER: Final = re.compile(rb"[0-9]+")
# Escaped letters of these words serve only to be parsed in two ways.
ESCAPED_LETTER: Final = re.compile(rb"\\u00(?:6[13568CcEeFf9]|7[034])")
ESCAPE_FILLER: Final = b"\0\0"  # replaces an escape; not valid in JSON
MAX_ESCAPE_BYTES: Final = len(rb"\u0000")
MAX_GUARDED_KEY_BYTES: Final = max(map(len, GUARDED_KEYS))

# Between quotes, which are not paired here, and before a colon. Each byte is looked at twice at most.
LONG_KEY: Final = re.compile(rb'"[^"]{%d,}"' % (MAX_KEY_BYTES + 1) + JSON_SPACE_PATTERN + b":")

STRUCTURAL_BYTES: Final = b"[]{}:"
NON_STRUCTURAL_BYTES: Final = bytes(set(range(256)) - set(STRUCTURAL_BYTES))
DEPTH_CHANGES: Final = bytes.maketrans(b"[{:]}", b"\x01\x01\x00\xff\xff")  # as signed bytes
BRACE_TABLE: Final = bytes.maketrans(b"}", b"{")


class JsonGuard:
    """Checks one request in chunks: its first `json_bytes`, or all of it.

    Shapes of tensors may have at most `max_elements` elements: the body's length, or its upper limit; in
    that case, `finish` checks them against the actual length. `refuses_sequence` is for JSON that is too
    large to be searched for the sequence, which decides on the replica.
    """

    def __init__(
        self,
        max_elements: int,
        json_bytes: int | None = None,
        rules: JsonRules = INFER_RULES,
        *,
        refuses_sequence: bool = False,
    ) -> None:
        self.has_classification = False
        self.json_bytes = json_bytes
        self._max_elements = max_elements
        self._remaining_json_bytes = json_bytes
        self._rules = rules
        self._refuses_sequence = refuses_sequence
        self._body_bytes = 0
        # The state of the structure checks.
        self._partial_escape = b""  # the beginning of an incomplete escape
        self._in_string = (
            0  # the index of the first part between quotes that is outside strings: 0 or 1
        )
        self._depth = 0
        self._key_count = 0
        self._consecutive_keys = 0
        self._open_string_bytes = 0  # the length of the string that is open, or may still be a key
        # The state of the shape checks.
        self._pending = b""  # an incomplete word, key or list
        self._largest_elements = 0
        self._largest_shape = b""

    def feed(self, data: bytes) -> None:
        """Check the next chunk, of at most `GUARD_CHUNK_BYTES` on the event loop.

        Raises `InputMismatch` or `MalformedRequest`.
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
            if self._rules.has_tensors:
                self._check_guarded_keys(self._pending + text)

    @property
    def is_past_json(self) -> bool:
        return self._remaining_json_bytes == 0

    def skip(self, length: int) -> None:
        self._body_bytes += length

    def finish(self) -> None:
        """Check the shapes against the body's actual length. Raises `InputMismatch`."""
        if self._largest_elements > self._body_bytes:
            raise make_shape_error(self._largest_shape)

    def _remove_escapes(self, text: bytes) -> bytes:
        text = text.replace(b"\\\\", ESCAPE_FILLER)
        start = text.rfind(b"\\", 1 - MAX_ESCAPE_BYTES)
        is_partial = start >= 0 and text[start + 1 : start + 2] in (b"", b"u")
        self._partial_escape = text[start:] if is_partial else b""
        if is_partial:
            text = text[:start]
        if ESCAPED_LETTER.search(text):
            raise MalformedRequest(
                "the JSON contains plain letters as \\u escapes; write them unescaped"
            )
        return text.replace(b'\\"', ESCAPE_FILLER)

    # Structure: depth and keys.

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
        rules = self._rules
        self._key_count += key_count
        if self._key_count > rules.total_keys:
            raise MalformedRequest(f"the JSON has more than {rules.total_keys} keys")
        if self._key_count > rules.consecutive_keys:
            rows = marks.translate(BRACE_TABLE, b"[]").split(b"{")
            if max(len(rows[0]) + self._consecutive_keys, *map(len, rows)) > rules.consecutive_keys:
                raise MalformedRequest(
                    f"an object of the JSON has more than {rules.consecutive_keys} keys"
                )
        brace = max(marks.rfind(b"{"), marks.rfind(b"}"))
        self._consecutive_keys = (
            self._consecutive_keys + key_count if brace < 0 else marks.count(b":", brace)
        )

    def _check_key_lengths(self, parts: list[bytes], first: int) -> None:
        # A key is a string that a colon follows, which can be the first character of these parts.
        strings = parts[1 - first :: 2]
        earlier_bytes = self._open_string_bytes
        if earlier_bytes + max(map(len, strings), default=0) <= MAX_KEY_BYTES:
            return
        separators = parts[first::2]
        if first:
            # Zeros stand for the part of the string in earlier chunks.
            strings[0] += bytes(min(earlier_bytes, MAX_KEY_BYTES + 1))
        else:
            strings.insert(0, bytes(min(earlier_bytes, MAX_KEY_BYTES + 1)))
        for string, separator in zip(strings, separators, strict=False):
            if len(string) > MAX_KEY_BYTES and separator.lstrip(JSON_WHITESPACE).startswith(b":"):
                raise MalformedRequest(f"a key of the JSON is longer than {MAX_KEY_BYTES} bytes")

    def _measure_open_string(self, parts: list[bytes], first: int) -> int:
        """Return the length of the string that is open, or so far followed by whitespace only."""
        if (first + len(parts)) % 2:  # the chunk ends outside a string
            if parts[-1].strip(JSON_WHITESPACE):
                return 0
            parts = parts[:-1]
            if not parts:
                return self._open_string_bytes
        earlier_bytes = self._open_string_bytes if first and len(parts) == 1 else 0
        return earlier_bytes + len(parts[-1])

    # Shapes, and the use of classification and sequences.

    def _check_guarded_keys(self, text: bytes) -> None:
        if self._refuses_sequence and SEQUENCE_ID_KEY in text:
            raise InputMismatch(
                "the JSON of a sequence step is too large to be searched for the sequence; send its id in "
                "the header X-Sequence-ID as well, or the tensors as binary data"
            )
        self.has_classification = self.has_classification or uses_classification(text)
        for start, dims in find_shapes(text):
            if dims is None:
                self._pending = SHAPE_KEY + b":[" + text[start:]
                return
            elements = count_elements(dims, self._max_elements)
            if elements > self._largest_elements:
                self._largest_elements = elements
                self._largest_shape = dims
        self._pending = find_partial_key(text)


def check_complete_json(body: bytes, json_bytes: int | None, rules: JsonRules) -> bool:
    """Check a whole body of at most `GUARD_CHUNK_BYTES` like a `JsonGuard`, at less cost.

    Return whether the request uses classification. Raises `InputMismatch` or `MalformedRequest`.
    """
    if json_bytes is None:
        return check_json(body, len(body), rules)
    # The JSON before binary data is the same for all tensors of the same shapes.
    check = check_json_cached if json_bytes <= MAX_CACHED_JSON_BYTES else check_json
    return check(body[:json_bytes], len(body), rules)


def check_json(text: bytes, max_elements: int, rules: JsonRules) -> bool:
    if not is_within_limits(text, rules):
        guard = JsonGuard(max_elements, rules=rules)
        guard.feed(text)
        return guard.has_classification
    if not rules.has_tensors:
        return False
    for _, dims in find_shapes(text):
        if dims is not None:
            count_elements(dims, max_elements)
    return uses_classification(text)


check_json_cached = lru_cache(256)(check_json)


def uses_classification(text: bytes) -> bool:
    return CLASSIFICATION_NAME in text and CLASSIFICATION_KEY.search(text) is not None


def find_shapes(text: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Yield the start and content of each shape's list, which is None if the text ends before it does.

    Raises `MalformedRequest` for a shape that is too long.
    """
    for match in SHAPE_LIST.finditer(text) if SHAPE_KEY in text else ():
        start = match.end()
        end = text.find(b"]", start, start + MAX_SHAPE_BYTES)
        if end >= 0:
            yield start, text[start:end]
        elif len(text) - start < MAX_SHAPE_BYTES:
            yield start, None
            return
        else:
            raise MalformedRequest(f"a shape in the JSON is longer than {MAX_SHAPE_BYTES} bytes")


def count_elements(dims: bytes, max_elements: int) -> int:
    """Return the number of elements of a shape. Raises `InputMismatch` above the maximum."""
    sizes = [int(number[:20]) for number in SHAPE_NUMBER.findall(dims)]
    # A size of 0 means no elements, but the product of the others must not overflow either.
    is_empty = 0 in sizes
    limit = MAX_EMPTY_SHAPE_PRODUCT if is_empty else max_elements
    elements = 1
    for size in sizes:
        elements *= size or 1
        if elements > limit:
            raise make_shape_error(dims)
    return 0 if is_empty else elements


def is_within_limits(text: bytes, rules: JsonRules) -> bool:
    """Return whether JSON of so few brackets, colons and bytes cannot exceed a limit, whatever it means."""
    return (
        b"\\" not in text
        and text.count(b"[") + text.count(b"{") <= MAX_JSON_DEPTH
        and text.count(b":") <= rules.consecutive_keys
        and (len(text) <= MAX_KEY_BYTES or LONG_KEY.search(text) is None)
    )


def find_partial_key(text: bytes) -> bytes:
    """Return the part of a guarded key, without whitespace, with which the text ends."""
    if text.endswith(b"}"):  # as complete JSON does
        return b""
    stripped = text.rstrip(JSON_WHITESPACE)
    is_key = stripped.endswith(b":")
    if is_key:
        stripped = stripped[:-1].rstrip(JSON_WHITESPACE)
    for word in GUARDED_KEYS:
        if stripped.endswith(word):
            return word + b":" * is_key
    if len(stripped) < len(text):
        return b""
    start = text.rfind(b'"', 1 - MAX_GUARDED_KEY_BYTES)
    tail = text[start:] if start >= 0 else b""
    return tail if any(word.startswith(tail) for word in GUARDED_KEYS) else b""


def make_shape_error(dims: bytes) -> InputMismatch:
    shown = dims[:100].decode("latin-1")
    return InputMismatch(f"the shape [{shown}] has more elements than the body can hold")
