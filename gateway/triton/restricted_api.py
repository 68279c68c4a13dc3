"""The secret of Triton's management APIs, if Triton restricts them to its gateways."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gateway.config.settings import Settings

# Inference, metadata and health stay open, because they cannot run code of the caller.
RESTRICTED_APIS: Final = ("model-repository", "shared-memory", "logging", "trace")
DEFAULT_RESTRICTED_KEY: Final = "triton-gateway-secret"
SECRET_BYTES: Final = 32
GRPC_KEY_PREFIX: Final = "triton-grpc-protocol-"  # required before the key in gRPC metadata


@dataclass(frozen=True)
class RestrictedApi:
    """The header and secret of Triton's `--http-restricted-api=APIS:KEY=SECRET`."""

    key: str
    secret: str = field(repr=False)

    @property
    def setting(self) -> str:
        # the syntax of GATEWAY_TRITON_RESTRICTED_API
        return f"{self.key}={self.secret}"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(self.key.encode(), self.secret.encode())]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return ((f"{GRPC_KEY_PREFIX}{self.key}", self.secret),)

    def server_arguments(self) -> list[str]:
        value = f"{','.join(RESTRICTED_APIS)}:{self.setting}"
        return [f"--http-restricted-api={value}", f"--grpc-restricted-protocol={value}"]


def read_restricted_api(settings: Settings) -> RestrictedApi | None:
    """Return the value of `GATEWAY_TRITON_RESTRICTED_API`, which `Settings` has validated."""
    if settings.triton_restricted_api is None:
        return None
    key, _, secret = settings.triton_restricted_api.get_secret_value().partition("=")
    return RestrictedApi(key, secret)


def generate_restricted_api() -> RestrictedApi:
    return RestrictedApi(DEFAULT_RESTRICTED_KEY, secrets.token_urlsafe(SECRET_BYTES))
