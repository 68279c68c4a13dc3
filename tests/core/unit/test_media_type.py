"""Header values with parameters, by RFC 9110; and how long they may be."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import MalformedRequest, UnsupportedBody
from gateway.tensors.media_type import (
    MAX_CONTENT_TYPE_CHARS,
    parse_content_type,
    parse_header_parameters,
)
from gateway.tensors.outputs import MAX_ACCEPT_CHARS, list_accepted_types, parse_accept

TOKENS = st.text(string.ascii_lowercase + string.digits + "-._", min_size=1, max_size=10)


@pytest.mark.parametrize(
    ("header", "value", "parameters"),
    [
        ("", "", {}),
        ("text/plain", "text/plain", {}),
        (" Text/Plain ", "text/plain", {}),
        ("text/plain; charset=UTF-8", "text/plain", {"charset": "UTF-8"}),
        ("text/plain;charset=utf-8;", "text/plain", {"charset": "utf-8"}),
        ('text/plain; Charset = "utf-8" ; a=b', "text/plain", {"charset": "utf-8", "a": "b"}),
        ('a/b; c="d;e=f"; g=h', "a/b", {"c": "d;e=f", "g": "h"}),
        (r'a/b; c="d\"e\\f"', "a/b", {"c": r'd"e\f'}),
        (r'form-data; filename="C:\dir\a.png"', "form-data", {"filename": r"C:\dir\a.png"}),
        ('a/b; c="unclosed; d=e', "a/b", {"c": "unclosed; d=e"}),
        ('a/b; c="d" e; f=g', "a/b", {"c": "d", "f": "g"}),
        ("a/b; c; =d; ;; e=", "a/b", {"c": "", "e": ""}),
        ("a/b; c=d; c=e", "a/b", {"c": "e"}),
        ('a/b; c=""', "a/b", {"c": ""}),
        ('a/b; c="ends with a backslash\\', "a/b", {"c": "ends with a backslash"}),
        (";a=b", "", {"a": "b"}),
    ],
)
def test_header_is_parsed_as_value_and_parameters(
    header: str, value: str, parameters: dict[str, str]
) -> None:
    assert parse_header_parameters(header) == (value, parameters)


@given(TOKENS, st.dictionaries(TOKENS, st.text(max_size=20), max_size=5))
def test_quoted_parameters_are_read_back(value: str, parameters: dict[str, str]) -> None:
    def quote(text: str) -> str:
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'

    header = "; ".join([value, *(f"{name}={quote(text)}" for name, text in parameters.items())])
    assert parse_header_parameters(header) == (value, parameters)


@given(st.text(alphabet='ab;="\\ ,/\t', max_size=60))
def test_drawn_header_is_parsed(header: str) -> None:
    value, parameters = parse_header_parameters(header)
    assert ";" not in value
    assert all(parameters)


def test_lengths_of_content_type_and_accept_are_limited() -> None:
    longest = "text/plain; a=".ljust(MAX_CONTENT_TYPE_CHARS, "b")
    assert parse_content_type(longest)[0] == "text/plain"
    with pytest.raises(UnsupportedBody, match="send a Content-Type of at most 1024 bytes"):
        parse_content_type(longest + "b")
    assert list_accepted_types("a/a;q=0.1, b/b" + ", " * 100) == ["b/b", "a/a"]
    assert len(parse_accept("a," * (MAX_ACCEPT_CHARS // 2))) == MAX_ACCEPT_CHARS // 2
    with pytest.raises(MalformedRequest, match="longer than 2048 characters"):
        parse_accept("a" * (MAX_ACCEPT_CHARS + 1))


def test_invalid_quality_in_accept_raises_nothing() -> None:
    for quality in ("1" * 2000, "nan", "inf", "-1", "1e999", '"', ""):
        list_accepted_types(f"a/a;q={quality}, b/b;q=0.5")
