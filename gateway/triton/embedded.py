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

from gateway.triton import guard
from gateway.triton.chatter import Chatter
from gateway.triton.installation import Installation, install
from gateway.triton.options import (
    ALL,
    EXIT_GRACE_S,
    CannotStart,
    ModelControl,
    Options,
    check_distinct,
    check_port,
    ports_of,
)
from gateway.words import listed, say

POLL_S = 0.05
READY = "READY"
RESTARTS, RESTART_WINDOW_S = 3, 60.0


class Life:
    """One run of the server, from its start to its end, under a guard."""

    def __init__(self, options: Options, files: Installation, hear: Callable[[str], None]) -> None:
        self._options = options
        self._chatter = Chatter(verbose=options.log_verbose > 0)
        self._was_ready = False
        self._headers = {"Connection": "close"}
        if options.restricted_api is not None:
            self._headers[options.restricted_api.key] = options.restricted_api.secret
        self._prefix = f"triton_gateway_{os.getpid()}_{time.monotonic_ns():x}_"
        self._deadline = time.monotonic() + options.start_timeout_s
        # -I -S: the guard needs the standard library alone, and starts in 15 ms without `site`.
        command = [sys.executable, "-I", "-S", guard.__file__, str(EXIT_GRACE_S), self._prefix]
        self.process = subprocess.Popen(
            [*command, *options.command(files, self._prefix)],
            env={**files.environment(), **secret_arguments(options)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C is for us; we stop the guard
        )
        self._reader = threading.Thread(target=self._read, args=(hear,), daemon=True)
        self._reader.start()

    def _read(self, hear: Callable[[str], None]) -> None:
        with cast(IO[bytes], self.process.stdout) as log:
            for raw in log:
                essence = self._chatter.hear(raw.decode(errors="replace").rstrip())
                if essence is not None:
                    hear(essence)

    def ready(self) -> bool:
        """Whether it serves by now. Raises `CannotStart` when it has ended or the time is over."""
        # It listens when the models of its start are loaded, or have failed without ending it.
        if self._answer("GET", "/v2/health/live") is not None:
            self._was_ready = True
            self._chatter.forget()
            return True
        if self.process.poll() is not None:
            raise CannotStart(self.why_it_ended())
        if time.monotonic() > self._deadline:
            raise CannotStart(self._why_it_waits())
        return False

    def missing(self) -> list[str]:
        """The models of its start that it does not serve."""
        index = orjson.loads(self._answer("POST", "/v2/repository/index") or b"[]")
        ready = {entry["name"] for entry in index if entry.get("state") == READY}
        wanted = set(self._options.load)
        if ALL in wanted or self._options.model_control is not ModelControl.explicit:
            wanted = {entry["name"] for entry in index}
        return sorted(wanted - ready)

    def _answer(self, method: str, path: str) -> bytes | None:
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

    def _why_it_waits(self) -> str:
        late = f"Triton was not ready within {self._options.start_timeout_s:g} s (--start-timeout)"
        if self._options.remote:
            return (
                f"{late}: it may wait for {listed(self._options.remote)}; can that be reached, and are "
                "the credentials for it in the environment?"
            )
        return f"{late}; its last line: {self._chatter.last}"

    def why_it_ended(self) -> str:
        self._reader.join(1)
        if self._chatter.failures:
            failed = "; ".join(f"{model}: {why}" for model, why in self._chatter.failures.items())
            return f"Triton could not load {failed}"
        words = self._chatter.complaint or self._chatter.last
        if self._options.remote and not self._was_ready:
            return f"Triton cannot start with {listed(self._options.remote)}: {words}"
        return f"Triton ended with status {self.process.returncode}: {words}"

    def let_go(self) -> None:
        """Close the guard's lifeline: it stops the server."""
        cast(IO[bytes], self.process.stdin).close()

    def stop(self) -> None:
        """Let go and wait; what a killed guard left is removed here."""
        self.let_go()
        try:
            self.process.wait(EXIT_GRACE_S + 2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        guard.end_processes_of(self._prefix)
        self._reader.join(1)
        guard.remove_shared_memory(self._prefix)


def secret_arguments(options: Options) -> dict[str, str]:
    """The arguments of the server that the guard takes from its environment."""
    if options.restricted_api is None:
        return {}
    return {guard.ARGUMENTS: "\n".join(options.restricted_api.arguments())}


class EmbeddedTriton:
    """`with EmbeddedTriton(options) as triton:` a Triton that is ready.

    Raises `CannotInstall` or `CannotStart`. When the server ends by itself it is started again, up to
    three times in a minute; then `on_gone` is called, from a thread, with a sentence that says why.
    """

    def __init__(
        self,
        options: Options,
        *,
        say: Callable[[str], None] = say,
        on_gone: Callable[[str], None] = say,
        label: str = "",
    ) -> None:
        self.options = options
        self._say = say
        self._on_gone = on_gone
        self._label = label  # before every sentence, to tell several apart
        self._closing = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="triton-keeper", daemon=True)
        self._running = ExitStack()

    def __enter__(self) -> EmbeddedTriton:
        self._running.enter_context(side_by_side([self], self._say))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._running.close()

    @property
    def guard_pid(self) -> int:
        """The guard's process id; the server is its only child."""
        return self._life.process.pid

    def begin(self, files: Installation) -> None:
        """Start the server; it is not ready yet."""
        self._files = files
        self._life = Life(self.options, files, self._hear)

    def ready(self) -> bool:
        """Whether it serves by now; from then on it is kept. Raises `CannotStart`."""
        try:
            ready = self._life.ready()
        except CannotStart as exc:
            raise CannotStart(f"{self._label}{exc}") from exc
        if ready:
            self._tell_what_is_missing()
            self._keeper.start()
        return ready

    def let_go(self) -> None:
        """Ask the server to end, without waiting for it."""
        self._closing.set()
        self._life.let_go()

    def end(self) -> None:
        """Stop the server for good; without a trace of it when this returns."""
        self._closing.set()
        self._life.stop()
        while self._keeper.is_alive():
            self._keeper.join(0.1)
            self._life.stop()  # again, if the keeper was just beginning another life

    def _tell_what_is_missing(self) -> None:
        if not self.options.exit_on_error and (missing := self._life.missing()):
            self._tell(f"Triton goes on without {listed(missing)}")

    def _tell(self, sentence: str) -> None:
        self._say(f"{self._label}{sentence}")

    def _hear(self, essence: str) -> None:
        if not self._closing.is_set():
            self._tell(essence)

    def _keep(self) -> None:
        """Start the server again when it ends by itself; give up when that does not help."""
        ends: deque[float] = deque(maxlen=RESTARTS)
        while True:
            self._life.process.wait()
            why = self._life.why_it_ended()
            self._life.stop()
            if self._closing.is_set():
                return
            often = len(ends) == RESTARTS and time.monotonic() - ends[0] < RESTART_WINDOW_S
            ends.append(time.monotonic())
            try:
                if often:
                    raise CannotStart(
                        f"it ended {RESTARTS + 1} times within {RESTART_WINDOW_S:g} s"
                    )
                self._tell(f"{why}; starting it again")
                self._begin_again()
            except (CannotStart, OSError) as exc:
                if not self._closing.is_set():
                    self._on_gone(
                        f"{self._label}Triton is gone and does not come back: {why}; {exc}"
                    )
                return
            self._tell("Triton is ready again")
            self._tell_what_is_missing()

    def _begin_again(self) -> None:
        self.begin(self._files)
        try:
            while not self._life.ready():
                time.sleep(POLL_S)
        except BaseException:
            self._life.stop()
            raise


@contextmanager
def side_by_side(
    tritons: Sequence[EmbeddedTriton], say: Callable[[str], None] = say
) -> Iterator[None]:
    """All of them ready within, started and stopped at the same time; `say` hears of the preparation.

    Raises `CannotInstall` or `CannotStart`, and then none of them is left.
    """
    files = prepared([triton.options for triton in tritons], say)
    with ExitStack() as stack:
        for triton in tritons:
            triton.begin(files)
            stack.callback(triton.end)
        for triton in tritons:  # on the way out, before the first is waited for
            stack.callback(triton.let_go)
        waiting = list(tritons)
        while waiting := [triton for triton in waiting if not triton.ready()]:
            time.sleep(POLL_S)
        yield


def prepared(fleet: Sequence[Options], say: Callable[[str], None]) -> Installation:
    """What all of them need, once. Raises `CannotInstall`, or `CannotStart` where one cannot."""
    for options in fleet:
        options.check()
    check_distinct(ports_of(fleet))
    for options in fleet:
        for flag, port in options.ports.items():
            check_port(options.host, port, flag)
    return install(say)
