"""Export and import of the state: desired models and cordons, as a JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gateway.messages import CommandError
from gateway.state.desired import (
    DesiredModel,
    StateStore,
    UnreadableState,
    decode_state,
    desired_model_to_dict,
)

EXPORT_FORMAT: Final = 1


class BadExport(CommandError):
    """The file is not an exported state."""


@dataclass(frozen=True)
class ExportedState:
    """The state without what belongs to one store: revisions, loads and operations."""

    models: Mapping[str, DesiredModel]
    cordons: frozenset[str]

    def to_json(self) -> bytes:
        models = {name: desired_model_to_dict(self.models[name]) for name in sorted(self.models)}
        document = {"format": EXPORT_FORMAT, "models": models, "cordons": sorted(self.cordons)}
        return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def parse_export(raw: bytes) -> ExportedState:
    """Raises `BadExport`."""
    try:
        document: Any = decode_state(raw)
    except UnreadableState as exc:
        raise BadExport(f"the file is not an exported state: {exc}") from None
    match document:
        case {"format": int(version)} if version != EXPORT_FORMAT:
            raise BadExport(f"format {version} is not supported, only format {EXPORT_FORMAT}")
        case {"format": int(), "models": dict(models), "cordons": list(cordons)}:
            parsed = {name: parse_model(name, model) for name, model in models.items()}
            if all(isinstance(name, str) for name in cordons):
                return ExportedState(parsed, frozenset(cordons))
    raise BadExport("the file is not an exported state: unexpected structure")


def parse_model(name: str, document: Any) -> DesiredModel:
    match document:
        case {"loaded": bool(loaded), "parameters": dict(parameters)}:
            return DesiredModel(loaded, parameters)
    raise BadExport(f"the file is not an exported state: unexpected structure of model {name!r}")


async def export_state(store: StateStore) -> ExportedState:
    return ExportedState(await store.read_desired_models(), await store.read_cordons())


async def import_state(store: StateStore, exported: ExportedState) -> None:
    """Make the stored state equal to the exported one; models that it lacks are forgotten."""
    before = await export_state(store)
    for name, desired in exported.models.items():
        current = before.models.get(name)
        if current is None or desired_model_to_dict(current) != desired_model_to_dict(desired):
            await store.set_desired_model(name, desired)
    for name in before.models.keys() - exported.models.keys():
        await store.set_desired_model(name, None)
    for name in before.cordons ^ exported.cordons:
        await store.set_cordon(name, is_cordoned=name in exported.cordons)
