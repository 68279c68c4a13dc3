"""Bytes within a text: base64 (RFC 4648, section 4; the URL-safe alphabet too) or a `data:` URI (RFC 2397).

The cost is linear in the text, and long texts are decoded in pieces: one call of the C decoder holds the
interpreter's lock for as long as it runs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Final

import numpy as np

from gateway.errors import Malformed

# What may stand before the comma of a data: URI.
MAX_PREFIX: Final = 1024
PIECE: Final = 1 << 20  # characters
STANDARD_ALPHABET: Final = bytes.maketrans(b"-_", b"+/")
WHITESPACE: Final = b" \t\n\r\x0b\x0c"
PERCENT: Final = ord("%")
NO_DIGIT: Final = 255
HEX_DIGITS: Final = np.array(
    [int(chr(c), 16) if chr(c) in "0123456789abcdefABCDEF" else NO_DIGIT for c in range(256)],
    np.uint8,
)


def is_data_uri(text: str) -> bool:
    return text[:5].lower() == "data:"


def from_base64(text: str) -> bytes:
    """Return the bytes that base64 or a `data:` URI stands for. Raises `Malformed`."""
    if not is_data_uri(text):
        return b"".join(decode_base64(text, 0))
    comma = text.find(",", 0, MAX_PREFIX)
    if comma < 0:
        raise Malformed(
            f"the data: URI has no comma within its first {MAX_PREFIX} characters, and so no data"
        )
    is_base64 = text[:comma].lower().endswith(";base64")
    decode = decode_base64 if is_base64 else decode_percent
    return b"".join(decode(text, comma + 1))


def decode_base64(text: str, start: int) -> Iterator[bytes]:
    """Yield what the text stands for from `start` on. Whitespace is skipped, and padding may be missing."""
    end = max(start, len(text.rstrip("= \t\n\r\x0b\x0c")))
    padding = text.count("=", end)
    rest = b""
    try:
        for begin in range(start, end, PIECE):
            raw = text[begin : min(begin + PIECE, end)].encode("ascii")
            digits = rest + raw.translate(STANDARD_ALPHABET, WHITESPACE)
            if b"=" in digits:
                raise ValueError("padding before the end")
            whole = len(digits) // 4 * 4
            yield base64.b64decode(digits[:whole], validate=True)
            rest = digits[whole:]
        if padding > -len(rest) % 4:
            raise ValueError("too much padding")
        yield base64.b64decode(rest + b"=" * (-len(rest) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise Malformed('the value of "b64" is not base64') from None


def decode_percent(text: str, start: int) -> Iterator[bytes]:
    """Yield the text from `start` on with every `%41` decoded."""
    while start < len(text):
        end = start + PIECE
        if end < len(text) and (cut := text.rfind("%", end - 2, end)) > 0:
            end = cut  # an escape stays in one piece
        yield percent_decoded(text[start:end].encode())
        start = end


def percent_decoded(encoded: bytes) -> bytes:
    if b"%" not in encoded:
        return encoded
    characters = np.frombuffer(encoded, np.uint8)
    starts = np.flatnonzero(characters[:-2] == PERCENT)
    high, low = HEX_DIGITS[characters[starts + 1]], HEX_DIGITS[characters[starts + 2]]
    are_escapes = (high != NO_DIGIT) & (low != NO_DIGIT)
    starts = starts[are_escapes]
    decoded = characters.copy()
    decoded[starts] = (high[are_escapes] << 4) | low[are_escapes]
    is_kept = np.ones(len(decoded), bool)
    is_kept[starts + 1] = is_kept[starts + 2] = False
    return bytes(decoded[is_kept])
