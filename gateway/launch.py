"""What `triton-gateway up`, `triton` and `serve` start.

The gateway takes a second to import: what cannot be is said before, and Triton alone does without.
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
from tempfile import TemporaryDirectory
from typing import Any, Final, cast

from pydantic import SecretStr

from gateway import logs
from gateway.auth import is_loopback
from gateway.embedded.options import (
    TritonOptions,
    check_distinct_ports,
    check_port_free,
    collect_ports,
)
from gateway.embedded.supervisor import EmbeddedTriton, run_embedded_tritons
from gateway.messages import CommandError
from gateway.process_exit import prompt_exit
from gateway.settings import Settings, describe_unknown_settings, read_settings
from gateway.triton.restricted_api import (
    RestrictedApi,
    generate_restricted_api,
    parse_restricted_api,
)

log = logging.getLogger(__name__)

LOCALHOST: Final = "localhost"
MessageWriter = Callable[[str], None]


def run_with_embedded_triton(options: TritonOptions, host: str, port: int, replicas: int) -> None:
    began = time.monotonic()
    fleet = [options.for_replica(number) for number in range(replicas)]
    check_distinct_ports({"--port": port, **collect_ports(fleet)})
    check_port_free(host, port, "--port")
    # Nobody looks at the readiness of a laptop: what ends, ends at once.
    # And its repository is another one each time: what was loaded in the last session is forgotten.
    os.environ.setdefault("GATEWAY_STATE", "memory:")
    settings, say = configure_process(
        triton_urls=tuple(options.url for options in fleet), drain_s=0
    )
    restricted = read_restricted_api(settings) or generate_restricted_api()
    fleet = [replace(options, restricted_api=restricted) for options in fleet]
    settings = settings.model_copy(update={"triton_restricted_api": SecretStr(restricted.setting)})
    from gateway.app import create_app
    from gateway.server import create_server

    def on_ready() -> None:
        say(
            f"ready after {time.monotonic() - began:.1f} s on http://{host}:{port}  (Ctrl-C ends it)"
        )

    settings = restrict_allowed_hosts(host, settings)
    warn_if_exposed(settings, host)
    gateway = create_server(create_app(settings), settings, host, port, on_ready)
    reasons: list[str] = []

    def on_failure(reason: str) -> None:
        reasons.append(reason)
        if len(reasons) == replicas:
            gateway.should_exit = True
        else:
            say(f"{reason}; the gateway goes on with the others")

    with prompt_exit():
        with run_embedded_tritons(create_tritons(fleet, on_failure, say), say):
            gateway.run()
        if len(reasons) == replicas:
            raise CommandError(reasons[-1])


def run_triton(options: TritonOptions, host: str) -> None:
    settings, say = configure_process()
    restricted = read_restricted_api(settings)
    if warning := describe_exposure(host, restricted=restricted is not None):
        say(warning)
    reasons: list[str] = []

    def on_failure(reason: str) -> None:
        reasons.append(reason)
        # From another thread: only a signal to the main one wakes it.
        signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGTERM)

    options = replace(options, host=host, restricted_api=restricted)
    with prompt_exit(), EmbeddedTriton(options, on_message=say, on_failure=on_failure):
        say(f"Triton is ready: {options.url}  (Ctrl-C ends it)")
        try:
            signal.pause()
        except SystemExit:
            if reasons:
                raise CommandError(reasons[0]) from None
            raise


def run_gateway(host: str, port: int, workers: int) -> None:
    check_port_free(host, port, "--port")
    settings, say = configure_process()
    from gateway.app import create_app
    from gateway.server import create_server, run_workers

    tritons = ", ".join(settings.triton_urls)
    ready = partial(say, f"serving {tritons} on http://{host}:{port}  (Ctrl-C ends it)")
    settings = restrict_allowed_hosts(host, settings)
    warn_if_exposed(settings, host)
    app = create_app(settings)  # what cannot be used is said here, and not by each worker
    with prompt_exit(), ExitStack() as stack:
        if workers > 1:
            if settings.state == "memory:":  # they share it, and forget it at the end
                folder = stack.enter_context(TemporaryDirectory(prefix="triton-gateway-state-"))
                os.environ["GATEWAY_STATE"] = f"file://{folder}/state.json"
            run_workers(settings, host, port, workers, ready)
        else:
            create_server(app, settings, host, port, ready).run()


def read_restricted_api(settings: Settings) -> RestrictedApi | None:
    secret = settings.triton_restricted_api
    return None if secret is None else parse_restricted_api(secret.get_secret_value())


def describe_exposure(host: str, *, restricted: bool) -> str:
    """A warning of what others may do with a Triton that listens at `host`; empty if nothing."""
    told = "GATEWAY_TRITON_RESTRICTED_API=KEY=SECRET, set for it and its gateway, prevents that"
    if restricted:
        use = f"whoever reaches {host} may use every model of this Triton: it asks nobody for a key"
        return "" if is_loopback(host) else use
    if is_loopback(host):
        return f"web pages and other users of this machine can load code into this Triton; {told}"
    return (
        f"whoever reaches {host} may do anything with this Triton, load code as well: it asks nobody "
        f"for a key; {told}"
    )


def configure_process(**overrides: Any) -> tuple[Settings, MessageWriter]:
    """The settings of the environment, with which the log is set up; and how one speaks beside it."""
    settings = read_settings(**overrides)
    writer = logs.configure(settings)
    for sentence in describe_unknown_settings(os.environ):
        log.warning("%s", sentence)
    return settings, writer.write_message


def restrict_allowed_hosts(host: str, settings: Settings) -> Settings:
    """The settings of a gateway that listens at `host`; for worker processes too, by the environment.

    On loopback, without keys, what keeps others out is that they cannot reach it; and a page whose name
    stands for 127.0.0.1 (DNS rebinding) can.
    """
    if settings.keys_file is not None or settings.allowed_hosts or not is_loopback(host):
        return settings
    os.environ["GATEWAY_ALLOWED_HOSTS"] = LOCALHOST
    return settings.model_copy(update={"allowed_hosts": (LOCALHOST,)})


def warn_if_exposed(settings: Settings, host: str) -> None:
    if settings.keys_file is None and not is_loopback(host):
        log.warning(
            "whoever reaches %s may use every model and read the metrics: there is no keys file "
            "(GATEWAY_KEYS_FILE; triton-gateway key create makes one)",
            host,
        )


def create_tritons(
    fleet: Sequence[TritonOptions], on_failure: MessageWriter, on_message: MessageWriter
) -> list[EmbeddedTriton]:
    """What one of several says begins with its address."""
    return [
        EmbeddedTriton(
            options,
            on_message=on_message,
            on_failure=on_failure,
            message_prefix=f"{options.address}: " if len(fleet) > 1 else "",
        )
        for options in fleet
    ]
