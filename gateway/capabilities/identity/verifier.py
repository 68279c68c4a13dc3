"""Finds the callers of tokens and of client certificates, by the rules of the keys file."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar, cast

from gateway.access.auth import UNVERIFIED, Verifier, extract_key, hash_key, is_cross_origin
from gateway.access.keys import CallerRule, KeysFile
from gateway.callers import Caller
from gateway.capabilities.identity.errors import (
    CredentialsRequired,
    CrossOriginCertificate,
    ExpiredCertificate,
    NamelessCertificate,
    NoMatchingRule,
)
from gateway.capabilities.identity.rules import (
    CERTIFICATE_RULES,
    TOKEN_RULES,
    CertificateName,
    CertificateRule,
    TokenRule,
    hash_parts,
    normalize_name,
)
from gateway.telemetry.request_info import RequestScope, read_head

if TYPE_CHECKING:
    from gateway.capabilities.identity.issuer import TokenChecker

MAX_IDENTITIES: Final = 10_000
MAX_LOGGED_SUBJECT_CHARS: Final = 256
RuleT = TypeVar("RuleT", bound=CallerRule)


@dataclass(frozen=True)
class Identity:
    caller: Caller
    subject: str
    subject_id: str
    expires_at: float  # Unix time


class IdentityVerifier(Verifier):
    """Identifies callers by a token, or without a key and a token by the certificate of their connection.

    Of the rules in the keys file, the first one that matches counts.
    """

    def __init__(
        self,
        keys_file: KeysFile,
        tokens: TokenChecker | None,
        *,
        asks_for_certificates: bool,
    ) -> None:
        self._keys_file = keys_file
        self._content = keys_file.value
        self._tokens = tokens
        self._asks_for_certificates = asks_for_certificates
        self._by_token_digest: dict[bytes, Identity] = {}
        if tokens is not None:
            tokens.source.on_change = self._by_token_digest.clear

    def find_caller(self, scope: RequestScope, digest: bytes) -> Caller | None:
        if self._content is not self._keys_file.value:
            self._forget_rules()
        if not digest:
            return self._find_certificate_caller(scope)
        identity = self._by_token_digest.get(digest)
        if identity is not None and time.time() < identity.expires_at:
            return accept_identity(scope, identity)
        # A key that `key create` made has no dots, and the parts of a token are separated by them.
        is_token = self._tokens is not None and b"." in extract_key(scope["headers"])
        return UNVERIFIED if is_token else None

    async def verify(self, scope: RequestScope, *, may_wait: bool) -> Caller:
        tokens = cast("TokenChecker", self._tokens)
        token = await tokens.check(extract_key(scope["headers"]), may_fetch=may_wait)
        if self._content is not self._keys_file.value:
            self._forget_rules()
        rule = self._find_rule(TOKEN_RULES, TokenRule, lambda rule: rule.matches(token.claims))
        if rule is None:
            raise NoMatchingRule("token", TOKEN_RULES)
        expires_at = min(token.expires_at, tokens.source.find_expiry())
        named = token.claims.get("sub")
        subject = named if isinstance(named, str) else ""
        subject_id = hash_parts("token", token.claims["iss"], subject) if subject else ""
        identity = Identity(rule.caller, shorten_subject(subject), subject_id, expires_at)
        store(self._by_token_digest, read_head(scope, hash_key), identity)
        return accept_identity(scope, identity)

    def _find_certificate_caller(self, scope: RequestScope) -> Caller:
        names = scope["certificate_names"]
        expires_at = scope["certificate_expires_at"]
        has_rules = bool(self._content.rules[CERTIFICATE_RULES])
        if expires_at is None or not has_rules:
            raise CredentialsRequired(
                token=self._tokens is not None,
                certificate=self._asks_for_certificates and has_rules,
            )
        if time.time() >= expires_at:
            raise ExpiredCertificate
        if not names:
            raise NamelessCertificate
        if is_cross_origin(scope["headers"]):
            raise CrossOriginCertificate(token=self._tokens is not None)
        return accept_identity(scope, self._identify_certificate(names))

    def _identify_certificate(self, names: tuple[CertificateName, ...]) -> Identity:
        def matches(rule: CertificateRule) -> bool:
            return any(rule.matches(*name) for name in names)

        rule = self._find_rule(CERTIFICATE_RULES, CertificateRule, matches)
        if rule is None:
            raise NoMatchingRule("certificate", CERTIFICATE_RULES)
        kind, subject = next(name for name in names if rule.matches(*name))
        subject_id = hash_parts("certificate", kind, normalize_name(kind, subject))
        return Identity(rule.caller, shorten_subject(subject), subject_id, math.inf)

    def _find_rule(
        self, section: str, kind: type[RuleT], matches: Callable[[RuleT], bool]
    ) -> RuleT | None:
        rules = self._content.rules[section]
        return next((each for each in rules if isinstance(each, kind) and matches(each)), None)

    def _forget_rules(self) -> None:
        self._content = self._keys_file.value
        self._by_token_digest.clear()


def shorten_subject(subject: str) -> str:
    """Return a subject for the log. A long one keeps its hash: no other caller may get its jobs."""
    if len(subject) <= MAX_LOGGED_SUBJECT_CHARS:
        return subject
    digest = hashlib.sha256(subject.encode()).hexdigest()
    return f"{subject[:MAX_LOGGED_SUBJECT_CHARS]}…{digest}"


def accept_identity(scope: RequestScope, identity: Identity) -> Caller:
    info = scope["request_info"]
    info.subject = identity.subject
    info.subject_id = identity.subject_id
    return identity.caller


def store(identities: dict[bytes, Identity], digest: bytes, identity: Identity) -> None:
    if len(identities) >= MAX_IDENTITIES:
        del identities[next(iter(identities))]
    identities[digest] = identity
