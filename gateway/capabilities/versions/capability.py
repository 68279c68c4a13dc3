"""Version labels: names for versions, splits of requests between versions, and shadow traffic."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from pydantic import Field

from gateway.capabilities.capability import Attachment, Capability
from gateway.capabilities.versions.labels import LABELS, parse_declared_labels
from gateway.config.settings import CapabilitySettings, Settings

if TYPE_CHECKING:
    from gateway.services import Services


class VersionSettings(CapabilitySettings):
    max_shadow_bytes: int = Field(1 << 20, ge=0)
    """Maximum size of a request or response body of which a copy is made for a label's shadow version; larger
    ones are dropped, and 0 drops all."""


def attach_versions(settings: Settings) -> Attachment:
    from gateway.capabilities.versions import routes
    from gateway.capabilities.versions.label_manager import LabelManager
    from gateway.capabilities.versions.label_router import LabelRouter
    from gateway.capabilities.versions.metrics import LabelMetrics
    from gateway.capabilities.versions.routes import LabelDescriber
    from gateway.capabilities.versions.shadows import ShadowRunner

    max_shadow_bytes = settings.read(VersionSettings).max_shadow_bytes

    async def open_labels(services: Services, stack: AsyncExitStack) -> None:
        pool = services.pool
        state = services.repository.state
        metrics = LabelMetrics(services.metrics.create)
        table = await state.open_table(LABELS)
        router = LabelRouter(pool, state, table, redirects=metrics.redirects)
        shadows = ShadowRunner(pool, services.admission, metrics, max_bytes=max_shadow_bytes)
        stack.push_async_callback(shadows.close)
        manager = LabelManager(
            pool,
            state,
            router,
            shadows=shadows,
            signatures=services.signatures,
            quorum=settings.ready_quorum,
        )
        services.provide(manager)
        services.resolver.policy = manager

    return Attachment((routes.router,), open=open_labels, describer=LabelDescriber())


CAPABILITY = Capability(
    "versions",
    attach_versions,
    settings=VersionSettings,
    table=LABELS,
    model_keys={LABELS.name: parse_declared_labels},
)
