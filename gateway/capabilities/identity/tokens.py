"""JSON Web Tokens (RFC 7519): their form, their claims and their signature. No I/O.

Tokens are checked as RFC 8725 advises: the accepted algorithms are listed, and fixed by the key; nothing in a
token names a key outside of the issuer's set.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from joserfc.errors import ClaimError, JoseError
from joserfc.jwk import ECKey, JWKRegistry, KeySet, OKPKey, RSAKey
from joserfc.jws import CompactSignature, JWSRegistry, extract_compact, validate_compact
from joserfc.jwt import JWTClaimsRegistry

from gateway.capabilities.identity.errors import InvalidToken
from gateway.messages import join_names, quote_text

MAX_TOKEN_BYTES: Final = 8 << 10
LEEWAY_S: Final = 60
MAX_TIME: Final = 1 << 40  # a larger integer may be no float
MAX_KEYS: Final = 100
EDDSA: Final = "EdDSA"
# The kind of key of each algorithm: its type and curve.
KEY_KINDS: Final = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", None)),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    EDDSA: ("OKP", "Ed25519"),
    "Ed25519": ("OKP", "Ed25519"),  # RFC 9864
}
# Without the private ones, and without those that name other places of the key.
KEY_FIELDS: Final = ("kty", "n", "e", "crv", "x", "y", "kid", "use", "key_ops", "alg")
# A key of RSA must have 2,048 bits, which base64 writes with this many characters.
MIN_MODULUS_CHARS: Final = 342
# Headers that change what is signed or how it is read. Those that name or contain a key are not used.
REFUSED_HEADERS: Final = ("crit", "b64", "zip")
# Issuers sign tokens of other types, such as logout+jwt, for other purposes (RFC 8725, section 3.11).
TOKEN_TYPES: Final = ("jwt", "at+jwt")
# joserfc 1.7, the last one for Python 3.10, accepts true as a time, and a list of issuers.
CLAIM_TYPES: Final = {"iss": (str,), **dict.fromkeys(("exp", "nbf", "iat"), (int, float))}
PROBLEMS: Final = {
    "iss": "has another issuer (iss) than GATEWAY_OIDC_ISSUER",
    "aud": "is meant for another audience (aud) than GATEWAY_OIDC_AUDIENCE",
    "exp": "has expired, or does not say when it expires (exp)",
    "nbf": "is not valid yet (nbf)",
    "iat": "was issued in the future (iat)",
}
KEY_ERRORS: Final = (JoseError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)
Key = RSAKey | ECKey | OKPKey


class TokenRegistry(JWSRegistry):
    """The algorithms by name; `fits` has chosen one. joserfc's own limits are below 8 KiB."""

    max_header_length = max_signature_length = MAX_TOKEN_BYTES

    def get_alg(self, name: str) -> Any:
        return self.algorithms[EDDSA if KEY_KINDS[name][0] == "OKP" else name]


# Private headers, such as the nonce of Microsoft Entra, are ignored (RFC 7515, section 4).
REGISTRY: Final = TokenRegistry(algorithms=list(KEY_KINDS), strict_check_header=False)


@dataclass(frozen=True)
class Token:
    """A token that is well-formed and meant for this gateway, before its signature is checked."""

    signature: CompactSignature
    algorithm: str
    key_id: str  # empty if it names none
    claims: Mapping[str, Any]

    @property
    def expires_at(self) -> float:
        return float(min(self.claims["exp"], MAX_TIME)) + LEEWAY_S


