"""Operations: loads and unloads on every replica, which continue when the client has disconnected.

An `OperationReport` has the outcomes. An operation in the background is a task of its gateway, with a row in
the state; it is lost with its gateway.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, Final

from gateway.errors import (
    BadUpstream,
    GatewayError,
    ModelControlModeConflict,
    Overloaded,
    StateUnavailable,
    Unavailable,
)
from gateway.fleet.index import READY, UNAVAILABLE
from gateway.fleet.transports import TRANSPORT_ERRORS
from gateway.messages import quote_text
from gateway.repository.events import EventLog
from gateway.repository.state.content import OPERATION_TTL_S
from gateway.repository.state.store import StateStore
from gateway.tasks import TaskSet
from gateway.telemetry.request_info import find_management_call, name_action
from gateway.triton.error_mapping import LoadFailed

RECORD_RETRY_S: Final = 1.0
MAX_RUNNING_TASKS: Final = 512  # an operation in the background has two
MAX_RECORDED: Final = 10_000  # operations in the background, within the time that they can be read


@dataclass(frozen=True)
class Outcome:
    """The result of an operation on one replica; it succeeded if there is no error."""

    state: str
    error: GatewayError | None = None
    is_in_progress: bool = False  # the replica still loads or unloads the model after the deadline

    def to_dict(self) -> dict[str, str]:
        document = {"state": self.state}
        return document if self.error is None else {**document, "reason": self.error.detail}


@dataclass
class OperationReport:
    """A load or an unload on every replica; outcomes are added while it runs."""

    model: str
    is_load: bool
    replica_count: int = 0
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    is_retried: bool = True  # the reconciler repeats it on the replicas that failed
    # Steps whose earlier unload a load has ended, and ensembles that an unload of their step unloaded.
    forgotten_unloads: list[str] = field(default_factory=list)
    unloaded_dependents: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def record(self, replica: str, outcome: Outcome) -> None:
        self.outcomes[replica] = outcome
        self.changed.set()

    @property
    def action(self) -> str:
        return "load" if self.is_load else "unload"

    @property
    def errors(self) -> dict[str, GatewayError]:
        return {at: each.error for at, each in self.outcomes.items() if each.error is not None}

    @property
    def answers(self) -> list[GatewayError]:
        """The errors of replicas that were reached, and said why they do not do it."""
        return [each for each in self.errors.values() if not isinstance(each, TRANSPORT_ERRORS)]

    @property
    def is_refused(self) -> bool:
        """Return whether no replica has done it, and none is still doing it after the deadline."""
        outcomes = self.outcomes.values()
        is_in_progress = any(each.is_in_progress for each in outcomes) and not self.answers
        return len(self.errors) == len(outcomes) and not is_in_progress

    def to_dict(self) -> dict[str, Any]:
        failed = [outcome.state for outcome in self.outcomes.values() if outcome.error is not None]
        state = failed[0] if failed else "PENDING"
        if not failed and 0 < len(self.outcomes) == self.replica_count:
            state = READY if self.is_load else UNAVAILABLE
        replicas = {at: outcome.to_dict() for at, outcome in sorted(self.outcomes.items())}
        others = {
            "forgotten_unloads": self.forgotten_unloads,
            "unloaded_dependents": self.unloaded_dependents,
        }
        concerned = {name: models for name, models in others.items() if models}
        return {"model": self.model, "state": state, "replicas": replicas, **concerned}

    def build_error(self) -> GatewayError:
        error = self._build_refusal() if self.is_refused else PartialFailure(self)
        error.report = self.to_dict()
        return error

    def _build_refusal(self) -> GatewayError:
        """Return the error that says most: of a replica that was reached, and about the model itself."""
        for kind in (ModelControlModeConflict, LoadFailed, GatewayError):
            for error in self.answers:
                if isinstance(error, kind):
                    return error
        return NothingDone(self)


class NothingDone(BadUpstream):
    """No replica could be reached. The error of the first gives the status and the code."""

    def __init__(self, report: OperationReport) -> None:
        address, first = next(iter(report.errors.items()))
        self.status = first.status  # type: ignore[misc]  # a class variable elsewhere
        self.code = first.code  # type: ignore[misc]  # a class variable elsewhere
        super().__init__(
            f"model {quote_text(report.model)} is {report.action}ed on 0 of {len(report.errors)} replicas, "
            f"and nothing is changed; error on {address}: {first.detail}",
            headers=dict(first.headers or {}),
        )


class PartialFailure(BadUpstream):
    code = "PARTLY_DONE"

    def __init__(self, report: OperationReport) -> None:
        errors = report.errors
        count = len(report.outcomes)
        address, error = next(iter(errors.items()))
        next_step = "the gateway keeps retrying" if report.is_retried else "repeat the call"
        super().__init__(
            f"model {quote_text(report.model)} is {report.action}ed on {count - len(errors)} of {count} "
            f"replicas; {next_step}; error on {address}: {error.detail}"
        )


def record_outcomes(report: OperationReport) -> None:
    name_action(report.action)
    if (call := find_management_call()) is not None:
        call.outcomes = report.outcomes


OperationWork = Coroutine[Any, Any, OperationReport]


class TooManyOperations(Overloaded):
    message = "too many loads and unloads run in the background; wait for some of them"


class OperationLost(Unavailable):
    message = (
        "the gateway that ran the operation ended before it; GET /v1/models shows the model's state, "
        "and a repeated request completes it"
    )


class OperationRunner:
    """Runs operations as tasks of their own, and records the ones that are started in the background."""

    def __init__(self, store: StateStore, events: EventLog) -> None:
        self._store = store
        self.events = events
        self.tasks = TaskSet()
        self._recorded_at: deque[float] = deque()  # starts of operations that can still be read

    async def run(self, report: OperationReport, work: OperationWork) -> OperationReport:
        # A client disconnect must not leave the model loaded on a part of the fleet.
        record_outcomes(report)
        return await self.events.run_call(self.tasks, report.action, report.model, work)

    async def start(self, report: OperationReport, work: Callable[[], OperationWork]) -> str:
        """Start an operation in the background and return its id. Raises `TooManyOperations`."""
        self._count_recorded(monotonic())
        operation_id = secrets.token_hex(16)
        record_outcomes(report)
        await self._record(operation_id, report, "running")
        self.tasks.start(self._run_recorded(operation_id, report, work()))
        return operation_id

    async def read(self, operation_id: str) -> Mapping[str, Any] | None:
        """Return the last record of an operation, which may run in another gateway."""
        record = await self._store.read_operation(operation_id)
        if record is None:
            return None
        document = {name: value for name, value in record.items() if name != "owner"}
        if record.get("operation") != "running" or await self._is_present(record):
            return document
        error = OperationLost()
        return {**document, "operation": "lost", "error": error.detail, "code": error.code}

    async def _is_present(self, record: Mapping[str, Any]) -> bool:
        owner = str(record.get("owner"))
        return owner == self._store.owner or await self._store.is_present(owner)

    def _count_recorded(self, now: float) -> None:
        while self._recorded_at and self._recorded_at[0] < now - OPERATION_TTL_S:
            self._recorded_at.popleft()
        if len(self.tasks) >= MAX_RUNNING_TASKS or len(self._recorded_at) >= MAX_RECORDED:
            raise TooManyOperations
        self._recorded_at.append(now)

    async def _run_recorded(
        self, operation_id: str, report: OperationReport, work: OperationWork
    ) -> None:
        task = self.tasks.start(work)
        task.add_done_callback(lambda _: report.changed.set())
        while not task.done():
            await report.changed.wait()
            report.changed.clear()
            if not task.done():
                with suppress(StateUnavailable):  # later records contain the same
                    await self._record(operation_id, report, "running")
        self.events.record_result(report.action, report.model, task, operation_id)
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
        document |= {"operation": status, "updated_at": int(time()), "owner": self._store.owner}
        document |= failure
        await self._store.record_operation(operation_id, document)
