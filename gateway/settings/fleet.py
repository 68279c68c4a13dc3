"""The replicas and their models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, Field, SecretStr, field_validator

from gateway.settings.bucket_url import BucketLocation, parse_bucket_url
from gateway.settings.values import CommaSeparated, NonNegativeSeconds, PositiveSeconds

# The key becomes part of a gRPC metadata name, which must be in lower case.
RESTRICTED_API: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}=[!-~]{16,1024}")
# Characters that another reader of the URL would decode.
REPOSITORY_URL_EXCLUSIONS: Final = frozenset("%?#")


class FleetSettings(BaseModel):
    triton_urls: CommaSeparated = ("http://127.0.0.1:8000",)
    """Comma-separated URLs of the Triton replicas. gRPC and metrics are expected on ports 8001 and 8002 of
    the same host unless the URL sets others: http://127.0.0.1:9000?grpc=9001&metrics=9002.
    dns+http://NAME:8000 stands for every address that NAME resolves to; the name is resolved periodically."""
    openai_urls: CommaSeparated = ()
    """Comma-separated URLs of servers of OpenAI's API, such as vLLM or Triton's OpenAI frontend, to which
    /v1/chat/completions and /v1/completions are forwarded: http://HOST:8000. Empty: 501."""
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
    repository: str = ""
    """Where the Tritons read their models, and where uploaded models are stored: a folder, file:///models, or
    a bucket, s3://BUCKET/PREFIX or s3://https://HOST:PORT/BUCKET/PREFIX, which requires triton-gateway[s3].
    Empty: no uploads; up uses the folder of its models."""
    max_model_bytes: int = Field(8 << 30, gt=0)
    """Maximum size of an uploaded model, as received and after decompression."""
    max_repository_bytes: int = Field(0, ge=0)
    """Maximum size of all files in GATEWAY_REPOSITORY, those of uploads in progress included; 0 means no
    limit."""
    max_model_instances: int = Field(64, gt=0)
    """Maximum number of instances in the config of an uploaded model, on each device of a group without a
    list of devices. GATEWAY_MODEL_UPLOADS=code has no such limits."""
    max_model_warmups: int = Field(10_000, gt=0)
    """Maximum number of warm-up requests of each instance in the config of an uploaded model: the counts of
    the samples, multiplied by their batch sizes."""
    max_model_sequences: int = Field(10_000, gt=0)
    """Maximum number of sequences at a time in the config of an uploaded model: the candidate sequences or
    the batch size, multiplied by the instances."""
    state: str = ""
    """Where the gateway stores which models were loaded and unloaded through the API:
    file:///path/state.json; redis://host:6379/0 if several gateways share the state; memory:; or none: for
    several gateways that share no state, where only the models file decides what is loaded. Empty: one file
    per fleet in the user's state directory (XDG_STATE_HOME), or memory: for up."""
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
        """Return the folder of GATEWAY_REPOSITORY; None if it is not a folder."""
        folder = self.repository.removeprefix("file://")
        return Path(folder) if folder != self.repository else None

    @property
    def repository_bucket(self) -> BucketLocation | None:
        """Return the bucket of GATEWAY_REPOSITORY; None if it is not a bucket."""
        return parse_bucket_url(self.repository)

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
