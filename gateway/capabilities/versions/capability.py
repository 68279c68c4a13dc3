"""Version labels: names for versions, splits of requests between versions, and shadow traffic."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from pydantic import Field

from gateway.capability import Attachment, Capability
from gateway.settings import CapabilitySettings, Settings

if TYPE_CHECKING:
    from gateway.services import Services


class VersionSettings(CapabilitySettings):
    max_shadow_bytes: int = Field(1 << 20, ge=0)
    """Maximum size of a request or response body of which a copy is made for a label's shadow version; larger
    ones are dropped, and 0 drops all."""


def attach_versions(settings: Settings) -> Attachment:
    from gateway.capabilities.versions.label_manager import LabelManager
    from gateway.capabilities.versions.metrics import LabelMetrics
    from gateway.capabilities.versions.policy import LabelPolicy
    from gateway.capabilities.versions.routes import router
    from gateway.capabilities.versions.shadows import ShadowRunner

    max_shadow_bytes = settings.read(VersionSettings).max_shadow_bytes

    async def open_labels(services: Services, stack: AsyncExitStack) -> None:
        pool, state = services.pool, services.repository.state
        manager = LabelManager(pool, state, settings.ready_quorum)
        metrics = LabelMetrics(services.metrics.create)
        shadows = ShadowRunner(pool, services.admission, metrics, max_shadow_bytes)
        stack.push_async_callback(shadows.close)
        services.provide(manager)
        services.resolver.policy = LabelPolicy(pool, state, manager, shadows, metrics)

    return Attachment((router,), open=open_labels)


CAPABILITY = Capability("versions", attach_versions, settings=VersionSettings)
