"""Changes of version labels, and their descriptions."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from typing import Any, Final

import orjson

from gateway.capabilities.versions.label_router import LabelChoice, LabelRouter, UnknownLabel
from gateway.capabilities.versions.labels import (
    DEFAULT_LABEL,
    InvalidLabel,
    VersionLabel,
    check_label_name,
    is_label_name,
    parse_label,
)
from gateway.errors import Conflict, MalformedRequest, UnknownModel
from gateway.fleet.health import HealthState
from gateway.fleet.index import (
    READY,
    UNAVAILABLE,
    VersionState,
    build_version_status,
    find_best_state,
)
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.fleet.signatures import SignatureCache
from gateway.messages import quote_text
from gateway.repository.resolver import VersionPolicy
from gateway.repository.shared_state import SharedState
from gateway.telemetry.request_info import RequestScope

MAX_LABELS: Final = 64  # labels of one model
MAX_PROBE_WAIT_S: Final = 2.0


class VersionNotReady(Conflict):
    code = "VERSION_NOT_READY"

    def __init__(self, model: str, version: str, reasons: Iterable[str], policy: str) -> None:
        advice = "load it first, or upload it if the repository lacks it"
        if policy:
            advice = (
                f"the version_policy of the model is {policy}: change it to serve this version and load "
                "the model again, or upload the version if the repository lacks it"
            )
        super().__init__(
            f"a label cannot mean version {version} of model {quote_text(model)}, which is not ready "
            f"({'; '.join(reasons)}); {advice}"
        )


class LabelManager(VersionPolicy):
    """The version labels of the fleet: the rules for requests, and the changes through the API."""

    def __init__(
        self,
        pool: ReplicaPool,
        state: SharedState,
        router: LabelRouter,
        signatures: SignatureCache,
        quorum: int,
    ) -> None:
        self._pool = pool
        self._signatures = signatures
        self._state = state
        self._router = router
        self._quorum = quorum

    @property
    def models_with_rules(self) -> Container[str]:
        return self._router.labels

    def is_label(self, version: str) -> bool:
        return is_label_name(version)

    def list_labels(self, model: str) -> dict[str, Any]:
        labels = self._router.labels.get(model, {})
        return {name: label.to_dict() for name, label in labels.items()}

    def find_default_versions(self, model: str) -> Collection[str]:
        label = self._router.find_label(model, DEFAULT_LABEL)
        return () if label is None else label.value.shares

    def choose(self, scope: RequestScope, model: str, version: str) -> LabelChoice | None:
        label = self._router.find_label(model, version or DEFAULT_LABEL)
        return None if label is None else LabelChoice(label, scope)

    def explain_unknown(self, model: str, version: str) -> UnknownLabel | None:
        if not (is_label_name(version) and self._pool.is_listed(model)):
            return None
        return UnknownLabel(model, version, self._router.labels.get(model, ()))

    async def set_default_version(self, model: str, version: str) -> None:
        await self.set_label(model, DEFAULT_LABEL, {"version": version})

    async def set_label(self, model: str, name: str, document: Any) -> dict[str, Any]:
        """Store a label and return its description.

        Raises `MalformedRequest`, `UnknownModel`, or `Conflict` if the label is declared or one of its
        versions is not ready on enough replicas.
        """
        try:
            check_label_name(name)
            label = parse_label(document)
        except InvalidLabel as exc:
            raise MalformedRequest(str(exc)) from None
        async with self._state.lock_model(model):
            self._check_model(model)
            self._check_not_declared(model, name)
            labels = self._router.labels.get(model, {})
            if name not in labels and len(labels) >= MAX_LABELS:
                raise Conflict(
                    f"model {quote_text(model)} has {len(labels)} labels, which is the maximum; "
                    "delete one first"
                )
            await self._pool.monitor.probe_all(MAX_PROBE_WAIT_S)
            for version in label.versions:
                await self._check_version(model, version)
            await self._router.set_label(model, name, label)
        return self._describe(model, name, label)

    async def delete_label(self, model: str, name: str) -> dict[str, Any]:
        async with self._state.lock_model(model):
            label = self._find_label(model, name)
            self._check_not_declared(model, name)
            description = self._describe(model, name, label)
            await self._router.set_label(model, name, None)
        return description

    async def forget_model(self, model: str) -> None:
        async with self._state.lock_model(model):
            for name in list(self._router.labels.get(model, {})):
                if not self._router.is_declared(model, name):
                    await self._router.set_label(model, name, None)

    def describe_label(self, model: str, name: str) -> dict[str, Any]:
        return self._describe(model, name, self._find_label(model, name))

    def describe_labels(self, model: str) -> list[dict[str, Any]]:
        labels = self._router.labels.get(model, {})
        if not labels:
            self._check_model(model)
        return [self._describe(model, name, labels[name]) for name in sorted(labels)]

    def _find_label(self, model: str, name: str) -> VersionLabel:
        labels = self._router.labels.get(model, {})
        if name not in labels:
            self._check_model(model)
            raise UnknownLabel(model, name, labels)
        return labels[name]

    def _check_model(self, model: str) -> None:
        if not self._pool.is_listed(model):
            raise UnknownModel(model)

    def _check_not_declared(self, model: str, name: str) -> None:
        if self._router.is_declared(model, name):
            raise Conflict(
                f"label {quote_text(name)} of model {quote_text(model)} is declared in the models file; "
                "change it there"
            )

    async def _check_version(self, model: str, version: str) -> None:
        replicas = list(self._pool.replicas.values())
        reasons = {
            replica.name: reason
            for replica in replicas
            if (reason := self._explain_unready(replica, model, version))
        }
        if len(replicas) - len(reasons) < max(min(self._quorum, len(replicas)), 1):
            listed = (f"{name}: {reason}" for name, reason in sorted(reasons.items()))
            policy = await self._read_excluding_policy(model, version)
            raise VersionNotReady(model, version, listed, policy)

    async def _read_excluding_policy(self, model: str, version: str) -> str:
        """Return the policy in the config of a loaded model if the indexes lack the version; else empty."""
        policies: list[Any] = []
        if self._pool.is_loaded(model) and not self._pool.is_listed(model, version):
            await self._signatures.read_configs(
                [model], lambda _, config: policies.append(config.get("version_policy"))
            )
        return "".join(
            orjson.dumps(each).decode() for each in policies if each and "all" not in each
        )

    def _explain_unready(self, replica: Replica, model: str, version: str) -> str:
        state = self._pool.replica_state(replica)
        if state > HealthState.EJECTED:
            return state.name.lower()
        missing = VersionState(UNAVAILABLE, "not in this replica's index")
        version_state = replica.index.models.get(model, {}).get(version, missing)
        return "" if version_state.state == READY else str(version_state)

    def _describe(self, model: str, name: str, label: VersionLabel) -> dict[str, Any]:
        return {
            "model": model,
            "label": name,
            **label.to_dict(),
            **({"declared": True} if self._router.is_declared(model, name) else {}),
            "ready": {each: self._pool.is_served(model, each) for each in label.versions},
            "model_version_status": build_version_status(
                {"version": each, **self._find_best_state(model, each).to_dict()}
                for each in label.shares
            ),
        }

    def _find_best_state(self, model: str, version: str) -> VersionState:
        indexes = map(self._pool.known_index, self._pool.replicas.values())
        states = (index.models.get(model, {}).get(version) for index in indexes)
        return find_best_state(state for state in states if state is not None)
