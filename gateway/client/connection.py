"""The address of a gateway, and the access to it. Nothing here uses the network."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

DEFAULT_URL: Final = "http://localhost:8080"
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
URL_VARIABLE: Final = "TRITON_GATEWAY_URL"
KEY_VARIABLE: Final = "TRITON_GATEWAY_KEY"
CA_VARIABLE: Final = "TRITON_GATEWAY_CA"


@dataclass(frozen=True)
class GatewayAddress:
    """The parts of a gateway's URL."""

    scheme: str
    host: str
    port: int
    base_url: str
    path_prefix: str


def parse_address(url: str) -> GatewayAddress:
    """Return the parts of a URL, or of `HOST:PORT`. Raises `ValueError`."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"{url!r} is not a valid gateway URL: {exc}") from None
    if parts.username is not None:
        raise ValueError("the gateway URL contains a user name; the gateway expects an API key")
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname or port == 0:
        raise ValueError(f"{url!r} is not a valid gateway URL; example: {DEFAULT_URL}")
    path_prefix = parts.path.rstrip("/")
    return GatewayAddress(
        parts.scheme,
        parts.hostname,
        port or DEFAULT_PORTS[parts.scheme],
        base_url=f"{parts.scheme}://{parts.netloc}{path_prefix}",
        path_prefix=path_prefix,
    )


@dataclass(frozen=True)
class GatewayAccess:
    """A gateway, the key to call it with, and the certificates to trust."""

    address: GatewayAddress
    key: str
    ca_file: str

    def create_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def create_ssl_context(self) -> ssl.SSLContext | None:
        """Return the context of a `https:` URL. Raises `ValueError` if the certificates cannot be read."""
        if self.address.scheme == "http":
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file or None)
        except (OSError, ssl.SSLError) as exc:
            reason = exc.strerror or exc
            raise ValueError(f"cannot read the certificates of {self.ca_file}: {reason}") from None


def find_access(
    url: str | None, key: str | None, ca_file: str | os.PathLike[str] | None
) -> GatewayAccess:
    """Return the access of the arguments; what is None comes from the environment. Raises `ValueError`."""
    address = parse_address(os.environ.get(URL_VARIABLE, DEFAULT_URL) if url is None else url)
    if key is None:
        key = os.environ.get(KEY_VARIABLE, "")
    if not (key.isascii() and key.isprintable()):
        raise ValueError("the key contains invalid characters; a key is printable ASCII")
    if ca_file is None:
        ca_file = os.environ.get(CA_VARIABLE, "")
    return GatewayAccess(address, key, os.fspath(ca_file))
