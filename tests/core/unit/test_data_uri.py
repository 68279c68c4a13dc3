"""Bytes in a text: base64 and data: URIs, in pieces as in one, and never at more cost than their length."""

from __future__ import annotations

import base64
import tracemalloc
from contextlib import suppress
from urllib.parse import quote, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import MalformedRequest
from gateway.tensors import data_uri
from gateway.tensors.data_uri import decode_base64_text

MIB = 1 << 20


@pytest.fixture(params=[7, 8, 1 << 20])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_uri, "CHUNK_CHARS", request.param)


@pytest.mark.parametrize("length", [*range(20), 100, 1000])
@pytest.mark.usefixtures("piece")
def test_base64_is_read_in_either_alphabet_with_and_without_padding(length: int) -> None:
    raw = bytes(range(256)) * 4
    for encode in (base64.standard_b64encode, base64.urlsafe_b64encode):
        text = encode(raw[-length:] if length else b"").decode()
        for given_text in (text, text.rstrip("="), f" {text[:5]}\r\n{text[5:]}\n"):
            assert decode_base64_text(given_text) == (raw[-length:] if length else b"")
            assert decode_base64_text(f"data:image/png;base64,{given_text}") == decode_base64_text(
                text
            )


@pytest.mark.parametrize(
    "text",
    ["a", "aaaaa", "a===", "=aaa", "aa=a", "aa==aaaa", "aaaa====", "aa*a", "é", "aaaa\0", "☕" * 9,
     "aaaaaaa=aaaaaaaa", "=" * 20],
)  # fmt: skip
@pytest.mark.usefixtures("piece")
def test_what_is_no_base64_is_malformed(text: str) -> None:
    for value in (text, f"data:;base64,{text}"):
        with pytest.raises(MalformedRequest, match="not valid base64"):
            decode_base64_text(value)


@given(st.text(alphabet="%4aAfFg\0é☕", max_size=60))
def test_escapes_are_read_as_the_library_reads_them(text: str) -> None:
    assert decode_base64_text(f"data:,{text}") == unquote_to_bytes(text)


@given(st.binary(max_size=200))
@pytest.mark.usefixtures("piece")
@pytest.mark.filterwarnings("ignore")
def test_escaped_bytes_are_read_back(raw: bytes) -> None:
    assert decode_base64_text(f"DATA:a/b;c=d,{quote(raw)}") == raw


@pytest.mark.parametrize(
    "text", ["data:", "data:;;;", "data:image/png;base64", "data:" + ";" * 5000 + ","]
)
def test_a_data_uri_without_a_comma_near_its_start_has_no_data(text: str) -> None:
    with pytest.raises(MalformedRequest, match="no comma in its first 1024 characters"):
        decode_base64_text(text)


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("data:" + ";" * (8 * MIB), 1 * MIB),
        ("a " * (4 * MIB), 20 * MIB),
        ("data:," + "%41" * (3 * MIB), 30 * MIB),
        ("data:," + "%4" * (4 * MIB), 40 * MIB),
    ],
    ids=["no comma", "blanks", "escapes", "half escapes"],
)
def test_the_memory_is_a_small_multiple_of_the_text(text: str, most: int) -> None:
    tracemalloc.start()
    with suppress(MalformedRequest):
        decode_base64_text(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < most
