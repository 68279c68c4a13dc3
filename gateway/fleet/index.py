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
RANKS: Final = {UNAVAILABLE: 0, UNLOADING: 1, LOADING: 2, READY: 3}
UNLOADED: Final = "unloaded"
TOLD: Final = ("state", "reason")


@dataclass(frozen=True)
class Version:
    state: str
    reason: str = ""

    @property
    def rank(self) -> int:
        return RANKS.get(self.state, 0)


@dataclass(frozen=True)
class Index:
    """Model → version → state. A model that was never loaded has no versions."""

    models: Mapping[str, Mapping[str, Version]]

    @cached_property
    def loaded(self) -> frozenset[str]:
        """The models that can be asked. Kept: a plan looks at every model on every replica."""
        return self._having(READY)

    @cached_property
    def changing(self) -> frozenset[str]:
        return self._having(LOADING, UNLOADING)

    def _having(self, *states: str) -> frozenset[str]:
        return frozenset(
            name
            for name, versions in self.models.items()
            if any(version.state in states for version in versions.values())
        )

    def ready(self, model: str, version: str = "") -> bool:
        """Whether that version can be asked; without one: any."""
        if not version:
            return model in self.loaded
        found = self.models.get(model, {}).get(version)
        return found is not None and found.state == READY

    def ready_versions(self, model: str) -> frozenset[str]:
        """The versions that can be asked."""
        versions = self.models.get(model, {})
        return frozenset(number for number, found in versions.items() if found.state == READY)

    def state(self, model: str) -> Version:
        """Of the whole model: what its best version is."""
        versions = self.models.get(model)
        if not versions:
            return Version(UNAVAILABLE, "" if model in self.models else "unknown to this replica")
        return max(versions.values(), key=lambda version: version.rank)

    def busy(self, model: str) -> bool:
        """Whether it is being loaded or unloaded just now."""
        return model in self.changing

    def settled(self, model: str) -> bool:
        """Whether an unload has come to its end."""
        versions = self.models.get(model, {})
        return all(found.state == UNAVAILABLE for found in versions.values())

    def without(self, model: str) -> Index:
        """The model is not as this says; until the next look it is taken for unloaded."""
        versions = {number: Version(UNAVAILABLE) for number in self.models.get(model, {})}
        return Index({**self.models, model: versions})


NOTHING: Final = Index({})


def index_of(document: Any) -> Index:
    """Triton's answer to `POST /v2/repository/index`. Raises `ValueError` for what is none."""
    if not isinstance(document, list):
        raise ValueError("a repository index is a list")
    models: dict[str, dict[str, Version]] = {}
    for entry in document:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise ValueError("an entry of a repository index has a name")
        if not all(isinstance(entry.get(key, ""), (str, int)) for key in ("version", *TOLD)):
            raise ValueError("what an entry of a repository index says is text")
        versions = models.setdefault(entry["name"], {})
        if "version" in entry:
            versions[str(entry["version"])] = Version(
                str(entry.get("state", UNAVAILABLE)), str(entry.get("reason", ""))
            )
    return Index(models)


def merged(indexes: Mapping[str, Index]) -> list[dict[str, str]]:
    """The indexes of several replicas as one, in Triton's own form: the worst state wins.

    A version that a replica does not have is unavailable there, and the reason says where.
    """
    entries: list[dict[str, str]] = []
    for name in sorted({name for index in indexes.values() for name in index.models}):
        numbers = {number for index in indexes.values() for number in index.models.get(name, ())}
        if not numbers:
            entries.append({"name": name})
        for number in sorted(numbers, key=numeric):
            found = {
                address: index.models.get(name, {}).get(number, Version(UNAVAILABLE, "not loaded"))
                for address, index in indexes.items()
            }
            entries.append({"name": name, "version": number, **worst(found)})
    return entries


def worst(found: Mapping[str, Version]) -> dict[str, str]:
    """State and reason of a version over the replicas; where they differ the reason names them."""
    bad = min(version.rank for version in found.values())
    there = [address for address, version in found.items() if version.rank == bad]
    state, reason = found[there[0]].state, found[there[0]].reason
    told = {"state": state}
    if len(there) < len(found):
        where = ", ".join(there)
        reason = f"on {where}: {reason}" if reason else f"on {where}"
    if reason:
        told["reason"] = reason
    return told


def numeric(version: str) -> tuple[int, str]:
    return (int(version) if version.isdecimal() and len(version) < 20 else 0, version)


def names(indexes: Iterable[Index]) -> set[str]:
    return {name for index in indexes for name in index.models}
