"""The settings of tokens, which an OpenID provider or a Kubernetes cluster issues."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from gateway.access.auth import is_loopback
from gateway.config.settings import CapabilitySettings, CommaSeparated

ISSUER: Final = "oidc_issuer"
FILE_PREFIX: Final = "file:///"
# An empty variable is no path.
OptionalPath = Annotated[Path | None, BeforeValidator(lambda value: value or None)]


class IdentitySettings(CapabilitySettings):
    oidc_issuer: str = ""
    """Issuer of the JWTs that the gateway accepts as bearer tokens, exactly as their claim iss has it:
    https://login.example.com/realms/prod. Its public keys are read from its OpenID configuration. Empty: no
    tokens. Requires the extra triton-gateway[oidc], and GATEWAY_KEYS_FILE with a list oidc."""
    oidc_audience: CommaSeparated = Field((), validate_default=True)
    """Comma-separated audiences, one of which the claim aud of a token must contain. Required with
    GATEWAY_OIDC_ISSUER."""
    oidc_jwks_url: str = Field("", validate_default=True)
    """Address of the issuer's public keys (JSON Web Key Set), if the one in its OpenID configuration cannot
    be reached from here. file:///PATH is a file, for a place without a network; it is reloaded when it
    changes, and nothing is fetched."""
    oidc_ca_file: OptionalPath = Field(None, validate_default=True)
    """CA certificate that signed the certificate of the issuer (PEM), instead of those of the system."""
    oidc_token_file: OptionalPath = Field(None, validate_default=True)
    """File with a token that is sent when keys are fetched, to the issuer's own host only: in Kubernetes, the
    token of the pod's service account."""
    oidc_client_id: str = Field("", validate_default=True)
    """Name of this gateway's page as a public client of the issuer (authorization code with PKCE), with which
    users of the page sign in. Empty: they enter a key or a token."""

    @field_validator("oidc_issuer", "oidc_jwks_url")
    @classmethod
    def check_address(cls, value: str, info: ValidationInfo) -> str:
        is_file = info.field_name != ISSUER and value.startswith(FILE_PREFIX)
        if value and not is_file and not is_safe_address(value):
            raise ValueError(
                "use https://HOST/PATH without a query; http:// is accepted on loopback only"
            )
        return value

    @field_validator("oidc_jwks_url", "oidc_ca_file", "oidc_token_file", "oidc_client_id")
    @classmethod
    def check_has_issuer(cls, value: str | Path | None, info: ValidationInfo) -> str | Path | None:
        if value and not info.data.get(ISSUER, True):
            raise ValueError("GATEWAY_OIDC_ISSUER is missing")
        return value

    @field_validator("oidc_audience")
    @classmethod
    def check_audience(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        issuer = info.data.get(ISSUER)
        if issuer and not value:
            raise ValueError(
                "GATEWAY_OIDC_ISSUER requires the audience for which the issuer's tokens are meant; without "
                "it, tokens for any other application of this issuer would be accepted"
            )
        if value and issuer == "":
            raise ValueError("GATEWAY_OIDC_ISSUER is missing")
        return value

    @property
    def jwks_file(self) -> Path | None:
        path = self.oidc_jwks_url.removeprefix("file://")
        return Path(path) if path != self.oidc_jwks_url else None


def is_safe_address(address: str) -> bool:
    """Return whether an address is https, or http on loopback, and has no query and no credentials."""
    try:
        parts = urlsplit(address)
        if not parts.hostname or parts.port == 0:
            return False
    except ValueError:
        return False
    is_plain = address.isascii() and address.isprintable() and " " not in address
    if not is_plain or "?" in address or "#" in address or "@" in parts.netloc:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname))
