"""A small OpenID provider on loopback, whose keys and faults a test sets, and tokens that it signs."""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from joserfc.jwk import ECKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

AUDIENCE: Final = "triton"
CONFIGURATION: Final = "/.well-known/openid-configuration"
KEYS: Final = "/keys"
SIGN_IN: Final = "/sign-in"
TOKEN: Final = "/token"
HOUR_S: Final = 3600

Key = RSAKey | ECKey | OKPKey
# The key of each algorithm.
KEYS_BY_ALGORITHM: Final = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), "rsa"),
    "ES256": "p256",
    "ES384": "p384",
    "ES512": "p521",
    "EdDSA": "ed25519",
    "Ed25519": "ed25519",
}


@cache
def create_keys() -> Mapping[str, Key]:
    return {
        "rsa": RSAKey.generate_key(2048),
        "p256": ECKey.generate_key("P-256"),
        "p384": ECKey.generate_key("P-384"),
        "p521": ECKey.generate_key("P-521"),
        "ed25519": OKPKey.generate_key("Ed25519"),
    }


def encode_base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def encode_json(value: Any) -> bytes:
    """Return a part of a token: of a value, or of bytes as they are."""
    return encode_base64(value if isinstance(value, bytes) else json.dumps(value).encode())


def sign_parts(header: Any, payload: Any, sign: Callable[[bytes], bytes]) -> str:
    signed = encode_json(header) + b"." + encode_json(payload)
    return (signed + b"." + encode_base64(sign(signed))).decode()


def signer(key: Any, algorithm: str) -> Callable[[bytes], bytes]:
    return lambda signed: JWSRegistry.algorithms[algorithm].sign(signed, key)


def claims(issuer: str, **changes: Any) -> dict[str, Any]:
    """Return the claims of a valid token; a change to `...` leaves one out."""
    now = int(time.time())
    made = {"iss": issuer, "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + HOUR_S}
    return {name: value for name, value in {**made, **changes}.items() if value is not ...}


class Issuer:
    """The provider. `answer` is called with each path, and returns a body, a status or None for the usual."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.keys = dict(create_keys())
        self.requests: list[tuple[str, Mapping[str, str]]] = []
        self.challenges: dict[str, str] = {}  # of sign-ins in progress, by their code
        self.answer: Callable[[str], bytes | tuple[int, Mapping[str, str]] | None] = lambda path: (
            None
        )

    def sign(self, algorithm: str = "RS256", *, header: Any = (), **changes: Any) -> str:
        name = KEYS_BY_ALGORITHM[algorithm]
        head = {"alg": algorithm, "kid": name, **dict(header)}
        return sign_parts(head, claims(self.url, **changes), signer(self.keys[name], algorithm))

    def publish(self) -> bytes:
        keys = [{**key.as_dict(private=False), "kid": name} for name, key in self.keys.items()]
        return json.dumps({"keys": keys}).encode()

    def configuration(self) -> bytes:
        addresses = {"jwks_uri": KEYS, "authorization_endpoint": SIGN_IN, "token_endpoint": TOKEN}
        document = {name: self.url + path for name, path in addresses.items()}
        return json.dumps({"issuer": self.url, **document}).encode()

    def accept_user(self, query: Mapping[str, str]) -> str:
        """Return where a browser is sent after its user has signed in, with a code (RFC 6749)."""
        assert (query["response_type"], query["code_challenge_method"]) == ("code", "S256")
        code = f"code-{len(self.challenges)}"
        self.challenges[code] = query["code_challenge"]
        return f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"

    def exchange_code(self, form: Mapping[str, str]) -> dict[str, str]:
        """Return a token for a code, once, to who has the verifier of its challenge (RFC 7636)."""
        verifier = hashlib.sha256(form["code_verifier"].encode()).digest()
        if self.challenges.pop(form["code"], "") != encode_base64(verifier).decode():
            return {"error": "invalid_grant"}
        return {"access_token": self.sign(sub="alice", azp=form["client_id"])}

    def count(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.requests)


class Handler(BaseHTTPRequestHandler):
    issuer: Issuer

    def do_POST(self) -> None:
        """Hand out a token to every client, as Keycloak does."""
        size = int(self.headers.get("content-length", 0))
        form = dict(parse_qsl(self.rfile.read(size).decode()))
        if "code" in form:
            answer = self.issuer.exchange_code(form)
        else:
            roles = {"roles": [form["client_id"]]}
            answer = {"access_token": self.issuer.sign(azp=form["client_id"], realm_access=roles)}
        self.send_response(400 if "error" in answer else 200)
        self.send_header("Access-Control-Allow-Origin", "*")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_GET(self) -> None:
        issuer = self.issuer
        issuer.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
        path, _, query = self.path.partition("?")
        if path == SIGN_IN:
            self.send_response(302)
            self.send_header("Location", issuer.accept_user(dict(parse_qsl(query))))
            self.end_headers()
            return
        usual = {CONFIGURATION: issuer.configuration, KEYS: issuer.publish}
        answer = issuer.answer(self.path)
        if answer is None:
            answer = usual[self.path]() if self.path in usual else (404, {})
        status, headers = (200, {}) if isinstance(answer, bytes) else answer
        self.send_response(status)
        self.send_header("Access-Control-Allow-Origin", "*")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if isinstance(answer, bytes):
            with suppress(OSError):  # the gateway reads no further
                self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving_issuer(context: ssl.SSLContext | None = None, port: int = 0) -> Iterator[Issuer]:
    """Serve an issuer until the end of the block, over TLS with a context."""

    class IssuerHandler(Handler):
        """The handler of this issuer, which is set when its port is known."""

    server = ThreadingHTTPServer(("127.0.0.1", port), IssuerHandler)
    server.daemon_threads = True
    scheme = "http"
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https"
    issuer = IssuerHandler.issuer = Issuer(f"{scheme}://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield issuer
    finally:
        server.shutdown()
        server.server_close()
