"""The lists `oidc` and `certificates` of the keys file: the rights of tokens and of client certificates."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

from gateway.access.keys import (
    KEY_PREFIX,
    RIGHTS_FIELDS,
    BadKeysFile,
    CallerRule,
    RuleParsers,
    parse_caller,
)
from gateway.callers import Caller, CallerKind

TOKEN_RULES: Final = "oidc"  # noqa: S105 - the name of a list
CERTIFICATE_RULES: Final = "certificates"
CLAIM_FIELDS: Final = RIGHTS_FIELDS | {"claim", "value"}
CERTIFICATE_FIELDS: Final = RIGHTS_FIELDS | {"subject_alternative_name"}
# The name is logged and counts the rate; patterns of certificates are names as well.
RULE_NAME: Final = re.compile(rf"(?!{KEY_PREFIX})[\w.@:/+*?\[\]!-]{{1,64}}", re.ASCII)
MAX_TEXT_CHARS: Final = 1024
# Claims with several values in one text (RFC 8693, section 4.2; Microsoft Entra). Other texts are one value:
# users choose some of them, such as their display name.
SPACE_SEPARATED_CLAIMS: Final = frozenset(("scope", "scp"))

# What a pattern matches: a single name without separators, such as a comma or NUL, and without dot segments.
PATTERN_NAMES: Final = {
    "DNS": re.compile(r"[a-z0-9*_.-]+"),
    "email": re.compile(r"[!-+\--?A-~]+@[A-Za-z0-9.-]+"),
    "URI": re.compile(r"(?!.*/\.\.?(?:/|$))[!-+\--~]+"),
}

CertificateName = tuple[str, str]  # URI, DNS or email, and the name


@dataclass(frozen=True)
class TokenRule(CallerRule):
    """Gives the rights of `caller` to tokens with a value of a claim."""

    claim: str
    value: str

    def matches(self, claims: Mapping[str, Any]) -> bool:
        # Users can enter any address, and not every provider marks it as not verified.
        if self.claim == "email" and claims.get("email_verified") is not True:
            return False
        return self.value in read_claim(claims, self.claim)


@dataclass(frozen=True)
class CertificateRule(CallerRule):
    """Gives the rights of `caller` to certificates with a subject alternative name."""

    kind: str  # URI, DNS or email
    name: str  # a name or a pattern

    def matches(self, kind: str, name: str) -> bool:
        if kind != self.kind:
            return False
        name = normalize_name(kind, name)
        is_single = PATTERN_NAMES[kind].fullmatch(name) is not None
        return name == self.name or (is_single and fnmatchcase(name, self.name))


def read_claim(claims: Mapping[str, Any], path: str) -> Sequence[str]:
    """Return the values of a claim, whose name may contain dots or be a path through objects.

    A claim that is neither a text nor a list of texts has none.
    """
    value: Any = claims.get(path)
    name = path
    if path not in claims:
        value = claims
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, str):
        return value.split(" ") if name in SPACE_SEPARATED_CLAIMS else (value,)
    is_list = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return value if is_list else ()


def normalize_name(kind: str, name: str) -> str:
    return name.lower() if kind == "DNS" else name


def find_name_kind(name: str) -> str:
    """Return the kind of a name or pattern: only a URI has a colon, only an e-mail address an @."""
    if ":" in name:
        return "URI"
    return "email" if "@" in name else "DNS"


def parse_token_rule(label: str, entry: Any) -> TokenRule:
    check_fields(label, entry, CLAIM_FIELDS)
    claim = read_text(label, entry, "claim")
    value = read_text(label, entry, "value")
    caller = parse_rule_caller(label, entry, value)
    return TokenRule(replace(caller, id=hash_parts(TOKEN_RULES, claim, value)), claim, value)


def parse_certificate_rule(label: str, entry: Any) -> CertificateRule:
    check_fields(label, entry, CERTIFICATE_FIELDS)
    name = read_text(label, entry, "subject_alternative_name")
    kind = find_name_kind(name)
    caller = parse_rule_caller(label, entry, name)
    name = normalize_name(kind, name)
    return CertificateRule(replace(caller, id=hash_parts(CERTIFICATE_RULES, name)), kind, name)


def parse_rule_caller(label: str, entry: Mapping[str, Any], default_name: str) -> Caller:
    name = entry.get("name", default_name)
    if not isinstance(name, str) or not RULE_NAME.fullmatch(name):
        raise BadKeysFile(
            f"{label} needs a name of 1 to 64 letters, digits and . @ : / + - _ (and not a key)"
        )
    return parse_caller(label, name, entry, kind=CallerKind.rule)


def hash_parts(*parts: str) -> str:
    """Return a name for these texts that no others have, and that contains none of them."""
    content = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()


def check_fields(label: str, entry: Any, fields: set[str]) -> None:
    if not isinstance(entry, dict) or not entry.keys() <= fields:
        names = ", ".join(sorted(fields))
        raise BadKeysFile(f"{label} must be an object with the fields {names}")


def read_text(label: str, entry: Mapping[str, Any], field: str) -> str:
    text = entry.get(field)
    if not isinstance(text, str) or not 0 < len(text) <= MAX_TEXT_CHARS or not text.isprintable():
        raise BadKeysFile(
            f"{field} of {label} must be a text, in quotes if it could be something else"
        )
    return text


RULE_PARSERS: Final[RuleParsers] = {
    TOKEN_RULES: parse_token_rule,
    CERTIFICATE_RULES: parse_certificate_rule,
}
