"""The options of an embedded tritonserver, their validation, and its command line."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

from gateway.embedded.installation import Installation
from gateway.embedded.python_stub import find_unsafe_characters, find_unsupported_path
from gateway.listeners import ALL_ADDRESSES, ALL_IPV4_ADDRESSES, join_host_port, open_listeners
from gateway.messages import CommandError, join_names, quote_text
from gateway.triton.restricted_api import RestrictedApi

EXIT_GRACE_S: Final = 4.0  # Triton's limit for running requests is one second less
MAX_PORT: Final = 65535
REPLICA_PORT_STEP: Final = 100  # between the ports of consecutive replicas
LOAD_ALL: Final = "*"
URL_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*://")
OBJECT_STORE_SCHEMES: Final = ("s3://", "gs://", "as://")
# The reaper finds leftover shared memory by this setting.
SHM_PREFIX_SETTING: Final = re.compile(r"python,\s*shm-region-prefix-name\s*=")
# Settings of the ONNX Runtime backend, or of all backends, and the variable in which it finds them:
# Triton does not pass them to Python-based backends.
ONNXRUNTIME_SETTING: Final = re.compile(r"(?:onnxruntime,)?\s*(?P<setting>[^,=\s]+=[^\n]*)")
ONNXRUNTIME_VARIABLE: Final = "TRITON_GATEWAY_ONNXRUNTIME_SETTINGS"

# Flags of Triton that `--triton-arg` rejects, because the gateway has a flag for them, …
GATEWAY_FLAGS: Final = {
    "http-port": "--triton-http-port",
    "grpc-port": "--triton-grpc-port",
    "metrics-port": "--triton-metrics-port",
    "model-repository": "--model-repository",
    "model-store": "--model-repository",
    "model-control-mode": "--model-control",
    "repository-poll-secs": "--poll-secs",
    "load-model": "--load",
    "exit-on-error": "--exit-on-error",
    "backend-config": "--backend-config",
    "log-verbose": "--log-verbose",
}
# … or because the gateway relies on their values.
RESERVED_ARGUMENTS: Final = {
    "the embedded Triton listens on 127.0.0.1": ("http-address", "grpc-address", "metrics-address"),
    "the gateway requires all three ports": ("allow-http", "allow-grpc", "allow-metrics"),
    "the gateway connects to it without TLS": ("grpc-use-ssl", "grpc-use-ssl-mutual"),
    "the gateway reads the reasons of failures from the log": ("log-file", "log-format", "log-error"),
    "use the setting GATEWAY_TRITON_RESTRICTED_API": ("http-restricted-api", "grpc-restricted-protocol"),
    "the embedded Triton has its own backends": ("backend-directory",),
    "the embedded Triton reads configs/embedded.pbtxt": ("model-config-name",),
    f"the embedded Triton is killed after {EXIT_GRACE_S:g} s": ("exit-timeout-secs",),
}  # fmt: skip
REFUSED_ARGUMENTS: Final = {
    **{name: f"use {flag}" for name, flag in GATEWAY_FLAGS.items()},
    **{name: reason for reason, names in RESERVED_ARGUMENTS.items() for name in names},
}


class ModelControl(str, Enum):
    """Triton's `--model-control-mode`."""

    explicit = "explicit"
    none = "none"
    poll = "poll"


class CannotStart(CommandError):
    """Triton did not start. The message says why, or what to do."""


