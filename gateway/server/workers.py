"""Worker processes: several gateways on one port, and their supervisor."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp
from uvicorn.supervisors import Multiprocess

from gateway.config.settings import Settings
from gateway.listeners import open_listeners
from gateway.memory import MIN_BUDGET_BYTES, default_budget_bytes
from gateway.process_exit import CLOSE_TIMEOUT_S, KERNEL_KILL_GRACE_S, report_exit_status
from gateway.server.http import GatewayServer, WorkerProcess, create_uvicorn_config, fork_workers
from gateway.telemetry import logs
from gateway.telemetry.metrics import record_replaced_worker

log = logging.getLogger(__name__)

# The path of a Unix socket has at most 107 bytes; `multiprocessing` adds 32 to that of the temporary folder.
MAX_TEMP_FOLDER_BYTES: Final = 107 - 32
SHORT_TEMP_FOLDER: Final = "/tmp"  # noqa: S108 - multiprocessing makes a private folder in it


class GatewayWorker(WorkerProcess):
    server_class = GatewayServer


class WorkerSupervisor(Multiprocess):
    """A uvicorn supervisor that closes the listening sockets when it stops, so that clients are refused.

    Workers that are still running after `stop_timeout_s` are killed.
    """

    stop_timeout_s: float = math.inf
    metrics_folder: Path | None = None
    on_ready: Callable[[], None] | None = None  # called once, when the first worker serves

    def keep_subprocess_alive(self) -> None:
        """Replace workers that ended or hang, and log and count them; called twice a second."""
        previous = list(self.processes)
        super().keep_subprocess_alive()
        for old, new in zip(previous, self.processes, strict=True):
            if new is not old:
                code = old.exitcode or 0
                status = f"signal {-code}" if code < 0 else f"status {code}"
                message = "worker %s exited unexpectedly (%s); worker %s replaces it"
                log.error(message, old.pid, status, new.pid)
                if self.metrics_folder is not None:
                    record_replaced_worker(self.metrics_folder)
        if self.should_exit.is_set():  # a worker that has exited already would be waited for
            return
        if self.on_ready is not None and any(process.is_ready() for process in self.processes):
            self.on_ready()
            self.on_ready = None

    def terminate_all(self) -> None:
        super().terminate_all()
        for listener in self.sockets:
            listener.close()

    def join_all(self) -> None:
        deadline = time.monotonic() + self.stop_timeout_s
        for process in self.processes:
            process.process.join(max(deadline - time.monotonic(), 0))
            if process.process.is_alive():
                log.error("worker %d did not exit in time and is killed", process.pid)
                process.kill()
            process.join()


def create_worker_app(settings: Settings) -> ASGIApp:
    from gateway.app import create_app

    logs.configure(settings)
    threading.Thread(target=stop_with_supervisor, name="supervisor", daemon=True).start()
    return create_app(settings)


def stop_with_supervisor() -> None:
    """Send SIGTERM to this process when its supervisor has ended or lost it."""
    supervisor = multiprocessing.parent_process()
    if supervisor is not None:
        supervisor.join()
        log.error("the supervisor of this worker exited unexpectedly: shutting down")
        os.kill(os.getpid(), signal.SIGTERM)


def check_settings(settings: Settings) -> None:
    """Exit with an error message if the application cannot be created from the settings."""
    from gateway.app import create_app

    logs.configure(settings)
    try:
        create_app(settings)
    except Exception as exc:  # noqa: BLE001 - the border of the process, as in `prompt_exit`
        raise SystemExit(report_exit_status(exc)) from None
    finally:
        logs.flush()


def run_workers(
    settings: Settings, host: str, port: int, workers: int, on_ready: Callable[[], None]
) -> None:
    """Run several processes on one socket, each with its own app.

    Each worker writes its metrics to files in one directory, and every worker reads all of them. This process
    does not import the application: the fork server does, once for all workers.
    """
    with tempfile.TemporaryDirectory(prefix="triton-gateway-metrics-") as folder:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        if not settings.max_bytes_in_flight:  # the workers share the memory
            share = max(default_budget_bytes() // workers, MIN_BUDGET_BYTES)
            settings = settings.model_copy(update={"max_bytes_in_flight": share})
        # No process that forks may have threads, and nothing here multiplies matrices.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        if len(os.fsencode(tempfile.gettempdir())) > MAX_TEMP_FOLDER_BYTES:
            tempfile.tempdir = SHORT_TEMP_FOLDER  # for the socket of the fork server
        context = fork_workers("gateway.server.fork_server", GatewayWorker)
        # Errors are reported once, not in each worker.
        check = context.Process(target=check_settings, args=(settings,))
        check.start()
        check.join()
        if check.exitcode:
            raise SystemExit(check.exitcode)
        app = partial(create_worker_app, settings)
        config = create_uvicorn_config(app, settings, host, port, workers)
        listeners = open_listeners(host, port)
        for listener in listeners:
            # Clients that connect before the first worker is up wait instead of being refused.
            listener.listen(config.backlog)
        supervisor = WorkerSupervisor(config, sockets=listeners)
        supervisor.metrics_folder = Path(folder)
        supervisor.on_ready = on_ready
        supervisor.stop_timeout_s = (
            settings.drain_s + settings.shutdown_s + CLOSE_TIMEOUT_S + 2 * KERNEL_KILL_GRACE_S
        )
        supervisor.run()
