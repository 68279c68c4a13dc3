"""The gateway's settings: read once from the environment (prefix `GATEWAY_`), described once, and frozen.

The string below a field is its description in the documentation. pydantic does not read it: to parse the
source would take 20 ms of every start. No variable sets a `Fixed` field.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from gateway.messages import CommandError, suggest_name

T = TypeVar("T")
CapabilityT = TypeVar("CapabilityT", bound="CapabilitySettings")
ENV_PREFIX: Final = "GATEWAY_"
CLIENT_VARIABLES: Final = ("URL", "KEY", "CA")  # which the client and the commands read
# Kubernetes adds these variables to every pod beside a Service whose name begins with "gateway".
KUBERNETES_VARIABLE: Final = re.compile(
    r"GATEWAY_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
# A name and a password in an address; matches too much rather than a part of a password.
CREDENTIALS: Final = re.compile(r".*@", re.DOTALL)
ORIGIN: Final = re.compile(r"https?://[a-z0-9.\-\[\]:]+")
ALLOWED_HOST: Final = re.compile(r"[a-z0-9_.*-]+|[0-9a-f:.]+")
# The key becomes part of a gRPC metadata name, which must be in lower case.
RESTRICTED_API: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,63}=[!-~]{16,1024}")
MIN_OPEN_FILES: Final = 256
MAX_SETTING_S: Final = 86400.0


def split_list(value: Any) -> Any:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


FIXED: Final = "fixed"
# A constant that is a field, so that tests can pass another value; no variable sets it.
Fixed = Annotated[T, FIXED]
# Bounded, because timers do not accept infinity.
PositiveSeconds = Annotated[float, Field(gt=0, le=MAX_SETTING_S)]
NonNegativeSeconds = Annotated[float, Field(ge=0, le=MAX_SETTING_S)]
# pydantic-settings itself would read a tuple as JSON.
CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)]


# The replicas and their models


class FleetSettings(BaseModel):
    triton_urls: CommaSeparated = ("http://127.0.0.1:8000",)
    """Comma-separated URLs of the Triton replicas. gRPC and metrics are expected on ports 8001 and 8002 of
    the same host unless the URL sets others: http://127.0.0.1:9000?grpc=9001&metrics=9002.
    dns+http://NAME:8000 stands for every address that NAME resolves to; the name is resolved periodically.
    With dns+http://NAME:8000?prefer=OTHER, a replica at an address that OTHER does not resolve to gets a
    request only if no other replica can serve it."""
    poll_interval_s: Fixed[float] = 0.5  # between health probes of each replica
    dns_interval_s: Fixed[float] = 5.0  # between DNS lookups of dns+http:// names
    connect_timeout_s: Fixed[float] = 0.5  # for connections to a replica
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
    file:///path/state.db, a database on a local disk for the processes of one machine; redis://host:6379/0 if
    gateways on several machines share the state; memory:; or none: for several gateways that share no state,
    where only the models file decides what is loaded. Empty: one file per fleet in the user's state directory
    (XDG_STATE_HOME), or memory: for up."""
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


# Sizes, concurrency and timeouts of requests


class LimitSettings(BaseModel):
    # Triton counts the bytes of texts in 32 bits, and needs 4 more for each text.
    max_body_bytes: int = Field(64 << 20, gt=0, le=1 << 30)
    """Maximum size of a request body, as received and decompressed; 1 GiB at most."""
    max_answer_bytes: Fixed[int] = 256 << 20  # of a replica's response that /v1 buffers
    max_bytes_in_flight: int = Field(0, ge=0)
    """Memory that the bodies of requests and responses may use together in each process; 0 means a quarter of
    the memory limit, divided among the workers. Further requests are rejected with 429."""
    max_image_pixels: int = Field(25_000_000, gt=0)
    """Maximum number of pixels of one image, and of all images of a request at the size that the model
    takes."""
    max_inflight: int = Field(2048, gt=0)
    """Maximum number of concurrent inferences in each process."""
    max_model_inflight: int = Field(0, ge=0)
    """Maximum number of concurrent inferences of one model; 0 means half of GATEWAY_MAX_INFLIGHT."""
    max_request_inferences: Fixed[int] = 2048  # that one request may become
    max_queue: Fixed[int] = 512  # inferences of each priority that wait for a slot
    max_request_timeout_s: PositiveSeconds = 300.0
    """Maximum timeout that a client may set with X-Request-Timeout."""
    request_timeout_s: PositiveSeconds = Field(30.0, validate_default=True)
    """Timeout of a request if the client sets none."""

    @field_validator("request_timeout_s")
    @classmethod
    def check_request_timeout(cls, value: float, info: ValidationInfo) -> float:
        maximum: float = info.data.get("max_request_timeout_s", value)
        if value > maximum and value == cls.model_fields["request_timeout_s"].default:
            return maximum  # the default adapts to a lower maximum
        if value > maximum:
            raise ValueError(f"it exceeds GATEWAY_MAX_REQUEST_TIMEOUT_S, which is {maximum:g}")
        return value


