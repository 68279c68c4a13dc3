"""The gateway's URL, and the credentials and certificates to use with it."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

import typer

from gateway.client.errors import UsageError

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Target:
    """The flags of the gateway that a command uses. Properties raise `UsageError` for invalid values."""

    url: Annotated[
        str,
        typer.Option(envvar="TRITON_GATEWAY_URL", help="URL of the gateway.", show_envvar=True),
    ] = "http://localhost:8080"
    key: Annotated[
        str,
        typer.Option(
            envvar="TRITON_GATEWAY_KEY",
            help="API key, if the gateway requires one.",
            show_default=False,
        ),
    ] = ""
    ca: Annotated[
        Path | None,
        typer.Option(envvar="TRITON_GATEWAY_CA", help="PEM file of the trusted CA certificates."),
    ] = None

    @cached_property
    def url_parts(self) -> SplitResult:
        try:
            parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
            port = parts.port
        except ValueError as exc:
            raise UsageError(f"{self.url!r} is not a valid gateway URL: {exc}") from None
        if parts.username is not None:
            raise UsageError(
                "the gateway URL contains a user name; the gateway expects an API key (--key)"
            )
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname or port == 0:
            raise UsageError(
                f"{self.url!r} is not a valid gateway URL; example: http://localhost:8080"
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
        return self.url_parts.path.rstrip("/")

    @cached_property
    def ssl_context(self) -> ssl.SSLContext | None:
        if self.url_parts.scheme == "http":
            return None
        try:
            return ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as exc:
            reason = exc.strerror or exc
            raise UsageError(f"cannot read the certificates of {self.ca}: {reason}") from None

    @property
    def headers(self) -> dict[str, str]:
        if not self.key:
            return {}
        if not (self.key.isascii() and self.key.isprintable()):
            raise UsageError("the key contains invalid characters; a key is printable ASCII")
        return {"authorization": f"Bearer {self.key}"}
