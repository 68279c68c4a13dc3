"""Limits for clients: sizes, timeouts, rates and connections."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProtocolLimits:
    """The settings of the same names; see `gateway.settings`."""

    max_header_bytes: int = 64 << 10
    max_header_fields: int = 100
    max_url_bytes: int = 8 << 10
    max_body_bytes: int = 64 << 20
    max_pipelined: int = 16
    header_timeout_s: float = 10.0
    body_stall_s: float = 10.0
    write_timeout_s: float = 30.0
    min_bytes_per_s: int = 1 << 10
    max_connections: int = 4096
    max_connections_per_client: int = 1024  # 0: unlimited
