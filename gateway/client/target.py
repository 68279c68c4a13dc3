"""Where the gateway is, and how it is spoken to."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from gateway.client.errors import UsageError

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Target:
    """A gateway's address, and the key to it. Raises `Misused`."""

    url: str
    key: str = ""
    ca_file: Path | None = None

    @cached_property
    def url_parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
            port = parts.port
        except ValueError as exc:
            raise UsageError(f"{self.url!r} is no URL of a gateway: {exc}") from None
        if parts.username is not None:
            raise UsageError("the gateway's URL has a user in it; what the gateway takes is a key")
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname or port == 0:
            raise UsageError(
                f"{self.url!r} is no URL of a gateway, as http://localhost:8080 is one"
            )
        return parts

    @property
    def host(self) -> str:
        return self.url_parts.hostname or ""

    @property
    def port(self) -> int:
        return self.url_parts.port or DEFAULT_PORTS[self.url_parts.scheme]

    @property
    def base_url(self) -> str:
        return f"{self.url_parts.scheme}://{self.url_parts.netloc}{self.path_prefix}"

    @property
    def path_prefix(self) -> str:
        """Before every path of the API, where a proxy gives the gateway a folder of its own."""
        return self.url_parts.path.rstrip("/")

    @cached_property
    def ssl_context(self) -> ssl.SSLContext | None:
        if self.url_parts.scheme == "http":
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as exc:
            raise UsageError(f"the certificates of {self.ca_file} cannot be read: {exc}") from None

    @property
    def headers(self) -> dict[str, str]:
        """What every request has beside its own headers."""
        if not self.key:
            return {}
        if not (self.key.isascii() and self.key.isprintable()):
            raise UsageError("the key has characters that no key has")
        return {"authorization": f"Bearer {self.key}"}