class TokenParser:
    def __init__(self, issuer: str, audience: Sequence[str]) -> None:
        self._registry = JWTClaimsRegistry(
            now=time.time,  # type: ignore[arg-type]  # whole seconds would accept a token after `expires_at`
            leeway=LEEWAY_S,
            iss={"essential": True, "value": issuer},
            aud={"essential": True, "values": list(audience)},
            exp={"essential": True},
        )

    def parse(self, text: bytes) -> Token:
        """Return a token that may be valid. Raises `InvalidToken`."""
        if len(text) > MAX_TOKEN_BYTES:
            raise InvalidToken("is larger than 8 KiB")
        try:
            signature = extract_compact(text, registry=REGISTRY)
            check_header(signature.headers())
            claims = orjson.loads(signature.payload)
        except KEY_ERRORS:
            raise InvalidToken("is not a signed JWT, or malformed") from None
        if not isinstance(claims, dict):
            raise InvalidToken("has a payload that is not a JSON object")
        self._check_claims(claims)
        header = signature.headers()
        return Token(signature, header["alg"], header.get("kid", ""), claims)

    def _check_claims(self, claims: Mapping[str, Any]) -> None:
        for name, kinds in CLAIM_TYPES.items():
            if name in claims and type(claims[name]) not in kinds:
                raise InvalidToken(f"has a claim '{name}' of another type")
        try:
            self._registry.validate({name: claims[name] for name in PROBLEMS if name in claims})
        except ClaimError as exc:
            name = exc.claim.partition(",")[0]
            raise InvalidToken(PROBLEMS[name]) from None
        if "cnf" in claims:  # RFC 7800; of RFC 8705 and 9449 as well
            raise InvalidToken(
                "is bound to a key or a certificate (cnf), which the gateway does not check"
            )


def check_header(header: Mapping[str, Any]) -> None:
    """Check that the token may be an access token. Raises `InvalidToken`, or one of `KEY_ERRORS`."""
    for name in REFUSED_HEADERS:
        if name in header:
            raise InvalidToken(f"has the header '{name}', which is not accepted")
    kind = header.get("typ", "JWT")
    # A media type, perhaps without `application/` (RFC 7515, section 4.1.9).
    if not isinstance(kind, str) or kind.lower().removeprefix("application/") not in TOKEN_TYPES:
        raise InvalidToken("has a type (typ) of another purpose; accepted are JWT and at+jwt")
    if (algorithm := str(header["alg"])) not in KEY_KINDS:
        accepted = join_names(KEY_KINDS)
        raise InvalidToken(f"has 'alg' {quote_text(algorithm, 20)}; accepted are {accepted}")
    if not isinstance(header.get("kid", ""), str):
        raise InvalidToken("has a key ID (kid) that is not a text")


def find_key(keys: KeySet, token: Token) -> Key | None:
    """Return the key that must have signed the token; None for an unknown ID. Raises `InvalidToken`."""
    key_id = token.key_id
    candidates = [key for key in keys if not key_id or key.kid == key_id]
    fitting = [key for key in candidates if fits(key, token.algorithm)]
    if candidates and not fitting:
        raise InvalidToken(f"is signed with {token.algorithm}, which does not fit the issuer's key")
    if len(fitting) > 1:
        raise InvalidToken("does not say which of the issuer's keys signed it (kid)")
    return fitting[0] if fitting else None  # type: ignore[return-value]  # `import_key` takes no other


def fits(key: Any, algorithm: str) -> bool:
    is_kind = KEY_KINDS[algorithm] == (key.key_type, key.get("crv"))
    return is_kind and key.get("alg") in (None, algorithm)


def is_signed_by(token: Token, key: Key) -> bool:
    """Check the signature, in 0.1 to 0.3 ms."""
    try:
        return validate_compact(token.signature, key, registry=REGISTRY)
    except KEY_ERRORS:
        return False


def parse_issuer_keys(text: bytes) -> KeySet:
    """Return the keys of a JSON Web Key Set (RFC 7517) that can sign tokens.

    Raises `ValueError` if it is invalid, or has no such key.
    """
    document = orjson.loads(text)
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it is not a JSON Web Key Set")
    imported = map(import_key, entries[:MAX_KEYS])
    keys = [key for key in imported if key is not None]
    if not keys:
        raise ValueError(f"it has no key for one of {join_names(KEY_KINDS)}")
    return KeySet(keys)


def import_key(entry: Any) -> Any:
    """Return a public key; None for one that is not for signatures, or of a kind that is not accepted."""
    try:
        fields = {name: entry[name] for name in KEY_FIELDS if name in entry}
        if fields["kty"] == "OKP" and fields.get("alg") in KEY_KINDS:
            del fields["alg"]  # it has two names
        key = JWKRegistry.import_key(fields)
        key.check_use("sig")
        key.check_key_op("verify")
    except KEY_ERRORS:
        return None
    is_weak = key.key_type == "RSA" and len(fields["n"]) < MIN_MODULUS_CHARS
    is_accepted = any(fits(key, name) for name in KEY_KINDS)
    return key if is_accepted and not is_weak else None
