"""Models that are loaded with their first request, and requests that wait for the first replica."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from gateway.capabilities.capability import Attachment, Capability, LaunchPlan
from gateway.capabilities.on_demand.settings import MODEL_KEYS, OnDemandSettings
from gateway.config.settings import Settings
from gateway.messages import CommandError

if TYPE_CHECKING:
    from gateway.services import Services


def attach_on_demand(settings: Settings) -> Attachment:
    from gateway.capabilities.on_demand.description import OnDemandDescriber

    on_demand = settings.read(OnDemandSettings)

    async def open_activator(services: Services, stack: AsyncExitStack) -> None:
        from gateway.capabilities.on_demand.activation import create_activator
        from gateway.capabilities.on_demand.metrics import OnDemandCollector, OnDemandMetrics

        pool = services.pool
        metrics = OnDemandMetrics(services.metrics.create)
        services.repository.readiness.hold_s = on_demand.hold_s
        held = None
        if settings.models_file or on_demand.is_used:
            activator = create_activator(
                pool,
                services.signatures,
                services.repository,
                admission=services.admission,
                settings=on_demand,
                metrics=metrics,
            )
            pool.activator = await stack.enter_async_context(activator)
            services.provide(activator)
            held = activator.loader.held
            if on_demand.scaler_port:
                from gateway.capabilities.on_demand.scaler import FleetScaler

                usage = activator.loader.usage
                scaler = FleetScaler(usage, on_demand.scaler_port, services.waiting_work)
                await stack.enter_async_context(scaler)
        services.metrics.collector_registry.register(OnDemandCollector(pool, held))

    return Attachment(open=open_activator, describer=OnDemandDescriber())


def check_workers(plan: LaunchPlan) -> None:
    if plan.workers > 1 and plan.settings.read(OnDemandSettings).scaler_port:
        raise CommandError("GATEWAY_SCALER_PORT requires a single worker; omit --workers")


CAPABILITY = Capability(
    "on_demand",
    attach_on_demand,
    settings=OnDemandSettings,
    prepare_launch=check_workers,
    model_keys=MODEL_KEYS,
)
