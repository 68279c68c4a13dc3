"""The settings of Triton's gRPC API."""

from __future__ import annotations

from pydantic import Field

from gateway.config.settings import CapabilitySettings


class GrpcSettings(CapabilitySettings):
    grpc_port: int = Field(0, ge=0, le=65535)
    """Port on which the gateway serves Triton's gRPC API; 0 means no gRPC. up serves it on port 8001 if its
    Triton uses another one."""
    grpc_host: str = ""
    """Address on which gRPC is served. Empty: that of HTTP (--host)."""
    grpc_max_streams: int = Field(1024, gt=0)
    """Maximum number of concurrent gRPC calls of one connection; further calls wait in the client."""
    grpc_compression: bool = True
    """Whether gRPC messages of clients may be compressed. A small one can decompress into
    GATEWAY_MAX_BODY_BYTES, which takes much more time than it took to send it."""
