"""The choice of a version for each request whose version is a label."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

from prometheus_client import Counter as CounterMetric

from gateway.capabilities.versions.labels import LABELS, LabelTable, ModelLabels, VersionLabel
from gateway.capabilities.versions.splits import (
    WeightedRotation,
    choose_version_by_key,
    find_largest_share,
)
from gateway.errors import GatewayError, Unavailable
from gateway.fleet.pool import ReplicaPool
from gateway.messages import join_names, quote_text
from gateway.repository.models_file import DeclaredModel
from gateway.repository.shared_state import SharedState
from gateway.telemetry.request_info import RequestScope, name_action, record_change
from gateway.triton.sequence import SequenceStep

log = logging.getLogger(__name__)

SPLIT_KEY_HEADER: Final = b"x-split-key"
MAX_SEQUENCES: Final = 65_536
# The key of the label in the scope of a request that may be copied.
CHOSEN_LABEL: Final = "chosen_label"


class UnknownLabel(GatewayError):
    status = 404
    code = "LABEL_NOT_FOUND"

    def __init__(self, model: str, name: str, labels: Iterable[str] = ()) -> None:
        known = sorted(labels)
        text = f"its labels are {join_names(known)}" if known else "it has no labels"
        super().__init__(f"model {quote_text(model)} has no label {quote_text(name)}; {text}")


class LabelNotReady(Unavailable):
    code = "LABEL_NOT_READY"

    def __init__(self, model: str, name: str, versions: Iterable[str]) -> None:
        super().__init__(
            f"label {quote_text(name)} of model {quote_text(model)} means version {' or '.join(versions)}, "
            "which is not ready on any replica; load it, or change the label"
        )


@dataclass
class SequenceVersions:
    """The versions of running sequences. The sequence that was idle longest is dropped first."""

    _versions: OrderedDict[tuple[str, int | str], str] = field(default_factory=OrderedDict)

    def find_version(self, model: str, step: SequenceStep, choose: Callable[[], str]) -> str:
        """Return the version of the sequence: the one of its start, or if that is unknown, `choose()`."""
        key = (model, step.sequence_id)
        known = self._versions.pop(key, None)
        version = choose() if known is None or step.is_start else known
        if not step.is_end:
            self._versions[key] = version
            if len(self._versions) > MAX_SEQUENCES:
                self._versions.popitem(last=False)
        return version


class ActiveLabel:
    """A label in use: the rotation of its versions, and the versions that can be served now."""

    def __init__(
        self,
        pool: ReplicaPool,
        sequences: SequenceVersions,
        redirects: CounterMetric,
        *,
        model: str,
        name: str,
        value: VersionLabel,
    ) -> None:
        self._pool = pool
        self._sequences = sequences
        self._redirects = redirects
        self.model = model
        self.name = name
        self.value = value
        self._ready = value.shares
        self._is_split = value.is_split
        self._rotation = self._ready_rotation = WeightedRotation(self._ready)
        self._seen_change = -1

    def choose_version(self, scope: RequestScope) -> str:
        ready = self.find_ready_shares()
        if not self._is_split:
            return next(iter(ready))
        if key := self._find_split_key(scope):
            return self.choose_by_key(key)
        if scope["method"] != "POST":  # the request reads metadata
            return find_largest_share(ready)
        version = self._rotation.choose()
        if version not in ready:
            self._count_redirect(version)
            return self._ready_rotation.choose()
        return version

    def choose_sequence_version(self, scope: RequestScope, chosen: str, step: SequenceStep) -> str:
        """Return the version of a sequence instead of the one that was `chosen` for the request.

        A sequence keeps the version of its start. One that another gateway started gets the version of its
        hash, which is the same everywhere.
        """
        key = self._find_split_key(scope)
        if not key:
            key = f"sequence {step.sequence_id}"
            if self._is_split and len(self._ready) == len(self.value.shares):
                self._rotation.return_choice(chosen)
        return self._sequences.find_version(self.model, step, lambda: self.choose_by_key(key))

    def _find_split_key(self, scope: RequestScope) -> str:
        """Return the key that decides on the version of a request; empty if the rotation does."""
        for header in scope["headers"]:
            if header[0] == SPLIT_KEY_HEADER:
                return str(header[1], "latin-1")
        return str(scope["request_info"].key) if self.value.is_sticky_by_key else ""

    def redirect(self, version: str) -> str:
        """Return a ready version other than this one; empty if there is none."""
        ready = {each: share for each, share in self.find_ready_shares().items() if each != version}
        if not ready:
            return ""
        self._count_redirect(version)
        return find_largest_share(ready)

    def choose_by_key(self, key: str) -> str:
        """Return the version of a key; a different one only while that is missing."""
        ready = self.find_ready_shares()
        version = choose_version_by_key(self.value.shares, key)
        if version not in ready:
            self._count_redirect(version)
            return choose_version_by_key(ready, key)
        return version

    def find_ready_shares(self) -> Mapping[str, int]:
        """Return the versions that a replica can serve. Raises `LabelNotReady` if there are none."""
        if self._seen_change != self._pool.changes.count:
            self._seen_change = self._pool.changes.count
            before, self._ready = self._ready, self._find_ready_shares()
            if before.keys() != self._ready.keys():
                self._ready_rotation = WeightedRotation(self._ready)
            for version in before.keys() - self._ready.keys():
                message = "version %s of label %s of model %s is not ready on any replica"
                log.warning(message, version, self.name, self.model)
        if not self._ready:
            raise LabelNotReady(self.model, self.name, self.value.shares)
        return self._ready

    def _find_ready_shares(self) -> Mapping[str, int]:
        # The request waits for the model, or gets the error of the pool.
        if not self._pool.has_live_replica or self._pool.is_awaited(self.model):
            return self.value.shares
        # Cordoned replicas still serve the running sequences of a version.
        shares = self.value.shares
        found = {each: self._pool.find_candidates(self.model, each) for each in shares}
        served = {each: share for each, share in shares.items() if found[each].serving}
        return served or {each: share for each, share in shares.items() if found[each].holders}

    def _count_redirect(self, version: str) -> None:
        self._redirects.labels(self.model, self.name, version).inc()


class LabelChoice:
    """A `VersionChoice` by a label."""

    def __init__(self, label: ActiveLabel, scope: RequestScope) -> None:
        self.version = label.choose_version(scope)
        self._label = label
        self._scope = scope
        cast("dict[str, Any]", scope)[CHOSEN_LABEL] = label

    def choose_sequence_version(self, step: SequenceStep) -> str:
        # A step means nothing without the others, some of which would not be copied.
        cast("dict[str, Any]", self._scope).pop(CHOSEN_LABEL, None)
        self.version = self._label.choose_sequence_version(self._scope, self.version, step)
        return self.version

    def choose_other_version(self, refused: str, step: SequenceStep | None) -> str:
        if step is not None or not self._label.value.is_split:
            return ""
        version = self._label.redirect(refused)
        self.version = version or self.version
        return version


class LabelRouter:
    """The labels of all models, from the state and from the models file, which takes precedence."""

    def __init__(
        self,
        pool: ReplicaPool,
        state: SharedState,
        redirects: CounterMetric,
    ) -> None:
        self._pool = pool
        self._state = state
        self._redirects = redirects
        self._active: dict[tuple[str, str], ActiveLabel] = {}
        self._sequences = SequenceVersions()
        self.labels: LabelTable = {}
        self.highest_shadow_percent = 0.0
        self._update()
        state.refresh_listeners.append(self._update)

    def find_label(self, model: str, name: str) -> ActiveLabel | None:
        return self._active.get((model, name))

    async def set_label(self, model: str, name: str, label: VersionLabel | None) -> None:
        before = self._state.store.get(LABELS).get(model, {}).get(name)
        documents = [None if each is None else each.to_dict() for each in (before, label)]
        await self._state.store.write(LABELS, (model, name), documents[1])
        name_action("label")
        record_change(f"label {name} of model {model}", *documents)
        self._update()

    def is_declared(self, model: str, name: str) -> bool:
        declared = self._state.declared_models.get(model)
        return declared is not None and name in find_declared_labels(declared)

    def _update(self) -> None:
        """Keep the rotations of labels that did not change."""
        labels = dict(self._state.store.get(LABELS))
        for model, declared in self._state.declared_models.items():
            if declared_labels := find_declared_labels(declared):
                labels[model] = {**labels.get(model, {}), **declared_labels}
        before, self._active = self._active, {}
        for model, model_labels in labels.items():
            for name, value in model_labels.items():
                active = before.get((model, name))
                if active is None or active.value != value:
                    active = ActiveLabel(
                        self._pool,
                        self._sequences,
                        self._redirects,
                        model=model,
                        name=name,
                        value=value,
                    )
                self._active[model, name] = active
        self.labels = labels
        shadows = (each.value.shadow for each in self._active.values())
        percents = (shadow.percent for shadow in shadows if shadow is not None)
        self.highest_shadow_percent = max(percents, default=0.0)


def find_declared_labels(model: DeclaredModel) -> ModelLabels:
    labels: ModelLabels = model.capability_values.get(LABELS.name, {})
    return labels
