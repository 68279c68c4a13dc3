"""Forms: parsed alike in pieces of any size, and bounded in parts, headers and padding."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any

import httpx
import pytest

from gateway.errors import GatewayError, MalformedRequest, TooLarge
from gateway.tensors.multipart import PartReader, RawPart
from tests.support.hostile_files import FORM_TYPE, field, form, read_form


def parse(body: bytes, cuts: list[int] | None = None) -> list[RawPart]:
    """The parts of a body that comes in pieces."""
    reader = PartReader(FORM_TYPE, 128)
    parts: list[RawPart] = []
    for start, end in pairwise([0, *sorted(cuts or []), len(body)]):
        parts += reader.feed(body[start:end])
    reader.finish()
    return parts


SOUND = (
    (form(field(b"a"), field(b"b", "Y"), field(b"", "Z")), [b"a", b"b", b""]),
    (form(field(b"\r\n--\r\n\r\n")), [b"\r\n--\r\n\r\n"]),
    (form(field(b"\r\n--bold\r\n--b-x")), [b"\r\n--bold\r\n--b-x"]),
    (b"\r\n--b\r\n\r\nx\r\n--b--after\r\n--b\r\n", [b"x"]),
    (b"--b\r\n\r\nx\r\n--b--", [b"x"]),
)


def test_form_is_parsed_in_any_pieces(subtests: pytest.Subtests) -> None:
    for body, contents in SOUND:
        for cuts in ([], list(range(1, len(body))), [len(body) // 2]):
            with subtests.test(repr(body), pieces=len(cuts) + 1):
                assert [bytes(part.content) for part in parse(body, cuts)] == contents


def test_names_and_charsets_of_other_libraries_are_read() -> None:
    files: dict[str, Any] = {
        "é": ('ü".png', b"\0\xff\r\n", "image/png"),
        "text": (None, "hello ☕"),
        "latin": (None, "é".encode("latin-1"), 'text/plain; charset="iso-8859-1"'),
    }
    request = httpx.Request("POST", "http://here", files=files)
    payload = read_form(request.read(), request.headers["content-type"])
    values = {name: [part.value for part in parts] for name, parts in payload.parts.items()}
    assert values == {"é": [b"\0\xff\r\n"], "text": ["hello ☕"], "latin": ["é"]}


INVALID_PARTS = (
    (b"X: " + b"y" * 9000 + b"\r\n\r\n", "header size exceeded"),
    (b"X: y\r\n" * 17 + b"\r\n", "header count exceeded"),
    (b"no colon\r\n\r\n", "invalid character"),
    (b" folded: x\r\n\r\n", "invalid character"),
    (b"\r\nx", "has no name"),
    (b"Content-Disposition: form-data\r\n\r\nx", "has no name"),
    (b'Content-Disposition: form-data; name="\xff"\r\n\r\nx', "not valid UTF-8"),
)
INVALID_TYPES = (
    ("multipart/form-data", "has no boundary"),
    ('multipart/form-data; boundary=""', "has no boundary"),
    (f"multipart/form-data; boundary={'b' * 257}", "boundary is not valid"),
    ("multipart/form-data; boundary=other", "malformed"),
)
ENDLESS = (
    (b"--b\r\nX: ", b"y" * 1000),
    (b"--b\r\n", b"X: y\r\n" * 200),
    (b"", b"\r\n" * 500),
    (b"--b\r\n\r\n", b"\r\n--bX" * 200),
)


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_invalid_part_or_boundary_is_refused() -> None:
    for part, words in INVALID_PARTS:
        with pytest.raises(MalformedRequest, match=words):
            read_form(form(part))
    for content_type, words in INVALID_TYPES:
        with pytest.raises(MalformedRequest, match=words):
            read_form(form(field(b"x")), content_type)
    with pytest.raises(MalformedRequest, match="ends before its closing boundary"):
        read_form(form(field(b"x"))[:-4])


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_limits_of_a_form_apply_while_it_arrives() -> None:
    for beginning, rest in ENDLESS:
        reader = PartReader(FORM_TYPE, 128)
        fed = 0
        with suppress(GatewayError):
            for piece in (beginning, *[rest] * 100):
                fed += len(piece)
                reader.feed(piece)
        assert fed < 10_000
    with pytest.raises(TooLarge, match="more than 3 parts"):
        PartReader(FORM_TYPE, 3).feed(form(*[field(b"x")] * 4))
