"""Stores that read and replace whole documents: their changes of tables, and the state in memory."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Concatenate, Final, ParamSpec, TypeVar

import orjson

from gateway.access.limits import QuotaCounters
from gateway.errors import Conflict
from gateway.messages import quote_text
from gateway.repository.state.content import (
    LOADS,
    MAX_EVENTS,
    MODELS,
    OPERATION_TTL_S,
    DesiredModel,
    Document,
    EventId,
    Loads,
    RawTable,
    StartedLoad,
    StoredEvent,
    Table,
    drop_orphaned_loads,
    drop_token,
    load_owners,
    new_load_token,
    next_event,
    select_events,
    with_entry,
    with_finished_load,
    with_load,
)
from gateway.repository.state.interface import READ_ACTION, WRITE_ACTION

T = TypeVar("T")
P = ParamSpec("P")
StoreT = TypeVar("StoreT", bound="DocumentStore")
BlockingMethod = Callable[Concatenate[StoreT, P], T]
Method = Callable[Concatenate[StoreT, P], Coroutine[Any, Any, T]]
REVISION: Final = "revision"  # the field with the number of changes of desired models


def reads(method: BlockingMethod[StoreT, P, T]) -> Method[StoreT, P, T]:
    """Make a coroutine of a method that reads the state, and may block."""

    async def read(store: StoreT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await store.run_blocking(READ_ACTION, lambda: method(store, *args, **kwargs))

    return read


def changes(method: BlockingMethod[StoreT, P, T]) -> Method[StoreT, P, T]:
    """Make a coroutine of a method that changes the state, and may block; others are excluded meanwhile."""

    async def change(store: StoreT, /, *args: P.args, **kwargs: P.kwargs) -> T:
        def run() -> T:
            with store.exclude_others():
                return method(store, *args, **kwargs)

        return await store.run_blocking(WRITE_ACTION, run)

    return change


class DocumentStore(ABC):
    """A `StateStore` whose changes read tables, and replace them under a lock."""

    loss_count: ClassVar[int] = 0
    rate_windows: ClassVar[None] = None
    quotas: QuotaCounters | None = None

    def __init__(self) -> None:
        self._decoded: dict[Table[Any], tuple[RawTable, Any]] = {}

    @abstractmethod
    async def run_blocking(self, action: str, function: Callable[[], T]) -> T:
        """Return the result of a function that may block. Raises `StateUnavailable`."""

    @abstractmethod
    def exclude_others(self) -> AbstractContextManager[object]:
        """Exclude changes by others. It may block."""

    @abstractmethod
    def _load_field(self, field: str) -> Any:
        """Return a table, or the `REVISION`; the same object as before if it has not changed."""

    @abstractmethod
    def _save_fields(self, fields: Mapping[str, Any]) -> None:
        """Replace tables of one document together."""

    @reads
    def read(self, table: Table[T]) -> T:
        raw = self._load_field(table.name)
        known, value = self._decoded.get(table, (None, None))
        if known is not raw:
            value = table.decode(raw)
            self._decoded[table] = raw, value
        return value  # type: ignore[return-value]  # it was decoded by this table

    @changes
    def write(self, table: Table[T], keys: Sequence[str], value: Any) -> T:
        raw = with_entry(self._load_field(table.name), keys, value)
        decoded = table.decode(raw)
        self._save_fields({table.name: raw})
        return decoded

    @changes
    def set_desired_model(
        self, model: str, desired: DesiredModel | None, expected_revision: int | None = None
    ) -> int:
        models = self._load_field(MODELS.name)
        if expected_revision not in (None, models.get(model, {}).get(REVISION, 0)):
            return 0
        revision: int = self._load_field(REVISION) + 1
        value = None
        if desired is not None:
            value = {**desired.to_dict(), REVISION: desired.revision or revision}
        models = with_entry(models, (model,), value)
        self._save_fields({REVISION: revision, MODELS.name: models})
        return revision

    @reads
    def read_events(self, start: EventId | None, limit: int) -> Sequence[StoredEvent]:
        return select_events(self._load_events(), start, limit)

    @abstractmethod
    def _load_events(self) -> Sequence[StoredEvent]: ...

    @reads
    def read_loads(self) -> Loads:
        loads = self._load_field(LOADS)
        return drop_orphaned_loads(loads, frozenset(filter(self._is_alive, load_owners(loads))))

    @changes
    def begin_load(self, replica: str, model: str) -> StartedLoad:
        loads: Loads = self._load_field(LOADS)
        token = new_load_token(self._claim_loads())
        self._save_fields({LOADS: with_load(loads, replica, model, token)})
        return StartedLoad(token, drop_token(loads.get(replica, {}).get(model, "")))

    @changes
    def end_load(self, replica: str, model: str, token: str, resulting_load: str) -> None:
        loads = with_finished_load(
            self._load_field(LOADS), replica, model, token=token, resulting_load=resulting_load
        )
        self._save_fields({LOADS: loads})

    @changes
    def forget_loads(self, replica: str) -> None:
        self._save_fields({LOADS: with_entry(self._load_field(LOADS), (replica,), None)})

    def _claim_loads(self) -> str:
        """Return the owner of this process's loads, which `_is_alive` until the process exits."""
        return ""

    def _is_alive(self, owner: str) -> bool:
        """Return whether the process exists that has loads in progress."""
        return True


