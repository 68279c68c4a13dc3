"""A repository index as a value: which versions of which models are in which state. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

READY: Final = "READY"
LOADING: Final = "LOADING"
UNLOADING: Final = "UNLOADING"
UNAVAILABLE: Final = "UNAVAILABLE"
# The worst first; what Triton may add later is as bad as unavailable.
STATE_RANKS: Final = {UNAVAILABLE: 0, UNLOADING: 1, LOADING: 2, READY: 3}
UNLOADED: Final = "unloaded"
STATE_KEYS: Final = ("state", "reason")


@dataclass(frozen=True)
class VersionState:
    state: str
    reason: str = ""

    @property
    def rank(self) -> int:
        return STATE_RANKS.get(self.state, 0)


@dataclass(frozen=True)
class Index:
    """Model → version → state. A model that was never loaded has no versions."""

    models: Mapping[str, Mapping[str, VersionState]]

    @cached_property
    def ready_models(self) -> frozenset[str]:
        """The models that can be asked. Kept: a plan looks at every model on every replica."""
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

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether that version can be asked; without one: any."""
        if not version:
            return model in self.ready_models
        found = self.models.get(model, {}).get(version)
        return found is not None and found.state == READY

    def ready_versions(self, model: str) -> frozenset[str]:
        """The versions that can be asked."""
        versions = self.models.get(model, {})
        return frozenset(number for number, found in versions.items() if found.state == READY)

    def model_state(self, model: str) -> VersionState:
        """Of the whole model: what its best version is."""
        versions = self.models.get(model)
        if not versions:
            return VersionState(
                UNAVAILABLE, "" if model in self.models else "unknown to this replica"
            )
        return max(versions.values(), key=lambda version: version.rank)

    def is_changing(self, model: str) -> bool:
        """Whether it is being loaded or unloaded just now."""
        return model in self.changing_models

    def is_unloaded(self, model: str) -> bool:
        """Whether an unload has come to its end."""
        versions = self.models.get(model, {})
        return all(found.state == UNAVAILABLE for found in versions.values())

    def with_model_unloaded(self, model: str) -> Index:
        """The model is not as this says; until the next look it is taken for unloaded."""
        versions = {number: VersionState(UNAVAILABLE) for number in self.models.get(model, {})}
        return Index({**self.models, model: versions})


EMPTY_INDEX: Final = Index({})


def parse_index(document: Any) -> Index:
    """Triton's answer to `POST /v2/repository/index`. Raises `ValueError` for what is none."""
    if not isinstance(document, list):
        raise ValueError("a repository index is a list")
    models: dict[str, dict[str, VersionState]] = {}
    for entry in document:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ValueError("an entry of a repository index has a name")
        if not all(isinstance(entry.get(key, ""), (str, int)) for key in ("version", *STATE_KEYS)):
            raise ValueError("what an entry of a repository index says is text")
        versions = models.setdefault(entry["name"], {})
        if "version" in entry:
            versions[str(entry["version"])] = VersionState(
                str(entry.get("state", UNAVAILABLE)), str(entry.get("reason", ""))
            )
    return Index(models)


def merge_indexes(indexes: Mapping[str, Index]) -> list[dict[str, str]]:
    """The indexes of several replicas as one, in Triton's own form: the worst state wins.

    A version that a replica does not have is unavailable there, and the reason says where.
    """
    entries: list[dict[str, str]] = []
    for name in sorted({name for index in indexes.values() for name in index.models}):
        numbers = {number for index in indexes.values() for number in index.models.get(name, ())}
        if not numbers:
            entries.append({"name": name})
        for number in sorted(numbers, key=version_sort_key):
            found = {
                address: index.models.get(name, {}).get(
                    number, VersionState(UNAVAILABLE, "not loaded")
                )
                for address, index in indexes.items()
            }
            entries.append({"name": name, "version": number, **merge_version_states(found)})
    return entries


def merge_version_states(states: Mapping[str, VersionState]) -> dict[str, str]:
    """State and reason of a version over the replicas; where they differ the reason names them."""
    bad = min(version.rank for version in states.values())
    there = [address for address, version in states.items() if version.rank == bad]
    state, reason = states[there[0]].state, states[there[0]].reason
    told = {"state": state}
    if len(there) < len(states):
        where = ", ".join(there)
        reason = f"on {where}: {reason}" if reason else f"on {where}"
    if reason:
        told["reason"] = reason
    return told


def version_sort_key(version: str) -> tuple[int, str]:
    return (int(version) if version.isdecimal() and len(version) < 20 else 0, version)


def model_names(indexes: Iterable[Index]) -> set[str]:
    return {name for index in indexes for name in index.models}
