"""Export and import of the state: desired models, cordons and the tables of capabilities, as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gateway.messages import CommandError
from gateway.repository.state.desired import CORDONS, MODELS, DesiredModel, StateStore
from gateway.repository.state.tables import (
    CAPABILITY_TABLES,
    RawTable,
    Table,
    UnreadableState,
    check_capability_tables,
    create_raw_table,
    decode_state,
)

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


async def import_state(store: StateStore, exported: ExportedState) -> None:
    """Make the stored state equal to the exported one; what the exported one lacks is forgotten."""
    before = await export_state(store)
    for name, desired in exported.models.items():
        current = before.models.get(name)
        if current is None or current.to_dict() != desired.to_dict():
            await store.set_desired_model(name, desired)
    for name in before.models.keys() - exported.models.keys():
        await store.set_desired_model(name, None)
    for name in CAPABILITY_TABLES:
        old = dict(list_values(before.tables[name]))
        new = dict(list_values(exported.tables[name]))
        for keys in old.keys() | new.keys():
            if old.get(keys) != new.get(keys):
                await store.write(create_raw_table(name), keys, new.get(keys))
    for name in before.cordons ^ exported.cordons:
        await store.write(CORDONS, (name,), name in exported.cordons or None)


def list_values(table: RawTable) -> Iterator[tuple[tuple[str, str], Any]]:
    for model, values in table.items():
        for name, value in values.items():
            yield (model, name), value
