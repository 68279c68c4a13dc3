"""Descriptions of on-demand models in the list of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.capabilities.on_demand.activation import ModelActivator
from gateway.fleet.index import (
    UNAVAILABLE,
    Index,
    VersionState,
    find_best_state,
    find_states,
    list_versions,
)
from gateway.routes.openapi import Schema
from gateway.services import ModelDescriber, Services

ON_DEMAND: Final = "ON_DEMAND"  # the state of a model that is not loaded
LISTED_MODEL_FIELDS: Final[Schema] = {
    "on_demand": {"const": True, "description": "The model is loaded when it is requested."},
    "state": {
        "type": "string",
        "description": "Best state of an on-demand model on any replica; ON_DEMAND while it is not "
        "loaded.",
    },
}


class OnDemandDescriber(ModelDescriber):
    """Marks the on-demand models of the list, and shows the best state of each version, not the worst."""

    listed_model_fields = LISTED_MODEL_FIELDS

    def complete_listed_model(
        self, services: Services, model: dict[str, Any], indexes: Mapping[str, Index]
    ) -> None:
        activator = services.find(ModelActivator)
        name = model["name"]
        if activator is None or not activator.is_on_demand(name):
            return
        model["on_demand"] = True
        states = {at: index.model_state(name) for at, index in indexes.items()}
        model["state"] = find_best_name(states)
        model["versions"] = [
            {"version": number, "state": find_best_name(find_states(indexes, name, number))}
            for number in list_versions(indexes.values(), name)
        ]
        if "replicas" in model:
            model["replicas"] = {at: name_state(state) for at, state in model["replicas"].items()}


def find_best_name(states: Mapping[str, VersionState]) -> str:
    return name_state(find_best_state(states.values()).state)


def name_state(state: str) -> str:
    return ON_DEMAND if state == UNAVAILABLE else state