@dataclass(frozen=True)
class TritonOptions:
    model_repositories: tuple[Path | str, ...]  # folders, or URLs of an object store
    load_models: tuple[str, ...] = ()
    model_control: ModelControl = ModelControl.explicit
    poll_interval_s: int | None = None  # None: Triton's default, 15
    exit_on_error: bool = True
    backend_configs: tuple[str, ...] = ()  # BACKEND,SETTING=VALUE
    log_verbose: int = 0
    extra_arguments: tuple[str, ...] = ()  # passed to Triton last
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    start_timeout_s: float = 120.0
    restricted_api: RestrictedApi | None = None  # passed in the environment, not by `build_command`
    port_offset: int = 0  # difference to the ports of the flags

    def for_replica(self, number: int) -> TritonOptions:
        """Return the options of a replica, whose ports are `number` x `REPLICA_PORT_STEP` higher."""
        shift = number * REPLICA_PORT_STEP
        return replace(
            self,
            http_port=self.http_port + shift,
            grpc_port=self.grpc_port + shift,
            metrics_port=self.metrics_port + shift,
            port_offset=self.port_offset + shift,
        )

    @property
    def ports(self) -> dict[str, int]:
        plus = f" (+ {self.port_offset})" if self.port_offset else ""
        return {
            f"--triton-http-port{plus}": self.http_port,
            f"--triton-grpc-port{plus}": self.grpc_port,
            f"--triton-metrics-port{plus}": self.metrics_port,
        }

    @property
    def address(self) -> str:
        return join_host_port(self.host, self.http_port)

    @property
    def url(self) -> str:
        # The syntax of GATEWAY_TRITON_URLS.
        return f"http://{self.address}?grpc={self.grpc_port}&metrics={self.metrics_port}"

    @property
    def http_host(self) -> str:
        """The host of HTTP and of the metrics, which Triton serves on one family (`http_relay.py`)."""
        return ALL_IPV4_ADDRESSES if self.host == ALL_ADDRESSES else self.host

    @property
    def remote_repositories(self) -> list[str]:
        return [str(place) for place in self.model_repositories if is_remote_repository(place)]

    def validate(self) -> None:
        for repository in self.model_repositories:
            check_repository(repository)
        self._check_mode()
        self._check_paths()
        for value in self.backend_configs:
            if SHM_PREFIX_SETTING.match(value):
                raise CannotStart(
                    f"--backend-config does not accept {value}: "
                    "the gateway uses this prefix to remove shared memory after a crash"
                )
        for argument in self.extra_arguments:
            check_argument(argument)

    def _check_mode(self) -> None:
        mode = self.model_control
        if self.load_models and mode is not ModelControl.explicit:
            raise CannotStart(
                f"--load requires --model-control explicit; in mode {mode.value} Triton loads every "
                "model of the repository"
            )
        if self.poll_interval_s is not None and mode is not ModelControl.poll:
            raise CannotStart(
                f"--poll-secs requires --model-control poll; in mode {mode.value} Triton does not "
                "scan the repository again"
            )

    def _check_paths(self) -> None:
        for place in self.model_repositories:
            if is_remote_repository(place):
                continue  # Triton copies it to a local path
            if (folder := find_unsupported_path(Path(format_repository(place)))) is not None:
                raise CannotStart(
                    f"Triton cannot run a model at {quote_text(str(folder), 200)}: its Python backend "
                    f"does not support paths with {join_names(find_unsafe_characters(folder))}; "
                    "rename it, or use a symbolic link with a plain name"
                )

    def build_environment(self) -> dict[str, str]:
        settings = [
            match["setting"]
            for value in self.backend_configs
            if (match := ONNXRUNTIME_SETTING.fullmatch(value))
        ]
        return {ONNXRUNTIME_VARIABLE: "\n".join(settings)} if settings else {}

    def build_command(self, installation: Installation, shared_memory_prefix: str) -> list[str]:
        interval_s = self.poll_interval_s
        poll = [] if interval_s is None else [f"--repository-poll-secs={interval_s}"]
        repositories = map(format_repository, self.model_repositories)
        return [
            str(installation.server),
            *(f"--model-repository={repository}" for repository in repositories),
            f"--model-control-mode={self.model_control.value}",
            *poll,
            *(f"--load-model={model}" for model in self.load_models),
            f"--exit-on-error={str(self.exit_on_error).lower()}",
            # With Triton's default, it is not ready during a load, and never again after a failed one.
            "--strict-readiness=false",
            "--model-config-name=embedded",
            f"--backend-directory={installation.backends}",
            f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix}",
            *(f"--backend-config={value}" for value in self.backend_configs),
            *self._build_address_flags(),
            f"--http-port={self.http_port}",
            f"--grpc-port={self.grpc_port}",
            f"--metrics-port={self.metrics_port}",
            f"--exit-timeout-secs={int(EXIT_GRACE_S) - 1}",
            f"--log-verbose={self.log_verbose}",
            *self.extra_arguments,
        ]

    def _build_address_flags(self) -> list[str]:
        # Triton's HTTP servers have a syntax of their own for IPv6, and gRPC the usual one.
        http = f"ipv6:{self.http_host}" if ":" in self.http_host else self.http_host
        grpc = f"[{self.host}]" if ":" in self.host else self.host
        return [f"--http-address={http}", f"--grpc-address={grpc}", f"--metrics-address={http}"]


def is_remote_repository(repository: Path | str) -> bool:
    return isinstance(repository, str) and URL_SCHEME.match(repository) is not None


def format_repository(repository: Path | str) -> str:
    return str(repository) if is_remote_repository(repository) else str(Path(repository).absolute())


def check_repository(repository: Path | str) -> None:
    if is_remote_repository(repository):
        if not str(repository).startswith(OBJECT_STORE_SCHEMES):
            raise CannotStart(
                f"{repository} is not a valid model repository; Triton reads folders and URLs with "
                f"{join_names(OBJECT_STORE_SCHEMES)}"
            )
    elif not Path(repository).is_dir():
        raise CannotStart(
            f"model repository not found: {repository}; choose another with --model-repository"
        )


def check_argument(argument: str) -> None:
    """Refuse a reserved flag, or a prefix of one, which Triton accepts as well. Raises `CannotStart`."""
    if not argument.startswith("--"):
        return  # the value of the preceding flag
    flag = argument[2:].partition("=")[0]
    for name, reason in REFUSED_ARGUMENTS.items():
        if flag and name.startswith(flag):
            raise CannotStart(f"--triton-arg does not accept {argument}: {reason}")


def collect_ports(fleet: Sequence[TritonOptions]) -> dict[str, int]:
    return {flag: port for options in fleet for flag, port in options.ports.items()}


def check_distinct_ports(ports: Mapping[str, int]) -> None:
    flags: dict[int, str] = {}
    for flag, port in ports.items():
        check_port_number(port, flag)
        if port in flags:
            raise CannotStart(
                f"{flags[port]} and {flag} both use port {port}; choose different ports"
            )
        flags[port] = flag


def check_port_number(port: int, flag: str) -> None:
    if not 0 <= port <= MAX_PORT:
        raise CannotStart(f"{flag} must be between 1 and {MAX_PORT}, not {port}")


def check_port_free(host: str, port: int, flag: str) -> None:
    """Check that the port is free; Triton's own message does not name the flag. Raises `CannotStart`."""
    check_port_number(port, flag)
    try:
        listeners = open_listeners(host, port)
    except OSError as exc:
        raise CannotStart(
            f"port {port} cannot be used ({os.strerror(exc.errno or 0).lower()}); "
            f"choose another with {flag}"
        ) from exc
    for listener in listeners:
        listener.close()
