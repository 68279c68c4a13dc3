"""Tokens of a real issuer, over HTTP and gRPC, before one gateway."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.hashes import SHA256
from joserfc.jwk import RSAKey

from tests.capabilities.grpc_api.support.grpc_gateway import SERVICE, call_bytes, failure
from tests.capabilities.identity.support.issuer import (
    AUDIENCE,
    KEYS_BY_ALGORITHM,
    Issuer,
    claims,
    encode_json,
    serving_issuer,
    sign_parts,
    signer,
)
from tests.support.fake_triton import Fake, fake_triton
from tests.support.keys import INFER, bearer, entry
from tests.support.servers import ROOT, Command, free_ports, gateway
from tests.support.wait import wait_until

ADDRESS = "alice@corp.example"
RULES: list[dict[str, Any]] = [
    {"claim": "groups", "value": "ops", "roles": ["admin"]},
    {"claim": "groups", "value": "team-vision", "roles": ["infer"], "models": ["vision-*"]},
    {"claim": "sub", "value": "alice", "roles": ["infer", "metrics"]},
    {"claim": "realm_access.roles", "value": "reader", "roles": ["metrics"], "name": "readers"},
    {"claim": "https://claims.example/team", "value": "text", "roles": ["infer"]},
    {"claim": "scope", "value": "models", "roles": ["infer"]},
    {"claim": "email", "value": ADDRESS, "roles": ["infer"]},
    {"claim": "slow", "value": "yes", "roles": ["infer"], "requests_per_second": 0.01},
]


@dataclass(frozen=True)
class Service:
    issuer: Issuer
    client: httpx.Client
    command: Command
    grpc_address: str
    triton: Fake
    keys_file: Path

    def get(self, token: str, path: str = "/v1/models", **headers: str) -> httpx.Response:
        return self.client.get(path, headers={**bearer(token), **headers})


def write_keys(path: Path, **lists: Any) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.write_text(yaml.safe_dump(lists))
    fresh.replace(path)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    keys_file = tmp_path_factory.mktemp("tokens") / "keys.yaml"
    write_keys(keys_file, keys=[entry(INFER, "infer")], oidc=RULES)
    (port,) = free_ports(1)
    with serving_issuer() as issuer, fake_triton() as triton:
        settings = {
            "keys_file": str(keys_file),
            "oidc_issuer": issuer.url,
            "oidc_audience": f"other,{AUDIENCE}",
            "log_format": "json",
            "grpc_port": str(port),
        }
        url = f"http://127.0.0.1:{triton.port}"
        with gateway(url, **settings) as (client, command):
            # The gateway fetches the keys when it starts, so that the tests that follow are not the first.
            wait_until(lambda: issuer.count("/keys"))
            yield Service(issuer, client, command, f"127.0.0.1:{port}", triton, keys_file)


@pytest.mark.parametrize("algorithm", KEYS_BY_ALGORITHM)
def test_token_of_each_algorithm_is_accepted(service: Service, algorithm: str) -> None:
    response = service.get(service.issuer.sign(algorithm))
    assert response.status_code == 200, response.text


def test_caller_is_the_rule_and_the_subject_is_logged(service: Service) -> None:
    token = service.issuer.sign(sub="a user of the cluster", groups=["x", "team-vision"])
    assert service.get(token).status_code == 200
    refused = service.get(token, METRICS_PATH)
    assert refused.status_code == 403
    assert "rule 'team-vision' lacks the role 'metrics'" in refused.json()["error"]
    line = json.loads(service.command.wait_for('"subject":"a user of the cluster"'))
    assert line["key"] == "team-vision"
    assert service.get(token, "/v1/models/text").json()["code"] == "MODEL_NOT_FOUND"


def test_subject_is_in_the_audit_log(service: Service) -> None:
    token = service.issuer.sign(sub="auditor", groups=["ops"])
    path = "/v2/repository/models/none/load"
    service.client.post(path, headers=bearer(token), json={})
    line = json.loads(service.command.wait_for('"logger":"gateway.audit"'))
    assert (line["key"], line["subject"]) == ("ops", "auditor")


MODELS = "/v1/models"
METRICS_PATH = "/metrics"
# The claims, a path, and its status.
CLAIMS: dict[str, tuple[Mapping[str, Any], str, int]] = {
    "a text": ({"groups": "team-vision"}, MODELS, 200),
    "one of a list": ({"groups": ["a", "team-vision"]}, MODELS, 200),
    "the first rule": ({"groups": ["team-vision", "ops"]}, METRICS_PATH, 200),
    "a path": ({"realm_access": {"roles": ["reader"]}}, METRICS_PATH, 200),
    "a path, without the role": ({"realm_access": {"roles": ["reader"]}}, MODELS, 403),
    "a name with dots": ({"https://claims.example/team": "text"}, MODELS, 200),
    "a scope": ({"scope": "openid models"}, MODELS, 200),
    "none": ({}, MODELS, 403),
    "another case": ({"groups": "Team-Vision"}, MODELS, 403),
    "a part of a text": ({"groups": "team-vision-2"}, MODELS, 403),
    "words of a text": ({"groups": "my team-vision"}, MODELS, 403),
    "a list with a number": ({"groups": ["team-vision", 1]}, MODELS, 403),
    "an object": ({"groups": {"team-vision": True}}, MODELS, 403),
    "a list in a list": ({"groups": [["team-vision"]]}, MODELS, 403),
    "true": ({"groups": True}, MODELS, 403),
    "an address that nobody has verified": ({"email": ADDRESS}, MODELS, 403),
    "a verified address": ({"email": ADDRESS, "email_verified": True}, MODELS, 200),
    "an unverified address": ({"email": ADDRESS, "email_verified": False}, MODELS, 403),
    "an address of unknown state": ({"email": ADDRESS, "email_verified": "true"}, MODELS, 403),
    "an address with a number": ({"email": ADDRESS, "email_verified": 1}, MODELS, 403),
    "an address with null": ({"email": ADDRESS, "email_verified": None}, MODELS, 403),
    "a path through a list": ({"realm_access": [{"roles": ["reader"]}]}, METRICS_PATH, 403),
}


@pytest.mark.parametrize(("changes", "path", "status"), CLAIMS.values(), ids=CLAIMS.keys())
def test_claims_give_the_rights_of_the_first_rule(
    service: Service, changes: Mapping[str, Any], path: str, status: int
) -> None:
    response = service.get(service.issuer.sign(sub="bob", **changes), path)
    assert response.status_code == status, response.text


def test_token_without_a_rule_is_forbidden(service: Service) -> None:
    response = service.get(service.issuer.sign(sub="bob"))
    assert response.json()["error"] == "the token matches no entry of 'oidc' in the keys file"
    assert response.json()["code"] == "FORBIDDEN"
    assert "www-authenticate" not in response.headers


def test_rate_of_a_rule_counts_for_all_its_tokens(service: Service) -> None:
    tokens = [service.issuer.sign(sub=name, slow="yes") for name in ("bob", "carol")]
    assert [service.get(token).status_code for token in tokens] == [200, 429]


def test_token_and_key_in_one_request_are_refused(service: Service) -> None:
    token = service.issuer.sign()
    response = service.get(token, **{"X-API-Key": INFER})
    assert response.status_code == 401
    assert "two different keys or tokens" in response.json()["error"]
    assert service.get(token, **{"X-API-Key": token}).status_code == 200
    assert service.get(INFER).status_code == 200
    assert service.get("tgw_unknown").json()["error"] == "unknown key"
    assert "a key or a token is required" in service.get("").json()["error"]


def test_public_paths_ignore_a_bad_token(service: Service) -> None:
    token = service.issuer.sign(aud="another")
    for path in ("/livez", "/openapi.json"):
        assert service.get(token, path).status_code == 200
    assert "replicas" not in service.get(token, "/readyz").text


Forge = Callable[[Issuer], str]
OTHER_KEY = RSAKey.generate_key(2048)
PADDING = "x" * (8 << 10)
OTHER_ALPHABET = str.maketrans("-_", "+/")
RSA_HEAD = {"alg": "RS256", "kid": "rsa"}


def header(**changes: Any) -> Forge:
    return lambda issuer: issuer.sign(header=changes)


def claim(**changes: Any) -> Forge:
    return lambda issuer: issuer.sign(**changes)


def raw(head: Any, payload: Any = None, algorithm: str = "RS256") -> Forge:
    """A token with a good signature of whatever is in it."""

    def forge(issuer: Issuer) -> str:
        key = issuer.keys[KEYS_BY_ALGORITHM[algorithm]]
        made = claims(issuer.url) if payload is None else payload
        return sign_parts(head, made, signer(key, algorithm))

    return forge


def forged(**changes: Any) -> Forge:
    """A token of another key, which its header names or contains."""
    head = {name: value for name, value in {**RSA_HEAD, **changes}.items() if value is not ...}
    return lambda issuer: sign_parts(head, claims(issuer.url), signer(OTHER_KEY, "RS256"))


def unsigned(algorithm: str) -> Forge:
    return lambda issuer: sign_parts({"alg": algorithm}, claims(issuer.url), lambda _: b"")


def keyed(algorithm: str, secret: Callable[[Issuer], bytes]) -> Forge:
    """A token with an HMAC whose secret is the public key."""

    def forge(issuer: Issuer) -> str:
        digest = getattr(hashlib, f"sha{algorithm[2:]}")
        head = {"alg": algorithm, "kid": "rsa"}
        return sign_parts(
            head, claims(issuer.url), lambda text: hmac.digest(secret(issuer), text, digest)
        )

    return forge


def changed(part: int, value: Callable[[str], str], **changes: Any) -> Forge:
    """A good token, one of whose parts is another."""

    def forge(issuer: Issuer) -> str:
        parts = issuer.sign(**changes).split(".")
        parts[part] = value(parts[part])
        return ".".join(parts)

    return forge


def der_signature(issuer: Issuer) -> str:
    key: Any = issuer.keys["p256"]
    head = {"alg": "ES256", "kid": "p256"}
    return sign_parts(
        head, claims(issuer.url), lambda text: bytes(key.private_key.sign(text, ECDSA(SHA256())))
    )


NOW = int(time.time())
# How each is forged, and what the error says is wrong.
HOSTILE: dict[str, tuple[Forge, str]] = {
    "no signature": (unsigned("none"), "'alg' 'none'"),
    "no signature, in capitals": (unsigned("NONE"), "'alg' 'NONE'"),
    "a HMAC with the public key in PEM": (
        keyed("HS256", lambda issuer: issuer.keys["rsa"].as_pem(private=False)),
        "'alg' 'HS256'",
    ),
    "a HMAC with the public key in JSON": (
        keyed("HS512", lambda issuer: json.dumps(issuer.keys["rsa"].as_dict()).encode()),
        "'alg' 'HS512'",
    ),
    "the algorithm of a curve of Bitcoin": (header(alg="ES256K"), "'alg' 'ES256K'"),
    "the algorithm Ed448": (header(alg="Ed448"), "'alg' 'Ed448'"),
    "a list of algorithms": (header(alg=["RS256"]), "has 'alg'"),
    "no algorithm": (raw({"kid": "rsa"}), "malformed"),
    "an algorithm of another key": (header(alg="ES256"), "does not fit the issuer's key"),
    "an algorithm of another curve": (
        lambda issuer: issuer.sign("ES256", header={"alg": "ES384"}),
        "does not fit the issuer's key",
    ),
    "the ID of another key": (header(kid="p256"), "does not fit the issuer's key"),
    "another padding": (header(alg="PS256"), "invalid signature"),
    "another hash": (header(alg="RS512"), "invalid signature"),
    "another key with the ID": (
        lambda issuer: sign_parts(RSA_HEAD, claims(issuer.url), signer(OTHER_KEY, "RS256")),
        "invalid signature",
    ),
    "an empty signature": (changed(2, lambda _: ""), "invalid signature"),
    "a cut signature": (changed(2, lambda text: text[:-8]), "invalid signature"),
    "a longer signature": (changed(2, lambda text: text + "AAAA"), "invalid signature"),
    "another payload": (
        lambda issuer: changed(1, lambda _: encode_json(claims(issuer.url, sub="root")).decode())(
            issuer
        ),
        "invalid signature",
    ),
    "a signature of zeros": (
        lambda issuer: sign_parts(
            {"alg": "ES256", "kid": "p256"}, claims(issuer.url), lambda _: bytes(64)
        ),
        "invalid signature",
    ),
    "a signature in DER": (der_signature, "invalid signature"),
    "an unknown key": (header(kid="unknown"), "not among its issuer's usable keys"),
    "a path for a key": (header(kid="../../../dev/null"), "not among its issuer's usable keys"),
    "a number for a key": (header(kid=1), "not a text"),
    "its own key": (forged(jwk=OTHER_KEY.as_dict(private=False)), "invalid signature"),
    "the address of a key": (forged(jku="https://evil.example/keys"), "invalid signature"),
    "the address of a certificate": (forged(x5u="https://evil.example/c"), "invalid signature"),
    "its own certificate": (forged(x5c=["MIIB"]), "invalid signature"),
    "its own key without an ID": (
        forged(kid=..., jwk=OTHER_KEY.as_dict(private=False)),
        "invalid signature",
    ),
    "a critical header": (header(crit=["exp"], exp=NOW), "header 'crit'"),
    "a payload that is not encoded": (header(crit=["b64"], b64=False), "header 'crit'"),
    "a compressed payload": (header(zip="DEF"), "header 'zip'"),
    "expired": (claim(exp=NOW - 120), "has expired"),
    "no expiry": (claim(exp=...), "(exp)"),
    "an expiry in text": (claim(exp=str(NOW + 60)), "of another type"),
    "an expiry that is true": (claim(exp=True), "of another type"),
    "an expiry that is null": (claim(exp=None), "of another type"),
    "an expiry that is infinite": (raw(RSA_HEAD, b'{"exp": 1e999}'), "malformed"),
    "an expiry that is NaN": (raw(RSA_HEAD, b'{"exp": NaN}'), "malformed"),
    "valid later": (claim(nbf=NOW + 600), "not valid yet"),
    "a start in text": (claim(nbf="now"), "of another type"),
    "issued in the future": (claim(iat=NOW + 600), "issued in the future"),
    "another issuer": (claim(iss="https://evil.example"), "another issuer"),
    "a longer issuer": (lambda issuer: issuer.sign(iss=f"{issuer.url}/"), "another issuer"),
    "a list of issuers": (lambda issuer: issuer.sign(iss=[issuer.url]), "of another type"),
    "no issuer": (claim(iss=...), "another issuer"),
    "another audience": (claim(aud="another"), "another audience"),
    "a longer audience": (claim(aud=[f"{AUDIENCE}-2"]), "another audience"),
    "audiences in an object": (claim(aud={AUDIENCE: True}), "another audience"),
    "no audience": (claim(aud=...), "another audience"),
    "more than 8 KiB": (claim(padding=PADDING), "larger than 8 KiB"),
    "two parts": (lambda issuer: issuer.sign().rpartition(".")[0], "malformed"),
    "five parts": (lambda issuer: f"{issuer.sign()}.AAAA.AAAA", "malformed"),
    "no parts": (lambda issuer: "..", "malformed"),
    "a header that is a list": (raw([]), "malformed"),
    "a header that is no JSON": (raw(b"{'alg': 'RS256'}"), "malformed"),
    "a header with other characters": (changed(0, lambda text: f"{text[:-1]}~"), "malformed"),
    "a header with padding": (changed(0, lambda text: f"{text}="), "malformed"),
    "a payload in the other alphabet": (
        changed(1, lambda text: text.translate(OTHER_ALPHABET), team="?" * 6),
        "malformed",
    ),
    "a signature in the other alphabet": (
        changed(2, lambda text: text.translate(OTHER_ALPHABET)),
        "invalid signature",
    ),
    "a very deep header": (raw(b'{"alg": "RS256", "a": ' + b"[" * 4000), "malformed"),
    "a deep header": (
        raw(b'{"alg": "RS256", "kid": "rsa", "a": ' + b"[" * 1000 + b"]" * 1000 + b"}"),
        "malformed",
    ),
    "a payload that is a list": (raw(RSA_HEAD, []), "payload that is not"),
    "a payload that is no JSON": (raw(RSA_HEAD, b"\xff"), "malformed"),
    "a very deep payload": (raw(RSA_HEAD, b'{"a": ' + b"[" * 4000), "malformed"),
}


@pytest.mark.fault("tokens that are unsigned, forged, expired or malformed")
@pytest.mark.parametrize(("forge", "words"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_token_is_refused_with_its_reason(
    service: Service, forge: Forge, words: str
) -> None:
    token = forge(service.issuer)
    response = service.get(token)
    document = response.json()
    assert (response.status_code, document["code"]) == (401, "UNAUTHENTICATED"), document
    assert response.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    assert document["error"].startswith("the token ")
    assert words in document["error"]
    for part in filter(lambda part: len(part) > 8, token.split(".")):
        assert part not in response.text
        assert part not in service.command.output


OTHER_TYPE = "has a type (typ) of another purpose"
BOUND = "is bound to a key or a certificate (cnf)"
# Tokens with a good signature, their status and what the error says is wrong.
PURPOSES: dict[str, tuple[Forge, int, str]] = {
    "no type": (header(), 200, ""),
    "JWT": (header(typ="JWT"), 200, ""),
    "an access token": (header(typ="at+jwt"), 200, ""),
    "an access token, with the whole media type": (header(typ="application/at+JWT"), 200, ""),
    "a logout token": (header(typ="logout+jwt"), 401, OTHER_TYPE),
    "a security event": (header(typ="secevent+jwt"), 401, OTHER_TYPE),
    "a proof of possession": (header(typ="dpop+jwt"), 401, OTHER_TYPE),
    "the same with the whole media type": (header(typ="application/dpop+jwt"), 401, OTHER_TYPE),
    "a request for authorization": (header(typ="oauth-authz-req+jwt"), 401, OTHER_TYPE),
    "the response of an introspection": (
        header(typ="token-introspection+jwt"),
        401,
        OTHER_TYPE,
    ),
    "a JWS": (header(typ="JOSE"), 401, OTHER_TYPE),
    "an empty type": (header(typ=""), 401, OTHER_TYPE),
    "two types": (header(typ="at+jwt,logout+jwt"), 401, OTHER_TYPE),
    "a type that is a number": (header(typ=1), 401, OTHER_TYPE),
    "a type that is null": (header(typ=None), 401, OTHER_TYPE),
    "a list of types": (header(typ=["JWT"]), 401, OTHER_TYPE),
    "bound to a certificate": (claim(cnf={"x5t#S256": "bwcK0esc"}), 401, BOUND),
    "bound to the hash of a key": (claim(cnf={"jkt": "0ZcOCORZ"}), 401, BOUND),
    "bound to a key": (claim(cnf={"jwk": {"kty": "RSA"}}), 401, BOUND),
    "bound to nothing": (claim(cnf={}), 401, BOUND),
    "bound to null": (claim(cnf=None), 401, BOUND),
    "issued to a client": (claim(azp="app", client_id="app"), 200, ""),
    "the address of a genuine key": (header(jku="https://issuer.example/keys"), 200, ""),
    "a genuine certificate": (header(x5u="https://issuer.example/c"), 200, ""),
    "a key that is not used": (header(jwk=OTHER_KEY.as_dict(private=False)), 200, ""),
}


@pytest.mark.parametrize(("forge", "status", "words"), PURPOSES.values(), ids=PURPOSES.keys())
def test_token_made_for_another_purpose_is_refused(
    service: Service, forge: Forge, status: int, words: str
) -> None:
    response = service.get(forge(service.issuer))
    assert response.status_code == status, response.text
    assert words in response.text


@pytest.mark.fault("tokens of unknown keys")
def test_unknown_keys_cause_one_fetch_in_ten_seconds(service: Service) -> None:
    before = service.issuer.count("/keys")
    for number in range(20):
        assert service.get(service.issuer.sign(header={"kid": f"k{number}"})).status_code == 401
    assert service.issuer.count("/keys") <= before + 2
    assert service.get(service.issuer.sign()).status_code == 200
    assert service.issuer.url not in service.command.output  # a URL can contain a secret


def test_key_of_the_issuer_is_found_without_its_id_if_it_is_the_only_one(service: Service) -> None:
    head = {"alg": "ES384"}
    key = service.issuer.keys["p384"]
    token = sign_parts(head, claims(service.issuer.url), signer(key, "ES384"))
    assert service.get(token).status_code == 200


def test_tokens_do_not_reach_triton(service: Service) -> None:
    token = service.issuer.sign()
    path = "/v2/models/m/infer"
    for headers in (
        bearer(token),
        {"X-API-Key": token},
        {**bearer(token), "Connection": "authorization"},
    ):
        service.client.post(path, headers=headers, json={})
    received = []
    while not service.triton.requests.empty():
        received.append(b"".join(service.triton.requests.get()))
    assert any(path.encode() in request for request in received)
    signature = token.rpartition(".")[2].encode()
    assert not any(signature in request for request in received)


def test_age_of_the_keys_is_a_metric(service: Service) -> None:
    page = service.get(service.issuer.sign(), "/metrics").text
    assert "# TYPE gateway_oidc_keys_age_seconds gauge" in page
    (text,) = re.findall(r"^# HELP gateway_oidc_keys_age_seconds (.*)$", page, re.MULTILINE)
    row = f"| `gateway_oidc_keys_age_seconds` | gauge |  | {text} |"
    assert row in (ROOT / "docs/operate/metrics.md").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("gateway_oidc_keys_age"))
    assert 0 <= float(line.split()[1]) < 600


METADATA = f"{SERVICE}/ServerMetadata"
OVER_GRPC: dict[str, tuple[Forge, str, str]] = {
    "no rule": (claim(sub="bob", slow="no", groups="x"), "PERMISSION_DENIED", "no entry"),
    "no signature": (unsigned("none"), "UNAUTHENTICATED", "'alg' 'none'"),
    "another signature": (changed(2, lambda text: text[:-8]), "UNAUTHENTICATED", "signature"),
}


@pytest.mark.parametrize(("forge", "code", "words"), OVER_GRPC.values(), ids=OVER_GRPC.keys())
def test_hostile_token_is_refused_over_grpc(
    service: Service, forge: Forge, code: str, words: str
) -> None:
    metadata = [("authorization", f"Bearer {forge(service.issuer)}")]
    found, message = failure(call_bytes, service.grpc_address, METADATA, b"", metadata=metadata)
    assert (found, words in message) == (code, True), message


def test_token_is_accepted_over_grpc(service: Service) -> None:
    method = f"{SERVICE}/SystemSharedMemoryStatus"  # answered without a replica
    metadata = [("authorization", f"Bearer {service.issuer.sign()}")]
    assert call_bytes(service.grpc_address, method, b"", metadata=metadata) == b""
    both = [*metadata, ("x-api-key", INFER)]
    code, _ = failure(call_bytes, service.grpc_address, method, b"", metadata=both)
    assert code == "UNAUTHENTICATED"


def test_rule_that_is_removed_ends_the_rights_of_known_tokens(service: Service) -> None:
    token = service.issuer.sign(sub="carol", scope="models")
    assert service.get(token).status_code == 200
    rules = [rule for rule in RULES if rule["claim"] != "scope"]
    write_keys(service.keys_file, keys=[entry(INFER, "infer")], oidc=rules)
    try:
        wait_until(lambda: service.get(token).status_code == 403)
    finally:
        write_keys(service.keys_file, keys=[entry(INFER, "infer")], oidc=RULES)
    wait_until(lambda: service.get(token).status_code == 200)


@pytest.mark.long
def test_rotated_key_works_within_ten_seconds(service: Service) -> None:
    issuer = service.issuer
    assert service.get(issuer.sign()).status_code == 200
    key = issuer.keys["rotated"] = RSAKey.generate_key(2048)
    head = {"alg": "RS256", "kid": "rotated"}
    token = sign_parts(head, claims(issuer.url), signer(key, "RS256"))
    assert wait_until(lambda: service.get(token).status_code == 200) < 11


def test_gateway_serves_before_the_issuer_and_without_it(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.yaml"
    write_keys(keys_file, oidc=[{"claim": "sub", "value": "alice", "roles": ["infer"]}])
    with serving_issuer() as issuer:
        token = issuer.sign()
        other = issuer.sign(iss="https://other.example")
    settings = {"keys_file": str(keys_file), "oidc_issuer": issuer.url, "oidc_audience": AUDIENCE}
    with gateway("http://127.0.0.1:9", **settings) as (client, command):
        assert client.get("/livez").status_code == 200
        response = client.get("/v1/models", headers=bearer(token))
        assert response.status_code == 503
        assert response.json()["code"] == "ISSUER_UNAVAILABLE"
        assert response.headers["retry-after"] == "10"
        assert client.get("/livez", headers=bearer(token)).status_code == 200
        assert client.get("/v1/models", headers=bearer(other)).status_code == 401
        command.wait_for("cannot be fetched")


def test_tokens_need_an_extra_and_without_an_issuer_it_is_not_imported(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.yaml"
    keys_file.write_text("keys: []")
    program = (
        "import sys; sys.modules['joserfc'] = None;"
        "from gateway.capabilities.identity.capability import attach_identity as attach;"
        "from gateway.config.settings import Settings;"
        f"files = dict(keys_file='{keys_file}', tls_client_ca_file=None);"
        "attach(Settings(**files));"
        "assert 'gateway.capabilities.identity.verifier' not in sys.modules;"
        "assert 'cryptography' not in sys.modules;"
        f"attach(Settings(oidc_issuer='https://login.example', oidc_audience='a', **files))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    last = run.stderr.strip().splitlines()[-1]
    assert last.endswith("requires an extra: pip install 'triton-gateway[oidc]'"), run.stderr
