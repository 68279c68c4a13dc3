"""Bytes in a text: base64 and data: URIs, and never at more cost than their length."""

from __future__ import annotations

import base64
import tracemalloc
from contextlib import suppress
from urllib.parse import quote, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import MalformedRequest
from gateway.tensors.json_body import decode_base64_text

MIB = 1 << 20


def test_base64_is_decoded_in_both_alphabets_with_and_without_padding() -> None:
    raw = bytes(range(256)) * 4
    for length in (*range(20), 100, 1000):
        content = raw[-length:] if length else b""
        for encode in (base64.standard_b64encode, base64.urlsafe_b64encode):
            text = encode(content).decode()
            for variant in (text, text.rstrip("="), f" {text[:5]}\r\n{text[5:]}\n"):
                assert decode_base64_text(variant) == content
                assert decode_base64_text(f"data:image/png;base64,{variant}") == content


def test_invalid_base64_or_data_uri_is_malformed() -> None:
    for text in (
        *("a", "aaaaa", "a===", "=aaa", "aa=a", "aa==aaaa", "aaaa====", "aa*a", "é", "aaaa\0"),
        *("aaaa****", "☕" * 9, "aaaaaaa=aaaaaaaa", "=" * 20),
    ):
        for value in (text, f"data:;base64,{text}"):
            with pytest.raises(MalformedRequest, match="not valid base64"):
                decode_base64_text(value)
    for text in ("data:", "data:;;;", "data:image/png;base64", "data:" + ";" * 5000 + ","):
        with pytest.raises(MalformedRequest, match="no comma in its first 1024 characters"):
            decode_base64_text(text)
    with pytest.raises(MalformedRequest, match="too long without base64"):
        decode_base64_text("data:," + "%41" * (MIB // 3))


@given(st.text(alphabet="%4aAfFg\0é☕", max_size=60))
def test_escapes_are_decoded_like_the_standard_library(text: str) -> None:
    assert decode_base64_text(f"data:,{text}") == unquote_to_bytes(text)


@given(st.binary(max_size=200))
@pytest.mark.filterwarnings("ignore")
def test_escaped_bytes_are_read_back(raw: bytes) -> None:
    assert decode_base64_text(f"DATA:a/b;c=d,{quote(raw)}") == raw


@pytest.mark.parametrize(
    ("text", "most"),
    [("data:" + ";" * (8 * MIB), 1 * MIB), ("a " * (4 * MIB), 20 * MIB)],
    ids=["no comma", "blanks"],
)
def test_memory_is_a_small_multiple_of_the_text(text: str, most: int) -> None:
    tracemalloc.start()
    with suppress(MalformedRequest):
        decode_base64_text(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < most
