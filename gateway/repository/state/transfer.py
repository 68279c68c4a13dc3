"""Export and import of the state: desired models, cordons and the tables of capabilities, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, cast

import orjson

from gateway.errors import StateUnavailable
from gateway.messages import CommandError, quote_text
from gateway.repository.state.content import (
    ALL,
    CAPABILITY_TABLES,
    CORDONS,
    MODELS,
    DesiredModel,
    Document,
    Keys,
    Origin,
    Table,
    TableEntry,
    create_raw_table,
)
from gateway.repository.state.documents import UnreadableState, check_form, parse_json
from gateway.repository.state.store import StateStore
from gateway.telemetry.audit import SUCCEEDED, Event, list_changes

EXPORT_FORMAT: Final = 1
EXPORT_FORM: Final = {
    "format": int,
    "models": {str: {}},
    **{name: {str: {str: {}}} for name in CAPABILITY_TABLES},
    "cordons": [str],
}


class BadExport(CommandError):
    """The file is not an exported state."""


async def export_state(store: StateStore) -> Document:
    """Return the state without what belongs to one store: revisions, confirmed loads and operations."""
    await store.refresh()
    models = {
        name: {"loaded": model.is_loaded, "parameters": dict(model.parameters)}
        for name, model in store.get(MODELS).items()
        if model.origin is Origin.api
    }
    tables = {name: store.get_documents(name) for name in CAPABILITY_TABLES}
    cordons = sorted(store.get(CORDONS))
    return {"format": EXPORT_FORMAT, "models": models, **tables, "cordons": cordons}


def format_export(exported: Document) -> bytes:
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE
    return orjson.dumps(exported, option=options)


def parse_export(raw: bytes, capability_tables: Iterable[Table[Any]] = ()) -> Document:
    """Parse an exported state. Raises `BadExport`, also if a capability cannot read an entry of its table."""
    parsers: dict[str, Callable[[TableEntry], Any]] = {MODELS.name: parse_exported_model}
    parsers |= {table.name: table.parse for table in capability_tables}
    try:
        exported = parse_json(raw)
        check_form(exported, EXPORT_FORM)
        if (version := exported.get("format")) != EXPORT_FORMAT:
            raise BadExport(f"format {version} is not supported, only format {EXPORT_FORMAT}")
        for (table, keys), value in list_entries(exported).items():
            if table in parsers:
                parsers[table](TableEntry(keys, value))
    except KeyError as exc:
        raise BadExport(f"the file is not an exported state: {exc} is missing") from None
    except UnreadableState as exc:
        raise BadExport(f"the file is not an exported state: {exc}") from None
    return cast(Document, exported)


def parse_exported_model(entry: TableEntry) -> DesiredModel:
    match entry.document:
        case {"loaded": bool(is_loaded), "parameters": dict(parameters)}:
            return DesiredModel(ALL if is_loaded else 0, parameters)
    raise UnreadableState(f"unexpected structure of model {quote_text(entry.keys[0])}")


def list_entries(exported: Document) -> dict[tuple[str, Keys], Any]:
    """Return the values of an exported state by the names of their tables and their keys."""
    entries: dict[tuple[str, Keys], Any] = {}
    for name, value in sorted(exported["models"].items()):
        entries[MODELS.name, (name,)] = value
    for table in CAPABILITY_TABLES:
        for model, values in sorted(exported.get(table, {}).items()):
            entries |= {(table, (model, name)): each for name, each in sorted(values.items())}
    return entries | {(CORDONS.name, (name,)): True for name in sorted(exported["cordons"])}


async def import_state(store: StateStore, exported: Document, caller: str = "") -> None:
    """Make the stored state equal to the exported one; what the exported one lacks is forgotten."""
    before = list_entries(await export_state(store))
    after = list_entries(exported)
    changes: list[tuple[str, Any, Any]] = []
    try:
        for table, keys in dict.fromkeys((*before, *after)):
            values = [each.get((table, keys)) for each in (before, after)]
            if values[0] != values[1]:
                changes.append(await store_value(store, table, keys, *values))
    finally:
        if changes:
            listed = list_changes(changes)
            event = Event("state import", "state import", SUCCEEDED, caller=caller, changes=listed)
            # The import itself has succeeded, or says why not.
            with suppress(StateUnavailable, TypeError, ValueError):
                await store.append_event(event.encode())


async def store_value(
    store: StateStore, table: str, keys: Keys, before: Any, after: Any
) -> tuple[str, Any, Any]:
    """Store a value, and return the change for the event: its subject, and both values."""
    if table == MODELS.name:
        old, new = (
            each and parse_exported_model(TableEntry(keys, each)) for each in (before, after)
        )
        await store.set_desired_model(keys[0], new)
        return f"model {keys[0]}", old and old.describe(), new and new.describe()
    if table == CORDONS.name:
        await store.write(CORDONS, keys, after)
        return f"replica {keys[0]}", {"cordoned": bool(before)}, {"cordoned": bool(after)}
    await store.write(create_raw_table(table), keys, after)
    return f"{table} {keys[1]} of model {keys[0]}", before, after
