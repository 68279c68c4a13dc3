"""URLs of S3 buckets, as Triton spells them: s3://BUCKET/PREFIX, s3://[https://]HOST:PORT/BUCKET/PREFIX."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pydantic import SecretStr

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
    secret_access_key: SecretStr | None = None  # None: that of the environment


def parse_bucket_url(url: str) -> BucketLocation | None:
    """Return the location; None for other URLs. Like Triton, a host without a scheme is reached over HTTP."""
    match = BUCKET_URL.fullmatch(url)
    if match is None:
        return None
    host = match["host"]
    endpoint = f"{match['scheme'] or 'http://'}{host}" if host else ""
    return BucketLocation(match["bucket"], match["prefix"].strip("/"), endpoint)
