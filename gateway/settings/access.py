"""Authentication, authorization and browser access."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ValidationInfo, field_validator

from gateway.settings.values import CommaSeparated

ORIGIN: Final = re.compile(r"https?://[a-z0-9.\-\[\]:]+")
ALLOWED_HOST: Final = re.compile(r"[a-z0-9_.*-]+|[0-9a-f:.]+")


class ModelUploads(str, Enum):
    """The models that administrators may upload."""

    off = "off"
    artifacts = "artifacts"
    code = "code"


class AccessSettings(BaseModel):
    keys_file: Path | None = None
    """YAML file of the API keys; triton-gateway key create writes it. Without it, inference is open to
    everyone, and administration to the gateway's own user on the same machine."""
    local_admin: bool = True
    """Allow local administration without a keys file: by programs of the gateway's own user on the same
    machine. false: administration always requires a key."""
    model_uploads: ModelUploads = ModelUploads.off
    """Which models administrators may upload: off; artifacts, files that are data for their backend (ONNX,
    TensorRT, OpenVINO), with a config that runs no code; or code, any model, and also a config and files in a
    load request. The default of up is artifacts."""
    allow_model_upload: bool = False
    """Deprecated: true means GATEWAY_MODEL_UPLOADS=code."""
    cors_origins: CommaSeparated = ()
    """Comma-separated origins whose pages may call the gateway from a browser: https://app.example.com; *
    allows every origin. Empty: none."""
    cors_credentials: bool = False
    """Allow the pages of GATEWAY_CORS_ORIGINS to send cookies, client certificates and credentials of HTTP
    authentication, which a proxy before the gateway may need. Not possible with the origin *."""
    allowed_hosts: CommaSeparated = ()
    """Comma-separated values that the Host header may have: models.example.com,*.test; localhost is always
    allowed, * allows any host. Empty: only localhost if the gateway listens on loopback and has no keys file,
    otherwise any host."""

    @property
    def accepted_uploads(self) -> ModelUploads:
        return ModelUploads.code if self.allow_model_upload else self.model_uploads

    @field_validator("cors_origins")
    @classmethod
    def check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Accept only origins as browsers send them (RFC 6454, section 6.2)."""
        for origin in value:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not a valid origin; use https://HOST or https://HOST:PORT"
                )
        return value

    @field_validator("cors_credentials")
    @classmethod
    def check_credentials(cls, value: bool, info: ValidationInfo) -> bool:
        if value and "*" in info.data.get("cors_origins", ()):
            raise ValueError("GATEWAY_CORS_ORIGINS allows every origin; name the origins instead")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names as in `Host`: in lower case and without a port."""
        names = tuple(name.lower().strip("[]") for name in value)
        for name in names:
            if not ALLOWED_HOST.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not a valid host; use names without http:// and without a port"
                )
        return names
