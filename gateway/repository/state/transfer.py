"""Export and import of the state: desired models, cordons and the tables of capabilities, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gateway.errors import StateUnavailable
from gateway.messages import CommandError
from gateway.repository.state.content import (
    CAPABILITY_TABLES,
    CORDONS,
    MODELS,
    DesiredModel,
    RawTable,
    Table,
    UnreadableState,
    check_capability_tables,
    create_raw_table,
    decode_state,
)
from gateway.repository.state.interface import StateStore
from gateway.telemetry.audit import SUCCEEDED, Event, list_changes

EXPORT_FORMAT: Final = 1


class BadExport(CommandError):
    """The file is not an exported state."""


@dataclass(frozen=True)
class ExportedState:
    """The state without what belongs to one store: revisions, loads and operations."""

    models: Mapping[str, DesiredModel]
    tables: Mapping[str, RawTable]  # name → table of a capability
    cordons: frozenset[str]

    def to_json(self) -> bytes:
        models = {name: self.models[name].to_dict() for name in sorted(self.models)}
        tables = {
            name: {model: dict(sorted(values.items())) for model, values in sorted(table.items())}
            for name, table in self.tables.items()
        }
        cordons = sorted(self.cordons)
        document = {"format": EXPORT_FORMAT, "models": models, **tables, "cordons": cordons}
        return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def parse_export(raw: bytes, capability_tables: Iterable[Table[Any]] = ()) -> ExportedState:
    """Parse an exported state. Raises `BadExport`, also if a capability cannot decode its table."""
    try:
        exported = parse_exported_document(decode_state(raw))
        for table in capability_tables:
            table.decode(exported.tables[table.name])
    except UnreadableState as exc:
        raise BadExport(f"the file is not an exported state: {exc}") from None
    return exported


def parse_exported_document(document: Any) -> ExportedState:
    match document:
        case {"format": int(version)} if version != EXPORT_FORMAT:
            raise BadExport(f"format {version} is not supported, only format {EXPORT_FORMAT}")
        case {"format": int(), "models": dict(models), "cordons": list(cordons)}:
            # Revisions belong to one store.
            unrevised = {
                name: {**model, "revision": 0} if isinstance(model, dict) else model
                for name, model in models.items()
            }
            check_capability_tables(document)
            tables = {name: document.get(name, {}) for name in CAPABILITY_TABLES}
            if all(isinstance(name, str) for name in cordons):
                return ExportedState(MODELS.decode(unrevised), tables, frozenset(cordons))
    raise UnreadableState("unexpected structure")


async def export_state(store: StateStore) -> ExportedState:
    return ExportedState(
        await store.read(MODELS),
        {name: await store.read(create_raw_table(name)) for name in CAPABILITY_TABLES},
        await store.read(CORDONS),
    )


async def import_state(store: StateStore, exported: ExportedState, caller: str = "") -> None:
    """Make the stored state equal to the exported one; what the exported one lacks is forgotten."""
    before = await export_state(store)
    changes: list[tuple[str, Any, Any]] = []
    try:
        await write_differences(store, before, exported, changes)
    finally:
        if changes:
            listed = list_changes(changes)
            event = Event("state import", "state import", SUCCEEDED, caller=caller, changes=listed)
            # The import itself has succeeded, or says why not.
            with suppress(StateUnavailable, TypeError, ValueError):
                await store.append_event(event.encode())


async def write_differences(
    store: StateStore,
    before: ExportedState,
    after: ExportedState,
    changes: list[tuple[str, Any, Any]],
) -> None:
    for name in sorted(before.models.keys() | after.models.keys()):
        old_model = before.models.get(name)
        model = after.models.get(name)
        if old_model is None or model is None or old_model.to_dict() != model.to_dict():
            await store.set_desired_model(name, model)
            old_value, value = (
                None if each is None else each.describe() for each in (old_model, model)
            )
            changes.append((f"model {name}", old_value, value))
    for table in CAPABILITY_TABLES:
        old = dict(list_values(before.tables[table]))
        new = dict(list_values(after.tables[table]))
        for keys in sorted(old.keys() | new.keys()):
            if old.get(keys) != new.get(keys):
                await store.write(create_raw_table(table), keys, new.get(keys))
                subject = f"{table} {keys[1]} of model {keys[0]}"
                changes.append((subject, old.get(keys), new.get(keys)))
    for name in sorted(before.cordons ^ after.cordons):
        is_cordoned = name in after.cordons
        await store.write(CORDONS, (name,), is_cordoned or None)
        changes.append(
            (f"replica {name}", {"cordoned": not is_cordoned}, {"cordoned": is_cordoned})
        )


def list_values(table: RawTable) -> Iterator[tuple[tuple[str, str], Any]]:
    for model, values in table.items():
        for name, value in values.items():
            yield (model, name), value
