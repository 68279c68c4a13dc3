"""Signatures of callbacks, by the Standard Webhooks specification 1.0.0."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Final

# Lets secret scanners find leaked secrets.
SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - it is none itself
SECRET_BYTES: Final = range(24, 64 + 1)
GENERATED_BYTES: Final = 32
SIGNATURE_PREFIX: Final = "v1,"
TOLERANCE_S: Final = 300.0
ID_HEADER: Final = "webhook-id"
TIMESTAMP_HEADER: Final = "webhook-timestamp"
SIGNATURE_HEADER: Final = "webhook-signature"


class InvalidSignature(ValueError):
    """A callback was not signed with any of the secrets, or is too old."""


def generate_secret() -> str:
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(GENERATED_BYTES)).decode()


def decode_secret(secret: str) -> bytes:
    """Return the key of a secret. Raises `ValueError`, whose message does not contain the secret."""
    encoded = secret.removeprefix(SECRET_PREFIX)
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if encoded == secret or len(key) not in SECRET_BYTES:
        raise ValueError(f"use {SECRET_PREFIX} and 24 to 64 random bytes in base64")
    return key


def compute_signature(secret: str, identifier: str, timestamp: str, body: bytes) -> str:
    signed = b".".join((identifier.encode(), timestamp.encode(), body))
    digest = hmac.new(decode_secret(secret), signed, hashlib.sha256).digest()
    return SIGNATURE_PREFIX + base64.b64encode(digest).decode()


def build_headers(secrets: Sequence[str], identifier: str, body: bytes) -> dict[str, str]:
    """Return the headers of a callback that is sent now, with a signature for each secret."""
    timestamp = str(int(time.time()))
    signatures = (compute_signature(secret, identifier, timestamp, body) for secret in secrets)
    return {
        ID_HEADER: identifier,
        TIMESTAMP_HEADER: timestamp,
        SIGNATURE_HEADER: " ".join(signatures),
    }


def verify_callback(
    body: bytes,
    headers: Mapping[str, str],
    secrets: Sequence[str],
    *,
    tolerance_s: float = TOLERANCE_S,
) -> None:
    """Check that a callback was signed with one of the secrets, and not long ago.

    `body` is what was received, byte for byte. Raises `InvalidSignature`.
    """
    received = {name.lower(): value for name, value in headers.items()}
    missing = {ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER} - received.keys()
    if missing:
        raise InvalidSignature(f"the header {min(missing)} is missing")
    timestamp = received[TIMESTAMP_HEADER]
    if not (timestamp.isascii() and timestamp.isdecimal()):
        raise InvalidSignature(f"the header {TIMESTAMP_HEADER} is not a number of seconds")
    signatures = [each.encode() for each in received[SIGNATURE_HEADER].split()]
    expected = [
        compute_signature(secret, received[ID_HEADER], timestamp, body).encode()
        for secret in secrets
    ]
    if not any(hmac.compare_digest(own, each) for own in expected for each in signatures):
        raise InvalidSignature("no signature matches: the secret, an ID or the body is another one")
    age_s = time.time() - int(timestamp)
    if abs(age_s) > tolerance_s:
        raise InvalidSignature(
            f"the signature is right, but its time differs from now by {abs(age_s):.0f} s"
        )
