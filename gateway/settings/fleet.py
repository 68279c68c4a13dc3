"""The replicas and their models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field, SecretStr, field_validator

from gateway.settings.values import CommaSeparated, NonNegativeSeconds, PositiveSeconds

# The key becomes part of a gRPC metadata name, which must be in lower case.
RESTRICTED_API: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}=[!-~]{16,1024}")


class FleetSettings(BaseModel):
    triton_urls: CommaSeparated = ("http://127.0.0.1:8000",)
    """Comma-separated URLs of the Triton replicas. gRPC and metrics are expected on ports 8001 and 8002 of
    the same host unless the URL sets others: http://127.0.0.1:9000?grpc=9001&metrics=9002.
    dns+http://NAME:8000 stands for every address that NAME resolves to; the name is resolved periodically."""
    poll_interval_s: PositiveSeconds = Field(0.5, le=60)
    """Interval between health probes of each replica."""
    dns_interval_s: PositiveSeconds = 5.0
    """Interval between DNS lookups of dns+http:// names."""
    slow_start_s: NonNegativeSeconds = 0.0
    """Time in which the share of a replica that can serve a model again, or for the first time, grows from a
    tenth to the share of the others; 0 means that it gets its full share at once."""
    connect_timeout_s: PositiveSeconds = 0.5
    """Timeout for connecting to a replica."""
    triton_ca_file: Path | None = None
    """CA certificate that signed the certificates of https:// replicas."""
    triton_cert_file: Path | None = None
    """Client certificate that the gateway presents to replicas that request one (PEM)."""
    triton_key_file: Path | None = None
    """Private key of that client certificate (PEM)."""
    triton_restricted_api: SecretStr | None = None
    """Header and secret that the replicas' management APIs require, KEY=SECRET, as in Triton's
    --http-restricted-api=model-repository,shared-memory,logging,trace:KEY=SECRET and
    --grpc-restricted-protocol. The gateway sends the header with its own calls. Empty: no header; up
    generates a secret."""
    models_file: Path | None = None
    """YAML file that declares the models that must be served: models: [NAME, …]. The gateway keeps them
    loaded, and /readyz waits for them. With {name: NAME, required: always}, /readyz also fails when the model
    does later."""
    ready_quorum: int = Field(1, gt=0)
    """Number of replicas on which each declared model must be ready before /readyz succeeds, and those with
    required: always from then on."""
    state: str = ""
    """Where the gateway stores which models were loaded and unloaded through the API:
    file:///path/state.json; redis://host:6379/0 if several gateways share the state; memory:; or none: for
    several gateways that share no state, where only the models file decides what is loaded. Empty: one file
    per fleet in the user's state directory (XDG_STATE_HOME), or memory: for up."""
    state_password: SecretStr | None = None
    """Password of the Redis in GATEWAY_STATE, if its URL contains none."""
    cancellable_models: CommaSeparated = ()
    """Comma-separated glob patterns, such as llm-*,detector, of models whose inference is cancelled in Triton
    when the client disconnects or the deadline expires. The gateway calls these models over gRPC, which costs
    more than HTTP. A model's config can also set gateway.cancellable to true."""
    load_timeout_s: PositiveSeconds = 300.0
    """Timeout for loading a model."""

    @field_validator("triton_urls")
    @classmethod
    def check_replicas(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        # `parse_replica_url` checks the rest.
        if not value:
            raise ValueError("at least one Triton URL is required")
        if any("@" in url for url in value):
            raise ValueError(
                "Triton does not accept a user and password; remove the part that ends with @"
            )
        return value

    @field_validator("triton_restricted_api", mode="before")
    @classmethod
    def check_restricted_api(cls, value: Any) -> Any:
        if value == "":
            return None
        if isinstance(value, str) and not RESTRICTED_API.fullmatch(value):
            raise ValueError(
                "expected KEY=SECRET: KEY consists of lower-case letters, digits and -, SECRET of 16 to 1024 "
                "visible ASCII characters"
            )
        return value
