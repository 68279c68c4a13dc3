"""Checksums of uploads in the headers `Repr-Digest` and `Content-Digest` (RFC 9530)."""

from __future__ import annotations

import base64
import binascii
import re
from typing import Final

from gateway.errors import MalformedRequest

SHA256_BYTES: Final = 32
# An item of a structured dictionary (RFC 8941) with a byte sequence as its value.
SHA256_ITEM: Final = re.compile(r"(?:^|,)[ \t]*sha-256=:([A-Za-z0-9+/=]*):")


def parse_sha256_digest(header: str) -> bytes:
    """Return the SHA-256 digest of the header. Raises `MalformedRequest` if there is no valid one."""
    found = SHA256_ITEM.findall(header)
    try:
        digest = base64.b64decode(found[-1], validate=True) if found else b""
    except binascii.Error:
        digest = b""
    if len(digest) != SHA256_BYTES:
        raise MalformedRequest("Repr-Digest must contain sha-256=:BASE64: with 32 bytes in base64")
    return digest
