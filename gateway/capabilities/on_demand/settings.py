"""The settings of models that are loaded on demand and of requests that wait, and keys of the models file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field

from gateway.config.settings import CapabilitySettings, CommaSeparated, NonNegativeSeconds
from gateway.repository.models_file import BadModelsFile, LoadRules


class OnDemandSettings(CapabilitySettings):
    on_demand_models: CommaSeparated = ()
    """Comma-separated glob patterns, such as ocr-*, of models that are loaded when they are first requested;
    * stands for every model of the repository that is not in the models file. A model of the models file is
    loaded on demand with on_demand: true."""
    max_loaded_models: int = Field(0, ge=0)
    """Maximum number of models that each replica holds. For another one, the least recently used on-demand
    model is unloaded; 0 means no limit."""
    model_memory_mb: int = Field(0, ge=0)
    """Memory in MiB that the models of each replica may use, by their config parameter gateway.memory_mb; 0
    means no limit."""
    idle_unload_s: NonNegativeSeconds = 0.0
    """Time after which an on-demand model without requests is unloaded; 0 means never."""
    hold_s: NonNegativeSeconds = 0.0
    """Time that inference requests wait while no replica is up, and then until its declared models are
    loaded, at most until their own deadline. /readyz is 200 meanwhile. 0: they are rejected at once."""

    @property
    def is_used(self) -> bool:
        """Return whether requests may wait without a models file."""
        return bool(self.on_demand_models or self.hold_s)


ON_DEMAND: Final = "on_demand"
FORBIDDEN_KEYS: Final = ("required", "versions")


def parse_on_demand(entry: Mapping[str, Any]) -> LoadRules | None:
    """Return the rules of an on-demand model; None for a model that is always loaded."""
    name = entry["name"]
    is_on_demand = entry[ON_DEMAND]
    if not isinstance(is_on_demand, bool):
        raise BadModelsFile(f"on_demand of model {name!r} must be true or false")
    if not is_on_demand:
        return None
    for key in FORBIDDEN_KEYS:
        if entry.get(key):
            raise BadModelsFile(f"model {name!r} has {key}, which on_demand: true does not permit")
    return LoadRules()


MODEL_KEYS: Final = {ON_DEMAND: parse_on_demand}
