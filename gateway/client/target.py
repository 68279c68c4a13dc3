"""Where the gateway is, and how it is spoken to."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from gateway.client.errors import Misused

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Target:
    """A gateway's address, and the key to it. Raises `Misused`."""

    url: str
    key: str = ""
    ca: Path | None = None

    @cached_property
    def parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
            port = parts.port
        except ValueError as exc:
            raise Misused(f"{self.url!r} is no URL of a gateway: {exc}") from None
        if parts.username is not None:
            raise Misused("the gateway's URL has a user in it; what the gateway takes is a key")
        if parts.scheme not in PORTS or not parts.hostname or port == 0:
            raise Misused(f"{self.url!r} is no URL of a gateway, as http://localhost:8080 is one")
        return parts

    @property
    def host(self) -> str:
        return self.parts.hostname or ""

    @property
    def port(self) -> int:
        return self.parts.port or PORTS[self.parts.scheme]

    @property
    def base(self) -> str:
        return f"{self.parts.scheme}://{self.parts.netloc}{self.path}"

    @property
    def path(self) -> str:
        """Before every path of the API, where a proxy gives the gateway a folder of its own."""
        return self.parts.path.rstrip("/")

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        if self.parts.scheme == "http":
            return None
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as exc:
            raise Misused(f"the certificates of {self.ca} cannot be read: {exc}") from None

    @property
    def headers(self) -> dict[str, str]:
        """What every request has beside its own headers."""
        if not self.key:
            return {}
        if not (self.key.isascii() and self.key.isprintable()):
            raise Misused("the key has characters that no key has")
        return {"authorization": f"Bearer {self.key}"}
