"""Access to private attributes of uvicorn."""

from __future__ import annotations

import signal

import uvicorn


def forget_captured_signal(server: uvicorn.Server, number: signal.Signals) -> None:
    """Prevent the server from raising a signal again that it received while it ran."""
    server._captured_signals = [kept for kept in server._captured_signals if kept != number]
