"""Models that are loaded with their first request, and requests that wait for the first replica."""

from __future__ import annotations

from contextlib import AsyncExitStack

from gateway.capability import Attachment, Capability
from gateway.services import Services
from gateway.settings import Settings


def attach_on_demand(settings: Settings) -> Attachment:
    return Attachment(open=open_activator)


async def open_activator(services: Services, stack: AsyncExitStack) -> None:
    from gateway.capabilities.on_demand.activation import create_activator
    from gateway.capabilities.on_demand.loader import INITIATOR
    from gateway.capabilities.on_demand.metrics import OnDemandCollector, OnDemandMetrics

    settings = services.settings
    pool = services.pool
    metrics = OnDemandMetrics(services.metrics.create)
    services.metrics.add_initiator(INITIATOR)
    loader = None
    if any(
        (settings.on_demand_models, settings.models_file, settings.hold_s, settings.scaler_port)
    ):
        activator = create_activator(
            pool, services.signatures, services.repository, services.admission, settings, metrics
        )
        loader = activator.loader
        pool.activator = await stack.enter_async_context(activator)
    services.metrics.collector_registry.register(
        OnDemandCollector(pool, None if loader is None else loader.held)
    )
    if loader is not None and settings.scaler_port:
        from gateway.capabilities.on_demand.scaler import FleetScaler

        await stack.enter_async_context(FleetScaler(loader.usage, settings.scaler_port))


CAPABILITY = Capability("on_demand", attach_on_demand)