class MemoryStateStore(DocumentStore):
    """State of one process, which is lost when it exits."""

    is_shared: ClassVar[bool] = False
    is_available: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._fields: dict[str, Any] = {REVISION: 0}
        self._operations: dict[str, tuple[float, bytes]] = {}
        self._events: list[StoredEvent] = []

    async def run_blocking(self, action: str, function: Callable[[], T]) -> T:
        return function()

    def exclude_others(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _load_field(self, field: str) -> Any:
        return self._fields.setdefault(field, {})

    def _save_fields(self, fields: Mapping[str, Any]) -> None:
        self._fields.update(fields)

    async def append_event(self, raw: bytes) -> None:
        if (event := next_event(self._events, raw)) is not None:
            self._events = [*self._events[1 - MAX_EVENTS :], event]

    def _load_events(self) -> Sequence[StoredEvent]:
        return self._events

    async def record_operation(self, operation_id: str, document: Document) -> None:
        now = time.monotonic()
        operations = self._operations  # the oldest one is the first
        operations.pop(operation_id, None)
        operations[operation_id] = (now, orjson.dumps(document))
        while now - operations[oldest := next(iter(operations))][0] > OPERATION_TTL_S:
            del operations[oldest]

    async def read_operation(self, operation_id: str) -> Document | None:
        _, raw = self._operations.get(operation_id, (0, b"null"))
        document: Document | None = orjson.loads(raw)
        return document

    async def acquire_lease(self, name: str) -> bool:
        return True

    async def release_lease(self, name: str) -> None:
        pass

    async def exchange_reports(self, report: Document) -> list[Document]:
        return []

    async def close(self) -> None:
        pass


class StateNotShared(Conflict):
    code = "STATE_NOT_SHARED"

    def __init__(self, subject: str, name: str) -> None:
        super().__init__(
            f"{subject} {quote_text(name)} cannot be changed through the API, because GATEWAY_STATE is "
            "none:; change the models file, or share the state of the gateways in Redis"
        )


class ReadOnlyStateStore(MemoryStateStore):
    """State for gateways that do not share any: only the models file decides on loads."""

    async def write(self, table: Table[T], keys: Sequence[str], value: Any) -> T:
        raise StateNotShared(table.subject, keys[0])

    async def set_desired_model(
        self, model: str, desired: DesiredModel | None, expected_revision: int | None = None
    ) -> int:
        raise StateNotShared(MODELS.subject, model)
