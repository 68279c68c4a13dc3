"""Access to private attributes of uvicorn."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.context import ForkServerContext
from socket import socket

import uvicorn
from uvicorn import _subprocess
from uvicorn.supervisors import multiprocess


def forget_captured_signal(server: uvicorn.Server, number: signal.Signals) -> None:
    """Prevent the server from raising a signal again that it received while it ran."""
    server._captured_signals = [kept for kept in server._captured_signals if kept != number]


class WorkerProcess(multiprocess.Process):
    """A worker process of uvicorn's supervisor that runs a server of another class."""

    server_class: type[uvicorn.Server] = uvicorn.Server

    def target(self, sockets: list[socket] | None = None) -> None:
        self._server = self.server_class(self.config)
        super().target(sockets)


def fork_workers(preload: str, process_class: type[WorkerProcess]) -> ForkServerContext:
    """Make uvicorn's supervisor fork its workers from a process that has imported the module `preload`.

    By default it starts an interpreter for each worker, and none shares the memory of its imports. Return the
    context, which starts other processes in the same way.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    multiprocess.Process = process_class  # type: ignore[misc]  # a class of another name
    _subprocess.spawn = context  # type: ignore[assignment]  # a context of another kind
    return context
