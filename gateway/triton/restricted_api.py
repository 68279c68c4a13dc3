"""The secret that opens Triton's management APIs, where Triton restricts them to its gateways."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Final

# Inference, metadata and health stay open: they run no code of the caller's.
RESTRICTED_APIS: Final = ("model-repository", "shared-memory", "logging", "trace")
DEFAULT_RESTRICTED_KEY: Final = "triton-gateway-secret"
SECRET_BYTES: Final = 32
GRPC_KEY_PREFIX: Final = "triton-grpc-protocol-"  # Triton's own, before the key in gRPC metadata


@dataclass(frozen=True)
class RestrictedApi:
    """A header and its secret value, as `--http-restricted-api=APIS:KEY=SECRET` names them."""

    key: str
    secret: str = field(repr=False)

    @property
    def setting(self) -> str:
        """The value of `GATEWAY_TRITON_RESTRICTED_API`."""
        return f"{self.key}={self.secret}"

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The header of a call over HTTP."""
        return [(self.key.encode(), self.secret.encode())]

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of a call over gRPC."""
        return {f"{GRPC_KEY_PREFIX}{self.key}": self.secret}

    def server_arguments(self) -> list[str]:
        """The arguments of a tritonserver that restricts `APIS`. They hold the secret."""
        value = f"{','.join(RESTRICTED_APIS)}:{self.setting}"
        return [f"--http-restricted-api={value}", f"--grpc-restricted-protocol={value}"]


def parse_restricted_api(setting: str) -> RestrictedApi:
    """Return the key and secret of `GATEWAY_TRITON_RESTRICTED_API`, which `Settings` has checked."""
    key, _, secret = setting.partition("=")
    return RestrictedApi(key, secret)


def generate_restricted_api() -> RestrictedApi:
    return RestrictedApi(DEFAULT_RESTRICTED_KEY, secrets.token_urlsafe(SECRET_BYTES))
