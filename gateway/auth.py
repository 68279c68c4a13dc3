"""Who may call. Without keys, administration is for callers on this very machine."""

from __future__ import annotations

from ipaddress import ip_address

from starlette.types import Scope

from gateway.errors import Forbidden


def require_admin(scope: Scope) -> None:
    """Raises `Forbidden` unless the caller may manage models."""
    client = scope.get("client")
    try:
        local = client is not None and ip_address(client[0]).is_loopback
    except ValueError:
        local = False
    if not local:
        raise Forbidden("administration is open to callers on the gateway's own machine only")
