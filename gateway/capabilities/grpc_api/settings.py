"""The settings of Triton's gRPC API."""

from __future__ import annotations

from pydantic import Field

from gateway.config.settings import CapabilitySettings, Fixed


class GrpcSettings(CapabilitySettings):
    grpc_port: int = Field(0, ge=0, le=65535)
    """Port on which the gateway serves Triton's gRPC API; 0 means no gRPC. up serves it on port 8001 if its
    Triton uses another one."""
    grpc_host: Fixed[str] = "127.0.0.1"  # `prepare_grpc` sets that of HTTP
