"""A supervised tritonserver as a context manager: starts, restarts and stops it."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, cast

from gateway.embedded import reaper
from gateway.embedded.installation import Installation, install_triton
from gateway.embedded.log_filter import LogFilter
from gateway.embedded.options import (
    EXIT_GRACE_S,
    CannotStart,
    TritonOptions,
    check_distinct_ports,
    check_port_free,
    collect_ports,
)
from gateway.messages import join_names, print_message

READY_POLL_INTERVAL_S = 0.05
MAX_RESTARTS = 3
RESTART_WINDOW_S = 60.0


class ServerRun:
    """A run of the server under a reaper, from its start to its exit."""

    def __init__(
        self, options: TritonOptions, installation: Installation, on_line: Callable[[str], None]
    ) -> None:
        self._options = options
        self._log_filter = LogFilter(verbose=options.log_verbose > 0)
        self._was_ready = False
        self._headers = {"Connection": "close"}
        environment = {**installation.environment(), **options.build_environment()}
        if (api := options.restricted_api) is not None:
            self._headers[api.key] = api.secret
            # Other users can read the arguments of a process, but not its environment.
            environment[reaper.ARGUMENTS_VARIABLE] = "\n".join(api.server_arguments())
        self._shared_memory_prefix = f"triton_gateway_{os.getpid()}_{time.monotonic_ns():x}_"
        self._deadline = time.monotonic() + options.start_timeout_s
        # -I -S: the reaper needs only the standard library, and starts in 15 ms without `site`.
        prefix = self._shared_memory_prefix
        command = [sys.executable, "-I", "-S", reaper.__file__, str(EXIT_GRACE_S), prefix]
        self.process = subprocess.Popen(
            [*command, *options.build_command(installation, prefix)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C goes to this process, which stops the reaper
        )
        self._log_reader = threading.Thread(target=self._read_log, args=(on_line,), daemon=True)
        self._log_reader.start()

    def _read_log(self, on_line: Callable[[str], None]) -> None:
        with cast(IO[bytes], self.process.stdout) as log:
            for raw in log:
                message = self._log_filter.filter_line(raw.decode(errors="replace").rstrip())
                if message is not None:
                    on_line(message)

    def check_ready(self) -> bool:
        """Return True once the server is live. Raises `CannotStart` on exit or timeout."""
        # Triton listens once its startup models are loaded, or have failed without ending it.
        if self._is_live():
            self._was_ready = True
            self._log_filter.clear_failures()
            return True
        if self.process.poll() is not None:
            raise CannotStart(self.explain_exit())
        if time.monotonic() > self._deadline:
            raise CannotStart(self._explain_timeout())
        return False

    def _is_live(self) -> bool:
        # A new connection each time: a stopping Triton keeps responding on old ones.
        options = self._options
        connection = http.client.HTTPConnection(options.http_host, options.http_port, timeout=1)
        try:
            connection.request("GET", "/v2/health/live", headers=self._headers)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _explain_timeout(self) -> str:
        reason = f"last line of its log: {self._log_filter.last_line}"
        if remote := self._options.remote_repositories:
            reason = f"check that {join_names(remote)} can be reached, and its credentials"
        limit_s = self._options.start_timeout_s
        return f"Triton was not ready within {limit_s:g} s (--start-timeout); {reason}"

    def explain_exit(self) -> str:
        self._log_reader.join(1)
        if failures := self._log_filter.failures.items():
            failed = "; ".join(f"{model}: {reason}" for model, reason in failures)
            return f"Triton could not load {failed}"
        message = self._log_filter.error or self._log_filter.last_line
        if self._options.remote_repositories and not self._was_ready:
            return f"Triton cannot start with {join_names(self._options.remote_repositories)}: {message}"
        return f"Triton exited with status {self.process.returncode}: {message}"

    def request_stop(self) -> None:
        cast(IO[bytes], self.process.stdin).close()

    def stop(self) -> None:
        """Stop the server and wait; remove the leftovers of a killed reaper."""
        self.request_stop()
        try:
            self.process.wait(EXIT_GRACE_S + 2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        reaper.kill_processes_by_prefix(self._shared_memory_prefix)
        self._log_reader.join(1)
        reaper.remove_shared_memory(self._shared_memory_prefix)


class EmbeddedTriton:
    """A Triton that is ready inside its `with` block.

    Raises `CannotInstall` or `CannotStart`. A server that exits is restarted, up to three times within a
    minute; then `on_failure` is called, from a thread, with the reason.
    """

    def __init__(
        self,
        options: TritonOptions,
        *,
        on_message: Callable[[str], None] = print_message,
        on_failure: Callable[[str], None] = print_message,
        message_prefix: str = "",
    ) -> None:
        self.options = options
        self.on_message = on_message
        self.on_failure = on_failure
        self.message_prefix = message_prefix
        self._stop_requested = threading.Event()
        self._supervisor = threading.Thread(
            target=self._supervise, name="triton-supervisor", daemon=True
        )
        self._exit_stack = ExitStack()
        self._installation: Installation
        self._server_run: ServerRun

    def __enter__(self) -> EmbeddedTriton:
        self._exit_stack.enter_context(run_embedded_tritons([self]))
        return self

    def __exit__(self, *_: object) -> None:
        self._exit_stack.close()

    @property
    def reaper_pid(self) -> int:
        return self._server_run.process.pid

    def start(self, installation: Installation) -> None:
        self._installation = installation
        self._server_run = ServerRun(self.options, installation, self._report_log_line)

    def check_ready(self) -> bool:
        """Return True once the server is ready, and supervise it from then on. Raises `CannotStart`."""
        try:
            ready = self._server_run.check_ready()
        except CannotStart as exc:
            raise CannotStart(f"{self.message_prefix}{exc}") from exc
        if ready:
            self._supervisor.start()
        return ready

    def request_stop(self) -> None:
        self._stop_requested.set()
        self._server_run.request_stop()

    def stop(self) -> None:
        self._stop_requested.set()
        self._server_run.stop()
        while self._supervisor.is_alive():
            self._supervisor.join(0.1)
            self._server_run.stop()  # again, if it was being restarted

    def _report(self, message: str) -> None:
        self.on_message(f"{self.message_prefix}{message}")

    def _report_log_line(self, line: str) -> None:
        if not self._stop_requested.is_set():
            self._report(line)

    def _supervise(self) -> None:
        exit_times: deque[float] = deque(maxlen=MAX_RESTARTS)
        while True:
            self._server_run.process.wait()
            reason = self._server_run.explain_exit()
            self._server_run.stop()
            if self._stop_requested.is_set():
                return
            now = time.monotonic()
            is_repeated = len(exit_times) == MAX_RESTARTS
            is_limit_reached = is_repeated and now - exit_times[0] < RESTART_WINDOW_S
            exit_times.append(now)
            try:
                if is_limit_reached:
                    times = f"{MAX_RESTARTS + 1} times within {RESTART_WINDOW_S:g} s"
                    raise CannotStart(f"it exited {times}")
                self._report(f"{reason}; restarting it")
                self._restart()
            except (CannotStart, OSError) as exc:
                if not self._stop_requested.is_set():
                    message = f"{self.message_prefix}Triton cannot be restarted: {reason}; {exc}"
                    self.on_failure(message)
                return
            self._report("Triton is ready again")

    def _restart(self) -> None:
        self.start(self._installation)
        try:
            while not self._server_run.check_ready():
                time.sleep(READY_POLL_INTERVAL_S)
        except BaseException:
            self._server_run.stop()
            raise


@contextmanager
def run_embedded_tritons(tritons: Sequence[EmbeddedTriton]) -> Iterator[None]:
    """Start all servers at the same time, wait until they are ready, and stop them together.

    Raises `CannotInstall` or `CannotStart`, after stopping those that were started.
    """
    options = [triton.options for triton in tritons]
    installation = prepare_installation(options, tritons[0].on_message)
    with ExitStack() as stack:
        for triton in tritons:
            triton.start(installation)
            stack.callback(triton.stop)
        for triton in tritons:  # on exit, all stop before the first is waited for
            stack.callback(triton.request_stop)
        waiting = list(tritons)
        while waiting := [triton for triton in waiting if not triton.check_ready()]:
            time.sleep(READY_POLL_INTERVAL_S)
        yield


def prepare_installation(
    fleet: Sequence[TritonOptions], on_message: Callable[[str], None]
) -> Installation:
    for options in fleet:
        options.validate()
    check_distinct_ports(collect_ports(fleet))
    for options in fleet:
        for flag, port in options.ports.items():
            check_port_free(options.host, port, flag)
    return install_triton(on_message)
