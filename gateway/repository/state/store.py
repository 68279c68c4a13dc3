"""The state of the fleet upon a place that keeps it.

Tables are read once a second, and only if they have changed. If the place has a lower revision than before,
it has lost the state, and the gateway that notices it writes its last copy again; of several copies the one
of the highest revision wins as a whole.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar, cast

from gateway.access.limits import QuotaCount, RateWindows
from gateway.errors import Conflict, StateUnavailable
from gateway.messages import quote_text
from gateway.repository.state.content import (
    CAPABILITY_TABLES,
    CONFIRMED,
    CORDONS,
    LOAD_ERRORS,
    MAX_DOCUMENT_BYTES,
    MAX_EVENTS,
    MODELS,
    OPERATION_TTL_S,
    DesiredModel,
    Document,
    EventId,
    Keys,
    RawTable,
    StoredEvent,
    Table,
    create_raw_table,
    decode_event,
    decode_operation,
    is_operation_id,
)
from gateway.repository.state.documents import (
    UnreadableState,
    check_form,
    decode_document,
    encode_stored_document,
)
from gateway.repository.state.interface import (
    LOST,
    READ_ACTION,
    UNKNOWN_CHANGE,
    WRITE_ACTION,
    Entries,
    Entry,
    EntryChange,
    KeyValues,
)
from gateway.telemetry.audit import MAX_EVENT_BYTES

log = logging.getLogger(__name__)

T = TypeVar("T")
LEASE_S: Final = 5.0  # of leases, of reports, and of the operations of a process
QUOTA_TTL_S: Final = 40 * 24 * 3600  # longer than a month
MAX_RESTORATIONS: Final = 3  # for one call
LOST_REPEATEDLY: Final = "it was lost repeatedly"
MAX_CLAIM_BYTES: Final = 200
EVENTS: Final = "events"  # kinds of documents besides the tables
OPERATIONS: Final = "operations"
REPORTS: Final = "reports"
QUOTAS: Final = "quotas"
TABLES: Final[Sequence[Table[Any]]] = (
    MODELS,
    CONFIRMED,
    LOAD_ERRORS,
    CORDONS,
    *map(create_raw_table, CAPABILITY_TABLES),
)
KINDS: Final = (*(table.name for table in TABLES), EVENTS, OPERATIONS, REPORTS, QUOTAS)


class CachedTable:
    """A table as it was last read. Entries that did not change are not parsed again."""

    def __init__(self, table: Table[Any]) -> None:
        self.table = table
        self.change = UNKNOWN_CHANGE
        self.entries: Entries = {}
        self.parsed: dict[str, tuple[Keys, Any] | UnreadableState] = {}
        self.value: Any = table.combine(())

    def update(self, change: str, entries: Entries) -> None:
        self.parsed = {
            key: self.parsed[key]
            if self.entries.get(key) == entry
            else self.table.parse_entry(key, *entry)
            for key, entry in entries.items()
        }
        self.value = self.table.combine(self.parsed.values())
        self.change = change
        self.entries = entries

    def list_readable_entries(self) -> Entries:
        """Return the entries that may be written again."""
        return {
            key: self.entries[key]
            for key, each in self.parsed.items()
            if not isinstance(each, UnreadableState)
        }


class StateStore:
    """The state that gateways share. A method that raises `StateUnavailable` leaves it unchanged."""

    def __init__(self, place: KeyValues) -> None:
        self._place = place
        self.owner = secrets.token_hex(16)  # this process
        self._claims: set[str] = set()  # names that this process may have
        self._tables = {table.name: CachedTable(table) for table in TABLES}
        self._revision = 0
        self.loss_count = 0  # how often this process has restored a state that was lost
        self.unreadable_counts = Counter(dict.fromkeys(KINDS, 0))

    # Tables.

    def get(self, table: Table[T]) -> T:
        """Return the table, as it was last read or changed."""
        return cast(T, self._find(table).value)

    async def read(self, table: Table[T]) -> T:
        """Return the table; the same object as before if it has not changed."""
        await self.refresh()
        return self.get(table)

    def get_documents(self, name: str) -> RawTable:
        """Return a table of a capability as JSON, as it was last read or changed."""
        raw = CachedTable(create_raw_table(name))
        raw.update(UNKNOWN_CHANGE, self._tables[name].list_readable_entries())
        return cast(RawTable, raw.value)

    async def refresh(self) -> None:
        """Read all tables that have changed."""
        for _ in range(MAX_RESTORATIONS):
            known = {
                name: (each.change, each.table.max_bytes) for name, each in self._tables.items()
            }
            reading = await self._place.read(known)
            self.unreadable_counts.update(reading.damaged)
            if reading.revision >= self._revision:
                self._revision = reading.revision
                for name, (change, entries) in reading.tables.items():
                    self._update(self._tables[name], change, entries)
                return
            await self._restore()
        raise StateUnavailable(READ_ACTION, LOST_REPEATEDLY)

    def _find(self, table: Table[Any]) -> CachedTable:
        cached = self._tables[table.name]
        if cached.table is not table:  # its owner reads it for the first time
            self._tables[table.name] = CachedTable(table)
            self._update(self._tables[table.name], cached.change, cached.entries)
        return self._tables[table.name]

    def _update(self, cached: CachedTable, change: str, entries: Entries) -> None:
        before = cached.parsed
        cached.update(change, entries)
        for key, each in cached.parsed.items():
            if isinstance(each, UnreadableState) and each is not before.get(key):
                name = cached.table.name
                self.unreadable_counts[name] += 1
                message = "entry %s of the %s in the state is ignored: %s"
                log.warning(message, quote_text(key), name, each)

    async def _restore(self) -> None:
        """Write the last known state again, unless another gateway has done it."""
        tables = {name: each.list_readable_entries() for name, each in self._tables.items()}
        if await self._place.restore(self._revision, tables):
            self.loss_count += 1
            counts = {name: len(each.value) for name, each in self._tables.items()}
            log.error(
                "the state was lost; the last known one was written again: %d models, %s, %d cordons "
                "(to go back further, use triton-gateway state import)",
                counts[MODELS.name],
                ", ".join(f"{name} of {counts[name]} models" for name in CAPABILITY_TABLES),
                counts[CORDONS.name],
            )

    async def write(self, table: Table[T], keys: Keys, value: Any) -> T:
        """Store a value, or delete it if None, and return the table. It is not for desired models."""
        await self._write(table, keys, value)
        return self.get(table)

    async def set_desired_model(
        self, model: str, desired: DesiredModel | None, expected_revision: int | None = None
    ) -> int:
        """Store the desired model, or delete it if None, and return the new revision of the state.

        The revision is higher than every earlier one. A model that already has a revision keeps it. If
        `expected_revision` is given (0: none is stored) and the stored model has another one, nothing is
        changed, and the result is 0.
        """
        document = None if desired is None else desired.to_dict()
        revisions = (expected_revision, 0 if desired is None else desired.revision)
        return await self._write(MODELS, (model,), document, *revisions)

    async def _write(
        self,
        table: Table[Any],
        keys: Keys,
        document: Any,
        expected_revision: int | None = None,
        kept_revision: int = 0,
    ) -> int:
        """Change an entry, and return the new revision; 0 if the entry has another than expected."""
        cached = self._find(table)
        key = table.encode_keys(keys)
        value = None if document is None else encode_stored_document(document, table.max_bytes)
        if expected_revision == 0 and isinstance(cached.parsed.get(key), UnreadableState):
            expected_revision = cached.entries[key].revision
        for _ in range(MAX_RESTORATIONS):
            change = EntryChange(
                table.name,
                key,
                value,
                self._revision,
                expected_revision=expected_revision,
                kept_revision=kept_revision,
                is_durable=table.is_durable,
            )
            revision = await self._place.write(change)
            if revision != LOST:
                break
            await self._restore()
        else:
            raise StateUnavailable(WRITE_ACTION, LOST_REPEATEDLY)
        if revision:
            self._revision = max(self._revision, revision)
            entries = {name: each for name, each in cached.entries.items() if name != key}
            if value is not None:
                entries[key] = Entry(value, kept_revision or revision)
            # The table is read again for changes of others, because the name of its last change is another.
            self._update(cached, cached.change, entries)
        return revision

    async def forget_replica(self, table: Table[T], replica: str) -> None:
        """Delete all entries of a replica from a table whose first key it is."""
        entries = cast("Mapping[str, Mapping[str, Any]]", self.get(table))
        for model in entries.get(replica, {}):
            await self._write(table, (replica, model), None)

    # Operations and events.

    async def record_operation(self, operation_id: str, document: Document) -> None:
        """Store the progress of an operation for an hour."""
        raw = encode_stored_document(document, MAX_DOCUMENT_BYTES)
        await self._place.put(format_operation_key(operation_id), raw, OPERATION_TTL_S)

    async def read_operation(self, operation_id: str) -> Document | None:
        """Return the last record of an operation; None if there is none, or if the id is invalid."""
        if is_operation_id(operation_id):
            keys = [format_operation_key(operation_id)]
            for raw in await self._place.get(keys, MAX_DOCUMENT_BYTES):
                if raw is not None:
                    with self._count_unreadable(OPERATIONS):
                        return decode_operation(operation_id, raw)
        return None

    async def append_event(self, raw: bytes) -> None:
        """Store an event in JSON after the others; of those, the last `MAX_EVENTS` are kept."""
        await self._place.append_event(raw, MAX_EVENTS)

    async def read_events(self, start: EventId | None, limit: int) -> Sequence[StoredEvent]:
        """Return the first events from an id on, or without one the last; in order."""
        found = await self._place.read_events(start or EventId(0), MAX_EVENTS, MAX_EVENT_BYTES)
        events = list(filter(self._is_readable, found))
        return events[:limit] if start else events[-limit:]

    def _is_readable(self, event: StoredEvent) -> bool:
        with self._count_unreadable(EVENTS):
            decode_event(event)
            return True
        return False

    @contextmanager
    def _count_unreadable(self, kind: str) -> Iterator[None]:
        """Count a document that is unreadable, and go on without it."""
        try:
            yield
        except UnreadableState:
            self.unreadable_counts[kind] += 1

    # Leases and reports.

    async def acquire_lease(self, name: str) -> bool:
        """Take or renew a lease for five seconds, and return whether this process has it."""
        return await self._claim(f"lease:{name}")

    async def _claim(self, *names: str) -> bool:
        """Claim names, and the one that shows that this process is alive."""
        alive = format_alive_name(self.owner)
        self._claims.update(names, [alive])
        return await self._place.claim([alive, *names], self.owner, LEASE_S)

    async def renew_presence(self) -> None:
        """Show for five seconds that this process is alive: the operations of others are lost."""
        await self._claim()

    async def is_present(self, owner: str) -> bool:
        """Return whether a process has shown that it is alive."""
        (claim,) = await self._place.get([format_alive_name(owner)], MAX_CLAIM_BYTES)
        return claim is not None

    async def release_lease(self, name: str) -> None:
        """Give a lease back; nothing happens without it."""
        self._claims.discard(f"lease:{name}")
        await self._place.release([f"lease:{name}"], self.owner)

    async def exchange_reports(self, report: Document) -> list[Document]:
        """Publish this process's report, and return the last ones of the others, for five seconds each."""
        own = encode_stored_document(report, MAX_DOCUMENT_BYTES)
        reports: list[Document] = []
        for raw in await self._place.exchange(self.owner, own, LEASE_S, MAX_DOCUMENT_BYTES):
            with self._count_unreadable(REPORTS):
                document = decode_document(raw, MAX_DOCUMENT_BYTES)
                check_form(document, {})
                reports.append(document)
        return reports

    # Quotas and rates.

    async def add(self, name: str, limits: Mapping[str, int], count: int) -> QuotaCount:
        """Add to the quotas of a caller, as `QuotaCounters` says."""
        counters = {f"quota:{period}:{name}": limit for period, limit in limits.items()}
        counted = await self._place.count(counters, count, QUOTA_TTL_S)
        self.unreadable_counts[QUOTAS] += counted.unreadable
        return counted

    @property
    def quotas(self) -> StateStore | None:
        """Return the counters of quotas, if other processes can have this state."""
        return self if self.is_shared else None

    @property
    def rate_windows(self) -> RateWindows | None:
        return self._place.rate_windows

    @property
    def is_shared(self) -> bool:
        """Return whether other processes can have this state."""
        return self._place.is_shared

    @property
    def is_available(self) -> bool:
        """Return whether the last read and write succeeded."""
        return self._place.is_available

    async def find_weakness(self) -> str:
        """Return why the state can be lost; empty if it cannot, or if that is unknown."""
        return await self._place.find_weakness()

    async def close(self) -> None:
        # Resign, so that another process leads at once and not only when the lease has expired.
        if self._claims:
            with suppress(StateUnavailable):
                await self._place.release(sorted(self._claims), self.owner)
        await self._place.close()


class StateNotShared(Conflict):
    code = "STATE_NOT_SHARED"

    def __init__(self, subject: str, name: str) -> None:
        super().__init__(
            f"{subject} {quote_text(name)} cannot be changed through the API, because GATEWAY_STATE is "
            "none:; change the models file, or share the state of the gateways in Redis"
        )


class ReadOnlyStateStore(StateStore):
    """State for gateways that do not share any: only the models file decides on loads."""

    async def _write(self, table: Table[Any], keys: Keys, document: Any, *revisions: Any) -> int:
        if table not in (CONFIRMED, LOAD_ERRORS):
            raise StateNotShared(table.subject, keys[0])
        return await super()._write(table, keys, document, *revisions)


def format_alive_name(owner: str) -> str:
    return f"alive:{owner}"


def format_operation_key(operation_id: str) -> str:
    return f"operation:{operation_id}"
