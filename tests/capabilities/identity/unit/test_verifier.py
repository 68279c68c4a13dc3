"""Callers of certificates and tokens, without a server."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from joserfc.jwk import KeySet

from gateway.access.auth import UNAUTHENTICATED, Authenticator
from gateway.access.keys import KeysFile
from gateway.capabilities.identity.errors import (
    CredentialsRequired,
    ExpiredCertificate,
    InvalidToken,
    IssuerUnavailable,
    NamelessCertificate,
)
from gateway.capabilities.identity.issuer import KeySource, TokenChecker
from gateway.capabilities.identity.rules import RULE_PARSERS
from gateway.capabilities.identity.tokens import LEEWAY_S, TokenParser, parse_issuer_keys
from gateway.capabilities.identity.verifier import MAX_LOGGED_SUBJECT_CHARS, IdentityVerifier
from gateway.telemetry.request_info import RequestInfo, RequestScope
from tests.capabilities.identity.support.issuer import AUDIENCE, HOUR_S, Issuer
from tests.support.wait import TIMEOUT_S, wait_until_async

CERTIFICATES = [{"subject_alternative_name": "spiffe://prod/*", "roles": ["infer"]}]
TOKENS = [{"claim": "sub", "value": "alice", "roles": ["infer"]}]
MODELS = "/v1/models"
# Long enough for a token to be checked once on a busy machine.
SHORT_S = 2.0


def authenticator(folder: Path, tokens: TokenChecker | None = None) -> Authenticator:
    path = folder / "keys.yaml"
    path.write_text(yaml.safe_dump({"certificates": CERTIFICATES, "oidc": TOKENS}))
    keys_file = KeysFile(path, RULE_PARSERS)
    access = Authenticator(keys_file)
    access.verifiers.append(IdentityVerifier(keys_file, tokens, asks_for_certificates=True))
    return access


def scope_of(path: str = MODELS, **more: Any) -> RequestScope:
    scope = {
        "method": "GET",
        "path": path,
        "headers": [],
        "certificate_names": (("URI", "spiffe://prod/vision"),),
        "certificate_expires_at": time.time() + 60,
        "request_info": RequestInfo("id"),
        **more,
    }
    return cast("RequestScope", scope)


def test_certificate_that_expires_on_an_open_connection_is_refused(tmp_path: Path) -> None:
    access = authenticator(tmp_path)
    assert access.authenticate(scope_of())
    with pytest.raises(ExpiredCertificate, match="has expired; open a new connection") as caught:
        access.authenticate(scope_of(certificate_expires_at=time.time()))
    assert (caught.value.headers or {})["Connection"] == "close"


def test_certificate_without_a_name_is_told_from_none(tmp_path: Path) -> None:
    access = authenticator(tmp_path)
    with pytest.raises(NamelessCertificate, match="no subject alternative name"):
        access.authenticate(scope_of(certificate_names=()))
    with pytest.raises(CredentialsRequired, match="or a client certificate is required"):
        access.authenticate(scope_of(certificate_names=(), certificate_expires_at=None))


def test_long_subject_of_a_certificate_is_cut_and_equals_no_other(tmp_path: Path) -> None:
    name = "spiffe://prod/" + "x" * MAX_LOGGED_SUBJECT_CHARS
    subjects = []
    for each in (f"{name}1", f"{name}2"):
        scope = scope_of(certificate_names=(("URI", each),))
        assert authenticator(tmp_path).authenticate(scope)
        subjects.append(scope["request_info"].subject)
    assert subjects[0] != subjects[1]
    for subject in subjects:
        assert subject[:MAX_LOGGED_SUBJECT_CHARS] == name[:MAX_LOGGED_SUBJECT_CHARS]
        assert len(subject) == MAX_LOGGED_SUBJECT_CHARS + 65


async def test_public_requests_do_not_wait_for_the_issuer(tmp_path: Path) -> None:
    async def wait_forever() -> KeySet:
        await asyncio.Event().wait()
        raise AssertionError

    issuer = Issuer("https://issuer.example")
    source = KeySource(issuer.url, wait_forever, max_age_s=60)
    tokens = TokenChecker(TokenParser(issuer.url, (AUDIENCE,)), source)
    access = authenticator(tmp_path, tokens)
    headers = [(b"authorization", f"Bearer {issuer.sign()}".encode())]
    for path in ("/livez", "/readyz"):
        scope = scope_of(path, headers=headers)
        assert access.authenticate(scope) is None
        caller = await asyncio.wait_for(access.verify(scope), TIMEOUT_S)
        assert caller is UNAUTHENTICATED
    scope = scope_of("/grpc.health.v1.Health/Check", headers=headers)
    caller = await asyncio.wait_for(access.verify(scope, is_public=True), TIMEOUT_S)
    assert caller is UNAUTHENTICATED
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(access.verify(scope_of(headers=headers)), 0.05)


# Seconds until the token and the keys end, whether its key is withdrawn, and the error of the known token.
ENDS_OF_A_KNOWN_TOKEN = {
    "its time": (SHORT_S, HOUR_S, False, InvalidToken),
    "the age of the keys": (HOUR_S, SHORT_S, False, IssuerUnavailable),
    "the withdrawal of its key": (HOUR_S, HOUR_S, True, InvalidToken),
}


@pytest.mark.parametrize("end", ENDS_OF_A_KNOWN_TOKEN)
async def test_known_token_ends_with_what_it_rests_on(tmp_path: Path, end: str) -> None:
    token_s, keys_s, is_withdrawn, error = ENDS_OF_A_KNOWN_TOKEN[end]
    issuer = Issuer("https://issuer.example")

    async def fetch() -> KeySet:
        return parse_issuer_keys(issuer.publish())

    source = KeySource(issuer.url, fetch, max_age_s=keys_s)
    access = authenticator(tmp_path, TokenChecker(TokenParser(issuer.url, (AUDIENCE,)), source))
    token = issuer.sign(exp=time.time() - LEEWAY_S + token_s)
    scope = scope_of(headers=[(b"authorization", f"Bearer {token}".encode())])
    caller = await access.verify(scope)
    assert access.authenticate(scope) is caller
    if is_withdrawn:
        del issuer.keys["rsa"]
        source.replace_keys(await fetch())
    await wait_until_async(lambda: access.authenticate(scope) is None)
    with pytest.raises(error):
        await access.verify(scope)
