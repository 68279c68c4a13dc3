"""Labels as the rules that choose the version of a request."""

from __future__ import annotations

from collections.abc import Container

from starlette.types import Scope

from gateway.capabilities.versions.label_choice import LabelChoice
from gateway.capabilities.versions.label_manager import LabelManager
from gateway.capabilities.versions.label_router import LabelRouter, UnknownLabel
from gateway.capabilities.versions.metrics import LabelMetrics
from gateway.capabilities.versions.shadows import ShadowRunner
from gateway.fleet.pool import ReplicaPool
from gateway.repository.shared_state import SharedState
from gateway.version_labels import DEFAULT_LABEL, is_label_name


class LabelPolicy:
    """The `VersionPolicy` of a gateway with labels."""

    def __init__(
        self,
        pool: ReplicaPool,
        state: SharedState,
        manager: LabelManager,
        shadows: ShadowRunner,
        metrics: LabelMetrics,
    ) -> None:
        self._pool = pool
        self._state = state
        self._manager = manager
        self._shadows = shadows
        self._router = LabelRouter(pool, state, metrics.redirects)

    @property
    def models(self) -> Container[str]:
        return self._state.labels

    def choose(self, scope: Scope, model: str, version: str) -> LabelChoice | None:
        """Raises `LabelNotReady`."""
        label = self._router.find_label(model, version or DEFAULT_LABEL)
        return None if label is None else LabelChoice(label, scope, self._shadows)

    def explain_unknown(self, model: str, version: str) -> UnknownLabel | None:
        if not (is_label_name(version) and self._pool.has_model(model)):
            return None
        return UnknownLabel(model, version, self._state.labels.get(model, ()))

    async def set_default_version(self, model: str, version: str) -> None:
        await self._manager.set_label(model, DEFAULT_LABEL, {"version": version})

    async def forget_model(self, model: str) -> None:
        await self._manager.delete_labels(model)
