"""Access to private attributes of uvicorn."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.context import ForkServerContext

import uvicorn
from uvicorn import _subprocess


def forget_captured_signal(server: uvicorn.Server, number: signal.Signals) -> None:
    """Prevent the server from raising a signal again that it received while it ran."""
    server._captured_signals = [kept for kept in server._captured_signals if kept != number]


def fork_workers(preload: str) -> ForkServerContext:
    """Make uvicorn's supervisor fork its workers from a process that has imported the module `preload`.

    By default it starts an interpreter for each worker, and none shares the memory of its imports. Return the
    context, which starts other processes in the same way.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    _subprocess.spawn = context  # type: ignore[assignment]  # a context of another kind
    return context
