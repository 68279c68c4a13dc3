"""Export and import of the state: desired models, cordons and the tables of capabilities, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gateway.errors import StateUnavailable
from gateway.messages import CommandError, quote_text
from gateway.repository.state.content import (
    ALL,
    CAPABILITY_TABLES,
    CORDONS,
    MODELS,
    DesiredModel,
    Keys,
    Origin,
    RawTable,
    Table,
    TableEntry,
    create_raw_table,
    parse_desired_model,
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


@dataclass(frozen=True)
class ExportedState:
    """The state without what belongs to one store: revisions, confirmed loads and operations."""

    models: Mapping[str, DesiredModel]
    tables: Mapping[str, RawTable]  # name → table of a capability
    cordons: frozenset[str]

    def to_json(self) -> bytes:
        models = {name: export_model(self.models[name]) for name in sorted(self.models)}
        tables = {
            name: {model: dict(sorted(values.items())) for model, values in sorted(table.items())}
            for name, table in self.tables.items()
        }
        cordons = sorted(self.cordons)
        document = {"format": EXPORT_FORMAT, "models": models, **tables, "cordons": cordons}
        return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

    def list_entries(self) -> dict[tuple[str, Keys], Any]:
        """Return what is stored, by the name of its table and its keys."""
        entries: dict[tuple[str, Keys], Any] = {
            (MODELS.name, (name,)): model.to_dict() for name, model in sorted(self.models.items())
        }
        for table, models in self.tables.items():
            for model, values in sorted(models.items()):
                entries |= {(table, (model, name)): each for name, each in sorted(values.items())}
        return entries | {(CORDONS.name, (name,)): True for name in sorted(self.cordons)}


def export_model(model: DesiredModel) -> dict[str, Any]:
    return {"loaded": model.is_loaded, "parameters": dict(model.parameters)}


def parse_exported_model(name: str, document: Any) -> DesiredModel:
    """Raises `UnreadableState`."""
    match document:
        case {"loaded": bool(is_loaded), "parameters": dict(parameters)}:
            return DesiredModel(ALL if is_loaded else 0, parameters)
    raise UnreadableState(f"unexpected structure of model {quote_text(name)}")


def parse_export(raw: bytes, capability_tables: Iterable[Table[Any]] = ()) -> ExportedState:
    """Parse an exported state. Raises `BadExport`, also if a capability cannot read an entry of its table."""
    try:
        document = parse_json(raw)
        check_form(document, EXPORT_FORM)
        if (version := document.get("format")) != EXPORT_FORMAT:
            raise BadExport(f"format {version} is not supported, only format {EXPORT_FORMAT}")
        models = {
            name: parse_exported_model(name, each) for name, each in document["models"].items()
        }
        tables = {name: document.get(name, {}) for name in CAPABILITY_TABLES}
        exported = ExportedState(models, tables, frozenset(document["cordons"]))
        parsers = {table.name: table.parse for table in capability_tables}
        for (table, keys), each in exported.list_entries().items():
            if table in parsers:
                parsers[table](TableEntry(keys, each))
    except KeyError as exc:
        raise BadExport(f"the file is not an exported state: {exc} is missing") from None
    except UnreadableState as exc:
        raise BadExport(f"the file is not an exported state: {exc}") from None
    return exported


async def export_state(store: StateStore) -> ExportedState:
    await store.refresh()
    tables = {name: store.get_documents(name) for name in CAPABILITY_TABLES}
    stored = store.get(MODELS).items()
    models = {name: model for name, model in stored if model.origin is Origin.api}
    return ExportedState(models, tables, frozenset(store.get(CORDONS)))


async def import_state(store: StateStore, exported: ExportedState, caller: str = "") -> None:
    """Make the stored state equal to the exported one; what the exported one lacks is forgotten."""
    before = (await export_state(store)).list_entries()
    after = exported.list_entries()
    changes: list[tuple[str, Any, Any]] = []
    try:
        for table, keys in dict.fromkeys((*before, *after)):
            documents = [each.get((table, keys)) for each in (before, after)]
            if documents[0] != documents[1]:
                await store_entry(store, table, keys, documents[1])
                changes.append(describe_change(table, keys, documents))
    finally:
        if changes:
            listed = list_changes(changes)
            event = Event("state import", "state import", SUCCEEDED, caller=caller, changes=listed)
            # The import itself has succeeded, or says why not.
            with suppress(StateUnavailable, TypeError, ValueError):
                await store.append_event(event.encode())


async def store_entry(store: StateStore, table: str, keys: Keys, document: Any) -> None:
    if table == MODELS.name:
        model = None if document is None else parse_desired_model(TableEntry(keys, document))
        await store.set_desired_model(keys[0], model)
    elif table == CORDONS.name:
        await store.write(CORDONS, keys, document)
    else:
        await store.write(create_raw_table(table), keys, document)


def describe_change(table: str, keys: Keys, documents: Sequence[Any]) -> tuple[str, Any, Any]:
    """Return the subject of a change, and its values before and afterwards."""
    before, after = documents
    if table == CORDONS.name:
        return f"replica {keys[0]}", {"cordoned": bool(before)}, {"cordoned": bool(after)}
    if table == MODELS.name:
        before, after = (
            each and parse_desired_model(TableEntry(keys, each)).describe() for each in documents
        )
        return f"model {keys[0]}", before, after
    return f"{table} {keys[1]} of model {keys[0]}", before, after
