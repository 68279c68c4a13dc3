"""The options of the gRPC server."""

from __future__ import annotations

from pathlib import Path

from gateway.capabilities.grpc_api.server import build_options
from gateway.config.settings import Settings


def test_connections_with_client_certificates_end_after_an_hour() -> None:
    authority = Path("clients.pem")
    settings = Settings.model_construct(tls_client_ca_file=authority, max_request_timeout_s=60.0)
    options = dict(build_options(settings, shares_port=False))
    assert options["grpc.max_connection_age_ms"] == 3_600_000
    assert options["grpc.max_connection_age_grace_ms"] == 60_000
    assert "grpc.max_connection_age_ms" not in dict(build_options(Settings(), shares_port=False))
