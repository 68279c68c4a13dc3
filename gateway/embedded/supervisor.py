"""A tritonserver as a context manager: started, watched, and gone without a trace when left."""

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
from types import TracebackType
from typing import IO, cast

import orjson

from gateway.embedded import reaper
from gateway.embedded.installation import Installation, install_triton
from gateway.embedded.log_filter import LogFilter
from gateway.embedded.options import (
    EXIT_GRACE_S,
    LOAD_ALL,
    CannotStart,
    ModelControl,
    TritonOptions,
    check_distinct_ports,
    check_port_free,
    collect_ports,
)
from gateway.messages import join_names, print_message

READY_POLL_INTERVAL_S = 0.05
MODEL_READY = "READY"
MAX_RESTARTS, RESTART_WINDOW_S = 3, 60.0


class ServerRun:
    """One run of the server, from its start to its end, under a guard."""

    def __init__(
        self, options: TritonOptions, installation: Installation, on_line: Callable[[str], None]
    ) -> None:
        self._options = options
        self._log_filter = LogFilter(verbose=options.log_verbose > 0)
        self._was_ready = False
        self._headers = {"Connection": "close"}
        if options.restricted_api is not None:
            self._headers[options.restricted_api.key] = options.restricted_api.secret
        self._shared_memory_prefix = f"triton_gateway_{os.getpid()}_{time.monotonic_ns():x}_"
        self._deadline = time.monotonic() + options.start_timeout_s
        # -I -S: the guard needs the standard library alone, and starts in 15 ms without `site`.
        command = [
            sys.executable,
            "-I",
            "-S",
            reaper.__file__,
            str(EXIT_GRACE_S),
            self._shared_memory_prefix,
        ]
        self.process = subprocess.Popen(
            [*command, *options.build_command(installation, self._shared_memory_prefix)],
            env={**installation.environment(), **secret_environment(options)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C is for us; we stop the guard
        )
        self._log_reader = threading.Thread(target=self._read_log, args=(on_line,), daemon=True)
        self._log_reader.start()

    def _read_log(self, on_line: Callable[[str], None]) -> None:
        with cast(IO[bytes], self.process.stdout) as log:
            for raw in log:
                essence = self._log_filter.filter_line(raw.decode(errors="replace").rstrip())
                if essence is not None:
                    on_line(essence)

    def check_ready(self) -> bool:
        """Whether it serves by now. Raises `CannotStart` when it has ended or the time is over."""
        # It listens when the models of its start are loaded, or have failed without ending it.
        if self._request("GET", "/v2/health/live") is not None:
            self._was_ready = True
            self._log_filter.clear_failures()
            return True
        if self.process.poll() is not None:
            raise CannotStart(self.explain_exit())
        if time.monotonic() > self._deadline:
            raise CannotStart(self._explain_timeout())
        return False

    def list_missing_models(self) -> list[str]:
        """The models of its start that it does not serve."""
        index = orjson.loads(self._request("POST", "/v2/repository/index") or b"[]")
        ready = {entry["name"] for entry in index if entry.get("state") == MODEL_READY}
        wanted = set(self._options.load_models)
        if LOAD_ALL in wanted or self._options.model_control is not ModelControl.explicit:
            wanted = {entry["name"] for entry in index}
        return sorted(wanted - ready)

    def _request(self, method: str, path: str) -> bytes | None:
        """On a fresh connection: a Triton that is stopping goes on answering old ones as if well."""
        host, port = self._options.host, self._options.http_port
        connection = http.client.HTTPConnection(host, port, timeout=1)
        try:
            connection.request(method, path, headers=self._headers)
            answer = connection.getresponse()
            return answer.read() if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def _explain_timeout(self) -> str:
        late = f"Triton was not ready within {self._options.start_timeout_s:g} s (--start-timeout)"
        if self._options.remote_repositories:
            return (
                f"{late}: it may wait for {join_names(self._options.remote_repositories)}; can "
                "that be reached, and are "
                "the credentials for it in the environment?"
            )
        return f"{late}; its last line: {self._log_filter.last_line}"

    def explain_exit(self) -> str:
        self._log_reader.join(1)
        if self._log_filter.failures:
            failed = "; ".join(
                f"{model}: {why}" for model, why in self._log_filter.failures.items()
            )
            return f"Triton could not load {failed}"
        words = self._log_filter.error or self._log_filter.last_line
        if self._options.remote_repositories and not self._was_ready:
            return (
                f"Triton cannot start with {join_names(self._options.remote_repositories)}: {words}"
            )
        return f"Triton ended with status {self.process.returncode}: {words}"

    def request_stop(self) -> None:
        """Close the guard's lifeline: it stops the server."""
        cast(IO[bytes], self.process.stdin).close()

    def stop(self) -> None:
        """Let go and wait; what a killed guard left is removed here."""
        self.request_stop()
        try:
            self.process.wait(EXIT_GRACE_S + 2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        reaper.kill_processes_by_prefix(self._shared_memory_prefix)
        self._log_reader.join(1)
        reaper.remove_shared_memory(self._shared_memory_prefix)


def secret_environment(options: TritonOptions) -> dict[str, str]:
    """The arguments of the server that the guard takes from its environment."""
    if options.restricted_api is None:
        return {}
    return {reaper.ARGUMENTS_VARIABLE: "\n".join(options.restricted_api.server_arguments())}


class EmbeddedTriton:
    """`with EmbeddedTriton(options) as triton:` a Triton that is ready.

    Raises `CannotInstall` or `CannotStart`. When the server ends by itself it is started again, up to
    three times in a minute; then `on_gone` is called, from a thread, with a sentence that says why.
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
        self._on_message = on_message
        self._on_failure = on_failure
        self._message_prefix = message_prefix  # before every sentence, to tell several apart
        self._stop_requested = threading.Event()
        self._supervisor = threading.Thread(
            target=self._supervise, name="triton-keeper", daemon=True
        )
        self._exit_stack = ExitStack()

    def __enter__(self) -> EmbeddedTriton:
        self._exit_stack.enter_context(run_embedded_tritons([self], self._on_message))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit_stack.close()

    @property
    def reaper_pid(self) -> int:
        """The guard's process id; the server is its only child."""
        return self._server_run.process.pid

    def start(self, installation: Installation) -> None:
        """Start the server; it is not ready yet."""
        self._installation = installation
        self._server_run = ServerRun(self.options, installation, self._report_log_line)

    def check_ready(self) -> bool:
        """Whether it serves by now; from then on it is kept. Raises `CannotStart`."""
        try:
            ready = self._server_run.check_ready()
        except CannotStart as exc:
            raise CannotStart(f"{self._message_prefix}{exc}") from exc
        if ready:
            self._report_missing_models()
            self._supervisor.start()
        return ready

    def request_stop(self) -> None:
        """Ask the server to end, without waiting for it."""
        self._stop_requested.set()
        self._server_run.request_stop()

    def stop(self) -> None:
        """Stop the server for good; without a trace of it when this returns."""
        self._stop_requested.set()
        self._server_run.stop()
        while self._supervisor.is_alive():
            self._supervisor.join(0.1)
            self._server_run.stop()  # again, if the keeper was just beginning another life

    def _report_missing_models(self) -> None:
        if not self.options.exit_on_error and (missing := self._server_run.list_missing_models()):
            self._report(f"Triton goes on without {join_names(missing)}")

    def _report(self, message: str) -> None:
        self._on_message(f"{self._message_prefix}{message}")

    def _report_log_line(self, line: str) -> None:
        if not self._stop_requested.is_set():
            self._report(line)

    def _supervise(self) -> None:
        """Start the server again when it ends by itself; give up when that does not help."""
        ends: deque[float] = deque(maxlen=MAX_RESTARTS)
        while True:
            self._server_run.process.wait()
            why = self._server_run.explain_exit()
            self._server_run.stop()
            if self._stop_requested.is_set():
                return
            often = len(ends) == MAX_RESTARTS and time.monotonic() - ends[0] < RESTART_WINDOW_S
            ends.append(time.monotonic())
            try:
                if often:
                    raise CannotStart(
                        f"it ended {MAX_RESTARTS + 1} times within {RESTART_WINDOW_S:g} s"
                    )
                self._report(f"{why}; starting it again")
                self._restart()
            except (CannotStart, OSError) as exc:
                if not self._stop_requested.is_set():
                    self._on_failure(
                        f"{self._message_prefix}Triton is gone and does not come back: {why}; {exc}"
                    )
                return
            self._report("Triton is ready again")
            self._report_missing_models()

    def _restart(self) -> None:
        self.start(self._installation)
        try:
            while not self._server_run.check_ready():
                time.sleep(READY_POLL_INTERVAL_S)
        except BaseException:
            self._server_run.stop()
            raise


@contextmanager
def run_embedded_tritons(
    tritons: Sequence[EmbeddedTriton], on_message: Callable[[str], None] = print_message
) -> Iterator[None]:
    """All of them ready within, started and stopped at the same time; `say` hears of the preparation.

    Raises `CannotInstall` or `CannotStart`, and then none of them is left.
    """
    files = prepare_installation([triton.options for triton in tritons], on_message)
    with ExitStack() as stack:
        for triton in tritons:
            triton.start(files)
            stack.callback(triton.stop)
        for triton in tritons:  # on the way out, before the first is waited for
            stack.callback(triton.request_stop)
        waiting = list(tritons)
        while waiting := [triton for triton in waiting if not triton.check_ready()]:
            time.sleep(READY_POLL_INTERVAL_S)
        yield


def prepare_installation(
    fleet: Sequence[TritonOptions], on_message: Callable[[str], None]
) -> Installation:
    """What all of them need, once. Raises `CannotInstall`, or `CannotStart` where one cannot."""
    for options in fleet:
        options.validate()
    check_distinct_ports(collect_ports(fleet))
    for options in fleet:
        for flag, port in options.ports.items():
            check_port_free(options.host, port, flag)
    return install_triton(on_message)
