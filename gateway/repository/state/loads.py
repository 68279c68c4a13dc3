"""The table of loads: which load of each model every replica confirmed, and loads in progress."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.repository.state.tables import with_entry

# Replica → model → the id of the last confirmed load, or the token of a load in progress.
Loads = Mapping[str, Mapping[str, str]]

LOADS: Final = "loads"  # the name of the table
IN_PROGRESS_PREFIX: Final = "?"
UNKNOWN_LOAD: Final = ""  # the replica may have any load of the model, or none


@dataclass(frozen=True)
class StartedLoad:
    """A load in progress on a replica, and the load that the replica had confirmed before."""

    token: str
    confirmed_load: str


def parse_loads(document: Any) -> Loads:
    # An invalid document yields an empty table, so that the models are loaded again.
    if not isinstance(document, dict):
        return {}
    return {
        replica: {model: load for model, load in models.items() if isinstance(load, str)}
        for replica, models in document.items()
        if isinstance(models, dict)
    }


def new_load_token(owner: str) -> str:
    return f"{IN_PROGRESS_PREFIX}{owner}:{secrets.token_hex(8)}"


def is_in_progress(load: str) -> bool:
    return load.startswith(IN_PROGRESS_PREFIX)


def token_owner(token: str) -> str:
    return token[len(IN_PROGRESS_PREFIX) :].partition(":")[0]


def drop_token(load: str) -> str:
    """Return a confirmed load; empty if it is in progress, and so unknown."""
    return "" if is_in_progress(load) else load


def with_finished_load(
    loads: Loads, replica: str, model: str, token: str, resulting_load: str
) -> Loads:
    """Return the table with the resulting load.

    If another load has begun since, it is unknown which ended last. A repeated call changes nothing.
    """
    is_known = loads.get(replica, {}).get(model) in (token, resulting_load)
    return with_load(loads, replica, model, resulting_load if is_known else UNKNOWN_LOAD)


def with_load(loads: Loads, replica: str, model: str, load: str) -> Loads:
    """Return the table with a load; without one if it is unknown."""
    return with_entry(loads, (replica, model), load or None)


def without_replica(loads: Loads, replica: str) -> Loads:
    return with_entry(loads, (replica,), None)


def drop_orphaned_loads(loads: Loads, live_owners: frozenset[str]) -> Loads:
    """Return the table without loads in progress of exited processes: their results are unknown."""
    return {
        replica: {
            model: load
            for model, load in models.items()
            if not is_in_progress(load) or token_owner(load) in live_owners
        }
        for replica, models in loads.items()
    }


def load_owners(loads: Loads) -> frozenset[str]:
    all_loads = (load for models in loads.values() for load in models.values())
    return frozenset(token_owner(load) for load in all_loads if is_in_progress(load))
