"""Requests that wait until their model can be used: for a replica, and for a load on demand.

The first request stores that its model is desired, and the others wait for the same load. From top to
bottom: requests, the loads that they share, room for a load, unloads, reports to other gateways.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from math import ceil
from time import perf_counter
from typing import Final

from gateway.callers import Right
from gateway.capabilities.on_demand.held_models import HeldModels
from gateway.capabilities.on_demand.metrics import OnDemandMetrics
from gateway.capabilities.on_demand.settings import OnDemandSettings
from gateway.capabilities.on_demand.usage import ModelUsage
from gateway.capacity.admission import AdmissionQueueFull
from gateway.errors import (
    BadUpstream,
    DeadlinePassed,
    GatewayError,
    ModelControlModeConflict,
    ModelNotReady,
    StateUnavailable,
    Unavailable,
)
from gateway.fleet.health import HealthState
from gateway.fleet.pool import NoReplica, ReplicaPool
from gateway.fleet.replica import Replica
from gateway.http_client.connection import RequestNotSent
from gateway.messages import join_names, quote_text
from gateway.repository.loader import ACTION_POLL_S
from gateway.repository.placement import ModelBudget, NoPlacement, plan_idle_unloads, plan_placement
from gateway.repository.plan import Backoff, ModelAction
from gateway.repository.repository import Repository
from gateway.repository.state.content import DEMAND
from gateway.tasks import TaskSet, cancel_tasks, repeat
from gateway.telemetry.request_info import current_request_info, measure_phase
from gateway.triton.error_mapping import LoadFailed

log = logging.getLogger(__name__)

INITIATOR: Final = "on_demand"
RETRY_PAUSE_S: Final = 0.05  # while the models that hold the memory are in use
RETRY_PAUSES: Final = 4  # times the duration of the search for places, which grows with the fleet
MIN_REMAINING_S: Final = 0.001  # left to a request that waited until its deadline
MAX_UNREACHABLE: Final = 3  # replicas that fail during one load
UNKNOWN_LOAD_S: Final = 5.0  # expected for a model that was never loaded
REPORT_INTERVAL_S: Final = 0.5
REVIEW_INTERVAL_S: Final = 0.5
FACTS_INTERVAL_S: Final = 1.0  # also at each change of a replica's models
RECENT_USE_S: Final = (
    30.0  # a model that was used lately is loaded again when its replica has ended
)
LEASE_NAME: Final = "on demand"  # of the gateway that reviews the models
# Other decisions on the replica wait for an eviction. It goes on afterwards.
EVICTION_TIMEOUT_S: Final = 10.0
MAX_PROBE_WAIT_S: Final = 2.0


class ModelLoading(Unavailable):
    code = "MODEL_LOADING"

    def __init__(self, model: str, retry_after_s: int) -> None:
        GatewayError.__init__(
            self,
            f"model {quote_text(model)} is being loaded; try again, or set a longer timeout with "
            "X-Request-Timeout, in seconds",
            headers={"Retry-After": str(retry_after_s)},
        )


class NoRoom(Unavailable):
    """Other models hold the memory of all replicas. Those that the caller cannot see are not named."""

    code = "NO_ROOM"

    def __init__(self, model: str, holders: Collection[str]) -> None:
        info = current_request_info.get()
        names = [quote_text(name) for name in holders if info is None or info.caller.can_see(name)]
        if len(names) < len(holders):
            names.append("models that this key cannot see")
        held = f"; its memory is held by {join_names(names)}" if names else ""
        super().__init__(f"no replica has room for model {quote_text(model)}{held}")


@dataclass
class SharedLoad:
    """A load that all requests of a model wait for."""

    model: str
    started_at: float
    result: asyncio.Future[NoPlacement | None]  # None when the model may be ready
    waiters: int = 0
    attempt: asyncio.Task[None] | None = None
    unreachable: int = 0  # attempts on replicas that were not reached
    obstacle: NoPlacement | None = None  # why there was no room the last time


class ModelActivator:
    """Lets requests wait for a replica and for the load of their model, which they share."""

    def __init__(
        self,
        pool: ReplicaPool,
        repository: Repository,
        held: HeldModels,
        *,
        usage: ModelUsage,
        settings: OnDemandSettings,
        metrics: OnDemandMetrics,
    ) -> None:
        self._pool = pool
        self._state = repository.state
        self._loader = repository.loader
        self._reconciler = repository.reconciler
        self.held = held
        self._usage = usage
        self._settings = settings
        self._metrics = metrics
        self._budget = ModelBudget(settings.max_loaded_models, settings.model_memory_mb)
        self._loads: dict[str, SharedLoad] = {}  # in the order of their first requests
        self._failures: dict[str, Backoff] = {}
        self._load_times_s: dict[str, float] = {}
        self._has_loads = asyncio.Event()
        self._seen_changes = 0
        self._tasks = TaskSet()
        self.is_on_demand = held.is_on_demand
        self.matches = held.matches

    async def __aenter__(self) -> ModelActivator:
        for step in (
            self._advance_loads,
            self._update_facts,
            self._report_usage,
            self._review_models,
        ):
            self._tasks.start(repeat(INITIATOR, step))
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks(self._tasks)

    # Requests

    def can_activate(self, model: str) -> bool:
        if not self._pool.has_live_replica:
            return self._settings.hold_s > 0
        if self._is_loadable(model):
            return True
        # The reconciler loads a desired model on a new replica.
        return self._settings.hold_s > 0 and self._state.is_desired(model)

    def _is_loadable(self, model: str) -> bool:
        is_controllable = any(map(self._is_controllable, self._pool.replicas.values()))
        return is_controllable and self.is_on_demand(model) and self._pool.is_listed(model)

    async def activate(self, model: str, timeout_s: float) -> float:
        """Wait until the model is ready on a replica, or cannot be activated; return the remaining seconds.

        Raises `NoReplica`, `ModelNotReady`, `ModelLoading` or `NoRoom` after the timeout, `LoadFailed`, or
        `AdmissionQueueFull`.
        """
        if self._pool.is_served(model) or not self.can_activate(model):
            return timeout_s
        waiting = self._usage.held_count
        if waiting >= self._usage.admission.max_waiting:
            self._pool.metrics.shed.labels("queue_full").inc()
            raise AdmissionQueueFull(model, 0, waiting)
        started_at = perf_counter()
        with self._usage.hold(model), hold_charge(), measure_phase("load"):
            await self._wait(model, started_at, timeout_s)
        return max(timeout_s - (perf_counter() - started_at), MIN_REMAINING_S)

    async def _wait(self, model: str, started_at: float, timeout_s: float) -> None:
        failure = self._failures.get(model, Backoff())
        if started_at < failure.not_before:
            raise build_load_error(model, failure.reason)
        load = self._loads.get(model) or self._start_load(model)
        load.waiters += 1
        try:
            while not load.result.done():
                # The whole timeout applies to a load, the shorter one as long as there is no replica.
                hold_s = min(timeout_s, self._settings.hold_s)
                limit_s = timeout_s if self._is_loadable(model) else hold_s
                remaining_s = started_at + limit_s - perf_counter()
                if remaining_s <= 0:
                    raise self._build_timeout_error(model, load)
                await asyncio.wait([load.result], timeout=remaining_s)
            if (obstacle := load.result.result()) is not None:
                raise NoRoom(model, obstacle.holders)
        except LoadFailed as exc:
            raise build_load_error(exc.model, exc.reason) from exc
        finally:
            load.waiters -= 1

    def _build_timeout_error(self, model: str, load: SharedLoad) -> GatewayError:
        if not self._is_loadable(model):
            return ModelNotReady(model) if self._pool.has_live_replica else NoReplica()
        if load.obstacle is not None:
            return NoRoom(model, load.obstacle.holders)
        expected_s = self._load_times_s.get(model, UNKNOWN_LOAD_S)
        elapsed_s = perf_counter() - load.started_at
        return ModelLoading(model, max(ceil(expected_s - elapsed_s), 1))

    # Loads

    def _start_load(self, model: str) -> SharedLoad:
        result = asyncio.get_running_loop().create_future()
        load = self._loads[model] = SharedLoad(model, perf_counter(), result)
        self._has_loads.set()
        return load

    async def _advance_loads(self) -> None:
        """Begin loads for which there is room, in the order of their first requests.

        A load for which there is no room yet does not hold up those behind it.
        """
        await self._has_loads.wait()
        started_at = perf_counter()
        for load in list(self._loads.values()):
            if load.attempt is None:
                self._advance(load)
            await asyncio.sleep(0)  # a search takes milliseconds in a large fleet
        if not self._pool.has_live_replica:
            await self._pool.look_up_replicas()
        await asyncio.sleep(max(RETRY_PAUSES * (perf_counter() - started_at), RETRY_PAUSE_S))
        if not self._loads:
            self._has_loads.clear()

    def _advance(self, load: SharedLoad) -> None:
        model = load.model
        if self._pool.is_served(model) or not (load.waiters and self.can_activate(model)):
            self._finish(load, None)  # Triton's error tells why it is not ready
        elif self._is_loadable(model):  # otherwise the reconciler loads it on a new replica
            plan = self._plan_load(model)
            if isinstance(plan, NoPlacement):
                load.obstacle = plan
                if plan.is_final:
                    self._finish(load, plan)
            elif plan:
                load.obstacle = None
                load.attempt = self._tasks.start(self._attempt(load, plan[-1].replica))

    def _finish(self, load: SharedLoad, result: NoPlacement | GatewayError | None) -> None:
        self._loads.pop(load.model)
        if isinstance(result, GatewayError):
            load.result.set_exception(result)
            load.result.exception()  # the requests that waited may have gone
        else:
            load.result.set_result(result)

    async def _attempt(self, load: SharedLoad, replica_name: str) -> None:
        try:
            await self._load_at(load.model, replica_name)
        except ModelControlModeConflict:
            pass  # this replica is not chosen again
        except (RequestNotSent, BadUpstream) as exc:
            load.unreachable += 1
            if load.unreachable == MAX_UNREACHABLE:
                self._finish(load, exc)
        except GatewayError as exc:
            self._finish(load, exc)
        else:
            if self._pool.is_served(load.model):
                self._finish(load, None)
        finally:
            load.attempt = None

    async def _update_facts(self) -> None:
        """Read the configs of models that became ready: an unknown one is not evicted."""
        if self.held.is_enabled:
            await self.held.update()
        await asyncio.sleep(RETRY_PAUSE_S)
        self._seen_changes = await self._pool.changes.wait(self._seen_changes, FACTS_INTERVAL_S)

    async def _load_at(self, model: str, replica_name: str) -> None:
        """Make room on the replica and load the model, unless another gateway does.

        Raises the `GatewayError` of a failed load.
        """
        started_at = perf_counter()
        async with self._reconciler.try_lock_model(model) as has_model:
            replica = self._pool.find_replica(replica_name)
            if replica is None or not has_model or not self._is_loadable(model):
                return
            await self._state.begin_demand(model)
            # Of gateways that share a state, one at a time decides what a replica holds.
            async with self._state.lease(f"replica:{replica.name}") as has_replica:
                load = await self._make_room(model, replica) if has_replica else None
                if load is None:
                    return
                log.info("loading model %s on %s on demand", model, replica.name)
                loading = self._tasks.start(self._run_load(load, replica))
                await self._wait_until_listed(model, replica, loading)
            await loading
        self.held.record_ready(model)
        self._usage.record_use(model)
        self._failures.pop(model, None)
        duration_s = self._load_times_s[model] = perf_counter() - started_at
        log.info("model %s is ready on %s after %.1f s", model, replica.name, duration_s)

    async def _run_load(self, action: ModelAction, replica: Replica) -> None:
        model = action.model
        try:
            await self._loader.run(replica, action, INITIATOR)
        except GatewayError as exc:
            log.warning("loading model %s on %s failed: %s", model, replica.name, exc.detail)
            if isinstance(exc, DeadlinePassed):
                late = "it did not become ready within GATEWAY_LOAD_TIMEOUT_S"
                raise self._record_failure(LoadFailed(model, late)) from exc
            if isinstance(exc, LoadFailed):
                self._record_failure(exc)
            raise

    async def _wait_until_listed(
        self, model: str, replica: Replica, loading: asyncio.Task[None]
    ) -> None:
        """Wait until the replica's index has the load, so that other gateways know of it."""
        while not (
            loading.done() or replica.index.is_loading(model) or replica.index.is_ready(model)
        ):
            pause_s = max(ACTION_POLL_S, replica.index_schedule.duration_s)
            await asyncio.wait([loading], timeout=pause_s)
            await self._pool.monitor.probe(replica)

    def _record_failure(self, error: LoadFailed) -> LoadFailed:
        failure = self._failures.get(error.model, Backoff())
        self._failures[error.model] = failure.with_repetition(perf_counter(), error.reason)
        return error

    # Room for a load

    def _plan_load(self, model: str) -> list[ModelAction] | NoPlacement:
        """Return the plan of a load; empty while the model is loaded, or no replica can load it."""
        candidates = self._list_candidates(model)
        if not candidates or not self._is_loadable(model):
            return []
        demand = self._state.demanded_models.get(model, DEMAND)
        desired = replace(demand, parameters=self.held.get_load_parameters(model))
        wanted_mb = self.held.list_memory_mb(model)
        return plan_placement(
            model, desired, self.held.describe(candidates), wanted_mb, self._budget
        )

    def _list_candidates(self, model: str) -> list[Replica]:
        replicas = self._list_replicas()
        if any(replica.index.is_loading(model) for replica in replicas):
            return []
        return [
            replica
            for replica in replicas
            if model in replica.index.models
            and replica.name not in self._pool.cordoned
            and not replica.index.is_ready(model)
            and not replica.index.is_changing(model)
        ]

    def _list_replicas(self) -> list[Replica]:
        return [
            replica
            for replica in filter(self._is_controllable, self._pool.replicas.values())
            if self._pool.replica_state(replica) is HealthState.UP
        ]

    def _is_controllable(self, replica: Replica) -> bool:
        is_uncontrollable = replica.name in self._loader.uncontrollable_replicas
        return self._pool.is_live(replica) and not is_uncontrollable

    async def _make_room(self, model: str, replica: Replica) -> ModelAction | None:
        """Unload victims until the model fits, and return its load.

        Returns None if another replica is the better one now, or a victim stays.
        """
        await self._state.refresh_tables()
        await self._exchange_usage()
        await self._pool.monitor.probe_all(MAX_PROBE_WAIT_S)
        await self.held.update(max_age_s=0.0)
        if self._pool.is_served(model):
            return None  # another gateway has loaded it
        plan = self._plan_load(model)
        if isinstance(plan, NoPlacement) or not plan or plan[-1].replica != replica.name:
            return None
        *evictions, load = plan
        return load if await self._evict(replica, evictions, "room") else None

    # Unloads

    async def _review_models(self) -> None:
        """Unload idle models, and end the demand for those that no replica has and nobody waits for."""
        await asyncio.sleep(REVIEW_INTERVAL_S)
        if not self.held.is_enabled or not await self._state.renew_lease(LEASE_NAME):
            return
        if self._settings.idle_unload_s:
            await asyncio.gather(*map(self._unload_idle_models_of, self._list_replicas()))
        for model in self._state.demanded_models:
            if not (self._pool.is_held(model) or self._usage.count_requests(model)):
                await self._renew_demand(model)

    async def _renew_demand(self, model: str) -> None:
        """Load a model whose replica has ended again if it was used lately; otherwise forget it."""
        used_s = perf_counter() - self._usage.get_last_used(model)
        if self.is_on_demand(model) and self._usage.was_used(model) and used_s < RECENT_USE_S:
            self._tasks.start(self._load_again(model))
        else:
            await self._state.end_demand(model)

    async def _load_again(self, model: str) -> None:
        with self._usage.hold(model), suppress(GatewayError):
            await self._wait(model, perf_counter(), RECENT_USE_S)

    async def _unload_idle_models_of(self, replica: Replica) -> None:
        if self._plan_idle_unloads(replica):
            await self.held.update(max_age_s=0.0)
            await self._evict(replica, self._plan_idle_unloads(replica), "idle")

    def _plan_idle_unloads(self, replica: Replica) -> list[ModelAction]:
        (load,) = self.held.describe([replica])
        return plan_idle_unloads(load, perf_counter(), self._settings.idle_unload_s)

    async def _evict(self, replica: Replica, unloads: Collection[ModelAction], label: str) -> bool:
        """Unload models that have no request in progress. Returns whether all are unloaded."""
        # Before the first `await`, so that no new request arrives there.
        for unload in unloads:
            self._pool.set_draining(replica, unload.model, is_draining=True)
        try:
            for unload in unloads:
                if not await self._unload(replica, unload):
                    return False
                self._metrics.evictions.labels(label).inc()
        finally:
            for unload in unloads:
                self._pool.set_draining(replica, unload.model, is_draining=False)
        return True

    async def _unload(self, replica: Replica, action: ModelAction) -> bool:
        model = action.model
        await self._state.end_demand(model)
        if replica.index.is_unloaded(model):
            return True  # Triton unloaded it together with its ensemble
        log.info("unloading model %s from %s %s", model, replica.name, action.reason)
        try:
            unload = self._tasks.start(self._run_unload(replica, action))
            return await asyncio.wait_for(asyncio.shield(unload), EVICTION_TIMEOUT_S)
        except asyncio.TimeoutError:
            return False
        except GatewayError as exc:
            log.warning("unloading model %s from %s failed: %s", model, replica.name, exc.detail)
            return False

    async def _run_unload(self, replica: Replica, action: ModelAction) -> bool:
        async with self._reconciler.try_lock_model(action.model) as is_granted:
            if is_granted:
                await self._loader.run(replica, action, INITIATOR)
            return is_granted

    # Reports to the other gateways

    async def _report_usage(self) -> None:
        """Report the used models; no slow action delays it."""
        self._usage.drop_unknown_models(self._pool.is_listed)
        if self.held.is_enabled:
            await self._exchange_usage()
        await asyncio.sleep(REPORT_INTERVAL_S)

    async def _exchange_usage(self) -> None:
        with suppress(StateUnavailable):  # the store logs it
            reports = await self._state.exchange_reports(self._usage.build_report())
            self._usage.apply_reports(reports)


def build_load_error(model: str, reason: str) -> LoadFailed:
    """Return the error with the reason only for callers that may read it: it can name other models."""
    info = current_request_info.get()
    if info is None or Right.fleet in info.caller.rights:
        return LoadFailed(model, reason)
    return LoadFailed(model, "an administrator finds the reason in GET /v1/models, and in the log")


def hold_charge() -> AbstractContextManager[None]:
    info = current_request_info.get()
    return nullcontext() if info is None or info.charge is None else info.charge.hold()
