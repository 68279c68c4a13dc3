"""The settings of models that are loaded on demand and of requests that wait, and keys of the models file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    eviction_protection_s: NonNegativeSeconds = 10.0
    """Time after a use during which an on-demand model is not unloaded to make room for a model of another
    caller: another key, or without keys another client address. 0: not protected."""
    idle_unload_s: NonNegativeSeconds = 0.0
    """Time after which an on-demand model without requests is unloaded; 0 means never."""
    hold_s: NonNegativeSeconds = 0.0
    """Time that inference requests wait while no replica is up, and then until its declared models are
    loaded, at most until their own deadline. /readyz is 200 meanwhile. 0: they are rejected at once."""
    scaler_port: int = Field(0, ge=0, le=65535)
    """Port of an external scaler for KEDA (gRPC, externalscaler.ExternalScaler), on all addresses: it reports
    whether requests run or wait, and how many. 0: none. It requires a single worker."""

    @property
    def is_used(self) -> bool:
        """Return whether requests may wait, or are counted for the scaler, without a models file."""
        return bool(self.on_demand_models or self.hold_s or self.scaler_port)


ON_DEMAND: Final = "on_demand"
REPLICAS: Final = "replicas"
FORBIDDEN_KEYS: Final = ("required", "versions")


@dataclass(frozen=True)
class CopyLimits(LoadRules):
    """The number of replicas that may hold an on-demand model."""

    minimum: int = 1
    maximum: int = 1


def parse_on_demand(entry: Mapping[str, Any]) -> CopyLimits | None:
    """Return the limits of an on-demand model; None for a model that is always loaded."""
    name = entry["name"]
    is_on_demand = entry[ON_DEMAND]
    if not isinstance(is_on_demand, bool):
        raise BadModelsFile(f"on_demand of model {name!r} must be true or false")
    if not is_on_demand:
        return None
    for key in FORBIDDEN_KEYS:
        if entry.get(key):
            raise BadModelsFile(f"model {name!r} has {key}, which on_demand: true does not permit")
    written = entry.get(REPLICAS, 1)
    limits = written if isinstance(written, dict) else {"min": written, "max": written}
    minimum: Any = limits.get("min", 1)
    maximum: Any = limits.get("max", minimum)
    are_numbers = type(minimum) is int and type(maximum) is int
    if are_numbers and limits.keys() <= {"min", "max"} and 1 <= minimum <= maximum:
        return CopyLimits(minimum, maximum)
    raise BadModelsFile(
        f"replicas of model {name!r} must be a number above 0, or {{min: 1, max: 3}}"
    )


def check_copy_limits(entry: Mapping[str, Any]) -> None:
    """Check that the model is on demand; `parse_on_demand` reads the key. Raises `BadModelsFile`."""
    if not entry.get(ON_DEMAND):
        raise BadModelsFile(
            f"model {entry['name']!r} has replicas, which only a model with on_demand: true can have"
        )


MODEL_KEYS: Final = {ON_DEMAND: parse_on_demand, REPLICAS: check_copy_limits}