# Authentication, authorization and browser access


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
    cors_origins: CommaSeparated = ()
    """Comma-separated origins whose pages may call the gateway from a browser: https://app.example.com; *
    allows every origin. Empty: none."""
    allowed_hosts: CommaSeparated = ()
    """Comma-separated values that the Host header may have: models.example.com,*.test; localhost is always
    allowed, * allows any host. Empty: only localhost if the gateway listens on loopback and has no keys file,
    otherwise any host."""

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


# Connections, TLS and shutdown


class ClientAuth(str, Enum):
    """The certificates that clients need."""

    required = "required"
    optional = "optional"


class ServerSettings(BaseModel):
    keep_alive_s: int = Field(75, gt=0, le=int(MAX_SETTING_S))
    """Time after which an idle client connection is closed."""
    header_timeout_s: Fixed[float] = 10.0  # also of the first request on a new connection
    # How far a body, or a client that reads its response, may fall behind 1 KiB/s.
    body_stall_s: Fixed[float] = 10.0
    write_timeout_s: Fixed[float] = 30.0
    max_connections: int = Field(4096, gt=0)
    """Maximum number of connections of each process, or fewer if it may not open as many files. Further
    connections are answered with 503."""
    max_connections_per_client: int = Field(1024, ge=0)
    """Maximum number of connections of one IP address, or of one IPv6 /64 network, and of its gRPC calls in
    progress; 0 means no limit."""
    tls_cert_file: Path | None = None
    """Certificate chain with which the gateway serves HTTPS (PEM). It is reloaded when it changes."""
    tls_key_file: Path | None = Field(None, validate_default=True)
    """Private key of that certificate (PEM); empty if it is in the same file."""
    tls_client_ca_file: Path | None = None
    """CA certificate that must have signed the certificates of clients, of HTTPS and of gRPC (PEM). It is
    reloaded when it changes. HTTPS then requires TLS 1.3. Empty: clients are not asked for a certificate."""
    tls_client_auth: ClientAuth = ClientAuth.required
    """With GATEWAY_TLS_CLIENT_CA_FILE: required, every client needs a certificate; or optional, one without a
    certificate may use a key or a token, and the health paths. gRPC asks for no optional certificate."""
    drain_s: NonNegativeSeconds = 10.0
    """How long serve keeps serving after SIGTERM while /readyz reports that it is not ready."""
    shutdown_s: PositiveSeconds = 30.0
    """How long requests in progress may then take before they are aborted."""

    @field_validator("tls_cert_file")
    @classmethod
    def check_certificate(cls, value: Path | None) -> Path | None:
        if value is not None:
            with describe_os_errors(ValueError, "the certificate cannot be read"):
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(value)
        return value

    @field_validator("tls_key_file", "tls_client_ca_file")
    @classmethod
    def check_has_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("tls_cert_file") is None:
            raise ValueError("GATEWAY_TLS_CERT_FILE is missing")
        return value

    @field_validator("tls_key_file")
    @classmethod
    def check_key(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if (certificate := info.data.get("tls_cert_file")) is not None:
            with describe_os_errors(ValueError, f"no key for {certificate} can be read"):
                load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate, value)
        return value

    @field_validator("tls_client_auth")
    @classmethod
    def check_client_auth(cls, value: ClientAuth, info: ValidationInfo) -> ClientAuth:
        if value is ClientAuth.optional and info.data.get("tls_client_ca_file") is None:
            raise ValueError("no certificate is asked for without GATEWAY_TLS_CLIENT_CA_FILE")
        return value

    @field_validator("tls_client_ca_file")
    @classmethod
    def check_client_authority(cls, value: Path | None) -> Path | None:
        if value is not None:
            with describe_os_errors(ValueError, "the CA certificate cannot be read"):
                load_authority(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), value, ClientAuth.required)
        return value


VERIFY_MODES: Final = {
    ClientAuth.required: ssl.CERT_REQUIRED,
    ClientAuth.optional: ssl.CERT_OPTIONAL,
}


def load_authority(context: ssl.SSLContext, authority: Path, client_auth: ClientAuth) -> None:
    """Ask clients for a certificate that this authority signed. Raises `OSError`."""
    context.load_verify_locations(authority)
    context.verify_mode = VERIFY_MODES[client_auth]
    # A resumed session would keep the rights of a certificate that has expired, or of a replaced authority.
    # Clients of TLS 1.2 can resume sessions without a ticket, which Python cannot turn off.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0


def load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    """Load a certificate chain without prompting for a password. Raises `OSError`."""
    context.load_cert_chain(certificate, key, password=lambda: "")


