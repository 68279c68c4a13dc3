"""The settings of uploads. `GATEWAY_MODEL_UPLOADS` is one of the core, which checks loads with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import Field, field_validator

from gateway.config.settings import CapabilitySettings

# Characters that another reader of the URL would decode.
REPOSITORY_URL_EXCLUSIONS: Final = frozenset("%?#")
# As Triton spells them: s3://BUCKET/PREFIX, s3://[https://]HOST:PORT/BUCKET/PREFIX.
BUCKET_URL: Final = re.compile(
    r"s3://"
    r"(?:(?P<scheme>https?://)?(?P<host>[0-9A-Za-z.-]+:[0-9]{1,5})/)?"
    r"(?P<bucket>[0-9a-z][0-9a-z.-]{1,61}[0-9a-z])"
    r"(?P<prefix>(?:/[0-9A-Za-z_-][0-9A-Za-z._-]*)*)/?"
)


@dataclass(frozen=True)
class BucketLocation:
    """A bucket and the prefix of its keys. The empty endpoint is AWS."""

    bucket: str
    prefix: str
    endpoint: str


def parse_bucket_url(url: str) -> BucketLocation | None:
    """Return the location; None for other URLs. Like Triton, a host without a scheme is reached over HTTP."""
    match = BUCKET_URL.fullmatch(url)
    if match is None:
        return None
    host = match["host"]
    endpoint = f"{match['scheme'] or 'http://'}{host}" if host else ""
    return BucketLocation(match["bucket"], match["prefix"].strip("/"), endpoint)


class UploadSettings(CapabilitySettings):
    repository: str = ""
    """Where the Tritons read their models, and where uploaded models are stored: a folder, file:///models, or
    a bucket, s3://BUCKET/PREFIX or s3://https://HOST:PORT/BUCKET/PREFIX, which requires triton-gateway[s3].
    Empty: no uploads; up uses the folder of its models."""
    max_model_bytes: int = Field(8 << 30, gt=0)
    """Maximum size of an uploaded model, as received and after decompression."""
    max_repository_bytes: int = Field(0, ge=0)
    """Maximum size of all files in GATEWAY_REPOSITORY, those of uploads in progress included; 0 means no
    limit."""

    @field_validator("repository")
    @classmethod
    def check_repository_url(cls, value: str) -> str:
        is_folder = value.startswith("file:///") and not REPOSITORY_URL_EXCLUSIONS & set(value)
        if value and not is_folder and parse_bucket_url(value) is None:
            raise ValueError(
                "expected file:///FOLDER, without %, ? and #, or s3://BUCKET/PREFIX or "
                "s3://HOST:PORT/BUCKET/PREFIX"
            )
        return value

    @property
    def repository_folder(self) -> Path | None:
        folder = self.repository.removeprefix("file://")
        return Path(folder) if folder != self.repository else None

    @property
    def repository_bucket(self) -> BucketLocation | None:
        return parse_bucket_url(self.repository)
