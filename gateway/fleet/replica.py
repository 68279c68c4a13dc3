"""A replica (one Triton of the fleet): its address, connections and last known state."""

from __future__ import annotations

import asyncio
import re
import ssl
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from gateway.config.settings import Settings
from gateway.fleet.health import Health, IndexSchedule
from gateway.fleet.index import EMPTY_INDEX, Index
from gateway.http_client.client import HttpClient
from gateway.http_client.response import Headers
from gateway.listeners import join_host_port
from gateway.messages import CommandError
from gateway.triton.grpc.byte_channel import GrpcByteChannel, GrpcTlsFiles, Metadata
from gateway.triton.restricted_api import read_restricted_api

HTTP_PORT = 8000
GRPC_PORT = 8001
METRICS_PORT = 8002
NOT_PROBED = "not probed yet"
PORT = re.compile("[0-9]{1,5}")
TLS_BY_SCHEME = {"http": False, "https": True}


class BadAddress(CommandError):
    """An invalid replica address."""


@dataclass(frozen=True)
class ReplicaAddress:
    """The address `http://host:8000?grpc=8001&metrics=8002`. Its `str()` is the name of the replica."""

    host: str
    port: int
    grpc_port: int = GRPC_PORT
    metrics_port: int = METRICS_PORT
    tls: bool = False
    server_name: str = ""  # the DNS name in its certificate, if `host` was resolved from it

    def __str__(self) -> str:
        return join_host_port(self.host, self.port)

    @property
    def grpc_target(self) -> str:
        return join_host_port(self.host, self.grpc_port)


def parse_replica_url(url: str) -> ReplicaAddress:
    """Parse an entry of GATEWAY_TRITON_URLS that stands for one replica. Raises `BadAddress`."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = HTTP_PORT if parts.port is None else parts.port
    except ValueError as exc:
        raise BadAddress(f"{url!r} is not a valid address: {exc}") from None
    if not port or parts.scheme not in TLS_BY_SCHEME or not parts.hostname or parts.path.strip("/"):
        raise BadAddress(
            f"{url!r} is not a valid address; write http://HOST:8000, or for Tritons also"
            " dns+http://NAME:8000"
        )
    ports = {"grpc": GRPC_PORT, "metrics": METRICS_PORT}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in ports or not PORT.fullmatch(value) or not 0 < int(value) < 65536:
            raise BadAddress(
                f"{url!r} has invalid parameters; only grpc=PORT and metrics=PORT are allowed"
            )
        ports[name] = int(value)
    tls = TLS_BY_SCHEME[parts.scheme]
    return ReplicaAddress(parts.hostname, port, ports["grpc"], ports["metrics"], tls)


def create_http_client(
    address: ReplicaAddress, settings: Settings, tls: ssl.SSLContext | None
) -> HttpClient:
    return HttpClient(
        address.host,
        address.port,
        tls=tls if address.tls else None,
        server_name=address.server_name,
        connect_timeout_s=settings.connect_timeout_s,
        max_answer_bytes=settings.max_answer_bytes,
        max_work_s=settings.max_request_timeout_s,
    )


class Replica:
    """One Triton, its connections, and its state, which only `HealthMonitor` writes."""

    def __init__(
        self, address: ReplicaAddress, settings: Settings, tls: ssl.SSLContext | None = None
    ) -> None:
        self.address = address
        self.name = str(address)
        self.restricted_api = read_restricted_api(settings)
        self.health = Health()
        self.answered_at = 0.0  # when it last answered a probe, by the loop's clock
        self.exit_count = 0  # how often another process has replaced it, or will
        self.index: Index = EMPTY_INDEX
        self.raw_index = b""
        self.index_schedule = IndexSchedule()
        # Whether the index that was read last could be parsed.
        self.is_index_valid = True
        # A read that began later must not end earlier.
        self.index_lock = asyncio.Lock()
        self.reason = NOT_PROBED
        # Set to probe now, not at the next interval.
        self.probe_requested = asyncio.Event()
        self.http = create_http_client(address, settings, tls)
        # Triton's metrics port speaks plain HTTP, even if a proxy terminates TLS before the other ports.
        self.metrics = HttpClient(
            address.host, address.metrics_port, connect_timeout_s=settings.connect_timeout_s
        )
        files = (settings.triton_ca_file, settings.triton_cert_file, settings.triton_key_file)
        self.grpc_tls = GrpcTlsFiles(*files) if address.tls else None
        self.byte_channel = GrpcByteChannel(
            address.grpc_target, self.grpc_tls, settings.max_answer_bytes
        )

    @property
    def management_headers(self) -> Headers:
        """The headers that authorize calls of Triton's management APIs, if it restricts them."""
        return [] if self.restricted_api is None else self.restricted_api.headers

    @property
    def management_metadata(self) -> Metadata:
        return () if self.restricted_api is None else self.restricted_api.metadata

    @property
    def outstanding(self) -> int:
        return self.http.outstanding + self.byte_channel.active_calls

    def drop_idle(self) -> None:
        """Close the idle connections, because a stopping Triton would wait for them."""
        self.http.drop_idle()
        self.metrics.drop_idle()
        self.byte_channel.drop_idle()

    def close(self) -> None:
        self.http.close()
        self.metrics.close()
        self.byte_channel.drop_idle()
