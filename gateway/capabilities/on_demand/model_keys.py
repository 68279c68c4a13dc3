"""The keys of on-demand models in the models file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.repository.models_file import BadModelsFile, LoadRules

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
