"""A decoder for base64 (RFC 4648, section 4, and the URL-safe alphabet) and `data:` URIs (RFC 2397).

The cost is linear in the length. Long strings are decoded in chunks, because a call of the C decoder holds
the GIL until it returns.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Final

import numpy as np

from gateway.errors import MalformedRequest

# The media type before the comma of a data: URI is much shorter than this.
MAX_DATA_URI_PREFIX_CHARS: Final = 1024
CHUNK_CHARS: Final = 1 << 20
STANDARD_ALPHABET: Final = bytes.maketrans(b"-_", b"+/")
BASE64_WHITESPACE: Final = b" \t\n\r\x0b\x0c"
PERCENT_SIGN: Final = ord("%")
NOT_A_HEX_DIGIT: Final = 255
HEX_DIGITS: Final = np.full(256, NOT_A_HEX_DIGIT, np.uint8)  # value by character code
for digit in "0123456789abcdefABCDEF":
    HEX_DIGITS[ord(digit)] = int(digit, 16)


def is_data_uri(text: str) -> bool:
    return text[:5].lower() == "data:"


def decode_base64_text(text: str) -> bytes:
    """Return the decoded bytes of base64 or of a `data:` URI. Raises `MalformedRequest`."""
    if not is_data_uri(text):
        return b"".join(iter_base64_chunks(text, 0))
    comma = text.find(",", 0, MAX_DATA_URI_PREFIX_CHARS)
    if comma < 0:
        raise MalformedRequest(
            f"the data: URI has no comma in its first {MAX_DATA_URI_PREFIX_CHARS} characters"
        )
    is_base64 = text[:comma].lower().endswith(";base64")
    decode = iter_base64_chunks if is_base64 else iter_percent_chunks
    return b"".join(decode(text, comma + 1))


def iter_base64_chunks(text: str, start: int) -> Iterator[bytes]:
    # Whitespace is skipped, and padding may be missing.
    end = max(start, len(text.rstrip("= \t\n\r\x0b\x0c")))
    padding = text.count("=", end)
    rest = b""
    try:
        for begin in range(start, end, CHUNK_CHARS):
            raw = text[begin : min(begin + CHUNK_CHARS, end)].encode("ascii")
            digits = rest + raw.translate(STANDARD_ALPHABET, BASE64_WHITESPACE)
            if b"=" in digits:
                raise ValueError("padding before the end")
            whole = len(digits) // 4 * 4
            yield base64.b64decode(digits[:whole], validate=True)
            rest = digits[whole:]
        if padding > -len(rest) % 4:
            raise ValueError("too much padding")
        yield base64.b64decode(rest + b"=" * (-len(rest) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise MalformedRequest('the value of "b64" is not valid base64') from None


def iter_percent_chunks(text: str, start: int) -> Iterator[bytes]:
    while start < len(text):
        end = start + CHUNK_CHARS
        if end < len(text) and (cut := text.rfind("%", end - 2, end)) > 0:
            end = cut  # an escape such as %41 must not be split
        yield percent_decode(text[start:end].encode())
        start = end


def percent_decode(encoded: bytes) -> bytes:
    if b"%" not in encoded:
        return encoded
    characters = np.frombuffer(encoded, np.uint8)
    starts = np.flatnonzero(characters[:-2] == PERCENT_SIGN)
    high = HEX_DIGITS[characters[starts + 1]]
    low = HEX_DIGITS[characters[starts + 2]]
    are_escapes = (high != NOT_A_HEX_DIGIT) & (low != NOT_A_HEX_DIGIT)
    starts = starts[are_escapes]
    decoded = characters.copy()
    decoded[starts] = (high[are_escapes] << 4) | low[are_escapes]
    is_kept = np.ones(len(decoded), bool)
    is_kept[starts + 1] = is_kept[starts + 2] = False
    return bytes(decoded[is_kept])
