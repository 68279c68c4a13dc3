"""Logs and traces."""

from __future__ import annotations

from enum import Enum
from urllib.parse import urlsplit

from pydantic import BaseModel, field_validator


class LogFormat(str, Enum):
    console = "console"
    json = "json"


class LogLevel(str, Enum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class ObservabilitySettings(BaseModel):
    log_level: LogLevel = LogLevel.info
    """debug, info, warning or error."""
    log_format: LogFormat = LogFormat.console
    """console for people, json for one JSON object per line."""
    metrics_replicas: bool = True
    """Include the metrics of all replicas in /metrics. Set false if Prometheus scrapes the Tritons itself."""
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
