"""Bytes in a text: base64 and data: URIs, and never at more cost than their length."""

from __future__ import annotations

import base64
import tracemalloc
from contextlib import suppress

import pytest

from gateway.errors import MalformedRequest
from gateway.tensors.json_body import decode_base64_text

MIB = 1 << 20
INVALID_BASE64 = (
    "a", "aaaaa", "a===", "=aaa", "aa=a", "aa==aaaa", "aaaa====", "aa*a", "aaaa\0", "aaaa****", "☕" * 9,
)  # fmt: skip


def test_base64_is_decoded_in_both_alphabets_with_and_without_padding() -> None:
    raw = bytes(range(256)) * 4
    for length in (*range(20), 100, 1000):
        content = raw[-length:] if length else b""
        for encode in (base64.standard_b64encode, base64.urlsafe_b64encode):
            text = encode(content).decode()
            for variant in (text, text.rstrip("="), f" {text[:5]}\r\n{text[5:]}\n"):
                assert decode_base64_text(variant) == content
                assert decode_base64_text(f"data:image/png;base64,{variant}") == content
    assert decode_base64_text("DATA:a/b;c=d,%41%4%zé") == "A%4%zé".encode()


def test_invalid_base64_or_data_uri_is_malformed() -> None:
    for text in INVALID_BASE64:
        for value in (text, f"data:;base64,{text}"):
            with pytest.raises(MalformedRequest, match="not valid base64"):
                decode_base64_text(value)
    for text in ("data:", "data:image/png;base64", "data:" + ";" * 5000 + ","):
        with pytest.raises(MalformedRequest, match="no comma in its first 1024 characters"):
            decode_base64_text(text)
    with pytest.raises(MalformedRequest, match="too long without base64"):
        decode_base64_text("data:," + "%41" * (MIB // 3))


def test_memory_is_a_small_multiple_of_the_text() -> None:
    for text, most in (("data:" + ";" * (8 * MIB), MIB), ("a " * (4 * MIB), 20 * MIB)):
        tracemalloc.start()
        with suppress(MalformedRequest):
            decode_base64_text(text)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < most
