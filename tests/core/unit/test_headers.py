"""Header values with parameters, the choice of a response's type, and how long these headers may be."""

from __future__ import annotations

import pytest

from gateway.errors import MalformedRequest, UnsupportedBody
from gateway.headers import (
    MAX_ACCEPT_CHARS,
    MAX_CONTENT_TYPE_CHARS,
    choose_media_type,
    list_accepted_types,
    parse_accept,
    parse_content_type,
)

VALUES: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("", "", {}),
    (" Text/Plain ", "text/plain", {}),
    ("text/plain;charset=utf-8;", "text/plain", {"charset": "utf-8"}),
    ('text/plain; Charset = "utf-8" ; a=b', "text/plain", {"charset": "utf-8", "a": "b"}),
    (r'a/b; c="d;e=f\"g"; h=""', "a/b", {"c": 'd;e=f"g', "h": ""}),
    (r'form-data; filename="C:\dir\a.png"', "form-data", {"filename": "a.png"}),
    ("a/b; c=d; c=e; ;; =f", "a/b", {"c": "e"}),
)


def test_header_is_parsed_as_value_and_parameters() -> None:
    for header, value, parameters in VALUES:
        assert parse_content_type(header) == (value, parameters)


OFFERED = (
    "application/json",
    "application/x-npz",
    "application/x-npy",
    "application/octet-stream",
    "image/png",
)
ACCEPT = (
    ("", "application/json"),
    (", ,", "application/json"),
    ("text/html, */*;q=0.1", "application/json"),
    ("application/*", "application/json"),
    ("application/x-npz, application/json", "application/x-npz"),
    ("application/json, application/x-npz", "application/json"),
    ("application/json;q=0.5, application/x-npz;q=0.9", "application/x-npz"),
    ("*/*, application/json;q=0", "application/x-npz"),
    ("*/*, application/json;q=0, application/x-npz;q=0.0", "application/x-npy"),
    ("application/json;q=0.1, */*;q=0.5", "application/x-npz"),
    ("application/*;q=0, image/*", "image/png"),
    ("image/png;q=soon", "image/png"),
    ("application/*;q=0, text/html", ""),
    ("*/*;q=0", ""),
)


def test_accept_selects_by_the_most_specific_range(subtests: pytest.Subtests) -> None:
    for accept, content_type in ACCEPT:
        with subtests.test(accept):
            assert choose_media_type(accept, OFFERED) == content_type
    preferred = list_accepted_types("a/a;q=0.5, b/b, c/c;q=0, d/d, e/e;q=0.9" + ", " * 100)
    assert preferred == ["b/b", "d/d", "e/e", "a/a"]
    for quality in ("1" * 2000, "nan", "inf", "-1", "1e999", '"', ""):
        list_accepted_types(f"a/a;q={quality}, b/b;q=0.5")


def test_lengths_of_content_type_and_accept_are_limited() -> None:
    longest = "text/plain; a=".ljust(MAX_CONTENT_TYPE_CHARS, "b")
    assert parse_content_type(longest)[0] == "text/plain"
    with pytest.raises(UnsupportedBody, match="send a Content-Type of at most 1024 bytes"):
        parse_content_type(longest + "b")
    with pytest.raises(MalformedRequest, match="longer than 2048 characters"):
        parse_accept("a" * (MAX_ACCEPT_CHARS + 1))
