"""Models that are loaded with their first request, and requests that wait for the first replica."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Final

from gateway.capabilities.capability import Attachment, Capability
from gateway.capabilities.on_demand.settings import MODEL_KEYS, OnDemandSettings
from gateway.config.settings import Settings
from gateway.tasks import cancel_tasks, repeat

if TYPE_CHECKING:
    from gateway.services import Services

DEMAND_INTERVAL_S: Final = 0.5


def attach_on_demand(settings: Settings) -> Attachment:
    from gateway.capabilities.on_demand.description import OnDemandDescriber

    on_demand = settings.read(OnDemandSettings)

    async def open_activator(services: Services, stack: AsyncExitStack) -> None:
        from gateway.capabilities.on_demand.activation import ModelActivator
        from gateway.capabilities.on_demand.held_models import HeldModels
        from gateway.capabilities.on_demand.metrics import OnDemandCollector, OnDemandMetrics
        from gateway.capabilities.on_demand.usage import ModelUsage

        pool = services.pool
        repository = services.repository
        repository.readiness.hold_s = on_demand.hold_s
        metrics = OnDemandMetrics(services.metrics.create)
        usage = ModelUsage(services.admission, perf_counter)

        async def report_demand() -> None:
            metrics.held_requests.set(usage.held_count)
            metrics.demand.set(usage.count_demand())
            await asyncio.sleep(DEMAND_INTERVAL_S)

        reporting = asyncio.create_task(repeat("on_demand", report_demand))
        stack.push_async_callback(cancel_tasks, [reporting])
        held = None
        if settings.models_file or on_demand.is_used:
            services.admission.record_use = usage.record_use
            held = HeldModels(pool, repository, usage=usage, settings=on_demand)
            activator = ModelActivator(
                pool, repository, held, usage=usage, settings=on_demand, metrics=metrics
            )
            pool.activator = await stack.enter_async_context(activator)
            services.provide(activator)
        services.metrics.collector_registry.register(OnDemandCollector(pool, held))

    return Attachment(open=open_activator, describer=OnDemandDescriber())


CAPABILITY = Capability(
    "on_demand", attach_on_demand, settings=OnDemandSettings, model_keys=MODEL_KEYS
)
