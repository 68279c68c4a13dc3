"""A key, and a token of the same rights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.capabilities.identity.support.issuer import AUDIENCE, Issuer

KEY: Final = "tgw_benchmark"
TOKEN_CALLER: Final = "bench-token"
ISSUER: Final = "https://login.example"


class Credentials(NamedTuple):
    settings: Mapping[str, str]  # with which a gateway accepts `KEY` and the token
    token: str


def write_keys_file(folder: Path, *rules: Mapping[str, Any], **fields: Any) -> Path:
    """Write a keys file with `KEY`, which has these fields, and rules for tokens; return its path."""
    entry = {"name": "bench", "sha256": hashlib.sha256(KEY.encode()).hexdigest(), **fields}
    rights = {"roles": ["infer"], "models": ["sm*"]}
    document = {"keys": [{**entry, **rights}], "oidc": [{**each, **rights} for each in rules]}
    path = folder / f"{len(fields)}.yaml"
    path.write_text(json.dumps(document))  # which is YAML
    return path


def write_credentials(folder: Path, **fields: Any) -> Credentials:
    """Write the files of a gateway that accepts the key and the token, which have these fields."""
    issuer = Issuer(ISSUER)
    rule = {"claim": "sub", "value": TOKEN_CALLER, **fields}
    jwks_file = folder / "jwks.json"
    jwks_file.write_bytes(issuer.publish())
    settings = {
        "keys_file": str(write_keys_file(folder, rule, **fields)),
        "oidc_issuer": ISSUER,
        "oidc_audience": AUDIENCE,
        "oidc_jwks_url": jwks_file.as_uri(),
    }
    return Credentials(settings, issuer.sign(sub=TOKEN_CALLER))
