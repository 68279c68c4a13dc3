"""Loads on demand: the choice of a replica, room for the model, the load; unloads of idle models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Set
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import Any, Final

from gateway.capabilities.on_demand.held_models import HeldModels, ModelFactsCache
from gateway.capabilities.on_demand.metrics import OnDemandMetrics
from gateway.capabilities.on_demand.models import UNKNOWN_CALLER, ModelUsage, OnDemandModels
from gateway.capabilities.on_demand.plan import (
    ModelBudget,
    NoPlacement,
    Placement,
    ReplicaLoad,
    choose_placement,
    find_idle_models,
    plan_excess,
)
from gateway.capabilities.on_demand.settings import OnDemandSettings
from gateway.capacity.admission import AdmissionQueue
from gateway.errors import GatewayError, StateUnavailable
from gateway.fleet.health import HealthState
from gateway.fleet.index import UNLOADING
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.fleet.signatures import SignatureCache
from gateway.fleet.transports import request_json, triton_model_path
from gateway.repository.loader import ModelLoader
from gateway.repository.reconcile_plan import ModelAction
from gateway.repository.reconciler import Reconciler
from gateway.repository.shared_state import SharedState
from gateway.repository.state.content import StartedLoad
from gateway.tasks import repeat
from gateway.triton.request_target import RequestTarget

log = logging.getLogger(__name__)

INITIATOR: Final = "on_demand"
REPORT_INTERVAL_S: Final = 0.5
SURPLUS_CHECK_INTERVAL_S: Final = 0.5
# Other decisions on the replica wait for an eviction. It goes on afterwards.
EVICTION_TIMEOUT_S: Final = 10.0
MAX_PROBE_WAIT_S: Final = 2.0


class OnDemandLoader:
    """Loads models on one replica each, within the replica's budget."""

    def __init__(
        self,
        pool: ReplicaPool,
        signatures: SignatureCache,
        state: SharedState,
        *,
        loader: ModelLoader,
        reconciler: Reconciler,
        admission: AdmissionQueue,
        settings: OnDemandSettings,
        metrics: OnDemandMetrics,
    ) -> None:
        self._pool = pool
        self.state = state
        self._loader = loader
        self._reconciler = reconciler
        self.settings = settings
        self.metrics = metrics
        self.inference_times = InferenceTimes()
        self._budget = ModelBudget(settings.max_loaded_models, settings.model_memory_mb)
        self.models = OnDemandModels(state, settings.on_demand_models)
        self.usage = ModelUsage(admission, perf_counter, settings.eviction_protection_s)
        self.facts = ModelFactsCache(pool, signatures)
        loader.change_listeners.append(self.facts.invalidate)
        self.held = HeldModels(state, reconciler, self.models, usage=self.usage, facts=self.facts)

    def list_candidates(self, model: str) -> list[Replica]:
        return [
            replica
            for replica in self._list_controllable_replicas()
            if model in replica.index.models
            and replica.name not in self._pool.cordoned
            and not replica.index.is_ready(model)
            and not replica.index.is_changing(model)
        ]

    @property
    def has_controllable_replica(self) -> bool:
        return any(
            self._pool.is_live(replica) and replica.name not in self._loader.uncontrollable_replicas
            for replica in self._pool.replicas.values()
        )

    def find_holders(self) -> dict[str, list[Replica]]:
        holders: dict[str, list[Replica]] = {}
        for replica in self._list_controllable_replicas():
            if replica.name not in self._pool.cordoned:
                for model in replica.index.ready_models | replica.index.changing_models:
                    holders.setdefault(model, []).append(replica)
        return holders

    def is_loading(self, model: str) -> bool:
        return any(
            replica.index.is_changing(model)
            and replica.index.model_state(model).state != UNLOADING
            and self._pool.replica_state(replica) is HealthState.UP
            for replica in self._pool.replicas.values()
        )

    def choose_placement(self, model: str, callers: Set[str]) -> Placement | NoPlacement:
        replicas = self.held.describe(self.list_candidates(model), callers)
        return choose_placement(replicas, self.facts.list_memory_mb(model), self._budget)

    async def load(
        self, model: str, replica_name: str, callers: Set[str], *, is_copy: bool = False
    ) -> bool:
        """Make room on the replica and load the model for `callers`. Returns whether there was room.

        A copy is loaded only if it needs no room of others.
        Raises the `GatewayError` of a failed load.
        """
        replica = self._pool.find_replica(replica_name)
        if replica is None:
            return False
        starting = self.held.starting.setdefault(replica.name, set())
        async with AsyncExitStack() as stack:
            # Of gateways that share a state, only one at a time changes a replica or a model.
            if not await stack.enter_async_context(self.state.lease(f"model:{model}")):
                return False
            async with self.lock_replica(replica) as is_granted:
                if not is_granted or not await self._make_room(
                    model, replica, callers, is_copy=is_copy
                ):
                    return False
                starting.add(model)
                stack.callback(starting.discard, model)
                started_load = await self.state.begin_load(replica.name, model)
            await self._run_load(model, replica, started_load)
            for caller in callers or (UNKNOWN_CALLER,):
                self.usage.record_use(model, caller)
            self.held.loaded_at[model] = perf_counter()
        return True

    @asynccontextmanager
    async def lock_replica(self, replica: Replica) -> AsyncIterator[bool]:
        """Serialize the decisions on a replica; yield False while another gateway makes one."""
        async with self.state.lease(f"replica:{replica.name}") as is_granted:
            if is_granted:
                await self.state.refresh_loads()
                await self.exchange_usage()
            yield is_granted

    async def exchange_usage(self) -> None:
        reports: list[Mapping[str, Any]] = []
        with suppress(StateUnavailable):  # the store logs it
            reports = await self.state.exchange_reports(**self.usage.build_report())
        self.usage.apply_reports(reports)

    def is_locked(self, replica_name: str) -> bool:
        return self.state.has_lease(f"replica:{replica_name}")

    async def _make_room(
        self, model: str, replica: Replica, callers: Set[str], *, is_copy: bool
    ) -> bool:
        """Unload victims until the model fits. Returns False if another replica is the better one now."""
        await self._pool.monitor.probe_all(MAX_PROBE_WAIT_S)
        await self.facts.update(checks_ensembles=True)
        if self._pool.is_served(model) and not is_copy:
            return False  # another gateway has loaded it
        placement = self.choose_placement(model, callers)
        if isinstance(placement, NoPlacement) or placement.replica != replica.name:
            return False
        if is_copy and placement.victims:
            return False
        return await self.evict(replica, placement.victims, f"to make room for {model}", "room")

    async def _run_load(self, model: str, replica: Replica, started_load: StartedLoad) -> None:
        log.info("loading model %s on %s on demand", model, replica.name)
        started_at = perf_counter()
        parameters = self.models.get_load_parameters(model)
        try:
            action = ModelAction(model, True, parameters)
            await self._loader.run(replica, action, INITIATOR, started_load)
        except GatewayError as exc:
            log.warning("loading model %s on %s failed: %s", model, replica.name, exc.detail)
            raise
        await self.facts.update()
        duration_s = perf_counter() - started_at
        log.info("model %s is ready on %s after %.1f s", model, replica.name, duration_s)

    async def report_usage(self) -> None:
        """Report used models to the other gateways, until cancelled; no slow action delays it."""

        async def report() -> None:
            self.usage.drop_unknown_models(self._pool.is_listed)
            self.metrics.demand.set(self.usage.count_own_demand())
            if self.models.is_enabled or self.settings.scaler_port:
                await self.exchange_usage()
            await asyncio.sleep(REPORT_INTERVAL_S)

        await repeat("on_demand", report)

    async def run(self) -> None:
        """Unload idle models, and models beyond the budget, until cancelled."""

        async def unload() -> None:
            await asyncio.sleep(SURPLUS_CHECK_INTERVAL_S)
            if self.models.is_enabled and self._reconciler.is_leader:
                await self.facts.update()
                await asyncio.gather(*map(self._unload_surplus, self._find_surplus_replicas()))

        await repeat("on_demand", unload)

    def _find_surplus_replicas(self) -> list[Replica]:
        replicas = self._list_controllable_replicas()
        return [
            replica
            for replica, load in zip(replicas, self.held.describe(replicas), strict=True)
            if self._find_idle_models(load) or plan_excess(load, self._budget)
        ]

    async def _unload_surplus(self, replica: Replica) -> None:
        async with self.lock_replica(replica) as is_granted:
            if not is_granted:
                return
            await self.facts.update(checks_ensembles=True)
            idle = await self._confirm_idle_models(replica)
            idle_s = self.settings.idle_unload_s
            await self.evict(replica, idle, f"after {idle_s:g} s without requests", "idle")
            excess = plan_excess(self._describe(replica), self._budget)
            await self.evict(replica, excess, "because the replica exceeds its budget", "room")

    def _find_idle_models(self, load: ReplicaLoad) -> tuple[str, ...]:
        if not self.settings.idle_unload_s:
            return ()
        return find_idle_models(load, perf_counter() - self.settings.idle_unload_s)

    async def _confirm_idle_models(self, replica: Replica) -> tuple[str, ...]:
        """Return the idle models that the replica has not run for others, which send no report."""
        for model in self._find_idle_models(self._describe(replica)):
            used_at = await self.inference_times.read(replica, model)
            self.usage.record_use_by_others(model, used_at)
        return self._find_idle_models(self._describe(replica))

    def _describe(self, replica: Replica) -> ReplicaLoad:
        (load,) = self.held.describe([replica])
        return load

    def _list_controllable_replicas(self) -> list[Replica]:
        return [
            replica
            for replica in self._pool.replicas.values()
            if self._pool.replica_state(replica) is HealthState.UP
            and replica.name not in self._loader.uncontrollable_replicas
        ]

    async def evict(self, replica: Replica, models: Iterable[str], reason: str, label: str) -> bool:
        """Unload models that have no request in progress. Returns whether all are unloaded."""
        victims = list(models)
        # Before the first `await`, so that no new request arrives there.
        for model in victims:
            self._pool.set_draining(replica, model, is_draining=True)
        try:
            for model in victims:
                if not await self._unload(replica, model, reason):
                    return False
                self.metrics.evictions.labels(label).inc()
        finally:
            for model in victims:
                self._pool.set_draining(replica, model, is_draining=False)
        return True

    async def _unload(self, replica: Replica, model: str, reason: str) -> bool:
        if replica.index.is_unloaded(model):
            return True  # Triton unloaded it together with its ensemble
        log.info("unloading model %s from %s %s", model, replica.name, reason)
        try:
            action = ModelAction(model, False, {})
            unload = asyncio.shield(self._reconciler.run_action(replica, action, INITIATOR))
            await asyncio.wait_for(unload, EVICTION_TIMEOUT_S)
        except asyncio.TimeoutError:
            return False
        except GatewayError as exc:
            log.warning("unloading model %s from %s failed: %s", model, replica.name, exc.detail)
            return False
        return True


