"""The settings: read once from the environment (prefix `GATEWAY_`), described here, and frozen."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gateway.messages import CommandError

ENV_PREFIX: Final = "GATEWAY_"
ORIGIN: Final = re.compile(r"https?://[a-z0-9.\-\[\]:]+")
ALLOWED_HOST: Final = re.compile(r"[a-z0-9_.*-]+|[0-9a-f:.]+")
# The key becomes part of a gRPC metadata name, which must be in lower case.
RESTRICTED_API: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}=[!-~]{16,1024}")
MAX_SETTING_S: Final = 86400.0
# Variables that Kubernetes sets in every pod for Services whose names begin with "gateway".
KUBERNETES_VARIABLE: Final = re.compile(
    r"GATEWAY_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
# User and password in a URL; greedy, so that no part of a password is shown.
CREDENTIALS: Final = re.compile(r".*@", re.DOTALL)

# Zero means no waiting. Timers do not accept infinity.
PositiveSeconds = Annotated[float, Field(gt=0, le=MAX_SETTING_S)]
NonNegativeSeconds = Annotated[float, Field(ge=0, le=MAX_SETTING_S)]


class LogFormat(str, Enum):
    console = "console"
    json = "json"


class LogLevel(str, Enum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Load a certificate chain without prompting for a password. Raises `OSError`."""
    context.load_cert_chain(certificate, key, password=lambda: "")