@contextmanager
def describe_os_errors(error: type[Exception], problem: str) -> Iterator[None]:
    """Turn an `OSError` of the block into `error`, with the reason in words instead of numbers."""
    try:
        yield
    except OSError as exc:
        reason = exc.strerror or str(exc)
        if isinstance(exc, ssl.SSLError) and exc.reason:
            reason = exc.reason.replace("_", " ")
        raise error(f"{problem}: {reason.lower()}") from None


# Logs, metrics and traces


class LogFormat(str, Enum):
    console = "console"
    json = "json"


class LogLevel(str, Enum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class ObservabilitySettings(BaseModel):
    log_level: LogLevel = LogLevel.info
    """debug, info, warning or error. Only debug logs probes, scrapes and the reads of an open page."""
    log_format: LogFormat = LogFormat.console
    """console for people, json for one JSON object per line."""
    audit_log: str = ""
    """stdout or a FILE: where the audit log is written, as JSON lines. Empty: it is a part of the log."""
    metrics_replicas: bool = True
    """Include the metrics of all replicas in /metrics. Set false if Prometheus scrapes the Tritons itself."""
    otlp_endpoint: str = ""
    """OTLP/HTTP endpoint to which traces are sent: http://collector:4318. Empty: no traces. Requires the
    extra triton-gateway[otel]."""

    @field_validator("otlp_endpoint")
    @classmethod
    def check_endpoint(cls, value: str) -> str:
        return check_http_url(value)


def check_http_url(value: str) -> str:
    """Return an address, or an empty text, which is none. Raises `ValueError`."""
    try:
        parts = urlsplit(value)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_valid = False
    if value and not is_valid:
        raise ValueError("it is not a valid URL; use https://HOST:PORT/PATH")
    return value


# Reading the settings


class Variables(EnvSettingsSource):
    """The environment variables of all fields but the fixed ones."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        if FIXED in field.metadata:
            return None, field_name, False
        return super().get_field_value(field, field_name)


class SecretFiles(EnvSettingsSource):
    """The secrets in the files that `GATEWAY_…_FILE` name. Raises `CommandError`."""

    def __call__(self) -> dict[str, str]:
        found = {}
        for name in find_secrets(self.settings_cls):
            setting = f"{ENV_PREFIX}{name}".upper()
            if path := self.env_vars.get(f"{setting}_FILE".lower()):
                if self.env_vars.get(setting.lower()):
                    raise CommandError(f"{setting} and {setting}_FILE are both set; unset one")
                found[name] = read_secret(f"{setting}_FILE", Path(path))
        return found


def read_secret(setting: str, path: Path) -> str:
    """Return the file's text without the end of its last line. Raises `CommandError`."""
    with describe_os_errors(CommandError, f"{setting} cannot be {str(path)!r}"):
        secret = path.read_text("utf-8", "surrogateescape").rstrip("\r\n")
    if not secret or not secret.isprintable():
        raise CommandError(f"{setting} cannot be {str(path)!r}: the file is empty or not one line")
    return secret


class EnvironmentSettings(BaseSettings):
    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, Variables(settings_cls), SecretFiles(settings_cls)


class CapabilitySettings(EnvironmentSettings):
    """The settings of one capability, which `Settings.read` returns."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore")


class Settings(
    # Validated from the last to the first, and an error of the last one is reported first.
    ObservabilitySettings,
    ServerSettings,
    LimitSettings,
    AccessSettings,
    FleetSettings,
    EnvironmentSettings,
):
    """The settings of the core. A test compares all settings with `docs/reference/settings.md`."""

    # Values that are none of these fields are kept for the capabilities.
    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="allow")

    def read(self, kind: type[CapabilityT]) -> CapabilityT:
        """Return a capability's settings from the environment and from this object's arguments."""
        return kind(**(self.model_extra or {}))


def read_settings(*kinds: type[CapabilitySettings], **overrides: Any) -> Settings:
    """Return the settings of the environment, after a check of the capabilities' settings.

    Raises `CommandError`.
    """
    check_removed_settings(os.environ, *kinds)
    try:
        settings = Settings(**overrides)
        for kind in kinds:
            settings.read(kind)
    except ValidationError as exc:
        error = exc.errors()[0]
        name = ENV_PREFIX + "_".join(map(str, error["loc"])).upper()
        # The context has the message without pydantic's prefix.
        reason = error.get("ctx", {}).get("error", error["msg"])
        if error["loc"][0] in find_secrets(Settings, *kinds):
            raise CommandError(f"{name} is invalid: {reason}") from None
        value = format_setting(error["input"])
        raise CommandError(f"{name} cannot be {value}: {reason}") from None
    return settings


def find_secrets(*kinds: type[BaseModel]) -> set[str]:
    """Return the names of the settings whose values are never shown."""
    return {
        name
        for kind in kinds
        for name, field in kind.model_fields.items()
        if "SecretStr" in str(field.annotation)
    }


def format_setting(value: Any) -> str:
    """Return the value as it was written, without a password in it."""
    written = ",".join(value) if isinstance(value, tuple) else "" if value is None else str(value)
    return repr(CREDENTIALS.sub("…@", written)) if written else "empty"


def list_setting_names(*kinds: type[CapabilitySettings]) -> list[str]:
    return [
        *list_variable_fields(Settings),
        *(name for kind in kinds for name in list_variable_fields(kind)),
    ]


def list_variable_fields(kind: type[BaseModel]) -> list[str]:
    """Return the names of the fields that a variable sets."""
    return [name for name, field in kind.model_fields.items() if FIXED not in field.metadata]


# Settings whose value is fixed; those of `Fixed` fields are as well.
FIXED_SETTINGS: Final = (
    *("DECODE_THREADS", "GRPC_MAX_STREAMS", "MAX_HEADER_BYTES", "MAX_HEADER_FIELDS"),
    *("MAX_MODEL_INSTANCES", "MAX_MODEL_SEQUENCES", "MAX_MODEL_WARMUPS"),
    *("MAX_PIPELINED", "MAX_PIXELS_IN_FLIGHT", "MAX_URL_BYTES", "MIN_BYTES_PER_S"),
    "OIDC_KEYS_MAX_AGE_S",
)
# What holds in place of a setting, or what to do instead.
REMOVED_SETTINGS: Final = {
    **{f"{ENV_PREFIX}{name}": "its value is fixed" for name in FIXED_SETTINGS},
    "GATEWAY_CALLBACK_HOSTS": "GATEWAY_CALLBACK_URLS lists prefixes such as https://shop.example/done",
    "GATEWAY_CORS_CREDENTIALS": "pages of other origins send a key or a token",
    "GATEWAY_DEFAULT_MODEL_MEMORY_MB": "set gateway.memory_mb in the config of each model",
    "GATEWAY_DOCUMENTATION_URL": "the page links to the documents at /guide/",
    "GATEWAY_EVICTION_PROTECTION_S": "an on-demand model stays for two seconds after a use",
    "GATEWAY_GRPC_COMPRESSION": "compressed messages are accepted",
    "GATEWAY_GRPC_HOST": "gRPC listens where --host says",
    "GATEWAY_MAX_SHADOW_BYTES": "a mirror copies bodies of 1 MiB at most",
    "GATEWAY_METRICS_CALLERS": "the metrics count by caller; Prometheus drops labels with labeldrop",
    "GATEWAY_OIDC_JWKS_FILE": "GATEWAY_OIDC_JWKS_URL may be file:///PATH",
    "GATEWAY_REPOSITORY_SECRET_ACCESS_KEY": "set AWS_SECRET_ACCESS_KEY",
    "GATEWAY_SAMPLES_MAX_AGE_HOURS": "samples go to an address only",
    "GATEWAY_SAMPLES_MAX_BYTES": "samples go to an address only",
    "GATEWAY_SCALER_PORT": "let KEDA ask Prometheus for sum(gateway_demand)",
    "GATEWAY_SLOW_START_S": "a replica gets its full share at once",
    "GATEWAY_USAGE": "the metrics count by caller",
}


def check_removed_settings(names: Iterable[str], *kinds: type[CapabilitySettings]) -> None:
    """Check that no variable sets what is no setting any longer. Raises `CommandError`."""
    models: tuple[type[BaseModel], ...] = (Settings, *kinds)
    fields = [name for model in models for name in model.model_fields]
    fixed = {f"{ENV_PREFIX}{name}".upper() for name in {*fields} - {*list_setting_names(*kinds)}}
    removed = dict.fromkeys(fixed, "its value is fixed") | REMOVED_SETTINGS
    for name in sorted(name.upper() for name in names):
        if name in removed:
            raise CommandError(f"{name} is no longer a setting; unset it: {removed[name]}")


def describe_unknown_settings(names: Iterable[str], *kinds: type[CapabilitySettings]) -> list[str]:
    known = [name.upper() for name in list_setting_names(*kinds)]
    known += [f"{name.upper()}_FILE" for name in find_secrets(Settings, *kinds)]
    warnings = []
    for name in sorted({name.upper() for name in names if name.upper().startswith(ENV_PREFIX)}):
        setting = name.removeprefix(ENV_PREFIX)
        if setting not in (*known, *CLIENT_VARIABLES) and not KUBERNETES_VARIABLE.fullmatch(name):
            hint = suggest_name(name, [f"{ENV_PREFIX}{each}" for each in known], cutoff=0.8)
            warnings.append(f"unknown setting {name}{hint}")
    return warnings
