"""Worker processes: several gateways on one port, and uvicorn's supervisor of them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp
from uvicorn.supervisors import Multiprocess

from gateway.config.settings import Settings
from gateway.listeners import open_listeners
from gateway.memory import MIN_BUDGET_BYTES, default_budget_bytes
from gateway.server.http import create_uvicorn_config
from gateway.telemetry import logs
from gateway.telemetry.metrics import record_replaced_worker

log = logging.getLogger(__name__)


class WorkerSupervisor(Multiprocess):
    """A uvicorn supervisor that logs and counts replaced workers, and reports the first that serves.

    When it stops, it closes the listening sockets: clients are refused as soon as no worker accepts them.
    """

    metrics_folder: Path
    on_ready: Callable[[], None] | None = None  # called once

    def keep_subprocess_alive(self) -> None:
        """Replace workers that ended or hang; called twice a second."""
        previous = list(self.processes)
        super().keep_subprocess_alive()
        for old, new in zip(previous, self.processes, strict=True):
            if new is not old:
                code = old.exitcode or 0
                status = f"signal {-code}" if code < 0 else f"status {code}"
                message = "worker %s exited unexpectedly (%s); worker %s replaces it"
                log.error(message, old.pid, status, new.pid)
                record_replaced_worker(self.metrics_folder)
        if self.on_ready is not None and any(process.is_ready() for process in self.processes):
            self.on_ready()
            self.on_ready = None

    def terminate_all(self) -> None:
        super().terminate_all()
        for listener in self.sockets:
            listener.close()


def create_worker_app(settings: Settings) -> ASGIApp:
    from gateway.app import create_app

    logs.configure(settings)
    # What another process sent is inheritable. The processes that decode bodies would keep the listening
    # sockets open, and clients would wait for a server that has ended.
    for descriptor in Path("/proc/self/fd").iterdir():
        if int(descriptor.name) > sys.stderr.fileno():
            with suppress(OSError):  # of the listing itself
                os.set_inheritable(int(descriptor.name), False)
    threading.Thread(target=stop_with_supervisor, name="supervisor", daemon=True).start()
    return create_app(settings)


def stop_with_supervisor() -> None:
    """Send SIGTERM to this process when its supervisor has ended or lost it."""
    supervisor = multiprocessing.parent_process()
    if supervisor is not None:
        supervisor.join()
        log.error("the supervisor of this worker exited unexpectedly: shutting down")
        os.kill(os.getpid(), signal.SIGTERM)


def run_workers(
    settings: Settings, host: str, port: int, workers: int, on_ready: Callable[[], None]
) -> None:
    """Run several processes on one socket, each with its own app.

    Each worker writes its metrics to files in one directory, and every worker reads all of them.
    """
    from gateway.app import create_app

    create_app(settings)  # raises what each worker would, again and again
    with tempfile.TemporaryDirectory(prefix="triton-gateway-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        if not settings.max_bytes_in_flight:  # the workers share the memory
            share = max(default_budget_bytes() // workers, MIN_BUDGET_BYTES)
            settings = settings.model_copy(update={"max_bytes_in_flight": share})
        app = partial(create_worker_app, settings)
        config = create_uvicorn_config(app, settings, host, port, workers)
        listeners = open_listeners(host, port)
        for listener in listeners:
            # Clients that connect before the first worker is up wait instead of being refused.
            listener.listen(config.backlog)
        supervisor = WorkerSupervisor(config, sockets=listeners)
        supervisor.metrics_folder = Path(folder)
        supervisor.on_ready = on_ready
        supervisor.run()
