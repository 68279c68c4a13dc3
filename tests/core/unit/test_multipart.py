"""Forms: parsed alike in pieces of any size, and bounded in parts, headers and padding."""

from __future__ import annotations

from contextlib import suppress
from email.message import EmailMessage
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError, MalformedRequest, TooLarge
from gateway.tensors.inputs import read_payload
from gateway.tensors.multipart import FormReader, PartReader, RawPart
from gateway.tensors.payload import PayloadLimits
from tests.support.hostile_files import field, form

TYPE = "multipart/form-data; boundary=b"


def parse(body: bytes, cuts: list[int] | None = None) -> list[RawPart]:
    """The parts of a body that comes in pieces."""
    reader = PartReader(TYPE, 128)
    parts: list[RawPart] = []
    for start, end in pairwise([0, *sorted(cuts or []), len(body)]):
        parts += reader.feed(body[start:end])
    reader.finish()
    return parts


SOUND = {
    "a field": (form(field(b"hello")), [b"hello"]),
    "several": (form(field(b"a"), field(b"b", "Y"), field(b"", "Z")), [b"a", b"b", b""]),
    "line ends": (form(field(b"\r\n--\r\n\r\n")), [b"\r\n--\r\n\r\n"]),
    "almost a delimiter": (form(field(b"\r\n--bold\r\n--b-x")), [b"\r\n--bold\r\n--b-x"]),
    "an epilogue": (b"\r\n--b\r\n\r\nx\r\n--b--after\r\n--b\r\n", [b"x"]),
    "no header": (b"--b\r\n\r\nx\r\n--b--", [b"x"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_form_is_parsed_as_its_parts(name: str) -> None:
    body, contents = SOUND[name]
    assert [bytes(part.content) for part in parse(body)] == contents
    one_by_one = parse(body, list(range(1, len(body))))
    assert [bytes(part.content) for part in one_by_one] == contents


@given(st.lists(st.binary(max_size=300), max_size=5), st.lists(st.integers(0, 1500), max_size=20))
def test_drawn_form_is_parsed_in_any_pieces(contents: list[bytes], cuts: list[int]) -> None:
    body = form(*map(field, contents))
    if any(b"\r\n--b" in b"\r\n" + content for content in contents):
        return
    parts = parse(body, [cut for cut in cuts if cut <= len(body)])
    assert [bytes(part.content) for part in parts] == contents


def test_forms_of_other_libraries_are_read() -> None:
    files: dict[str, Any] = {
        "é": ('ü".png', b"\0\xff\r\n", "image/png"),
        "text": (None, "hello ☕"),
    }
    request = httpx.Request("POST", "http://here", files=files)
    payload = read_payload(request.read(), request.headers["content-type"], PayloadLimits())
    assert [part.value for part in payload.parts["é"]] == [b"\0\xff\r\n"]
    assert payload.parts["text"][0].value == "hello ☕"
    part = EmailMessage()
    part["Content-Disposition"] = 'form-data; name="X"'
    part["Content-Type"] = 'text/plain; charset="iso-8859-1"'
    head = part.as_bytes().replace(b"\n", b"\r\n")
    payload = read_payload(form(head + "é".encode("latin-1")), TYPE, PayloadLimits())
    assert payload.parts["X"][0].value == "é"


INVALID_PARTS: tuple[tuple[bytes, type[GatewayError], str], ...] = (
    (b"X: " + b"y" * 9000 + b"\r\n\r\n", MalformedRequest, "header size exceeded"),
    (b"X: y\r\n" * 17 + b"\r\n", MalformedRequest, "header count exceeded"),
    (b"no colon\r\n\r\n", MalformedRequest, "invalid character"),
    (b" folded: x\r\n\r\n", MalformedRequest, "invalid character"),
    (b"\r\nx", MalformedRequest, "has no name"),
    (b"Content-Disposition: form-data\r\n\r\nx", MalformedRequest, "has no name"),
    (
        b'Content-Disposition: form-data; name="\xff"\r\n\r\nx',
        MalformedRequest,
        "not valid UTF-8",
    ),
)
INVALID_TYPES = (
    ("multipart/form-data", "has no boundary"),
    ('multipart/form-data; boundary=""', "has no boundary"),
    (f"multipart/form-data; boundary={'b' * 257}", "boundary is not valid"),
    ("multipart/form-data; boundary=other", "malformed"),
)


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_invalid_part_or_boundary_is_refused() -> None:
    for part, error, words in INVALID_PARTS:
        with pytest.raises(error, match=words):
            read_payload(form(part), TYPE, PayloadLimits())
    for content_type, words in INVALID_TYPES:
        with pytest.raises(MalformedRequest, match=words):
            read_payload(form(field(b"x")), content_type, PayloadLimits())


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_limits_of_a_form_apply_while_it_arrives() -> None:
    endless = {
        b"--b\r\nX: ": b"y" * 1000,
        b"--b\r\n": b"X: y\r\n" * 200,
        b"": b"\r\n" * 500,
        b"--b\r\n\r\n": b"\r\n--bX" * 200,
    }
    for beginning, rest in endless.items():
        reader = PartReader(TYPE, 128)
        fed = 0
        with suppress(GatewayError):
            for piece in (beginning, *[rest] * 100):
                fed += len(piece)
                reader.feed(piece)
        assert fed < 10_000
    limited = FormReader(TYPE, PayloadLimits(max_parts=3))
    with pytest.raises(TooLarge, match="more than 3 parts"):
        limited.feed(form(*[field(b"x")] * 4))


@given(st.text(alphabet='b-\r\n \t:X;"=', max_size=200))
def test_drawn_body_is_parsed_or_refused_in_any_pieces(body: str) -> None:
    def read(cuts: list[int]) -> list[bytes] | type[GatewayError]:
        try:
            return [part.content for part in parse(body.encode(), cuts)]
        except GatewayError as exc:
            return type(exc)

    assert read(list(range(1, len(body)))) == read([])
