"""The audit log: a line for every administrative call, whatever `GATEWAY_LOG_LEVEL` says.

An administrative call is one that needs the right to manage and may change something: a load, an unload,
Triton's log and trace settings. The calls that are refused to a known caller are among them.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from gateway.context import Notes, current
from gateway.errors import GatewayError

log = logging.getLogger(__name__)

LEVEL: Final = logging.INFO
ACCEPTED: Final = 202
CLIENT_LEFT: Final = 499
DENIED: Final = (401, 403)


def outcome_of(status: int) -> str:
    """Return what an answer with this status says of the call."""
    if status < 300:
        return "accepted" if status == ACCEPTED else "succeeded"
    if status == CLIENT_LEFT:
        return "client disconnected"
    return "denied" if status in DENIED else "failed"


def log_call(notes: Notes, method: str, path: str, client: str, status: int) -> None:
    """Log the end of an administrative call, as its caller experienced it."""
    call = notes.managed
    if call is None:
        return
    outcome = outcome_of(status)
    log.log(
        LEVEL,
        "%s %s: %s",
        method,
        path,
        outcome,
        extra={
            "route": notes.route,
            "model": call.model,
            "parameters": call.parameters,
            "operation": call.operation,
            "key": notes.key,
            "client": client,
            "status": status,
            "outcome": outcome,
        },
    )


def log_result(action: str, model: str, task: asyncio.Task[Any], operation: str = "") -> None:
    """Log how a load or an unload ended that its caller did not wait for: `task` is done."""
    notes = current.get()
    error = None if task.cancelled() else task.exception()
    outcome = "cancelled" if task.cancelled() else "succeeded" if error is None else "failed"
    extra = {
        "model": model,
        "operation": operation,
        "key": "" if notes is None else notes.key,
        "outcome": outcome,
    }
    if isinstance(error, GatewayError):
        extra |= {"code": error.code, "reason": error.detail}
    log.log(LEVEL, "%s of model %s: %s", action, model, outcome, extra=extra)
