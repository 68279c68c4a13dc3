"""JSON Web Tokens (RFC 7519): their form, their claims and their signature. No I/O.

Tokens are checked as RFC 8725 advises: the accepted algorithms are listed, and fixed by the key; nothing in a
token names a key outside of the issuer's set.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from joserfc.errors import BadSignatureError, JoseError
from joserfc.jwk import ECKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry, deserialize_compact

from gateway.capabilities.identity.errors import InvalidToken
from gateway.messages import join_names, quote_text

MAX_TOKEN_BYTES: Final = 8 << 10
LEEWAY_S: Final = 60.0
MAX_KEYS: Final = 100
EDDSA: Final = "EdDSA"
# The kind of key of each algorithm: its type and curve.
KEY_KINDS: Final = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", "")),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    EDDSA: ("OKP", "Ed25519"),
    "Ed25519": ("OKP", "Ed25519"),  # RFC 9864
}
KEY_CLASSES: Final[Mapping[str, Any]] = {"RSA": RSAKey, "EC": ECKey, "OKP": OKPKey}
KEY_FIELDS: Final = ("kty", "n", "e", "crv", "x", "y")
# A key of RSA must have 2,048 bits, which base64 writes with this many characters.
MIN_MODULUS_CHARS: Final = 342
# Headers that change what is signed or how it is read. Those that name or contain a key are not used.
REFUSED_HEADERS: Final = ("crit", "b64", "zip")
# Issuers sign tokens of other types, such as logout+jwt, for other purposes (RFC 8725, section 3.11).
TOKEN_TYPES: Final = ("jwt", "at+jwt")
KEY_ERRORS: Final = (JoseError, ValueError, TypeError, LookupError, ArithmeticError)


class TokenRegistry(JWSRegistry):
    """The algorithms by name; `IssuerKey.fits` has chosen one. joserfc's own limits are below 8 KiB."""

    max_header_length = max_signature_length = MAX_TOKEN_BYTES

    def get_alg(self, name: str) -> Any:
        return self.algorithms[EDDSA if KEY_KINDS[name][0] == "OKP" else name]


# Private headers, such as the nonce of Microsoft Entra, are ignored (RFC 7515, section 4).
REGISTRY: Final = TokenRegistry(algorithms=list(KEY_KINDS), strict_check_header=False)


@dataclass(frozen=True)
class IssuerKey:
    kind: tuple[str, str]  # the type and the curve
    algorithm: str  # the only one for which it may be used; empty if the issuer does not say
    key: RSAKey | ECKey | OKPKey
    material: Mapping[str, str]  # equal keys have equal material

    def fits(self, algorithm: str) -> bool:
        return KEY_KINDS[algorithm] == self.kind and self.algorithm in ("", algorithm)


# The keys by their IDs (kid), of which one may be empty.
IssuerKeys = Mapping[str, Sequence[IssuerKey]]


@dataclass(frozen=True)
class Token:
    """A token that is well-formed and meant for this gateway, before its signature is checked."""

    text: bytes
    algorithm: str
    key_id: str  # empty if it names none
    claims: Mapping[str, Any]
    expires_at: float

    @property
    def subject(self) -> str:
        subject = self.claims.get("sub")
        return subject if isinstance(subject, str) else ""


@dataclass(frozen=True)
class TokenParser:
    issuer: str
    audience: Sequence[str]

    def parse(self, text: bytes) -> Token:
        """Return a token that may be valid. Raises `InvalidToken`."""
        if len(text) > MAX_TOKEN_BYTES:
            raise InvalidToken("is larger than 8 KiB")
        parts = text.split(b".")
        if len(parts) != 3:
            raise InvalidToken(
                "is not a signed JWT: it does not have three parts with dots between them"
            )
        header = decode_token_object(parts[0], "header")
        for name in REFUSED_HEADERS:
            if name in header:
                raise InvalidToken(f"has the header '{name}', which is not accepted")
        check_type(header)
        algorithm = header.get("alg")
        if not isinstance(algorithm, str) or algorithm not in KEY_KINDS:
            name = (
                f"'alg' {quote_text(algorithm, 20)}" if isinstance(algorithm, str) else "no 'alg'"
            )
            raise InvalidToken(f"has {name}; accepted are {join_names(KEY_KINDS)}")
        key_id = header.get("kid", "")
        if not isinstance(key_id, str):
            raise InvalidToken("has a key ID (kid) that is not a text")
        claims = decode_token_object(parts[1], "payload")
        self._check_purpose(claims)
        return Token(text, algorithm, key_id, claims, check_times(claims, time.time()))

    def _check_purpose(self, claims: Mapping[str, Any]) -> None:
        if claims.get("iss") != self.issuer:
            raise InvalidToken("has another issuer (iss) than GATEWAY_OIDC_ISSUER")
        audience = claims.get("aud")
        named = audience if isinstance(audience, list) else [audience]
        if not any(each in named for each in self.audience):
            raise InvalidToken("is meant for another audience (aud) than GATEWAY_OIDC_AUDIENCE")
        if "cnf" in claims:  # RFC 7800; of RFC 8705 and 9449 as well
            raise InvalidToken(
                "is bound to a key or a certificate (cnf), which the gateway does not check"
            )


