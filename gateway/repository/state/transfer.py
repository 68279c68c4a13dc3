"""Export and import of the state: desired models, version labels and cordons, as a JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import orjson

from gateway.messages import CommandError
from gateway.repository.state.desired import (
    DesiredModel,
    Document,
    StateStore,
    UnreadableState,
    decode_state,
    desired_model_to_dict,
    parse_label_table,
)
from gateway.version_labels import LabelTable

EXPORT_FORMAT: Final = 1


class BadExport(CommandError):
    """The file is not an exported state."""


@dataclass(frozen=True)
class ExportedState:
    """The state without what belongs to one store: revisions, loads and operations."""

    models: Mapping[str, DesiredModel]
    labels: LabelTable
    cordons: frozenset[str]

    def to_json(self) -> bytes:
        models = {name: desired_model_to_dict(self.models[name]) for name in sorted(self.models)}
        labels = {
            model: {name: self.labels[model][name].to_dict() for name in sorted(self.labels[model])}
            for model in sorted(self.labels)
        }
        document = {
            "format": EXPORT_FORMAT,
            "models": models,
            "labels": labels,
            "cordons": sorted(self.cordons),
        }
        return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def parse_export(raw: bytes) -> ExportedState:
    """Raises `BadExport`."""
    try:
        return parse_document(decode_state(raw))
    except UnreadableState as exc:
        raise BadExport(f"the file is not an exported state: {exc}") from None


def parse_document(document: Any) -> ExportedState:
    """Raises `BadExport` or `UnreadableState`."""
    match document:
        case {"format": int(version)} if version != EXPORT_FORMAT:
            raise BadExport(f"format {version} is not supported, only format {EXPORT_FORMAT}")
        case {"format": int(), "models": dict(models), "cordons": list(cordons)}:
            parsed = {name: parse_model(name, model) for name, model in models.items()}
            labels = parse_label_table(document.get("labels", {}))
            if all(isinstance(name, str) for name in cordons):
                return ExportedState(parsed, labels, frozenset(cordons))
    raise UnreadableState("unexpected structure")


def parse_model(name: str, document: Any) -> DesiredModel:
    match document:
        case {"loaded": bool(loaded), "parameters": dict(parameters), **unknown}:
            return DesiredModel(loaded, parameters, unknown=cast(Document, unknown))
    raise UnreadableState(f"unexpected structure of model {name!r}")


async def export_state(store: StateStore) -> ExportedState:
    models, labels = await store.read_desired_models(), await store.read_labels()
    return ExportedState(models, labels, await store.read_cordons())


async def import_state(store: StateStore, exported: ExportedState) -> None:
    """Make the stored state equal to the exported one; models and labels that it lacks are forgotten."""
    before = await export_state(store)
    for name, desired in exported.models.items():
        current = before.models.get(name)
        if current is None or desired_model_to_dict(current) != desired_model_to_dict(desired):
            await store.set_desired_model(name, desired)
    for name in before.models.keys() - exported.models.keys():
        await store.set_desired_model(name, None)
    for model in before.labels.keys() | exported.labels.keys():
        old, new = before.labels.get(model, {}), exported.labels.get(model, {})
        for name in old.keys() | new.keys():
            if old.get(name) != new.get(name):
                await store.set_label(model, name, new.get(name))
    for name in before.cordons ^ exported.cordons:
        await store.set_cordon(name, is_cordoned=name in exported.cordons)
