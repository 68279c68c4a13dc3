"""The screening of passing JSON finds what a plain reading finds, however the bytes are cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.errors import GatewayError, InputMismatch, MalformedRequest
from gateway.triton.json_guard import (
    ESCAPED_LETTER,
    GENERATE_RULES,
    GUARD_CHUNK_BYTES,
    INFER_RULES,
    MAX_EMPTY_SHAPE_PRODUCT,
    MAX_JSON_DEPTH,
    MAX_KEY_BYTES,
    MAX_SHAPE_BYTES,
    JsonGuard,
    JsonRules,
    check_complete_json,
)
from tests.support.linearity import assert_linear, cpu_s

FEW = JsonRules(total_keys=8, consecutive_keys=4)
ROOM = 1000


def verdict(pieces: Iterable[bytes], keys: JsonRules = FEW, room: int = ROOM) -> str:
    """«refused», or «passed» and whether classes are asked for."""
    screening = JsonGuard(room, rules=keys)
    try:
        for piece in pieces:
            screening.feed(piece)
    except (InputMismatch, MalformedRequest):
        return "refused"
    return "classes" if screening.has_classification else "passed"


def verdict_of_complete(body: bytes, json_bytes: int | None = None) -> str:
    try:
        classes = check_complete_json(body, json_bytes, FEW)
    except (InputMismatch, MalformedRequest):
        return "refused"
    return "classes" if classes else "passed"


def cut(body: bytes, cuts: Iterable[int]) -> list[bytes]:
    ends = sorted({min(each, len(body)) for each in cuts} | {len(body)})
    return [body[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def expected(body: bytes, keys: JsonRules = FEW, room: int = ROOM) -> str:
    """The verdict of a reading byte by byte, which has all of the body at once."""
    text = blanked(body)
    if ESCAPED_LETTER.search(text) or is_too_structured(text, keys) or has_bad_shape(text, room):
        return "refused"
    return "classes" if re.search(rb'"classification"[ \t\r\n]*:', text) else "passed"


def blanked(body: bytes) -> bytes:
    """Remove escaped backslashes and quotes."""
    text = bytearray()
    position = 0
    while position < len(body):
        pair = body[position : position + 2]
        if pair in (rb"\\", rb"\""):
            text += b"\0\0"
            position += 2
        else:
            text.append(body[position])
            position += 1
    return bytes(text)


def is_too_structured(text: bytes, keys: JsonRules) -> bool:
    """Too deep, too many keys in all or in a row, or too long a key."""
    depth = deepest = count = row = longest_row = 0
    key = string = 0  # bytes of the last string while only whitespace follows; of the open string
    in_string = False
    for character in text:
        byte = bytes([character])
        if byte == b'"':
            in_string = not in_string
            key, string = (0, 0) if in_string else (string, 0)
        elif in_string:
            string += 1
        else:
            depth += (byte in b"[{") - (byte in b"]}")
            deepest = max(deepest, depth)
            row = 0 if byte in b"{}" else row + (byte == b":")
            longest_row = max(longest_row, row)
            count += byte == b":"
            if byte == b":" and key > MAX_KEY_BYTES:
                return True
            if byte not in b" \t\r\n":
                key = 0
    return (
        deepest > MAX_JSON_DEPTH or count > keys.total_keys or longest_row > keys.consecutive_keys
    )


def has_bad_shape(text: bytes, room: int) -> bool:
    position = 0
    while found := re.compile(rb'"shape"[ \t\r\n]*:[ \t\r\n]*\[').search(text, position):
        dims, bracket, rest = text[found.end() :].partition(b"]")
        if not bracket or len(dims) >= MAX_SHAPE_BYTES:
            return len(dims) + len(rest) >= MAX_SHAPE_BYTES
        sizes = [int(number[:20]) for number in re.findall(rb"[0-9]+", dims)]
        elements = 1
        for size in sizes:
            elements *= size or 1
        if elements > (MAX_EMPTY_SHAPE_PRODUCT if 0 in sizes else room):
            return True
        position = found.end()
    return False


WORDS = [
    b'"', b'"', b"\\", b"[", b"]", b"{", b"}", b":", b",", b" ", b"\n", b"\0", b"1", b"a", b"/",
    b'"shape"', b'"shape":[', b'"shape" : [2,3]', b"shape", b'"sha', b'pe"', b"[1001]", b"[0,2]",
    b"[0,9999999999999]", b'"classification"', b'"classification":', b"u0073", b"\\u0073", b"\\u00",
    b'\\"', b"\\\\", b'"k":1,', b'{"k":', b"9" * 30, b" " * 300, b"x" * 255, b"x" * 256, b"x" * 257,
    b"[" * 1023, b"1," * 2046, b"1," * 2048, b"\xef\xbb\xbf", b"\xff\xfe", b"{\0}\0",
]  # fmt: skip
CUTS = st.lists(st.integers(0, 9000), max_size=5)


@pytest.mark.long
@pytest.mark.fault("250 KiB made to be expensive to inspect")
@given(st.lists(st.sampled_from(WORDS), max_size=12).map(b"".join), CUTS)
@example(b'"shape":[' + b"1," * 2047 + b"1]", [4096])
@example(b'"shape":[' + b"1," * 2048 + b"]", [9, 4105])
@example(b'"' + b"x" * 257 + b'"' + b" " * 300 + b":", [259, 400])
@example(b'{"a":1,"b":2,"c":3}{"a":1,"b":2,"c":3}', [1, 19, 20])
@example(b'{"a":1,"b":2,"c":3,"d":4' + b',"e":5', [24])
@example(b'"\\\\\\"shape":[9999]"', [3, 4])
def test_drawn_body_has_the_verdict_of_a_plain_reading(body: bytes, cuts: list[int]) -> None:
    right = expected(body)
    assert verdict([body]) == right
    assert verdict_of_complete(body) == expected(body, room=len(body))
    for binary in (b"[" * 1000, b"", b"[" * 1000):  # the JSON is the same, but not its room
        room = len(body + binary)
        assert verdict_of_complete(body + binary, len(body)) == expected(body, room=room)
    assert verdict(cut(body, cuts)) == right
    if len(body) < 2000:
        assert verdict(cut(body, range(len(body)))) == right


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.sampled_from(["shape", "classification"]), inner)
    ),
    max_leaves=30,
)


@given(JSON, CUTS, st.booleans())
def test_keys_and_depth_are_those_of_a_parser(
    document: object, cuts: list[int], ascii_only: bool
) -> None:
    body = json.dumps(document, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    if (
        verdict([body], INFER_RULES, room=1 << 62) == "refused"
    ):  # such as a list of texts as a shape
        assert b'"shape"' in body or b"\\u00" in body
        return
    count = keys_of(document)
    depth = depth_of(document)
    assert verdict(cut(body, cuts), JsonRules(count, count), 1 << 62) != "refused"
    if count:
        assert verdict(cut(body, cuts), JsonRules(count - 1, count), 1 << 62) == "refused"
    deep = b"[" * (MAX_JSON_DEPTH - depth) + body
    assert verdict(cut(deep, cuts), INFER_RULES, 1 << 62) != "refused"
    assert verdict(cut(b"[" + deep, cuts), INFER_RULES, 1 << 62) == "refused"


def children(document: object) -> list[object]:
    if isinstance(document, dict):
        return list(document.values())
    return document if isinstance(document, list) else []


def keys_of(document: object) -> int:
    own = len(document) if isinstance(document, dict) else 0
    return own + sum(map(keys_of, children(document)))


def depth_of(document: object) -> int:
    if isinstance(document, dict | list):
        return 1 + max(map(depth_of, children(document)), default=0)
    return 0


# What the limits let through, and what they do not.


def body_with(count: int, in_a_row: int) -> bytes:
    """Build a body with so many keys, so many of them in each object of a list."""
    objects = [
        {f"k{key}": 1 for key in range(start, min(start + in_a_row, count))}
        for start in range(0, count, in_a_row)
    ]
    return json.dumps(objects).encode()


@pytest.mark.parametrize("limits", [INFER_RULES, GENERATE_RULES])
@pytest.mark.parametrize("size", [7, 1000, 1 << 20])
def test_number_of_keys_is_limited(limits: JsonRules, size: int) -> None:
    rows = min(limits.consecutive_keys, limits.total_keys)
    for count, in_a_row, right in (
        (limits.total_keys, rows, "passed"),
        (limits.total_keys + 1, rows, "refused"),
        (limits.consecutive_keys + 1, limits.consecutive_keys + 1, "refused"),
    ):
        body = body_with(count, in_a_row)
        assert verdict(cut(body, range(0, len(body), size)), limits) == right


@pytest.mark.parametrize("length", [MAX_KEY_BYTES, MAX_KEY_BYTES + 1])
@pytest.mark.parametrize("value", ["1", '"' + "y" * 5000 + '"'])
def test_length_of_a_key_is_limited(length: int, value: str) -> None:
    body = f'{{"a": "{"z" * 5000}", "{"x" * length}" : {value}, "b": ["{"w" * 5000}"]}}'.encode()
    right = "passed" if length == MAX_KEY_BYTES else "refused"
    for size in (1, 7, 300, 5000, 1 << 20):
        assert verdict(cut(body, range(0, len(body), size))) == right


def test_elements_of_a_chunked_body_are_checked_at_its_end() -> None:
    body = b'{"shape":[500],"data":[1,2]}'
    screening = JsonGuard(1000)
    screening.feed(body)
    with pytest.raises(InputMismatch, match=r"the shape \[500\] has more elements"):
        screening.finish()
    screening = JsonGuard(1000)
    screening.feed(body)
    screening.feed(b" " * 500)
    screening.finish()


def test_binary_part_is_counted_and_not_parsed() -> None:
    head = b'{"shape":[500]}'
    screening = JsonGuard(1000, len(head))
    screening.feed(head + b'"shape":[9999999],"\\u0073' + b"[" * 2000)
    assert screening.is_past_json
    screening.skip(500)
    screening.finish()


# Cost.

HOSTILE = {
    "shapes without an end": b'"shape":[',
    "shapes in strings": b'"shape":["a]b",',
    "short shapes": b'"shape":[1],',
    "shapes that are none": b'"shape","shape":1,',
    "quotes": b'"',
    "backslashes": b"\\",
    "escaped quotes": b'\\"',
    "escapes": b"\\u0000",
    "half escapes": b"\\u00",
    "spaces": b" ",
    "spaces after a word": b'"shape"' + b" " * 500,
    "brackets": b"[",
    "brackets in pairs": b"[]",
    "braces": b"{}",
    "keys": b'"k":1,',
    "colons": b":",
    "long keys": b'"' + b"x" * 300 + b'"' + b" " * 300,
    "long strings": b'"' + b"x" * 300 + b'",',
    "digits": b"9",
    "half a word": b'"sha',
    "words": b'"classification"',
}


def prepare_check(start: bytes, unit: bytes, size: int) -> Callable[[], None]:
    body = start + unit * (size // len(unit))

    def check() -> None:
        with suppress(GatewayError):
            check_complete_json(body, None, INFER_RULES)

    return check


def seconds(body: bytes, piece_bytes: int, enough_s: float = 0.0) -> float:
    """The least CPU time of several rounds, as long as it is not refused."""

    def screen() -> None:
        guard = JsonGuard(1 << 62, rules=JsonRules(1 << 60, 1 << 60))
        with suppress(GatewayError):
            for start in range(0, len(body), piece_bytes):
                guard.feed(body[start : start + piece_bytes])

    return cpu_s(screen, 3, enough_s)


@pytest.mark.long
@pytest.mark.fault("250 KiB made to be expensive to inspect")
@pytest.mark.parametrize(
    "piece_bytes", [GUARD_CHUNK_BYTES, 6, 1 << 30], ids=["pieces", "six", "whole"]
)
@pytest.mark.parametrize("start", [b"", b'"', b'"a'], ids=["", "a quote", "a string"])
def test_cost_of_screening_is_linear(start: bytes, piece_bytes: int) -> None:
    """Eight times the bytes cost eight times the time, and not sixty-four times."""
    base = 1 << 12 if piece_bytes == 6 else 1 << 15
    for name, unit in HOSTILE.items():
        few, many = (start + unit * (size // len(unit)) for size in (base, 8 * base))
        small = seconds(few, piece_bytes)
        large = seconds(many, piece_bytes, enough_s=12 * small)
        assert_linear(partial(prepare_check, start, unit), 1 << 12)
        assert large < 24 * small + 2e-3, (name, small, large)
