"""Client certificates: callers by their names, over HTTPS and gRPC."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
import trustme

from tests.capabilities.grpc_api.support.grpc_gateway import SERVICE, failure
from tests.capabilities.grpc_api.support.http2 import PREFACE, SETTINGS, encode_frame
from tests.capabilities.identity.support.certificates import write_client_certificate
from tests.capabilities.identity.test_tokens import write_keys
from tests.support.certificates import write_pair
from tests.support.fake_triton import fake_triton
from tests.support.keys import INFER, bearer, entry
from tests.support.servers import Command, free_ports
from tests.support.wait import TIMEOUT_S, wait_until

RULES = [
    {"subject_alternative_name": "spiffe://prod/vision", "roles": ["infer"]},
    {"subject_alternative_name": "spiffe://prod/ops/*", "roles": ["admin"], "name": "ops"},
    {"subject_alternative_name": "*.Clients.example", "roles": ["infer"]},
    {"subject_alternative_name": "mlops@clients.example", "roles": ["metrics"]},
]
Name = tuple[str, str]
NO_HEADERS: Mapping[str, str] = {}
APPLICATION = "https://app.example"
NO_REGIONS = f"{SERVICE}/SystemSharedMemoryStatus"  # answered without a replica


@dataclass
class Service:
    authority: trustme.CA
    clients: trustme.CA
    folder: Path
    port: int
    grpc_port: int
    command: Command

    def trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.authority.cert_pem.bytes().decode())

    def present(self, *names: Name, authority: trustme.CA | None = None) -> ssl.SSLContext:
        """Return a context with a certificate of these names, or without one."""
        context = self.trust()
        if names:
            files = write_client_certificate(authority or self.clients, self.folder, *names)
            context.load_cert_chain(*files)
        return context

    def get(
        self,
        path: str,
        *names: Name,
        authority: trustme.CA | None = None,
        key: str = "",
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> httpx.Response:
        context = self.present(*names, authority=authority)
        url = f"https://127.0.0.1:{self.port}{path}"
        sent = {**bearer(key), **headers}
        return httpx.get(url, verify=context, headers=sent, timeout=TIMEOUT_S)

    def call(self, *names: Name) -> bytes:
        files = write_client_certificate(self.clients, self.folder, *names)
        chain, key = (path.read_bytes() for path in files)
        root = self.authority.cert_pem.bytes()
        credentials = grpc.ssl_channel_credentials(root, key, chain)
        with grpc.secure_channel(f"127.0.0.1:{self.grpc_port}", credentials) as channel:
            return bytes(channel.unary_unary(NO_REGIONS)(b"", timeout=TIMEOUT_S))


@contextmanager
def serve_with(folder: Path, triton_url: str, client_auth: str) -> Iterator[Service]:
    authority = trustme.CA()
    clients = trustme.CA()
    write_pair(authority, folder)
    clients.cert_pem.write_to_path(folder / "clients.pem")
    write_keys(folder / "keys.yaml", keys=[entry(INFER, "infer")], certificates=RULES)
    port, grpc_port = free_ports(2)
    environment = {
        "GATEWAY_TRITON_URLS": triton_url,
        "GATEWAY_KEYS_FILE": str(folder / "keys.yaml"),
        "GATEWAY_TLS_CERT_FILE": str(folder / "cert.pem"),
        "GATEWAY_TLS_KEY_FILE": str(folder / "key.pem"),
        "GATEWAY_TLS_CLIENT_CA_FILE": str(folder / "clients.pem"),
        "GATEWAY_TLS_CLIENT_AUTH": client_auth,
        "GATEWAY_CORS_ORIGINS": APPLICATION,
        "GATEWAY_GRPC_PORT": str(grpc_port),
        "GATEWAY_LOG_FORMAT": "json",
    }
    with Command("serve", "--port", str(port), environment=environment) as command:
        command.wait_for("serving")
        yield Service(authority, clients, folder, port, grpc_port, command)


@pytest.fixture(scope="module")
def triton_url() -> Iterator[str]:
    with fake_triton() as triton:
        yield f"http://127.0.0.1:{triton.port}"


@pytest.fixture(scope="module")
def required(triton_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serve_with(tmp_path_factory.mktemp("required"), triton_url, "required") as service:
        yield service


@pytest.fixture(scope="module")
def optional(triton_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("optional")
    with serve_with(folder, triton_url, "optional") as service:
        yield service


MODELS = "/v1/models"
METRICS = "/metrics"
# The names of the certificate, and the statuses of the list of models and of the metrics.
NAMES: dict[str, tuple[list[Name], tuple[int, int]]] = {
    "a URI": ([("URI", "spiffe://prod/vision")], (200, 403)),
    "a URI in capitals": ([("URI", "spiffe://prod/VISION")], (403, 403)),
    "a longer URI": ([("URI", "spiffe://prod/vision/x")], (403, 403)),
    "a URI that matches a pattern": ([("URI", "spiffe://prod/ops/a")], (200, 200)),
    "a DNS name in capitals": ([("DNS", "A.clients.EXAMPLE")], (200, 403)),
    "the end of a DNS name": ([("DNS", "clients.example")], (403, 403)),
    "an e-mail address": ([("email", "mlops@clients.example")], (403, 200)),
    "an address as a DNS name": ([("DNS", "mlops@clients.example")], (403, 403)),
    "a DNS name in a URI": ([("URI", "urn:a.clients.example")], (403, 403)),
    "a URI after a comma": ([("URI", "spiffe://evil/x,spiffe://prod/vision")], (403, 403)),
    "a URI before a comma": ([("URI", "spiffe://prod/vision,x")], (403, 403)),
    "a URI before NUL": ([("URI", "spiffe://prod/vision\0.evil")], (403, 403)),
    "a URI with a line end": ([("URI", "spiffe://prod/vision\n")], (403, 403)),
    "a comma in a pattern": ([("URI", "spiffe://prod/ops/a,spiffe://evil/x")], (403, 403)),
    "a line end in a pattern": ([("URI", "spiffe://prod/ops/a\nspiffe://evil/x")], (403, 403)),
    "a space in a pattern": ([("URI", "spiffe://prod/ops/ x")], (403, 403)),
    "NUL in a pattern": ([("URI", "spiffe://prod/ops/a\0x")], (403, 403)),
    "dot segments in a pattern": ([("URI", "spiffe://prod/ops/../vision")], (403, 403)),
    "dots in a pattern": ([("URI", "spiffe://prod/ops/..a/b..")], (200, 200)),
    "the end of a list": ([("DNS", "evil.example,a.clients.example")], (403, 403)),
    "the end of lines": ([("DNS", "evil.example\na.clients.example")], (403, 403)),
    "the end after NUL": ([("DNS", "evil.example\0.clients.example")], (403, 403)),
    "the beginning before NUL": ([("DNS", "a.clients.example\0.evil.example")], (403, 403)),
    "a path before the end": ([("DNS", "evil.example/.clients.example")], (403, 403)),
    "a wildcard": ([("DNS", "*.clients.example")], (200, 403)),
    "the second of two": ([("DNS", "x.example"), ("URI", "spiffe://prod/vision")], (200, 403)),
}


@pytest.mark.fault("client certificates of another authority")
@pytest.mark.parametrize(("names", "statuses"), NAMES.values(), ids=NAMES.keys())
def test_certificate_has_the_rights_of_its_name(
    required: Service, names: list[Name], statuses: tuple[int, int]
) -> None:
    found = tuple(required.get(path, *names).status_code for path in (MODELS, METRICS))
    assert found == statuses


# The names of the certificate, and the status over gRPC, which itself cuts names off at a NUL.
OVER_GRPC: dict[str, tuple[list[Name], str]] = {
    "a URI": ([("URI", "spiffe://prod/ops/a")], "OK"),
    "two names": ([("DNS", "x.example"), ("URI", "spiffe://prod/vision")], "OK"),
    "a DNS name": ([("DNS", "a.clients.example")], "OK"),
    "a URI before NUL": ([("URI", "spiffe://prod/vision\0.evil")], "UNAUTHENTICATED"),
    "a DNS name before NUL": ([("DNS", "a.clients.example\0.evil")], "UNAUTHENTICATED"),
    "NUL after another name": (
        [("DNS", "x.example"), ("URI", "spiffe://prod/vision\0")],
        "PERMISSION_DENIED",
    ),
    "NUL first": ([("URI", "\0spiffe://prod/vision")], "UNAUTHENTICATED"),
    "a comma": ([("URI", "spiffe://prod/ops/a,b")], "PERMISSION_DENIED"),
    "a line end": ([("URI", "spiffe://prod/vision\n")], "PERMISSION_DENIED"),
}


@pytest.mark.parametrize(("names", "status"), OVER_GRPC.values(), ids=OVER_GRPC.keys())
def test_certificate_has_the_rights_of_its_whole_name_over_grpc(
    required: Service, names: list[Name], status: str
) -> None:
    if status == "OK":
        assert required.call(*names) == b""
    else:
        assert failure(required.call, *names)[0] == status


def test_caller_of_a_certificate_is_the_rule_and_its_name_is_logged(required: Service) -> None:
    required.get("/v1/models/none", ("URI", "spiffe://prod/ops/alice"))
    line = json.loads(required.command.wait_for('"subject":"spiffe://prod/ops/alice"'))
    assert line["key"] == "ops"


def test_certificate_without_a_rule_is_forbidden_and_a_key_comes_first(required: Service) -> None:
    stranger = ("DNS", "stranger.example")
    response = required.get(MODELS, stranger)
    assert response.status_code == 403
    expected = "the certificate matches no entry of 'certificates' in the keys file"
    assert response.json()["error"] == expected
    assert required.get("/livez", stranger).status_code == 200
    assert required.get(MODELS, stranger, key=INFER).status_code == 200
    ops = ("URI", "spiffe://prod/ops/a")
    assert required.get(METRICS, ops, key=INFER).status_code == 403
    assert required.get(METRICS, ops, key="tgw_unknown").status_code == 401


@pytest.mark.fault("client certificates of another authority")
def test_certificate_is_required_and_must_be_of_the_authority(required: Service) -> None:
    with pytest.raises(httpx.TransportError):
        required.get("/livez")
    with pytest.raises(httpx.TransportError):
        required.get("/livez", ("URI", "spiffe://prod/ops/a"), authority=trustme.CA())


CROSS_ORIGIN = (
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": APPLICATION, "Sec-Fetch-Site": "cross-site"},
)


@pytest.mark.fault("pages of other origins in a browser with a client certificate")
def test_certificate_of_a_browser_counts_for_the_gateways_own_page_only(required: Service) -> None:
    ops = ("URI", "spiffe://prod/ops/a")
    for headers in CROSS_ORIGIN:
        response = required.get(METRICS, ops, headers=headers)
        assert response.status_code == 403, headers
        expected = (
            "a web page of another origin sent this with the browser's certificate; send a key"
        )
        assert response.json()["error"] == expected
        assert required.get(MODELS, ops, key=INFER, headers=headers).status_code == 200
        assert required.get("/livez", ops, headers=headers).status_code == 200
    own = {"Origin": f"https://127.0.0.1:{required.port}", "Sec-Fetch-Site": "same-origin"}
    for headers in (own, {"Sec-Fetch-Site": "none"}):
        assert required.get(METRICS, ops, headers=headers).status_code == 200, headers


@pytest.mark.fault("client certificates that have expired")
def test_sessions_of_client_certificates_are_not_resumed(
    required: Service, optional: Service
) -> None:
    name = ("URI", "spiffe://prod/vision")
    for service in (required, optional):
        context = service.present(name)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            start_session(service.port, context)
        assert not is_resumed(service.port, service.present(name))
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = required.present(name)
        context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        assert not is_resumed(required.grpc_port, context)


def is_resumed(port: int, context: ssl.SSLContext) -> bool:
    session, _ = start_session(port, context)
    return start_session(port, context, session)[1]


def start_session(
    port: int, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLSession | None, bool]:
    """Return the session that a connection receives, and whether it has resumed one."""
    with (
        socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1", session=session) as connection,
    ):
        is_grpc = connection.selected_alpn_protocol() == "h2"
        settings = PREFACE + encode_frame(SETTINGS, 0, 0, b"")
        connection.sendall(settings if is_grpc else b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(100)
        return connection.session, connection.session_reused is True


def test_certificate_identifies_callers_of_grpc(required: Service) -> None:
    assert not required.call(("URI", "spiffe://prod/vision"))
    assert not required.call(("DNS", "a.clients.example"))
    code, message = failure(required.call, ("URI", "spiffe://prod/other"))
    assert (code, message.partition(" no ")[0]) == ("PERMISSION_DENIED", "the certificate matches")


def test_optional_certificate_leaves_keys_and_health_paths(optional: Service) -> None:
    assert optional.get("/livez").status_code == 200
    assert optional.get("/readyz").json()["ready"]
    assert optional.get(MODELS).status_code == 401
    assert optional.get(MODELS, key=INFER).status_code == 200
    assert optional.get(METRICS, ("URI", "spiffe://prod/ops/a")).status_code == 200
    with pytest.raises(httpx.TransportError):
        optional.get("/livez", ("URI", "spiffe://prod/ops/a"), authority=trustme.CA())


def test_renewed_authority_is_read_again(triton_url: str, tmp_path: Path) -> None:
    name = ("URI", "spiffe://prod/vision")
    with serve_with(tmp_path, triton_url, "required") as service:
        renewed = trustme.CA()
        fresh = tmp_path / "fresh.pem"
        renewed.cert_pem.write_to_path(fresh)
        fresh.replace(tmp_path / "clients.pem")
        service.command.wait_for("changed and was reloaded")

        def is_accepted() -> bool:
            try:
                return service.get(MODELS, name, authority=renewed).is_success
            except httpx.TransportError:
                return False

        wait_until(is_accepted)
        with pytest.raises(httpx.TransportError):
            service.get(MODELS, name)
        code, _ = failure(service.call, name)
        assert code == "UNAVAILABLE"
        service.clients = renewed
        assert not service.call(name)
