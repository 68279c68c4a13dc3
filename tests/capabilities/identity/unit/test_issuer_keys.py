"""Keys of an issuer: refreshes, rotation, outages, and what the gateway fetches from where."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from joserfc.jwk import ECKey, KeySet, OctKey, RSAKey

from gateway.capabilities.identity.errors import InvalidToken, IssuerUnavailable
from gateway.capabilities.identity.issuer import (
    FetchError,
    KeySource,
    TokenChecker,
    fetch_keys,
    open_key_source,
)
from gateway.capabilities.identity.settings import IdentitySettings
from gateway.capabilities.identity.tokens import TokenParser, fits, parse_issuer_keys
from gateway.messages import CommandError
from tests.capabilities.identity.support.issuer import (
    AUDIENCE,
    CONFIGURATION,
    KEYS,
    Issuer,
    claims,
    serving_issuer,
    sign_parts,
    signer,
)
from tests.support.certificates import server_context
from tests.support.wait import TIMEOUT_S, wait_until_async

INTERVAL_S = 0.05


@pytest.fixture(scope="module")
def shared_issuer() -> Iterator[Issuer]:
    with serving_issuer() as issuer:
        yield issuer


@pytest.fixture
def issuer(shared_issuer: Issuer) -> Iterator[Issuer]:
    keys = dict(shared_issuer.keys)
    shared_issuer.requests.clear()
    yield shared_issuer
    shared_issuer.keys = keys
    shared_issuer.answer = lambda path: None


def settings_for(issuer: Issuer, **more: Any) -> IdentitySettings:
    return IdentitySettings(oidc_issuer=issuer.url, oidc_audience=(AUDIENCE,), **more)


def source_of(issuer: Issuer, **intervals: Any) -> KeySource:
    settings = settings_for(issuer)
    intervals = {"max_age_s": 60, "refresh_s": 60, "min_interval_s": INTERVAL_S, **intervals}
    return KeySource(issuer.url, lambda: fetch_keys(settings), **intervals)


def checker(issuer: Issuer, source: KeySource) -> TokenChecker:
    return TokenChecker(TokenParser(issuer.url, (AUDIENCE,)), source)


@asynccontextmanager
async def refreshed(source: KeySource) -> AsyncIterator[None]:
    task = asyncio.create_task(source.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


def rotate(issuer: Issuer, name: str) -> str:
    """Add a key, and return a token that it signed."""
    key = issuer.keys[name] = ECKey.generate_key("P-256")
    return sign_parts({"alg": "ES256", "kid": name}, claims(issuer.url), signer(key, "ES256"))


def find_ids(keys: KeySet | None) -> set[str | None]:
    return {key.kid for key in keys or ()}


def fail(path: str) -> Any:
    return 500, {}


async def check(tokens: TokenChecker, token: str) -> None:
    await tokens.check(token.encode())


async def test_keys_are_refreshed_in_the_background(issuer: Issuer) -> None:
    source = source_of(issuer, refresh_s=INTERVAL_S)
    tokens = checker(issuer, source)
    async with refreshed(source):
        await wait_until_async(lambda: issuer.count(KEYS) > 1)
        token = rotate(issuer, "background")
        before = issuer.count(KEYS)
        await wait_until_async(lambda: issuer.count(KEYS) > before + 1)
        await check(tokens, token)


async def test_unknown_key_is_fetched_once_for_all_requests(issuer: Issuer) -> None:
    source = source_of(issuer, min_interval_s=60)
    tokens = checker(issuer, source)
    token = issuer.sign()
    await asyncio.gather(*(check(tokens, token) for _ in range(50)))
    assert issuer.count(KEYS) == 1
    for _ in range(5):
        with pytest.raises(InvalidToken, match="not among its issuer's usable keys"):
            await check(tokens, rotate(issuer, "early"))
    await check(tokens, token)
    assert issuer.count(KEYS) == 1


async def test_rotated_key_works_after_the_interval_and_removed_keys_do_not(issuer: Issuer) -> None:
    changes: list[None] = []
    source = source_of(issuer)
    source.on_change = lambda: changes.append(None)
    tokens = checker(issuer, source)
    old = issuer.sign()
    await check(tokens, old)
    token = rotate(issuer, "rotated")
    del issuer.keys["rsa"]
    await asyncio.sleep(INTERVAL_S)
    await check(tokens, token)
    assert len(changes) == 2
    with pytest.raises(InvalidToken):
        await check(tokens, old)


async def test_key_without_an_id_is_rotated(issuer: Issuer) -> None:
    source = source_of(issuer)
    tokens = checker(issuer, source)
    head = {"alg": "RS256"}
    issuer.keys = {"rsa": issuer.keys["rsa"]}
    old = sign_parts(head, claims(issuer.url), signer(issuer.keys["rsa"], "RS256"))
    await check(tokens, old)
    key = issuer.keys["rsa"] = RSAKey.generate_key(2048)
    await asyncio.sleep(INTERVAL_S)
    await check(tokens, sign_parts(head, claims(issuer.url), signer(key, "RS256")))
    slow_tokens = checker(issuer, source_of(issuer, min_interval_s=60))
    before = issuer.count(KEYS)
    for _ in range(3):
        with pytest.raises(InvalidToken, match="invalid signature"):
            await check(slow_tokens, old)
    assert issuer.count(KEYS) == before + 1


async def test_id_of_two_keys_is_named(issuer: Issuer, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = [jwk(RSAKey.generate_key(2048), kid="rsa") for _ in range(2)]
    path.write_text(json.dumps({"keys": keys}))
    tokens = checker(issuer, open_key_source(settings_for(issuer, oidc_jwks_url=path.as_uri())))
    with pytest.raises(InvalidToken, match="does not say which of the issuer's keys"):
        await check(tokens, issuer.sign())


@pytest.mark.fault("the issuer of tokens cannot be reached")
async def test_outage_leaves_known_keys_and_makes_unknown_tokens_503(issuer: Issuer) -> None:
    source = source_of(issuer, max_age_s=1)
    tokens = checker(issuer, source)
    known = issuer.sign()
    issuer.answer = fail
    with pytest.raises(IssuerUnavailable):
        await check(tokens, known)
    issuer.answer = lambda path: None
    await asyncio.sleep(INTERVAL_S)
    await check(tokens, known)
    assert time.time() < source.find_expiry() < time.time() + 1
    token = rotate(issuer, "unreachable")
    issuer.answer = fail
    for _ in range(2):
        await asyncio.sleep(INTERVAL_S)
        with pytest.raises(IssuerUnavailable):
            await check(tokens, token)
        await check(tokens, known)
    await wait_until_async(lambda: source.keys is None)
    with pytest.raises(IssuerUnavailable):
        await check(tokens, known)
    issuer.answer = lambda path: None
    await asyncio.sleep(INTERVAL_S)
    await check(tokens, token)


async def test_set_without_usable_keys_evicts_none(issuer: Issuer) -> None:
    source = source_of(issuer)
    tokens = checker(issuer, source)
    await check(tokens, issuer.sign())
    issuer.answer = lambda path: b'{"keys": []}' if path == KEYS else None
    await asyncio.sleep(INTERVAL_S)
    with pytest.raises(IssuerUnavailable):
        await check(tokens, rotate(issuer, "empty"))
    await check(tokens, issuer.sign())


def configuration(issuer: Issuer, **changes: Any) -> bytes:
    return json.dumps({**json.loads(issuer.configuration()), **changes}).encode()


FAULTS = {
    "a status": ({KEYS: (500, {})}, "answers with status 500"),
    "a redirect": ({KEYS: (302, {"Location": "http://127.0.0.1:9/"})}, "answers with status 302"),
    "too much": ({KEYS: b" " * (65 << 10)}, "more than 64 KiB"),
    "no JSON": ({KEYS: b"<html>"}, "the response is invalid"),
    "no set": ({KEYS: b'{"keys": 1}'}, "not a JSON Web Key Set"),
    "a secret": (
        {KEYS: json.dumps({"keys": [OctKey.generate_key(256).as_dict()]}).encode()},
        "no key",
    ),
    "no configuration": ({CONFIGURATION: (404, {})}, "answers with status 404"),
    "a list": ({CONFIGURATION: b"[]"}, "of another issuer"),
    "another issuer": ({CONFIGURATION: b'{"issuer": "https://evil.example"}'}, "another issuer"),
}


@pytest.mark.parametrize(("answers", "words"), FAULTS.values(), ids=FAULTS.keys())
async def test_fault_of_the_issuer_is_named(
    issuer: Issuer, answers: dict[str, Any], words: str
) -> None:
    issuer.answer = answers.get
    with pytest.raises(FetchError, match=words):
        await fetch_keys(settings_for(issuer))


@pytest.mark.parametrize("address", ["http://evil.example/keys", "ftp://127.0.0.1/keys", "", 1])
async def test_keys_are_not_fetched_from_an_unsafe_address(issuer: Issuer, address: Any) -> None:
    document = configuration(issuer, jwks_uri=address)
    issuer.answer = lambda path: document if path == CONFIGURATION else None
    with pytest.raises(FetchError, match="no jwks_uri with https"):
        await fetch_keys(settings_for(issuer))


async def test_slow_issuer_is_given_up(issuer: Issuer) -> None:
    ended = threading.Event()

    def hang(path: str) -> None:
        ended.wait(TIMEOUT_S)

    issuer.answer = hang
    with pytest.raises(FetchError, match="no complete response within 1 s"):
        await fetch_keys(settings_for(issuer), timeout_s=1)
    ended.set()


async def test_address_of_the_keys_overrides_the_configuration(issuer: Issuer) -> None:
    settings = settings_for(issuer, oidc_jwks_url=issuer.url + KEYS)
    assert await fetch_keys(settings)
    assert issuer.count(CONFIGURATION) == 0


async def test_proxy_is_used_for_encrypted_addresses_of_the_keys(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readline())
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, url)
        settings = settings_for(issuer, oidc_jwks_url="https://keys.example/keys")
        with pytest.raises(FetchError):
            await fetch_keys(settings)
        assert requests == [b"CONNECT keys.example:443 HTTP/1.1\r\n"]
        local = IdentitySettings(
            oidc_issuer="https://login.example",
            oidc_audience=(AUDIENCE,),
            oidc_jwks_url=issuer.url + KEYS,
        )
        assert await fetch_keys(local)
        assert len(requests) == 1


async def test_token_of_the_pod_is_sent_to_the_host_of_the_issuer_only(
    issuer: Issuer, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("pod-token\n")
    with serving_issuer() as other:
        other.keys = issuer.keys
        document = configuration(issuer, jwks_uri=other.url + KEYS)
        issuer.answer = lambda path: document if path == CONFIGURATION else None
        await fetch_keys(settings_for(issuer, oidc_token_file=token_file))
        (sent,) = (headers for _, headers in issuer.requests)
        assert sent["authorization"] == "Bearer pod-token"
        (sent,) = (headers for _, headers in other.requests)
        assert "authorization" not in sent
    token_file.write_text("renewed")
    issuer.answer = lambda path: None
    await fetch_keys(settings_for(issuer, oidc_token_file=token_file))
    assert issuer.requests[-1][1]["authorization"] == "Bearer renewed"


async def test_issuer_is_trusted_by_its_ca_file_only(tmp_path: Path) -> None:
    authority = trustme.CA()
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    context: ssl.SSLContext = server_context(authority, name="127.0.0.1", wants_client=False)
    with serving_issuer(context) as issuer:
        assert await fetch_keys(settings_for(issuer, oidc_ca_file=ca_file))
        with pytest.raises(FetchError, match="CERTIFICATE_VERIFY_FAILED"):
            await fetch_keys(settings_for(issuer))
        document = configuration(issuer, jwks_uri="http://127.0.0.1:9/keys")
        issuer.answer = lambda path: document if path == CONFIGURATION else None
        with pytest.raises(FetchError, match="is not encrypted"):
            await fetch_keys(settings_for(issuer, oidc_ca_file=ca_file))


async def test_keys_in_a_file_are_read_again(issuer: Issuer, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(issuer.publish())
    source = open_key_source(settings_for(issuer, oidc_jwks_url=path.as_uri()))
    tokens = checker(issuer, source)
    await check(tokens, issuer.sign("Ed25519"))
    token = rotate(issuer, "in the file")
    with pytest.raises(InvalidToken, match="not among its issuer's usable keys"):
        await check(tokens, token)
    assert issuer.requests == []
    async with refreshed(source):
        fresh = path.with_suffix(".fresh")
        fresh.write_bytes(issuer.publish())
        fresh.replace(path)
        await wait_until_async(lambda: "in the file" in find_ids(source.keys))
    await check(tokens, token)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("oidc_jwks_url", "{}", "not a JSON Web Key Set"),
        ("oidc_jwks_url", None, "No such file"),
        ("oidc_ca_file", "no certificate", "not a valid CA certificate"),
        ("oidc_ca_file", None, "No such file"),
        ("oidc_token_file", "two\nlines", "does not contain a token"),
        ("oidc_token_file", b"\xff", "is not a text in UTF-8"),
        ("oidc_token_file", None, "No such file"),
    ],
)
def test_start_fails_for_a_file_that_cannot_be_used(
    issuer: Issuer, tmp_path: Path, name: str, text: str | bytes | None, words: str
) -> None:
    path = tmp_path / "file"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    settings = settings_for(issuer, **{name: path.as_uri() if name.endswith("url") else path})
    with pytest.raises(CommandError, match=words) as caught:
        open_key_source(settings)
    assert str(path) in str(caught.value)


@given(st.binary(max_size=300) | st.from_regex(rb"\A[\w.=+/-]{0,300}\Z"))
def test_any_bytes_are_no_valid_token_and_no_keys(data: bytes) -> None:
    with pytest.raises(InvalidToken):
        TokenParser("https://issuer.example", (AUDIENCE,)).parse(data)
    with pytest.raises(ValueError, match=r"\w"):
        parse_issuer_keys(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
HEADERS = st.fixed_dictionaries(
    {}, optional={name: JSON | st.just("RS256") for name in ("alg", "kid", "typ", "crit", "jwk")}
)
CLAIMS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("exp", "nbf", "iat", "sub"), JSON)
    | {"iss": JSON | st.just("https://issuer.example"), "aud": JSON | st.just(AUDIENCE)},
)


@given(HEADERS, CLAIMS)
def test_token_of_any_json_is_refused_or_well_formed(head: Any, payload: Any) -> None:
    text = sign_parts(head, payload, lambda _: b"signature").encode()
    with suppress(InvalidToken):
        assert TokenParser("https://issuer.example", (AUDIENCE,)).parse(text).algorithm == "RS256"


@given(st.fixed_dictionaries({}, optional={"keys": JSON | st.lists(JSON, max_size=3)}))
def test_any_set_of_keys_is_read_or_refused(document: Any) -> None:
    with suppress(ValueError):
        parse_issuer_keys(json.dumps(document).encode())


def jwk(key: Any, **more: Any) -> dict[str, Any]:
    return {**key.as_dict(private=False), **more}


def test_only_keys_for_signatures_of_accepted_kinds_are_used(issuer: Issuer) -> None:
    rsa = issuer.keys["rsa"]
    entries = [
        jwk(rsa, kid="used", use="sig", alg="RS256", x5c=["ignored"], extra={"a": 1}),
        jwk(rsa, kid="encrypts", use="enc"),
        jwk(rsa, kid="signs", key_ops=["sign"]),
        jwk(rsa, kid="odd", key_ops=1),
        jwk(rsa, kid="weak", n=jwk(rsa)["n"][:171]),
        jwk(ECKey.generate_key("secp256k1"), kid="bitcoin"),
        jwk(issuer.keys["p256"], kid="off the curve", x=jwk(issuer.keys["p256"])["y"]),
        {"kty": "RSA", "kid": "empty"},
        {"kty": ["RSA"]},
        "text",
        None,
        jwk(issuer.keys["ed25519"], kid="edwards", alg="EdDSA"),
    ]
    keys = parse_issuer_keys(json.dumps({"keys": entries}).encode())
    used, edwards = keys
    assert (used.kid, edwards.kid) == ("used", "edwards")
    assert [fits(used, name) for name in ("RS256", "RS512", "ES256")] == [True, False, False]
    assert fits(edwards, "Ed25519")
