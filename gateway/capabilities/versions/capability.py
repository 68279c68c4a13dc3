"""Version labels: names for versions, splits of requests between versions, and shadow traffic."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from gateway.capabilities.capability import Attachment, Capability
from gateway.capabilities.versions.labels import LABELS, parse_declared_labels
from gateway.config.settings import Settings

if TYPE_CHECKING:
    from gateway.services import Services


def attach_versions(settings: Settings) -> Attachment:
    from gateway.capabilities.versions import routes
    from gateway.capabilities.versions.label_manager import LabelManager
    from gateway.capabilities.versions.label_router import LabelRouter
    from gateway.capabilities.versions.metrics import LabelMetrics
    from gateway.capabilities.versions.mirror import Mirror
    from gateway.capabilities.versions.routes import LabelDescriber

    async def open_labels(services: Services, stack: AsyncExitStack) -> None:
        pool = services.pool
        state = services.repository.state
        metrics = LabelMetrics(services.metrics.create)
        router = LabelRouter(pool, state, redirects=metrics.redirects)
        mirror = Mirror(services, router, metrics)
        stack.push_async_callback(mirror.close)
        services.recorders.append(mirror)
        manager = LabelManager(
            pool,
            state,
            router,
            signatures=services.signatures,
            quorum=settings.ready_quorum,
        )
        services.provide(manager)
        services.resolver.policy = manager

    return Attachment((routes.router,), open=open_labels, describer=LabelDescriber())


CAPABILITY = Capability(
    "versions",
    attach_versions,
    table=LABELS,
    model_keys={LABELS.name: parse_declared_labels},
)
