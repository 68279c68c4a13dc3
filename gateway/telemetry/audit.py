"""The audit log: one line for every administrative call, regardless of `GATEWAY_LOG_LEVEL`.

An administrative call requires the right to manage and may change something: a load, an unload, an upload or
removal of model files, a change of a version label, or a change of Triton's log and trace settings. Calls
that are denied to a known caller are logged as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from gateway.errors import GatewayError
from gateway.tasks import TaskSet
from gateway.telemetry.request_info import RequestInfo, current_request_info

log = logging.getLogger("gateway.audit")  # a public name, wherever this module is

T = TypeVar("T")
AUDIT_LEVEL: Final = logging.INFO
OUTCOMES: Final = {202: "accepted", 401: "denied", 403: "denied", 499: "client disconnected"}


def log_call(info: RequestInfo, method: str, path: str, client: str, status: int) -> None:
    call = info.management_call
    if call is None:
        return
    outcome = OUTCOMES.get(status, "succeeded" if status < 300 else "failed")
    log.log(
        AUDIT_LEVEL,
        "%s %s: %s",
        method,
        path,
        outcome,
        extra={
            "route": info.route,
            "model": call.model,
            "parameters": call.parameters,
            "operation": call.operation,
            "version": call.version,
            "sha256": call.sha256,
            "label": call.label,
            "key": info.key,
            "client": client,
            "status": status,
            "outcome": outcome,
        },
    )


async def run_audited(tasks: TaskSet, action: str, model: str, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work that goes on, and is logged, if the client disconnects."""
    task = tasks.start(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(partial(log_result, action, model))
        raise


def log_result(action: str, model: str, task: asyncio.Task[Any], operation: str = "") -> None:
    """Log the result of an action on a model that its caller did not wait for; `task` is done."""
    info = current_request_info.get()
    error = None if task.cancelled() else task.exception()
    outcome = "cancelled" if task.cancelled() else "succeeded" if error is None else "failed"
    key = "" if info is None else info.key
    extra = {"model": model, "operation": operation, "key": key, "outcome": outcome}
    if isinstance(error, GatewayError):
        extra |= {"code": error.code, "reason": error.detail}
    log.log(AUDIT_LEVEL, "%s of model %s: %s", action, model, outcome, extra=extra)
