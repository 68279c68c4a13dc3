"""Tables of the state: JSON in every store, which the owner of a table decodes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final, Generic, TypeVar

import orjson

T_co = TypeVar("T_co", covariant=True)
# The sums of a day: caller → model → measure → sum.
Counts = dict[str, dict[str, dict[str, int]]]
KEPT_DAYS: Final = 400  # the days whose counts are kept
RawTable = Mapping[str, Any]  # JSON objects, as deep as the keys of the table are long
# The tables that capabilities own; the keys of each are a model and another name. They are named here, so
# that a gateway without the capability exports them, and writes them again when Redis has lost its data.
CAPABILITY_TABLES: Final = ("labels",)


class UnreadableState(ValueError):
    """Stored data that no gateway of this version has written."""


@dataclass(frozen=True)
class Table(Generic[T_co]):
    """A table, by its name in the state. `decode` raises `UnreadableState`."""

    name: str
    decode: Callable[[RawTable], T_co]
    subject: str = "model"  # the meaning of a key's first name, for messages


def create_raw_table(name: str) -> Table[RawTable]:
    """Return a table as a gateway sees it that lacks the owner."""
    return Table(name, dict)


def with_entry(table: RawTable, keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return the table with a value; None deletes the value, and objects that become empty."""
    first, *others = keys
    if others:
        value = with_entry(table.get(first, {}), others, value) or None
    if value is not None:
        return {**table, first: value}
    return {name: kept for name, kept in table.items() if name != first}


def decode_state(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise UnreadableState("invalid JSON") from None


def sum_counts(*parts: Counts) -> Counts:
    """Return the sums in an object of its own."""
    total: Counts = {}
    for part in parts:
        for caller, models in part.items():
            for model, measures in models.items():
                sums = total.setdefault(caller, {}).setdefault(model, {})
                for measure, value in measures.items():
                    sums[measure] = sums.get(measure, 0) + value
    return total


def decode_counts(raw: bytes) -> Counts:
    """Return the stored counts of a day. Raises `UnreadableState`."""
    try:
        return sum_counts(decode_state(raw))
    except (AttributeError, TypeError):
        raise UnreadableState("unexpected structure of counts") from None


def find_first_kept_day(day: str) -> str:
    """Return the first day whose counts are kept on a day, both as YYYY-MM-DD."""
    return (date.fromisoformat(day) - timedelta(KEPT_DAYS - 1)).isoformat()


def check_capability_tables(document: Mapping[str, Any]) -> None:
    """Check that the tables of capabilities have two names for each value. Raises `UnreadableState`."""
    for name in CAPABILITY_TABLES:
        table = document.get(name, {})
        if not isinstance(table, dict) or not all(
            isinstance(each, dict) for each in table.values()
        ):
            raise UnreadableState(f"unexpected structure of the {name}")


# The table of loads: which load of each model every replica confirmed, and loads in progress.

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
