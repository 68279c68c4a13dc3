"""The processes that `triton-gateway up`, `triton` and `serve` start.

The gateway takes a second to import, so errors are reported before, and `triton` does not import it.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

from pydantic import SecretStr

from gateway.access.auth import is_loopback
from gateway.capabilities.capability import LaunchPlan
from gateway.capabilities.installed import INSTALLED, SETTINGS
from gateway.config.settings import Settings, describe_unknown_settings, read_settings
from gateway.embedded.demonstration import with_demonstration
from gateway.embedded.http_relay import start_relay
from gateway.embedded.model_paths import resolve_model_paths
from gateway.embedded.options import (
    TritonOptions,
    check_distinct_ports,
    check_port_free,
    collect_ports,
)
from gateway.embedded.supervisor import EmbeddedTriton, run_embedded_tritons
from gateway.listeners import ALL_ADDRESSES, join_host_port, open_listeners
from gateway.messages import CommandError, join_names
from gateway.telemetry import logs
from gateway.triton.restricted_api import generate_restricted_api, read_restricted_api

log = logging.getLogger(__name__)

LOCALHOST: Final = "localhost"
MessageWriter = Callable[..., None]
# Lines of the embedded Triton have this `source` in the log.
TRITON_SOURCE: Final = "triton"


def run_with_embedded_triton(
    options: TritonOptions,
    host: str,
    port: int,
    replicas: int,
    overrides: Mapping[str, Any],
    *,
    opens_page: bool,
) -> None:
    """Run Tritons and a gateway; the overrides are settings that flags set. Raises `CommandError`."""
    started_at = time.monotonic()
    tritons = [options.for_replica(number) for number in range(replicas)]
    ports = {"--port": port, **collect_ports(tritons)}
    check_distinct_ports(ports)
    check_port_free(host, port, "--port")
    # Sessions of `up` may use different repositories, so loaded models are not remembered between them.
    # Nothing watches their readiness, so they do not drain.
    os.environ.setdefault("GATEWAY_STATE", "memory:")
    settings, print_line = configure_process(
        triton_urls=tuple(triton.url for triton in tritons), drain_s=0, **overrides
    )
    options = with_demonstration(options, print_line)
    tritons = [options.for_replica(number) for number in range(replicas)]
    plan = prepare_capabilities(
        LaunchPlan(settings, host, ports, tritons=tritons, opens_page=opens_page)
    )
    plan.settings = restrict_allowed_hosts(host, plan.settings)
    api = read_restricted_api(settings) or generate_restricted_api()
    plan.update_settings(triton_restricted_api=SecretStr(api.setting))
    warn_if_exposed(settings, host)

    def print_ready() -> None:
        elapsed_s = time.monotonic() - started_at
        places = describe_places(port, plan)
        print_line(f"ready after {elapsed_s:.1f} s on {places}  (press Ctrl-C to stop)")

    with resolve_model_paths(options.model_repositories) as paths:
        tritons = [replace(each, model_repositories=paths, restricted_api=api) for each in tritons]
        run_fleet(tritons, plan, port, print_line, print_ready)


def run_fleet(
    tritons: Sequence[TritonOptions],
    plan: LaunchPlan,
    port: int,
    print_line: MessageWriter,
    print_ready: Callable[[], None],
) -> None:
    """Run until a signal arrives. Raises `CommandError` when the last Triton has failed."""
    from gateway.app import create_app
    from gateway.server.http import create_server
    from gateway.server.welcome import Welcome

    welcome = Welcome(plan, port, print_line)

    def on_ready() -> None:
        print_ready()
        welcome.start()

    app = create_app(plan.settings, welcome.receive_services)
    gateway = create_server(app, plan.settings, plan.host, port, on_ready)
    reasons: list[str] = []

    def on_failure(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == len(tritons):
            gateway.should_exit = True
        else:
            print_line(f"{reason}; the gateway continues with the other replicas")

    def create_triton(options: TritonOptions) -> EmbeddedTriton:
        # The messages of several Tritons begin with their addresses.
        prefix = f"{options.address}: " if len(tritons) > 1 else ""
        on_message = partial(print_line, source=TRITON_SOURCE)
        return EmbeddedTriton(
            options, on_message=on_message, on_failure=on_failure, message_prefix=prefix
        )

    with run_embedded_tritons(list(map(create_triton, tritons))):
        gateway.run(open_listeners(plan.host, port))
    if len(reasons) == len(tritons):
        raise CommandError(reasons[-1])


def prepare_capabilities(plan: LaunchPlan) -> LaunchPlan:
    for capability in INSTALLED:
        capability.prepare_launch(plan)
    return plan


def describe_places(port: int, plan: LaunchPlan) -> str:
    return join_names([f"http://{join_host_port(plan.host, port)}", *plan.places])


def run_triton(options: TritonOptions, host: str) -> None:
    settings, print_line = configure_process()
    options = with_demonstration(options, print_line)
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
        repositories = stack.enter_context(resolve_model_paths(options.model_repositories))
        options = replace(options, model_repositories=repositories)
        on_message = partial(print_line, source=TRITON_SOURCE)
        stack.enter_context(EmbeddedTriton(options, on_message=on_message, on_failure=on_failure))
        if host == ALL_ADDRESSES:
            start_relay((options.http_port, options.metrics_port))
        print_line(f"Triton is ready: {options.url}  (press Ctrl-C to stop)")
        try:
            signal.pause()
        except KeyboardInterrupt:
            print_line("stopping Triton")
            raise
        except SystemExit:  # SIGTERM, which is how a server is asked to end
            if reasons:
                raise CommandError(reasons[0]) from None


def run_gateway(host: str, port: int, workers: int, overrides: Mapping[str, Any]) -> None:
    check_port_free(host, port, "--port")
    settings, print_line = configure_process(**overrides)
    tritons = ", ".join(settings.triton_urls)
    plan = prepare_capabilities(LaunchPlan(settings, host, {"--port": port}, workers))
    places = describe_places(port, plan)
    on_ready = partial(print_line, f"serving {tritons} on {places}  (press Ctrl-C to stop)")
    settings = restrict_allowed_hosts(host, plan.settings)
    warn_if_exposed(settings, host)
    with ExitStack() as stack:
        if workers > 1:
            from gateway.server.workers import run_workers

            if settings.state == "memory:":  # the workers share a file that is deleted at the end
                folder = stack.enter_context(TemporaryDirectory(prefix="triton-gateway-state-"))
                settings = settings.model_copy(update={"state": f"file://{folder}/state.db"})
            run_workers(settings, host, port, workers, on_ready)
        else:
            from gateway.app import create_app
            from gateway.server.http import create_server

            server = create_server(create_app(settings), settings, host, port, on_ready)
            server.run(open_listeners(host, port))


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
    settings = read_settings(*SETTINGS, **overrides)
    handler = logs.configure(settings)
    atexit.register(logs.flush)
    for warning in describe_unknown_settings(os.environ, *SETTINGS):
        log.warning("%s", warning)
    return settings, handler.write_message


def restrict_allowed_hosts(host: str, settings: Settings) -> Settings:
    """Restrict the Host header to localhost on loopback without keys.

    Otherwise a web page whose name resolves to 127.0.0.1 (DNS rebinding) could reach such a gateway.
    """
    if settings.keys_file is not None or settings.allowed_hosts or not is_loopback(host):
        return settings
    return settings.model_copy(update={"allowed_hosts": (LOCALHOST,)})


def warn_if_exposed(settings: Settings, host: str) -> None:
    if settings.keys_file is None and not is_loopback(host):
        log.warning(
            "clients that reach %s can use all models and read the metrics: GATEWAY_KEYS_FILE is not set; "
            "create a keys file with: triton-gateway key create",
            host,
        )
