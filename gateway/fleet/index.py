"""A repository index as a value: the state of each version of each model. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from gateway.triton.error_mapping import sanitize_message

READY: Final = "READY"
LOADING: Final = "LOADING"
UNLOADING: Final = "UNLOADING"
UNAVAILABLE: Final = "UNAVAILABLE"
# From worst to best. A state that this gateway does not know ranks like UNAVAILABLE.
STATE_RANKS: Final = {UNAVAILABLE: 0, UNLOADING: 1, LOADING: 2, READY: 3}
# The states of TensorFlow Serving's `ModelVersionStatus`.
TF_SERVING_STATES: Final = {
    READY: "AVAILABLE",
    LOADING: "LOADING",
    UNLOADING: "UNLOADING",
    UNAVAILABLE: "END",
}
UNLOADED: Final = "unloaded"
STATE_KEYS: Final = ("state", "reason")
# Every plan goes through all of them, in about 2 µs each.
MAX_INDEX_ENTRIES: Final = 50_000


@dataclass(frozen=True)
class VersionState:
    state: str
    reason: str = ""

    @property
    def rank(self) -> int:
        return STATE_RANKS.get(self.state, 0)

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state

    def to_dict(self) -> dict[str, str]:
        reason = {"reason": self.reason} if self.reason else {}
        return {"state": self.state, **reason}


NEVER_LOADED: Final = VersionState(UNAVAILABLE)
NOT_IN_REPOSITORY: Final = VersionState(UNAVAILABLE, "not in this replica's repository")


@dataclass(frozen=True)
class Index:
    """Model → version → state. A model that was never loaded has no versions."""

    models: Mapping[str, Mapping[str, VersionState]]

    # Cached, because each plan checks every model on every replica.
    @cached_property
    def ready_models(self) -> frozenset[str]:
        return self._models_in_state(READY)

    @cached_property
    def changing_models(self) -> frozenset[str]:
        return self._models_in_state(LOADING, UNLOADING)

    def _models_in_state(self, *states: str) -> frozenset[str]:
        return frozenset(
            name
            for name, versions in self.models.items()
            if any(version.state in states for version in versions.values())
        )

    @cached_property
    def ready_versions_by_model(self) -> Mapping[str, frozenset[str]]:
        return {name: self.ready_versions(name) for name in self.ready_models}

    @cached_property
    def state_counts(self) -> Counter[str]:
        return Counter(self.model_state(name).state for name in self.models)

    def is_ready(self, model: str, version: str = "") -> bool:
        """Return whether the version is ready, or without a version, whether any is."""
        if not version:
            return model in self.ready_models
        version_state = self.models.get(model, {}).get(version)
        return version_state is not None and version_state.state == READY

    def ready_versions(self, model: str) -> frozenset[str]:
        versions = self.models.get(model, {})
        return frozenset(number for number, value in versions.items() if value.state == READY)

    def model_state(self, model: str) -> VersionState:
        return self._model_states.get(model, NOT_IN_REPOSITORY)

    @cached_property
    def _model_states(self) -> Mapping[str, VersionState]:
        return {name: find_best_state(versions.values()) for name, versions in self.models.items()}

    def is_changing(self, model: str) -> bool:
        return model in self.changing_models

    def is_loading(self, model: str) -> bool:
        return any(version.state == LOADING for version in self.models.get(model, {}).values())

    def is_unloaded(self, model: str) -> bool:
        versions = self.models.get(model, {})
        return all(version.state == UNAVAILABLE for version in versions.values())

    def with_model_unloaded(self, model: str, version: str = "") -> Index:
        """Return the index to assume until the next probe, after Triton contradicted this one."""
        versions = {
            number: VersionState(UNAVAILABLE) if version in ("", number) else state
            for number, state in self.models.get(model, {}).items()
        }
        return Index({**self.models, model: versions})


EMPTY_INDEX: Final = Index({})


def find_best_state(states: Iterable[VersionState]) -> VersionState:
    return max(states, key=lambda state: state.rank, default=NEVER_LOADED)


def parse_index(document: Any) -> Index:
    """Parse Triton's response to `POST /v2/repository/index`. Raises `ValueError` if it is invalid."""
    if not isinstance(document, list):
        raise ValueError("the repository index must be a list")
    if len(document) > MAX_INDEX_ENTRIES:
        raise ValueError(f"the repository index has more than {MAX_INDEX_ENTRIES} entries")
    models: dict[str, dict[str, VersionState]] = {}
    for entry in document:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ValueError("an entry of the repository index must have a name")
        if not all(isinstance(entry.get(key, ""), (str, int)) for key in ("version", *STATE_KEYS)):
            raise ValueError("version, state and reason in a repository index must be strings")
        versions = models.setdefault(entry["name"], {})
        if "version" in entry:
            versions[str(entry["version"])] = VersionState(
                str(entry.get("state", UNAVAILABLE)), sanitize_message(str(entry.get("reason", "")))
            )
    return Index(models)


def merge_indexes(
    indexes: Mapping[str, Index], models: Iterable[str] | None = None
) -> list[dict[str, str]]:
    """Merge the indexes of several replicas into one, in Triton's format; the worst state wins.

    A version that is missing on a replica counts as unavailable there, and the reason names the replica.
    Only the given models are merged, if any are given.
    """
    entries: list[dict[str, str]] = []
    known = model_names(indexes.values()) if models is None else models
    for name in sorted(known):
        numbers = list_versions(indexes.values(), name)
        if not numbers and any(name in index.models for index in indexes.values()):
            entries.append({"name": name})
        for number in numbers:
            states = find_states(indexes, name, number)
            entries.append({"name": name, "version": number, **merge_version_states(states)})
    return entries


def merge_version_states(states: Mapping[str, VersionState]) -> dict[str, str]:
    distinct = set(states.values())
    worst_rank = min(version.rank for version in distinct)
    worst_states = {version for version in distinct if version.rank == worst_rank}
    addresses = [address for address, version in states.items() if version in worst_states]
    worst = states[addresses[0]]
    if len(addresses) < len(states):
        place = f"on {', '.join(addresses)}"
        worst = replace(worst, reason=f"{place}: {worst.reason}" if worst.reason else place)
    return worst.to_dict()


def version_sort_key(version: str) -> tuple[int, str]:
    return (int(version) if version.isdecimal() and len(version) < 20 else 0, version)


def list_versions(indexes: Iterable[Index], model: str) -> list[str]:
    numbers = {number for index in indexes for number in index.models.get(model, ())}
    return sorted(numbers, key=version_sort_key)


def model_names(indexes: Iterable[Index]) -> set[str]:
    return set().union(*(index.models for index in indexes))


def build_index_entry(indexes: Mapping[str, Index], entry: Mapping[str, str]) -> dict[str, Any]:
    if "version" not in entry:
        return dict(entry)
    states = find_states(indexes, entry["name"], entry["version"])
    return {**entry, "replicas": {at: version.to_dict() for at, version in states.items()}}


def find_states(indexes: Mapping[str, Index], model: str, version: str) -> dict[str, VersionState]:
    missing = VersionState(UNAVAILABLE, "not loaded")
    return {at: index.models.get(model, {}).get(version, missing) for at, index in indexes.items()}


def build_version_status(entries: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return TensorFlow Serving's `model_version_status` for the entries of an index.

    Their reasons are left out, because they name replicas.
    """
    return [
        {
            "version": entry["version"],
            "state": TF_SERVING_STATES.get(entry.get("state", ""), "UNKNOWN"),
            "status": {"error_code": "OK", "error_message": ""},
        }
        for entry in entries
        if "version" in entry
    ]
