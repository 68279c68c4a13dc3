"""`https://` replicas: trusted by their authority, and shown the gateway's own certificate."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.fleet.discovery import create_tls_context
from gateway.fleet.replica import parse_replica_url
from gateway.http_client.client import CompleteResponse, HttpClient
from tests.support.certificates import server_context, serving
from tests.support.wait import TIMEOUT_S


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> Path:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own = authority.issue_cert("gateway")
    own.cert_chain_pems[0].write_to_path(tmp_path / "gateway.pem")
    own.private_key_pem.write_to_path(tmp_path / "gateway.key")
    return tmp_path


async def asked(context: ssl.SSLContext, settings: Settings) -> CompleteResponse:
    """A request to a server with this TLS, by a client with these settings."""
    async with serving(context) as url:
        replica = parse_replica_url(url)
        tls = create_tls_context(settings, [replica])
        upstream = HttpClient(replica.host, replica.port, tls=tls, connect_timeout_s=TIMEOUT_S)
        try:
            return await upstream.request(b"GET", b"/", timeout_s=TIMEOUT_S)
        finally:
            upstream.close()


async def test_replica_is_trusted_by_its_authority(authority: trustme.CA, files: Path) -> None:
    context = server_context(authority, name="127.0.0.1", wants_client=False)
    reply = await asked(context, Settings(triton_ca_file=files / "ca.pem"))
    assert (reply.status, reply.body) == (200, b"hello")
    # A plain address needs no TLS.
    assert create_tls_context(Settings(), [parse_replica_url("http://127.0.0.1:8000")]) is None


async def test_replica_of_another_name_or_authority_is_not_trusted(
    authority: trustme.CA, files: Path
) -> None:
    trusting = Settings(triton_ca_file=files / "ca.pem")
    for context, settings, reason in (
        (server_context(authority, name="other.example", wants_client=False), trusting, "IP addr"),
        (server_context(trustme.CA(), name="127.0.0.1", wants_client=False), trusting, "issuer"),
        (server_context(authority, name="127.0.0.1", wants_client=False), Settings(), "issuer"),
    ):
        with pytest.raises(GatewayError, match=rf"cannot be reached \(.*{reason}") as caught:
            await asked(context, settings)
        assert caught.value.status == 503


async def test_gateway_sends_its_own_certificate(authority: trustme.CA, files: Path) -> None:
    context = server_context(authority, name="127.0.0.1", wants_client=True)
    settings = Settings(
        triton_ca_file=files / "ca.pem",
        triton_cert_file=files / "gateway.pem",
        triton_key_file=files / "gateway.key",
    )
    assert (await asked(context, settings)).body == b"hello"
    with pytest.raises(GatewayError):
        await asked(context, Settings(triton_ca_file=files / "ca.pem"))