def check_type(header: Mapping[str, Any]) -> None:
    """Check that the token may be an access token. Raises `InvalidToken`."""
    kind = header.get("typ", "JWT")
    # A media type, perhaps without `application/` (RFC 7515, section 4.1.9).
    if not isinstance(kind, str) or kind.lower().removeprefix("application/") not in TOKEN_TYPES:
        raise InvalidToken("has a type (typ) of another purpose; accepted are JWT and at+jwt")


def check_times(claims: Mapping[str, Any], now: float) -> float:
    """Return when the token expires, with the leeway. Raises `InvalidToken`."""
    if "exp" not in claims:
        raise InvalidToken("does not expire: it has no 'exp'")
    expires_at = read_time(claims, "exp") + LEEWAY_S
    if expires_at <= now:
        raise InvalidToken("has expired (exp)")
    if "nbf" in claims and read_time(claims, "nbf") - LEEWAY_S > now:
        raise InvalidToken("is not valid yet (nbf)")
    if "iat" in claims and read_time(claims, "iat") - LEEWAY_S > now:
        raise InvalidToken("was issued in the future (iat)")
    return expires_at


def read_time(claims: Mapping[str, Any], name: str) -> float:
    value = claims[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidToken(f"has a time ({name}) that is not a number")
    return float(value)


def decode_token_object(part: bytes, name: str) -> dict[str, Any]:
    """Return a part of a token, which is a JSON object in base64url. Raises `InvalidToken`."""
    try:
        text = base64.b64decode(part + b"=" * (-len(part) % 4), b"-_", validate=True)
        value = orjson.loads(text)
    except (binascii.Error, orjson.JSONDecodeError):
        value = None
    if not isinstance(value, dict):
        raise InvalidToken(f"has a {name} that is not a JSON object in base64url")
    return value


def find_key(keys: IssuerKeys, token: Token) -> IssuerKey | None:
    """Return the key that must have signed the token; None for an unknown ID. Raises `InvalidToken`."""
    if token.key_id:
        candidates = keys.get(token.key_id, ())
    else:
        candidates = [key for same_id in keys.values() for key in same_id]
    fitting = [key for key in candidates if key.fits(token.algorithm)]
    if candidates and not fitting:
        raise InvalidToken(f"is signed with {token.algorithm}, which does not fit the issuer's key")
    if len(fitting) > 1 and token.key_id:
        raise InvalidToken("names a key ID (kid) that several of its issuer's keys have")
    if len(fitting) > 1:
        raise InvalidToken("does not say which of the issuer's keys signed it (kid)")
    return fitting[0] if fitting else None


def is_signed_by(token: Token, key: IssuerKey) -> bool:
    try:
        check_signature(token, key)
    except InvalidToken:
        return False
    return True


def check_signature(token: Token, key: IssuerKey) -> None:
    """Check the signature, in 0.1 to 0.3 ms. Raises `InvalidToken`."""
    try:
        deserialize_compact(token.text, key.key, registry=REGISTRY)
    except BadSignatureError:
        raise InvalidToken("has an invalid signature") from None
    except (*KEY_ERRORS, RecursionError):
        raise InvalidToken("has a malformed header or signature") from None


def parse_issuer_keys(text: bytes) -> IssuerKeys:
    """Return the keys of a JSON Web Key Set (RFC 7517) that can sign tokens.

    Raises `ValueError` if it is invalid, or has no such key.
    """
    document = orjson.loads(text)
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it is not a JSON Web Key Set")
    keys: dict[str, list[IssuerKey]] = {}
    for entry in entries[:MAX_KEYS]:
        if isinstance(entry, dict) and (key := import_key(entry)) is not None:
            key_id = entry.get("kid", "")
            keys.setdefault(key_id if isinstance(key_id, str) else "", []).append(key)
    if not keys:
        raise ValueError(f"it has no key for one of {join_names(KEY_KINDS)}")
    return keys


def import_key(entry: Mapping[str, Any]) -> IssuerKey | None:
    """Return a public key; None for one that is not for signatures, or of a kind that is not accepted."""
    material = {name: entry[name] for name in KEY_FIELDS if isinstance(entry.get(name), str)}
    kind = (material.get("kty", ""), material.get("crv", ""))
    operations = entry.get("key_ops", ["verify"])
    can_verify = isinstance(operations, list) and "verify" in operations
    is_for_signatures = can_verify and entry.get("use", "sig") == "sig"
    is_weak = kind[0] == "RSA" and len(material.get("n", "")) < MIN_MODULUS_CHARS
    if kind not in KEY_KINDS.values() or not is_for_signatures or is_weak:
        return None
    algorithm = str(entry.get("alg", ""))
    if kind[0] == "OKP" and KEY_KINDS.get(algorithm) == kind:
        algorithm = ""  # it has two names
    try:
        key = KEY_CLASSES[kind[0]].import_key(material)
    except KEY_ERRORS:
        return None
    return IssuerKey(kind, algorithm, key, material)
