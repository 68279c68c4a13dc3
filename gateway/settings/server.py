"""Connections, TLS, shutdown, logs and traces."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from gateway.settings.values import MAX_SETTING_S, NonNegativeSeconds, PositiveSeconds

MIN_OPEN_FILES: Final = 256


class LogFormat(str, Enum):
    console = "console"
    json = "json"


class LogLevel(str, Enum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class ClientAuth(str, Enum):
    """The certificates that clients need."""

    required = "required"
    optional = "optional"


class ObservabilitySettings(BaseModel):
    log_level: LogLevel = LogLevel.info
    """debug, info, warning or error. Only debug logs probes, scrapes and the reads of an open page."""
    log_format: LogFormat = LogFormat.console
    """console for people, json for one JSON object per line."""
    audit_log: str = ""
    """stdout or a FILE: where the audit log is written, as JSON lines, each before the response of its call.
    While it cannot be written, administrative changes are refused. Empty: it is a part of the log."""
    metrics_replicas: bool = True
    """Include the metrics of all replicas in /metrics. Set false if Prometheus scrapes the Tritons itself."""
    metrics_callers: bool = True
    """Count requests, their inference time and bytes, and refusals by the name of the caller's key
    (gateway_caller_requests_total and others)."""
    otlp_endpoint: str = ""
    """OTLP/HTTP endpoint to which traces are sent: http://collector:4318. Empty: no traces. Requires the
    extra triton-gateway[otel]."""

    @field_validator("otlp_endpoint")
    @classmethod
    def check_endpoint(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_valid = False
        if value and not is_valid:
            raise ValueError("it is not a valid URL; use http://HOST:4318")
        return value


class ServerSettings(BaseModel):
    keep_alive_s: int = Field(75, gt=0, le=int(MAX_SETTING_S))
    """Time after which an idle client connection is closed."""
    max_header_bytes: int = Field(64 << 10, ge=1 << 10)
    """Maximum size of a request's header, including the request line; also the maximum size of its
    trailers."""
    max_header_fields: int = Field(100, ge=16)
    """Maximum number of header fields of a request."""
    max_url_bytes: int = Field(8 << 10, ge=256)
    """Maximum length of a request's URL."""
    max_pipelined: int = Field(16, gt=0)
    """Maximum number of pipelined requests that wait for the previous response on one connection; further
    ones are read later."""
    header_timeout_s: PositiveSeconds = 10.0
    """Timeout for receiving a request's header, and for the first request on a new connection."""
    body_stall_s: PositiveSeconds = 10.0
    """How far a request body may fall behind GATEWAY_MIN_BYTES_PER_S before the request is aborted. A gRPC
    stream that is idle for this long, or a message that is incomplete for so long, may be ended for another
    call."""
    write_timeout_s: PositiveSeconds = 30.0
    """How far a client may fall behind GATEWAY_MIN_BYTES_PER_S in reading its response before it is
    disconnected."""
    min_bytes_per_s: int = Field(1 << 10, gt=0)
    """Minimum average rate at which a client must send a request body and read a response."""
    max_connections: int = Field(4096, gt=0)
    """Maximum number of connections of each process, or fewer if it may not open as many files. Further
    connections are answered with 503."""
    max_connections_per_client: int = Field(1024, ge=0)
    """Maximum number of connections of one IP address, or of one IPv6 /64 network, and of its gRPC calls in
    progress; 0 means no limit."""
    tls_cert_file: Path | None = None
    """Certificate chain with which the gateway serves HTTPS (PEM). It is reloaded when it changes."""
    tls_key_file: Path | None = Field(None, validate_default=True)
    """Private key of that certificate (PEM); empty if it is in the same file."""
    tls_client_ca_file: Path | None = Field(None, validate_default=True)
    """CA certificate that must have signed the certificates of clients, of HTTPS and of gRPC (PEM). It is
    reloaded when it changes. HTTPS then requires TLS 1.3. Empty: clients are not asked for a certificate."""
    tls_client_auth: ClientAuth = ClientAuth.required
    """With GATEWAY_TLS_CLIENT_CA_FILE: required, every client needs a certificate; or optional, one without a
    certificate may use a key or a token, and the health paths. gRPC asks for no optional certificate."""
    drain_s: NonNegativeSeconds = 10.0
    """How long serve keeps serving after SIGTERM while /readyz reports that it is not ready."""
    shutdown_s: PositiveSeconds = 30.0
    """How long requests in progress may then take before they are aborted. Five seconds later the process is
    terminated, whatever it is doing."""

    @field_validator("tls_cert_file")
    @classmethod
    def check_certificate(cls, value: Path | None) -> Path | None:
        if value is not None:
            with describe_os_errors(ValueError, "the certificate cannot be read"):
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(value)
        return value

    @field_validator("tls_key_file")
    @classmethod
    def check_key(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        certificate = info.data.get("tls_cert_file")
        if certificate is None:
            if value is not None:
                raise ValueError("GATEWAY_TLS_CERT_FILE is missing")
        else:
            with describe_os_errors(ValueError, f"no key for {certificate} can be read"):
                load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, value)
        return value

    @field_validator("tls_client_auth")
    @classmethod
    def check_client_auth(cls, value: ClientAuth, info: ValidationInfo) -> ClientAuth:
        if value is ClientAuth.optional and info.data.get("tls_client_ca_file") is None:
            raise ValueError("no certificate is asked for without GATEWAY_TLS_CLIENT_CA_FILE")
        return value

    @field_validator("tls_client_ca_file")
    @classmethod
    def check_client_authority(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is None:
            return value
        if info.data.get("tls_cert_file") is None:
            raise ValueError("GATEWAY_TLS_CERT_FILE is missing")
        with describe_os_errors(ValueError, "the CA certificate cannot be read"):
            load_authority(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), value, ClientAuth.required)
        return value


VERIFY_MODES: Final = {
    ClientAuth.required: ssl.CERT_REQUIRED,
    ClientAuth.optional: ssl.CERT_OPTIONAL,
}


def load_authority(context: ssl.SSLContext, authority: Path, client_auth: ClientAuth) -> None:
    """Ask clients for a certificate that this authority signed. Raises `OSError`."""
    context.load_verify_locations(authority)
    context.verify_mode = VERIFY_MODES[client_auth]
    # A resumed session would keep the rights of a certificate that has expired, or of a replaced authority.
    # Clients of TLS 1.2 can resume sessions without a ticket, which Python cannot turn off.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Load a certificate chain without prompting for a password. Raises `OSError`."""
    context.load_cert_chain(certificate, key, password=lambda: "")


@contextmanager
def describe_os_errors(error: type[Exception], problem: str) -> Iterator[None]:
    """Turn an `OSError` of the block into `error`, with the reason in words instead of numbers."""
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        if isinstance(exc, ssl.SSLError) and exc.reason:
            reason = exc.reason.replace("_", " ")
        raise error(f"{problem}: {reason.lower()}") from None
