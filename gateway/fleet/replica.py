"""One Triton of the fleet: where its three APIs are."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

GRPC_PORT, METRICS_PORT = 8001, 8002


class BadAddress(ValueError):
    """An address of a replica that cannot be one, in a sentence."""


@dataclass(frozen=True)
class Address:
    """`http://host:8000?grpc=8001&metrics=8002`; reports name a replica by `str()` of this."""

    host: str
    port: int
    grpc_port: int
    metrics_port: int
    tls: bool = False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(url: str) -> Address:
    """Read one entry of `GATEWAY_TRITON_URLS`. Raises `BadAddress`."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise BadAddress(f"{url!r} is no address of a Triton; write http://HOST:8000")
    ports = {"grpc": GRPC_PORT, "metrics": METRICS_PORT}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in ports or not value.isdigit():
            raise BadAddress(f"{url!r}: after the ? only grpc=PORT and metrics=PORT can stand")
        ports[name] = int(value)
    try:
        port = parts.port or 8000
    except ValueError:
        raise BadAddress(f"{url!r} has a port that is none") from None
    return Address(parts.hostname, port, ports["grpc"], ports["metrics"], parts.scheme == "https")
