"""The processes that `triton-gateway up`, `triton` and `serve` start.

The gateway takes a second to import, so errors are reported before, and `triton` does not import it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

from pydantic import SecretStr

from gateway import logs
from gateway.auth import is_loopback
from gateway.embedded.demonstration import resolve_repositories
from gateway.embedded.model_paths import is_model, resolve_model_paths
from gateway.embedded.options import (
    ModelControl,
    TritonOptions,
    check_distinct_ports,
    check_port_free,
    collect_ports,
    is_remote_repository,
)
from gateway.embedded.supervisor import EmbeddedTriton, run_embedded_tritons
from gateway.messages import CommandError, print_message
from gateway.process_exit import prompt_exit
from gateway.settings import ENV_PREFIX, Settings, describe_unknown_settings, read_settings
from gateway.settings.access import ModelUploads
from gateway.settings.fleet import REPOSITORY_URL_EXCLUSIONS
from gateway.triton.restricted_api import (
    RestrictedApi,
    generate_restricted_api,
    parse_restricted_api,
)

log = logging.getLogger(__name__)

LOCALHOST: Final = "localhost"
MessageWriter = Callable[[str], None]


def run_with_embedded_triton(options: TritonOptions, host: str, port: int, replicas: int) -> None:
    started_at = time.monotonic()
    options = with_demonstration(options)
    fleet = [options.for_replica(number) for number in range(replicas)]
    check_distinct_ports({"--port": port, **collect_ports(fleet)})
    check_port_free(host, port, "--port")
    # Sessions of `up` may use different repositories, so loaded models are not remembered between them.
    # Nothing watches their readiness, so they do not drain.
    os.environ.setdefault("GATEWAY_STATE", "memory:")
    urls = tuple(options.url for options in fleet)
    settings, print_line = configure_process(
        triton_urls=urls, drain_s=0, **choose_upload_settings(options)
    )
    restricted = read_restricted_api(settings) or generate_restricted_api()
    fleet = [replace(options, restricted_api=restricted) for options in fleet]
    settings = settings.model_copy(update={"triton_restricted_api": SecretStr(restricted.setting)})
    from gateway.app import create_app
    from gateway.server import create_server

    def on_ready() -> None:
        elapsed_s = time.monotonic() - started_at
        print_line(f"ready after {elapsed_s:.1f} s on http://{host}:{port}  (press Ctrl-C to stop)")

    settings = restrict_allowed_hosts(host, settings)
    warn_if_exposed(settings, host)
    gateway = create_server(create_app(settings), settings, host, port, on_ready)
    reasons: list[str] = []

    def on_failure(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == replicas:
            gateway.should_exit = True
        else:
            print_line(f"{reason}; the gateway continues with the other replicas")

    with prompt_exit():
        with resolve_model_paths(options.model_repositories) as repositories:
            fleet = [replace(each, model_repositories=repositories) for each in fleet]
            with run_embedded_tritons(create_tritons(fleet, on_failure, print_line), print_line):
                gateway.run()
        if len(reasons) == replicas:
            raise CommandError(reasons[-1])


def choose_upload_settings(options: TritonOptions) -> dict[str, Any]:
    """Return the settings with which models can be uploaded to the first folder of models.

    Without keys, only local programs of the same user may upload, and only data.
    """
    folders = [place for place in options.model_repositories if is_repository_folder(place)]
    if not folders or options.model_control is not ModelControl.explicit:
        return {}
    url = f"file://{Path(folders[0]).absolute()}"
    defaults = {"GATEWAY_REPOSITORY": url, "GATEWAY_MODEL_UPLOADS": ModelUploads.artifacts}
    is_usable = not REPOSITORY_URL_EXCLUSIONS & set(url)
    return {
        name.removeprefix(ENV_PREFIX).lower(): value
        for name, value in defaults.items()
        if is_usable and name not in os.environ
    }


def is_repository_folder(place: Path | str) -> bool:
    return not is_remote_repository(place) and Path(place).is_dir() and not is_model(Path(place))


def with_demonstration(options: TritonOptions) -> TritonOptions:
    """Return the options with the packaged models if no others are given. Raises `CannotInstall`."""
    repositories = resolve_repositories(options.model_repositories, print_message)
    return replace(options, model_repositories=repositories)


def run_triton(options: TritonOptions, host: str) -> None:
    options = with_demonstration(options)
    settings, print_line = configure_process()
    restricted = read_restricted_api(settings)
    if warning := describe_exposure(host, restricted=restricted is not None):
        print_line(warning)
    reasons: list[str] = []

    def on_failure(reason: str) -> None:
        reasons.append(reason)
        # This runs in another thread; only a signal wakes the main thread.
        signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGTERM)

    options = replace(options, host=host, restricted_api=restricted)
    with ExitStack() as stack:
        stack.enter_context(prompt_exit())
        repositories = stack.enter_context(resolve_model_paths(options.model_repositories))
        options = replace(options, model_repositories=repositories)
        stack.enter_context(EmbeddedTriton(options, on_message=print_line, on_failure=on_failure))
        print_line(f"Triton is ready: {options.url}  (press Ctrl-C to stop)")
        try:
            signal.pause()
        except SystemExit:
            if reasons:
                raise CommandError(reasons[0]) from None
            raise


def run_gateway(host: str, port: int, workers: int) -> None:
    check_port_free(host, port, "--port")
    settings, print_line = configure_process()
    tritons = ", ".join(settings.triton_urls)
    message = f"serving {tritons} on http://{host}:{port}  (press Ctrl-C to stop)"
    on_ready = partial(print_line, message)
    settings = restrict_allowed_hosts(host, settings)
    warn_if_exposed(settings, host)
    with prompt_exit(), ExitStack() as stack:
        if workers > 1:
            from gateway.workers import run_workers

            if settings.state == "memory:":  # the workers share a file that is deleted at the end
                folder = stack.enter_context(TemporaryDirectory(prefix="triton-gateway-state-"))
                os.environ["GATEWAY_STATE"] = f"file://{folder}/state.json"
            run_workers(settings, host, port, workers, on_ready)
        else:
            from gateway.app import create_app
            from gateway.server import create_server

            create_server(create_app(settings), settings, host, port, on_ready).run()


def read_restricted_api(settings: Settings) -> RestrictedApi | None:
    secret = settings.triton_restricted_api
    return None if secret is None else parse_restricted_api(secret.get_secret_value())


def describe_exposure(host: str, *, restricted: bool) -> str:
    """Return a warning about access to a Triton that listens on `host`; empty if there is no risk."""
    advice = (
        "to prevent this, set GATEWAY_TRITON_RESTRICTED_API=KEY=SECRET for Triton and the gateway"
    )
    if restricted:
        warning = f"clients that reach {host} can use all models: Triton does not check keys"
        return "" if is_loopback(host) else warning
    if is_loopback(host):
        return f"web pages and other users of this machine can load code into Triton; {advice}"
    return (
        f"clients that reach {host} have full access to Triton, including loading code, because Triton "
        f"does not check keys; {advice}"
    )


def configure_process(**overrides: Any) -> tuple[Settings, MessageWriter]:
    """Read the settings and configure the log; return a function that prints lines in order with it."""
    settings = read_settings(**overrides)
    writer = logs.configure(settings)
    for warning in describe_unknown_settings(os.environ):
        log.warning("%s", warning)
    if settings.allow_model_upload:
        log.warning("GATEWAY_ALLOW_MODEL_UPLOAD is deprecated; set GATEWAY_MODEL_UPLOADS=code")
    return settings, writer.write_message


def restrict_allowed_hosts(host: str, settings: Settings) -> Settings:
    """Restrict the Host header to localhost on loopback without keys; workers inherit it by the environment.

    Otherwise a web page whose name resolves to 127.0.0.1 (DNS rebinding) could reach such a gateway.
    """
    if settings.keys_file is not None or settings.allowed_hosts or not is_loopback(host):
        return settings
    os.environ["GATEWAY_ALLOWED_HOSTS"] = LOCALHOST
    return settings.model_copy(update={"allowed_hosts": (LOCALHOST,)})


def warn_if_exposed(settings: Settings, host: str) -> None:
    if settings.keys_file is None and not is_loopback(host):
        log.warning(
            "clients that reach %s can use all models and read the metrics: GATEWAY_KEYS_FILE is not set; "
            "create a keys file with: triton-gateway key create",
            host,
        )


def create_tritons(
    fleet: Sequence[TritonOptions], on_failure: MessageWriter, on_message: MessageWriter
) -> list[EmbeddedTriton]:
    def create_triton(options: TritonOptions) -> EmbeddedTriton:
        # The messages of several Tritons begin with their addresses.
        prefix = f"{options.address}: " if len(fleet) > 1 else ""
        return EmbeddedTriton(options, on_message, on_failure, prefix)

    return list(map(create_triton, fleet))