class Settings(BaseSettings):
    """The gateway's settings; `docs/settings.md` lists them, and a test compares the two."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore")

    triton_urls: Annotated[tuple[str, ...], NoDecode] = Field(
        ("http://127.0.0.1:8000",),
        description="Comma-separated URLs of the Triton replicas. gRPC and metrics are expected on ports "
        "8001 and 8002 of the same host unless the URL sets others: "
        "http://127.0.0.1:9000?grpc=9001&metrics=9002. dns+http://NAME:8000 stands for every "
        "address that NAME resolves to; the name is resolved periodically.",
    )
    poll_interval_s: PositiveSeconds = Field(
        0.5, le=60, description="Interval between health probes of each replica."
    )
    dns_interval_s: PositiveSeconds = Field(
        5.0, description="Interval between DNS lookups of dns+http:// names."
    )
    models_file: Path | None = Field(
        None,
        description="YAML file that declares the models that must be served: models: [NAME, …]. The gateway "
        "keeps them loaded, and /readyz waits for them.",
    )
    ready_quorum: int = Field(
        1,
        gt=0,
        description="Number of replicas on which each declared model must be ready for /readyz to succeed.",
    )
    state: str = Field(
        "",
        description="Where the gateway stores which models were loaded and unloaded through the API: "
        "file:///path/state.json; redis://host:6379/0 if several gateways share the state; "
        "memory:; or none: for several gateways that share no state, where only the models file "
        "decides what is loaded. Empty: one file per fleet in the user's state directory "
        "(XDG_STATE_HOME), or memory: for up.",
    )
    cancellable_models: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated glob patterns, such as llm-*,detector, of models whose inference is "
        "cancelled in Triton when the client disconnects or the deadline expires. The gateway "
        "calls these models over gRPC, which costs more than HTTP. A model's config can also "
        "set gateway.cancellable to true.",
    )
    load_timeout_s: PositiveSeconds = Field(300.0, description="Timeout for loading a model.")
    triton_ca_file: Path | None = Field(
        None, description="CA certificate that signed the certificates of https:// replicas."
    )
    triton_cert_file: Path | None = Field(
        None,
        description="Client certificate that the gateway presents to replicas that request one (PEM).",
    )
    triton_key_file: Path | None = Field(
        None, description="Private key of that client certificate (PEM)."
    )
    triton_restricted_api: SecretStr | None = Field(
        None,
        description="Header and secret that the replicas' management APIs require, KEY=SECRET, as in "
        "Triton's --http-restricted-api=model-repository,shared-memory,logging,trace:KEY=SECRET "
        "and --grpc-restricted-protocol. The gateway sends the header with its own calls. "
        "Empty: no header; up generates a secret.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated origins whose pages may call the gateway from a browser: "
        "https://app.example.com; * allows every origin. Empty: none.",
    )
    keys_file: Path | None = Field(
        None,
        description="YAML file of the API keys; triton-gateway key create writes it. Without it, inference "
        "is open to everyone, and administration to the gateway's own user on the same machine.",
    )
    local_admin: bool = Field(
        True,
        description="Allow local administration without a keys file: by programs of the gateway's own user "
        "on the same machine. false: administration always requires a key.",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated values that the Host header may have: models.example.com,*.test; "
        "localhost is always allowed, * allows any host. Empty: only localhost if the gateway "
        "listens on loopback and has no keys file, otherwise any host.",
    )
    allow_model_upload: bool = Field(
        False,
        description="Whether an administrator's load request may include a config and files, which Triton "
        "executes.",
    )
    # Triton counts the bytes of texts in 32 bits, and needs 4 more for each text.
    max_body_bytes: int = Field(
        64 << 20,
        gt=0,
        le=1 << 30,
        description="Maximum size of a request body, as received and decompressed; 1 GiB at most.",
    )
    max_answer_bytes: int = Field(
        256 << 20,
        gt=0,
        lt=1 << 31,
        description="Maximum size of a replica's response that /v1 buffers, over HTTP and gRPC; a larger "
        "response becomes a 502. Responses that pass through /v2 may have any size.",
    )
    max_bytes_in_flight: int = Field(
        0,
        ge=0,
        description="Memory that the bodies of requests and responses may use together in each process; 0 "
        "means a quarter of the memory limit, divided among the workers. Further requests are "
        "rejected with 429.",
    )
    max_image_pixels: int = Field(
        25_000_000,
        gt=0,
        description="Maximum number of pixels of one image, and of all images of a request at the size that "
        "the model takes.",
    )
    max_pixels_in_flight: int = Field(
        100_000_000, gt=0, description="Maximum number of pixels that are decoded at the same time."
    )
    decode_threads: int = Field(
        0,
        ge=0,
        description="Number of threads that decode images; 0 means one per core, four at most.",
    )
    max_inflight: int = Field(
        2048, gt=0, description="Maximum number of concurrent inferences in each process."
    )
    max_model_inflight: int = Field(
        0,
        ge=0,
        description="Maximum number of concurrent inferences of one model; 0 means half of "
        "GATEWAY_MAX_INFLIGHT.",
    )
    max_queue: int = Field(
        512,
        ge=0,
        description="Maximum number of inferences in the admission queue; further ones are rejected with "
        "429 at once.",
    )
    max_request_timeout_s: PositiveSeconds = Field(
        300.0, description="Maximum timeout that a client may set with X-Request-Timeout."
    )
    request_timeout_s: PositiveSeconds = Field(
        30.0,
        validate_default=True,
        description="Timeout of a request if the client sets none.",
    )
    connect_timeout_s: PositiveSeconds = Field(
        0.5, description="Timeout for connecting to a replica."
    )
    keep_alive_s: int = Field(
        75,
        gt=0,
        le=int(MAX_SETTING_S),
        description="Time after which an idle client connection is closed.",
    )
    max_header_bytes: int = Field(
        64 << 10,
        ge=1 << 10,
        description="Maximum size of a request's header, including the request line; also the maximum size "
        "of its trailers.",
    )
    max_header_fields: int = Field(
        100, ge=16, description="Maximum number of header fields of a request."
    )
    max_url_bytes: int = Field(8 << 10, ge=256, description="Maximum length of a request's URL.")
    max_pipelined: int = Field(
        16,
        gt=0,
        description="Maximum number of pipelined requests that wait for the previous response on one "
        "connection; further ones are read later.",
    )
    header_timeout_s: PositiveSeconds = Field(
        10.0,
        description="Timeout for receiving a request's header, and for the first request on a new "
        "connection.",
    )
    body_stall_s: PositiveSeconds = Field(
        10.0,
        description="How far a request body may fall behind GATEWAY_MIN_BYTES_PER_S before the request is "
        "aborted.",
    )
    write_timeout_s: PositiveSeconds = Field(
        30.0,
        description="How far a client may fall behind GATEWAY_MIN_BYTES_PER_S in reading its response "
        "before it is disconnected.",
    )
    min_bytes_per_s: int = Field(
        1 << 10,
        gt=0,
        description="Minimum average rate at which a client must send a request body and read a response.",
    )
    max_connections: int = Field(
        4096,
        gt=0,
        description="Maximum number of connections of each process, or fewer if it may not open as many "
        "files. Further connections are answered with 503.",
    )
    max_connections_per_client: int = Field(
        1024,
        ge=0,
        description="Maximum number of connections of one IP address, or of one IPv6 /64 network; 0 means "
        "no limit.",
    )
    tls_cert_file: Path | None = Field(
        None,
        description="Certificate chain with which the gateway serves HTTPS (PEM). It is reloaded when it "
        "changes.",
    )
    tls_key_file: Path | None = Field(
        None,
        validate_default=True,
        description="Private key of that certificate (PEM); empty if it is in the same file.",
    )
    drain_s: NonNegativeSeconds = Field(
        10.0,
        description="How long serve keeps serving after SIGTERM while /readyz reports that it is not ready.",
    )
    shutdown_s: PositiveSeconds = Field(
        30.0,
        description="How long requests in progress may then take before they are aborted. Five seconds "
        "later the process is terminated, whatever it is doing.",
    )
    page: bool = Field(
        True,
        description="Whether / serves browsers a page with the fleet, a form for every model and live "
        "metrics.",
    )
    otlp_endpoint: str = Field(
        "",
        description="OTLP/HTTP endpoint to which traces are sent: http://collector:4318. Empty: no traces. "
        "Requires the extra triton-gateway[otel].",
    )
    log_level: LogLevel = Field(LogLevel.info, description="debug, info, warning or error.")
    log_format: LogFormat = Field(
        LogFormat.console, description="console for people, json for one JSON object per line."
    )

    @field_validator("request_timeout_s")
    @classmethod
    def check_request_timeout(cls, value: float, info: ValidationInfo) -> float:
        maximum: float = info.data.get("max_request_timeout_s", value)
        if value > maximum and value == cls.model_fields["request_timeout_s"].default:
            return maximum  # only the default exceeds it
        if value > maximum:
            raise ValueError(f"it exceeds GATEWAY_MAX_REQUEST_TIMEOUT_S, which is {maximum:g}")
        return value

    @field_validator("tls_cert_file")
    @classmethod
    def check_certificate(cls, value: Path | None) -> Path | None:
        if value is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(value)
            except OSError as exc:
                raise ValueError(
                    f"the certificate cannot be read: {describe_os_error(exc)}"
                ) from exc
        return value

    @field_validator("tls_key_file")
    @classmethod
    def check_key(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        certificate = info.data.get("tls_cert_file")
        if certificate is None:
            if value is not None:
                raise ValueError("GATEWAY_TLS_CERT_FILE is missing")
        else:
            try:
                load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, value)
            except OSError as exc:
                reason = describe_os_error(exc)
                raise ValueError(f"no key for {certificate} can be read: {reason}") from exc
        return value

    @field_validator(
        "triton_urls", "cors_origins", "cancellable_models", "allowed_hosts", mode="before"
    )
    @classmethod
    def split_list(cls, value: Any) -> Any:
        # pydantic-settings itself would parse a tuple as JSON.
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("triton_urls")
    @classmethod
    def check_replicas(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        # `parse_replica_url` checks the rest of each URL.
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

    @field_validator("cors_origins")
    @classmethod
    def check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        # Only the form that browsers send can match (RFC 6454, section 6.2).
        for origin in value:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not a valid origin; use https://HOST or https://HOST:PORT"
                )
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def check_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(name.lower().strip("[]") for name in value)
        for name in names:
            if not ALLOWED_HOST.fullmatch(name):
                raise ValueError(
                    f"{name!r} is not a valid host; use names without http:// and without a port"
                )
        return names

    @field_validator("otlp_endpoint")
    @classmethod
    def check_endpoint(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            is_valid = False
        if value and not is_valid:
            raise ValueError("it is not a valid URL; use http://HOST:4318")
        return value


# Settings whose values are never shown.
SECRET_SETTINGS: Final = frozenset(
    name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)
)


def describe_os_error(exc: OSError) -> str:
    """Return the error in words, without error numbers and library names."""
    if isinstance(exc, ssl.SSLError) and exc.reason:
        return exc.reason.replace("_", " ").lower()
    return (exc.strerror or str(exc)).lower()


def read_settings(**overrides: Any) -> Settings:
    """Read the settings from the environment. Raises `CommandError`."""
    try:
        return Settings(**overrides)
    except ValidationError as exc:
        error = exc.errors()[0]
        name = ENV_PREFIX + "_".join(map(str, error["loc"])).upper()
        reason = error.get("ctx", {}).get("error", error["msg"])  # without pydantic's prefix
        if error["loc"][0] in SECRET_SETTINGS:
            raise CommandError(f"{name} is invalid: {reason}") from None
        value = format_setting(error["input"])
        raise CommandError(f"{name} cannot be {value}: {reason}") from None


def format_setting(value: Any) -> str:
    """Return the value as it was written, without a password in it."""
    written = ",".join(value) if isinstance(value, tuple) else "" if value is None else str(value)
    return repr(CREDENTIALS.sub("…@", written)) if written else "empty"


def describe_unknown_settings(names: Iterable[str]) -> list[str]:
    """Return a warning for each variable with the prefix that is not a setting."""
    known = [name.upper() for name in Settings.model_fields]
    candidates = sorted({name.upper() for name in names if name.upper().startswith(ENV_PREFIX)})
    warnings = []
    for name in candidates:
        suffix = name.removeprefix(ENV_PREFIX)
        if suffix not in known and not KUBERNETES_VARIABLE.fullmatch(name):
            matches = get_close_matches(suffix, known, 1)
            hint = f"; did you mean {ENV_PREFIX}{matches[0]}?" if matches else ""
            warnings.append(f"unknown setting {name}{hint}")
    return warnings
