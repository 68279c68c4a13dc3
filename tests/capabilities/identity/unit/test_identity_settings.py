"""The settings of tokens, and the lists of the keys file: what is accepted, and what the error says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.access.keys import BadKeysFile, KeysFile, parse_keys_content
from gateway.access.keys_editor import add_key, remove_key
from gateway.callers import Caller, CallerKind, CallerLimits, Role
from gateway.capabilities.identity.capability import attach_identity
from gateway.capabilities.identity.rules import RULE_PARSERS, CertificateRule, TokenRule, read_claim
from gateway.capabilities.identity.settings import IdentitySettings
from gateway.capabilities.identity.verifier import MAX_IDENTITIES, Identity, store
from gateway.config.settings import Settings, read_settings
from gateway.messages import CommandError
from tests.support.keys import INFER, entry

ISSUER = "https://login.example.com"
# The settings, and what the error says.
BAD_SETTINGS: dict[str, tuple[dict[str, str], str]] = {
    "no audience": ({"issuer": ISSUER}, "AUDIENCE cannot be empty: GATEWAY_OIDC_ISSUER requires"),
    "no issuer": ({"audience": "a"}, "AUDIENCE cannot be 'a': GATEWAY_OIDC_ISSUER is missing"),
    "a file without an issuer": ({"ca_file": "ca.pem"}, "GATEWAY_OIDC_ISSUER is missing"),
    "http": ({"issuer": "http://login.example.com", "audience": "a"}, "ISSUER cannot be"),
    "no scheme": ({"issuer": "login.example.com", "audience": "a"}, "use https://HOST/PATH"),
    "a query": ({"issuer": f"{ISSUER}/?a=1", "audience": "a"}, "without a query"),
    "a password": ({"issuer": "https://a:b@login.example.com", "audience": "a"}, "…@"),
    "an address of keys over http": (
        {"issuer": ISSUER, "audience": "a", "jwks_url": "http://keys.example.com"},
        "http:// is accepted on loopback only",
    ),
}


@pytest.mark.parametrize(("values", "words"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_setting_that_is_invalid_is_named(
    monkeypatch: pytest.MonkeyPatch, values: dict[str, str], words: str
) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"GATEWAY_OIDC_{name.upper()}", value)
    with pytest.raises(CommandError) as caught:
        read_settings(IdentitySettings)
    assert words in str(caught.value)
    assert "a:b" not in str(caught.value)


@pytest.mark.parametrize("issuer", ["http://127.0.0.1:8000/x", "http://[::1]", f"{ISSUER}/a/"])
def test_address_of_an_issuer_is_https_or_on_loopback(issuer: str) -> None:
    settings = IdentitySettings(oidc_issuer=issuer, oidc_audience=("a", "b"))
    assert settings.oidc_issuer == issuer


def test_issuer_needs_a_keys_file_with_rights() -> None:
    settings = Settings(oidc_issuer=ISSUER, oidc_audience="a")
    with pytest.raises(CommandError, match="requires GATEWAY_KEYS_FILE, whose list 'oidc'"):
        attach_identity(settings)


TOKEN_RULE = {"claim": "groups", "value": "ops", "roles": ["admin"]}
CERTIFICATE_RULE = {"subject_alternative_name": "spiffe://a/*", "roles": ["infer"]}


def content(**lists: Any) -> str:
    return json.dumps(lists)


BAD_LISTS: dict[str, tuple[str, str]] = {
    "no list": (content(oidc={}), "'oidc' must be a list"),
    "another list": (content(saml=[]), "no fields but certificates, keys and oidc"),
    "no field": ("{}", "must contain the field 'keys'"),
    "no claim": (content(oidc=[{"value": "a", "roles": ["infer"]}]), "claim of entry 1 of 'oidc'"),
    "a number": (content(oidc=[{**TOKEN_RULE, "value": 1}]), "value of entry 1 of 'oidc'"),
    "another field": (content(oidc=[{**TOKEN_RULE, "sha256": "a"}]), "entry 1 of 'oidc' must be"),
    "no object": (content(oidc=[TOKEN_RULE, "a"]), "entry 2 of 'oidc' must be an object"),
    "no roles": (content(oidc=[{**TOKEN_RULE, "roles": []}]), "the roles of entry 1 of 'oidc'"),
    "a value that is no name": (content(oidc=[{**TOKEN_RULE, "value": "a b"}]), "needs a name"),
    "a key for a name": (content(oidc=[{**TOKEN_RULE, "name": INFER}]), "needs a name"),
    "no SAN": (content(certificates=[{"roles": ["infer"]}]), "subject_alternative_name of entry 1"),
    "the name of a key": (
        content(keys=[entry(INFER, "infer", name="ops")], oidc=[TOKEN_RULE]),
        "a key and an entry of 'oidc' have the same name",
    ),
}


@pytest.mark.parametrize(("text", "words"), BAD_LISTS.values(), ids=BAD_LISTS.keys())
def test_list_of_rules_that_is_invalid_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadKeysFile) as caught:
        parse_keys_content(text, RULE_PARSERS)
    assert words in str(caught.value)
    assert "tgw_" not in str(caught.value)


def test_rules_have_the_rights_of_keys_and_the_name_of_their_value() -> None:
    rule = {**TOKEN_RULE, "models": ["a*"], "requests_per_second": 2}
    text = content(oidc=[rule, {**TOKEN_RULE, "name": "x"}], certificates=[CERTIFICATE_RULE])
    parsed = parse_keys_content(text, RULE_PARSERS)
    assert parsed.callers == {}
    first, second = parsed.rules["oidc"]
    assert isinstance(first, TokenRule)
    assert (first.caller.name, second.caller.name) == ("ops", "x")
    assert (first.caller.models, first.caller.limits) == (("a*",), CallerLimits(2.0))
    assert (first.caller.roles, first.caller.kind) == ((Role.admin,), CallerKind.rule)
    (certificate,) = parsed.rules["certificates"]
    assert isinstance(certificate, CertificateRule)
    assert certificate.matches("URI", "spiffe://a/b/c")
    assert not certificate.matches("DNS", "spiffe://a/b/c")


def test_claim_with_dots_comes_before_a_path() -> None:
    claims = {"a.b": "name", "a": {"b": "path", "scope": "x y"}}
    assert read_claim(claims, "a.b") == ("name",)
    assert read_claim(claims, "a.scope") == ["x", "y"]
    assert read_claim(claims, "a.b.c") == ()


def test_known_tokens_are_bounded_and_the_oldest_is_forgotten() -> None:
    identities: dict[bytes, Identity] = {}
    identity = Identity(Caller("name"), "subject", "a1", 0.0)
    digests = [b"%d" % number for number in range(MAX_IDENTITIES + 3)]
    for digest in digests:
        store(identities, digest, identity)
    assert [*identities] == digests[3:]


LISTS = """# The file of the platform team.
oidc:
  - {claim: groups, value: ops, roles: [admin]}  # on call

keys:
  - name: first
    sha256: "%s"
    roles: [infer]

# Meshes.
certificates:
  - {subject_alternative_name: "spiffe://a/*", roles: [infer]}
"""


def test_commands_for_keys_keep_the_other_lists_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    before = LISTS % ("0" * 64)
    path.write_text(before)
    add_key(path, "second", [Role.infer], ["*"])
    assert set(before.splitlines()) <= set(path.read_text().splitlines())
    file = KeysFile(path, RULE_PARSERS)
    assert {caller.name for caller in file.value.callers.values()} == {"first", "second"}
    assert [len(rules) for rules in file.value.rules.values()] == [1, 1]
    remove_key(path, "second")
    lost = set(before.splitlines()) - set(path.read_text().splitlines())
    assert lost <= {"", "# Meshes."}  # a comment after a removed entry goes with it
    remove_key(path, "first")
    assert file.reload_if_changed()
    assert file.value.callers == {}
    assert [len(rules) for rules in file.value.rules.values()] == [1, 1]