# The last inference of a model on a replica, by Triton's statistics: others than this gateway may use it.

STATISTICS_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True)
class LastInference:
    """The time of an inference, by the clocks of the replica and of this process."""

    timestamp_ms: int
    at: float


class InferenceTimes:
    """The last known inference of each model on each replica."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], LastInference] = {}

    async def read(self, replica: Replica, model: str) -> float:
        """Return when the model last ran there, by `time.perf_counter`; -inf if that is not known."""
        target = RequestTarget(model, timeout_s=STATISTICS_TIMEOUT_S)
        try:
            path = f"{triton_model_path(model)}/stats"
            document = await request_json(replica, target, b"GET", path)
        except GatewayError as exc:
            log.debug("the statistics of %s on %s cannot be read: %s", model, replica.name, exc)
            return -inf
        key = (replica.name, model)
        timestamp_ms = parse_last_inference(document)
        known = update_last_inference(
            self._known.get(key), timestamp_ms, now=time.perf_counter(), wall_clock_s=time.time()
        )
        self._known[key] = known
        return known.at


def parse_last_inference(document: Any) -> int:
    """Return the time of the last inference in Triton's statistics of a model, in ms; 0 for none."""
    match document:
        case {"model_stats": list(versions)}:
            times = (each.get("last_inference") for each in versions if isinstance(each, dict))
            return max((value for value in times if isinstance(value, int)), default=0)
    return 0


def update_last_inference(
    known: LastInference | None, timestamp_ms: int, *, now: float, wall_clock_s: float
) -> LastInference:
    """Return the time of an inference by this process's clock.

    Only for the first reading, the clocks of the replica and of this machine are trusted to agree: an
    inference that is new in a later reading ran since the previous one, whatever its timestamp is.
    """
    if known is not None:
        return known if known.timestamp_ms == timestamp_ms else LastInference(timestamp_ms, now)
    if not timestamp_ms:
        return LastInference(0, -inf)
    return LastInference(timestamp_ms, now - max(wall_clock_s - timestamp_ms / 1000, 0.0))
