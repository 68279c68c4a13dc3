"""The events of all gateways that share a state: recorded by each one, stored in order, and read."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from time import monotonic, perf_counter
from typing import Any, Final, TypeVar

import anyio
import orjson

from gateway.access.limits import LocalRateWindows, RateWindow
from gateway.callers import CallerKind
from gateway.config.files import FileChange, WatchedFile
from gateway.errors import GatewayError, StateUnavailable
from gateway.repository.state.content import MAX_EVENTS, EventId, StoredEvent, find_last_change
from gateway.repository.state.store import StateStore
from gateway.tasks import TaskSet, repeat
from gateway.telemetry.audit import (
    FAILED,
    SUCCEEDED,
    Event,
    build_call_event,
    find_outcome,
    list_changes,
)
from gateway.telemetry.request_info import (
    RequestInfo,
    RequestScope,
    current_request_info,
    name_action,
)

log = logging.getLogger(__name__)
T = TypeVar("T")
RETRY_S: Final = 2.0
MAX_FLUSH_S: Final = 1.0
LEASE_NAME: Final = "events"
# Refused calls of a key after the first one that each have a line of the audit log: 60 in a minute.
MAX_REFUSALS: Final = RateWindow(60, 60)


class EventLog:
    """Writes each event to the audit log, and stores it in the background, because it has happened already.

    What cannot be stored waits for the state; the oldest events are dropped if that takes long.
    """

    def __init__(
        self, store: StateStore, wait_for_lease: Callable[[str], AbstractAsyncContextManager[None]]
    ) -> None:
        self._store = store
        self._wait_for_lease = wait_for_lease
        self._unstored: deque[bytes] = deque(maxlen=MAX_EVENTS)
        self._recorded = asyncio.Event()
        self._turn = asyncio.Lock()
        self._refusals = LocalRateWindows(monotonic)

    def record_call(self, scope: RequestScope, status: int, *, is_repeated: bool) -> None:
        """Record a call whose response was sent.

        Refused calls could fill the disk: those of an anonymous caller, and many of one key, are left out
        if they are refused like one before.
        """
        info = scope["request_info"]
        call = info.management_call
        if call is None:
            return
        outcome = find_outcome(status)
        message = f"{scope['method']} {scope['path']}: {outcome}"
        error = {"code": info.error_code, "reason": info.error_reason}
        event = build_call_event(info, call, message, outcome, status=status, **error)
        if not (event.is_refused and is_repeated and self._is_sampled(info)):
            duration_ms = round(1000 * (perf_counter() - call.started_at), 2)
            self.record(event, method=scope["method"], path=scope["path"], duration_ms=duration_ms)

    def _is_sampled(self, info: RequestInfo) -> bool:
        if info.caller.kind is CallerKind.anonymous:
            return True
        return self._refusals.count(MAX_REFUSALS, info.caller_name).wait_s > 0

    def record(self, event: Event, **fields: Any) -> None:
        """Record an event; the fields are of its line alone."""
        event.write_line(**fields)
        if event.is_refused:  # those can be many, and nothing has changed
            return
        try:
            raw = event.encode()
        except (TypeError, ValueError) as exc:
            log.error("an event (%s) is not stored, because of its text: %s", event.action, exc)
            return
        self._unstored.append(raw)
        self._recorded.set()

    def watch(self, file: WatchedFile[Any], action: str, kind: str) -> None:
        """Record the changes of a file, whose entries are of this kind."""

        def record(change: FileChange[Any]) -> None:
            event = Event(
                f"{file.path} changed and was reloaded: {change.difference}",
                action,
                SUCCEEDED,
                changes=list_changes(
                    [(f"{kind} {name}", *values) for name, *values in change.differences]
                ),
                file=str(file.path),
                sha256=change.file_sha256,
            )
            self.record(event)

        file.on_change = record

    async def run_call(
        self, tasks: TaskSet, action: str, model: str, work: Coroutine[Any, Any, T]
    ) -> T:
        """Return the result of work that goes on, and is recorded, if the client disconnects."""
        name_action(action)
        task = tasks.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(self.record_result, action, model))
            raise

    def record_result(
        self, action: str, model: str, task: asyncio.Task[Any], operation: str = ""
    ) -> None:
        """Record the result of an action that its caller did not wait for; `task` is done."""
        info = current_request_info.get()
        if info is None or info.management_call is None:
            return  # no caller has started it
        error = None if task.cancelled() else task.exception()
        outcome = "cancelled" if task.cancelled() else SUCCEEDED if error is None else FAILED
        fields = {"operation": operation}
        if isinstance(error, GatewayError):
            fields |= {"code": error.code, "reason": error.detail}
        message = f"{action} of model {model}: {outcome}"
        self.record(build_call_event(info, info.management_call, message, outcome, **fields))

    async def run(self) -> None:
        await repeat("events", self._store_recorded)

    async def _store_recorded(self) -> None:
        await self._recorded.wait()
        try:
            await self._store_all()
        except StateUnavailable:  # the store logs it
            await asyncio.sleep(RETRY_S)

    async def flush(self) -> None:
        """Store what was recorded, unless that takes long."""
        with anyio.move_on_after(MAX_FLUSH_S), suppress(StateUnavailable):
            await self._store_all()

    async def _store_all(self) -> None:
        async with self._turn:
            while self._unstored:
                raw = self._unstored[0]
                await self._store_event(raw)
                if self._unstored and self._unstored[0] is raw:
                    self._unstored.popleft()
            self._recorded.clear()

    async def _store_event(self, raw: bytes) -> None:
        document = orjson.loads(raw)
        if "file" not in document:
            await self._store.append_event(raw)
            return
        # Every gateway and worker reads the file again; the first one stores the change.
        async with self._wait_for_lease(LEASE_NAME):
            events = await self._store.read_events(None, MAX_EVENTS)
            last = await asyncio.to_thread(find_last_change, events, document["file"])
            if any(last.get(name) != document.get(name) for name in ("sha256", "changes")):
                await self._store.append_event(raw)

    async def read(self, start: EventId | None, limit: int) -> Sequence[StoredEvent]:
        """Return the first events from an id on, or without one the last. Raises `StateUnavailable`.

        What this gateway has recorded is among them, unless it takes more than `MAX_FLUSH_S` to store it.
        """
        await self.flush()
        return await self._store.read_events(start, limit)
