"""Operations: loads and unloads that continue when the client has disconnected, or got its response."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from time import monotonic, time
from typing import Any, Final

from gateway.errors import GatewayError, Overloaded, StateUnavailable, Unavailable
from gateway.repository.report import OperationReport
from gateway.repository.state.desired import OPERATION_TTL_S, StateStore
from gateway.tasks import TaskSet
from gateway.telemetry import audit

PROGRESS_POLL_S: Final = 0.1
RECORD_RETRY_S: Final = 1.0
HEARTBEAT_S: Final = 5.0
# The operation ended with its gateway. The clocks of gateways may differ by less.
MAX_HEARTBEAT_AGE_S: Final = 30.0
OperationWork = Coroutine[Any, Any, OperationReport]


MAX_RUNNING_TASKS: Final = 512  # an operation in the background has two
MAX_RECORDED: Final = 10_000  # operations in the background, within the time that they can be read


class TooManyOperations(Overloaded):
    message = "too many loads and unloads run in the background; wait for some of them"


class OperationLost(Unavailable):
    message = (
        "the gateway that ran the operation ended before it; GET /v1/models shows the model's state, "
        "and a repeated request completes it"
    )


class OperationRunner:
    """Runs operations as tasks of their own, and records those that are started in the background."""

    def __init__(self, store: StateStore, tasks: TaskSet) -> None:
        self._store = store
        self._tasks = tasks
        self._recorded_at: deque[float] = deque()  # the starts of those that can still be read

    async def run(self, report: OperationReport, work: OperationWork) -> OperationReport:
        # A client disconnect must not leave the model loaded on a part of the fleet.
        return await audit.run_audited(self._tasks, report.action, report.model, work)

    async def start(self, report: OperationReport, work: Callable[[], OperationWork]) -> str:
        """Start an operation in the background and return its id. Raises `TooManyOperations`."""
        self._count_recorded(monotonic())
        operation_id = secrets.token_hex(16)
        await self._record(operation_id, report, "running")
        self._tasks.start(self._run_recorded(operation_id, report, work()))
        return operation_id

    async def read(self, operation_id: str) -> Mapping[str, Any] | None:
        """Return the last record of an operation, which may run in another gateway."""
        document = await self._store.read_operation(operation_id)
        if document is None or document.get("operation") != "running":
            return document
        updated_at = document.get("updated_at")
        if isinstance(updated_at, int) and updated_at > time() - MAX_HEARTBEAT_AGE_S:
            return document
        error = OperationLost()
        return {**document, "operation": "failed", "error": error.detail, "code": error.code}

    def _count_recorded(self, now: float) -> None:
        while self._recorded_at and self._recorded_at[0] < now - OPERATION_TTL_S:
            self._recorded_at.popleft()
        if len(self._tasks) >= MAX_RUNNING_TASKS or len(self._recorded_at) >= MAX_RECORDED:
            raise TooManyOperations
        self._recorded_at.append(now)

    async def _run_recorded(
        self, operation_id: str, report: OperationReport, work: OperationWork
    ) -> None:
        task = self._tasks.start(work)
        reported_count, recorded_at = 0, monotonic()
        while not task.done():
            await asyncio.wait([task], timeout=PROGRESS_POLL_S)
            is_heartbeat_due = monotonic() - recorded_at > HEARTBEAT_S
            if len(report.outcomes) > reported_count or is_heartbeat_due:
                reported_count, recorded_at = len(report.outcomes), monotonic()
                with suppress(StateUnavailable):  # later records contain the same
                    await self._record(operation_id, report, "running")
        audit.log_result(report.action, report.model, task, operation_id)
        error = task.exception()
        if error is None:
            await self._record_result(operation_id, report, "succeeded")
        elif isinstance(error, GatewayError):
            failure = {"error": error.detail, "code": error.code}
            await self._record_result(operation_id, report, "failed", **failure)
        else:
            raise error

    async def _record_result(
        self, operation_id: str, report: OperationReport, status: str, **failure: str
    ) -> None:
        """Record the result as soon as the state is available, unless that takes too long."""
        give_up_at = monotonic() + OPERATION_TTL_S
        while monotonic() < give_up_at:
            with suppress(StateUnavailable):  # the store logs it
                await self._record(operation_id, report, status, **failure)
                break
            await asyncio.sleep(RECORD_RETRY_S)

    async def _record(
        self, operation_id: str, report: OperationReport, status: str, **failure: str
    ) -> None:
        document = {"id": operation_id, "action": report.action, **report.to_dict()}
        document |= {"operation": status, "updated_at": int(time()), **failure}
        await self._store.record_operation(operation_id, document)
