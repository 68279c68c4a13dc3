"""The components for models on demand and waiting requests, as the settings configure them."""

from __future__ import annotations

from contextlib import AsyncExitStack

from gateway.admission import AdmissionQueue
from gateway.fleet.activation import ModelActivator
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.on_demand_models import OnDemandOptions
from gateway.fleet.on_demand_plan import ModelBudget
from gateway.fleet.repository import Repository
from gateway.settings import Settings


async def open_activator(
    settings: Settings,
    dispatcher: Dispatcher,
    repository: Repository,
    admission: AdmissionQueue,
    stack: AsyncExitStack,
) -> ModelActivator | None:
    """Return the component that requests wait in; None if no request can wait."""
    needs = (settings.on_demand_models, settings.models_file, settings.hold_s, settings.scaler_port)
    if not any(needs):
        return None
    options = OnDemandOptions(
        settings.on_demand_models,
        ModelBudget(settings.max_loaded_models, settings.model_memory_mb),
        settings.default_model_memory_mb,
        settings.idle_unload_s,
        settings.max_queue,
        settings.hold_s,
        settings.scaler_port,
    )
    last_used: dict[str, float] = {}
    activator = repository.create_activator(admission, last_used, options)
    dispatcher.enable_activation(activator, last_used)
    await stack.enter_async_context(activator)
    if settings.scaler_port:
        # Imported here, because gRPC's server takes a while to import.
        from gateway.fleet.scaler import FleetScaler  # noqa: PLC0415

        scaler = FleetScaler(activator.loader.usage, settings.scaler_port)
        await stack.enter_async_context(scaler)
    return activator
