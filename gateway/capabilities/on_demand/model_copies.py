"""The number of copies of each on-demand model: more for many concurrent requests, fewer for few."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Final

from gateway.capabilities.on_demand.loader import OnDemandLoader
from gateway.capabilities.on_demand.plan import (
    Placement,
    is_removable,
    plan_copies,
    update_mean_demand,
)
from gateway.errors import GatewayError
from gateway.fleet.replica import Replica
from gateway.repository.reconcile_plan import Backoff
from gateway.repository.reconciler import Reconciler
from gateway.tasks import cancel_tasks, repeat

DEMAND_INTERVAL_S: Final = 0.5
NO_ROOM_PAUSE_S: Final = 2.0
NO_CALLERS: Final[frozenset[str]] = frozenset()
UNUSED_COPY_S: Final = 2.0  # a copy that other gateways need runs more often


class ModelCopies:
    """Keeps the number of copies of each model within its limits, while this gateway holds the lease.

    A copy is loaded only where there is room, so that it displaces no other model.
    """

    def __init__(self, loader: OnDemandLoader, reconciler: Reconciler) -> None:
        self._loader = loader
        self._reconciler = reconciler
        self._mean_demand: dict[str, float] = {}
        self._changes: dict[str, asyncio.Task[None]] = {}
        self._backoffs: dict[str, Backoff] = {}

    async def run(self) -> None:
        async def update() -> None:
            await asyncio.sleep(DEMAND_INTERVAL_S)
            if self._loader.models.is_enabled and self._reconciler.is_leader:
                self._start_changes()

        try:
            await repeat("model_copies", update)
        finally:
            await cancel_tasks(self._changes.values())

    def _start_changes(self) -> None:
        for model, holders in self._loader.find_holders().items():
            limits = self._loader.models.get_copy_limits(model)
            # A model has too many copies when a replica that had it returns.
            if max(len(holders), limits.maximum) > 1 and self._loader.models.is_on_demand(model):
                requests = self._loader.usage.count_requests(model)
                mean = update_mean_demand(self._mean_demand.get(model, 0.0), requests)
                self._mean_demand[model] = mean
                target = plan_copies(mean, len(holders), limits)
                if target != len(holders) and self._can_change(model):
                    self._start_change(model, holders, is_load=target > len(holders))

    def _can_change(self, model: str) -> bool:
        is_early = perf_counter() < self._backoffs.get(model, Backoff()).not_before
        is_busy = model in self._loader.held.awaited or self._reconciler.is_locked(model)
        return not (is_early or is_busy or model in self._changes)

    def _start_change(self, model: str, holders: list[Replica], *, is_load: bool) -> None:
        work = self._load(model) if is_load else self._unload(model, holders)
        self._changes[model] = asyncio.create_task(work)
        self._changes[model].add_done_callback(lambda _: self._changes.pop(model, None))

    async def _load(self, model: str) -> None:
        await self._loader.facts.update()
        placement = self._loader.choose_placement(model, NO_CALLERS)
        if not isinstance(placement, Placement) or placement.victims:
            self._backoffs[model] = Backoff(not_before=perf_counter() + NO_ROOM_PAUSE_S)
            return
        try:
            async with self._reconciler.lock_model(model):
                await self._loader.load(model, placement.replica, NO_CALLERS, is_copy=True)
        except GatewayError:  # the loader has logged it
            backoff = self._backoffs.get(model, Backoff())
            self._backoffs[model] = backoff.with_repetition(perf_counter())
        else:
            self._backoffs.pop(model, None)

    async def _unload(self, model: str, holders: list[Replica]) -> None:
        loads = dict(zip(holders, self._loader.held.describe(holders), strict=True))
        removable = [replica for replica, load in loads.items() if is_removable(load, model)]
        if not removable:
            return
        fullest = max(removable, key=lambda replica: len(loads[replica].models))
        async with self._loader.lock_replica(fullest) as is_granted:
            if is_granted and await self._is_unused(fullest, model):
                await self._loader.evict(
                    fullest, [model], "because fewer copies are enough", "copies"
                )

    async def _is_unused(self, replica: Replica, model: str) -> bool:
        """Return whether no request for the model runs, by the replica where gateways do not report it."""
        if self._loader.usage.count_requests(model):
            return False
        if self._loader.state.has_reports:
            return True
        used_at = await self._loader.inference_times.read(replica, model)
        return perf_counter() - used_at > UNUSED_COPY_S
