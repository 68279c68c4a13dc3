"""Requests that wait until their model can be used: for a replica, and for a load on demand."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import anyio

from gateway.callers import Right
from gateway.capabilities.on_demand.loader import OnDemandLoader
from gateway.capabilities.on_demand.metrics import OnDemandMetrics
from gateway.capabilities.on_demand.model_copies import ModelCopies
from gateway.capabilities.on_demand.models import ModelLoading, NoRoom
from gateway.capabilities.on_demand.plan import (
    NoPlacement,
    Placement,
    compute_retry_after_s,
    update_load_time,
)
from gateway.capabilities.on_demand.settings import OnDemandSettings
from gateway.capacity.admission import AdmissionQueue, AdmissionQueueFull
from gateway.errors import (
    BadUpstream,
    DeadlinePassed,
    GatewayError,
    ModelControlModeConflict,
    ModelNotReady,
)
from gateway.fleet.pool import NoReplica, ReplicaPool
from gateway.fleet.signatures import SignatureCache
from gateway.http_client.connection import RequestNotSent
from gateway.repository.reconcile_plan import Backoff
from gateway.repository.reconciler import Reconciler
from gateway.repository.repository import Repository
from gateway.tasks import TaskSet, cancel_tasks, repeat
from gateway.telemetry.request_info import current_request_info, measure_phase
from gateway.triton.error_mapping import LoadFailed

RETRY_PAUSE_S: Final = 0.02  # while the models that hold the memory are in use
RETRY_PAUSES: Final = 10  # times the duration of the search for places, which grows with the fleet
MAX_RETRY_PAUSE_S: Final = 0.25
MAX_SEARCH_S: Final = 0.005  # the event loop is released after each search as long as this
RESUME_PAUSE_S: Final = 0.005
RESUMES_PER_PAUSE: Final = 32
MIN_REMAINING_S: Final = 0.001  # left to a request that waited until its deadline
MAX_UNREACHABLE: Final = 3  # replicas that fail during one load


@dataclass
class SharedLoad:
    """A load that all requests of a model wait for."""

    task: asyncio.Task[NoPlacement | None]
    started_at: float
    callers: Counter[str] = field(default_factory=Counter)  # caller → number of waiting requests
    # Set while the load waits for its turn.
    place: asyncio.Future[Placement | NoPlacement | None] | None = None
    resumed: int = 0  # number of requests that were let through
    resume_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # let through one after another
    obstacle: NoPlacement | None = None  # why there was no room the last time

    @property
    def waiters(self) -> int:
        return self.callers.total()


class ModelActivator:
    """Lets requests wait for a replica and for the load of their model, which they share."""

    def __init__(self, pool: ReplicaPool, loader: OnDemandLoader, reconciler: Reconciler) -> None:
        self._pool = pool
        self.loader = loader
        self._reconciler = reconciler
        self._loads: dict[str, SharedLoad] = {}
        self._failures: dict[str, Backoff] = {}
        self._load_times_s: dict[str, float] = {}
        self._tasks = TaskSet()
        self._wants_places = asyncio.Event()

    def can_activate(self, model: str) -> bool:
        if not self._pool.has_live_replica:
            return self.loader.settings.hold_s > 0
        if self._is_loadable(model):
            return True
        # The reconciler loads a desired model on a new replica.
        return self.loader.settings.hold_s > 0 and self.loader.state.is_desired(model)

    def is_on_demand(self, model: str) -> bool:
        return self.loader.models.is_on_demand(model)

    def matches(self, model: str) -> bool:
        return self.loader.models.matches(model)

    def _is_loadable(self, model: str) -> bool:
        return (
            self._pool.has_live_replica
            and self.loader.models.is_on_demand(model)
            and self._pool.is_listed(model)
        )

    async def activate(self, model: str, timeout_s: float) -> float:
        """Wait until the model is ready on a replica, or cannot be activated; return the remaining seconds.

        Raises `NoReplica`, `ModelNotReady`, `ModelLoading` or `NoRoom` after the timeout, `LoadFailed`, or
        `AdmissionQueueFull`.
        """
        if self._pool.is_served(model) or not self.can_activate(model):
            return timeout_s
        waiting = self.loader.usage.held_requests
        if waiting >= self.loader.usage.admission.max_waiting:
            self._pool.metrics.shed.labels("queue_full").inc()
            raise AdmissionQueueFull(model, 0, waiting)
        started_at = perf_counter()
        self._count_waiting(1)
        try:
            with hold_charge(), measure_phase("load"):
                await self._wait(model, timeout_s)
        finally:
            self._count_waiting(-1)
        return max(timeout_s - (perf_counter() - started_at), MIN_REMAINING_S)

    def _count_waiting(self, change: int) -> None:
        self.loader.usage.held_requests += change
        self.loader.metrics.held_requests.set(self.loader.usage.held_requests)

    async def _wait(self, model: str, timeout_s: float) -> None:
        self._check_backoff(model)
        load = self._loads.get(model) or self._start_load(model)
        started_at = perf_counter()
        hold_s = min(timeout_s, self.loader.settings.hold_s)
        caller = get_caller_name()
        load.callers[caller] += 1
        if load.place is not None:
            self.loader.usage.turns.add(model, (caller,))
        try:
            while not load.task.done():
                # The whole timeout applies to a load, the shorter one as long as there is no replica.
                limit_s = timeout_s if self._is_loadable(model) else hold_s
                remaining_s = started_at + limit_s - perf_counter()
                if remaining_s <= 0:
                    raise self._build_timeout_error(model, load)
                await asyncio.wait([load.task], timeout=remaining_s)
            try:
                obstacle = load.task.result()
            except LoadFailed as exc:
                raise build_load_error(exc.model, exc.reason) from exc
            if obstacle is not None:
                raise build_no_room_error(model, obstacle)
            with anyio.move_on_after(started_at + timeout_s - perf_counter()):
                return await self._wait_for_turn(model, load)
            raise self._build_timeout_error(model, load)
        finally:
            load.callers[caller] -= 1
            if not load.callers[caller]:
                del load.callers[caller]
                self.loader.usage.turns.remove(model, (caller,))
            if not load.callers and load.place is not None and not load.place.done():
                load.place.set_result(None)  # so that the load ends

    async def _wait_for_turn(self, model: str, load: SharedLoad) -> None:
        """Let requests through one by one: thousands at once would find the admission queue full."""
        admission = self.loader.usage.admission
        async with load.resume_lock:
            # An event would cost something for each request that ends.
            while load.waiters > RESUMES_PER_PAUSE and admission.is_crowded(model):  # noqa: ASYNC110 - cheaper
                await asyncio.sleep(RESUME_PAUSE_S)
            load.resumed += 1
            # In this time, earlier requests are admitted, or queue and crowd the model.
            if load.resumed % RESUMES_PER_PAUSE == 0 or admission.is_busy:
                await asyncio.sleep(RESUME_PAUSE_S)

    def _build_timeout_error(self, model: str, load: SharedLoad) -> GatewayError:
        if not self._is_loadable(model):
            return ModelNotReady(model) if self._pool.has_live_replica else NoReplica()
        if load.obstacle is not None:
            return build_no_room_error(model, load.obstacle)
        elapsed_s = perf_counter() - load.started_at
        expected_s = self._load_times_s.get(model)
        return ModelLoading(model, compute_retry_after_s(expected_s, elapsed_s))

    def _check_backoff(self, model: str) -> None:
        failure = self._failures.get(model, Backoff())
        if perf_counter() < failure.not_before:
            raise build_load_error(model, failure.reason)

    async def __aenter__(self) -> ModelActivator:
        copies = ModelCopies(self.loader, self._reconciler)
        places = repeat("on_demand", self._give_places)
        for work in (self.loader.report_usage(), self.loader.run(), copies.run(), places):
            self._tasks.start(work)
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks(self._tasks)

    def _start_load(self, model: str) -> SharedLoad:
        task = self._tasks.start(self._load(model))
        load = self._loads[model] = SharedLoad(task, perf_counter())
        self.loader.held.awaited.add(model)
        task.add_done_callback(lambda task: self._finish_load(model, task))
        return load

    def _finish_load(self, model: str, task: asyncio.Task[NoPlacement | None]) -> None:
        load = self._loads.pop(model)
        load.obstacle = None
        self.loader.usage.turns.remove(model, load.callers)
        self.loader.held.awaited.discard(model)
        if not task.cancelled():
            task.exception()  # the requests that waited may have gone

    async def _load(self, model: str) -> NoPlacement | None:
        """Wait for a replica and load the model, or return why there is no room for it."""
        current_request_info.set(None)  # the load serves all requests, not only the first
        load = self._loads[model]
        unreachable = 0
        while not self._pool.is_served(model) and load.waiters:
            if not self.can_activate(model):
                return None  # Triton's error tells why
            if not self._pool.has_live_replica:
                await self._pool.look_up_replicas()
                continue
            place = await self._wait_for_place(model, load) if self._is_loadable(model) else None
            if isinstance(place, NoPlacement):
                return place
            if isinstance(place, Placement):
                try:
                    if await self._load_once(model, place.replica, frozenset(load.callers)):
                        continue
                    self.loader.usage.turns.put_back(model, load.callers)
                except ModelControlModeConflict:
                    continue  # the loader does not choose this replica again
                except (RequestNotSent, BadUpstream):
                    unreachable += 1
                    if unreachable == MAX_UNREACHABLE:
                        raise
            await asyncio.sleep(RETRY_PAUSE_S)
        return None

    async def _wait_for_place(self, model: str, load: SharedLoad) -> Placement | NoPlacement | None:
        """Wait for the load's turn, and return its place, or why there will be none.

        None while the model or the replicas are changing.
        """
        if self.loader.is_loading(model):
            return None
        if not self.loader.list_candidates(model):
            if self.loader.has_controllable_replica:
                return None
            raise ModelNotReady(model)
        load.place = asyncio.get_running_loop().create_future()
        self.loader.usage.turns.add(model, load.callers)
        self._wants_places.set()
        try:
            return await load.place
        finally:
            load.place = None
            self.loader.usage.turns.remove(model, load.callers)

    async def _give_places(self) -> None:
        """Give the room that there is to the loads that wait for it, in the order of their turns."""
        await self._wants_places.wait()
        await self.loader.facts.update()
        turns = self.loader.usage.turns
        searched_s = 0.0
        chosen: set[str] = set()
        started_at = perf_counter()
        for model in turns.list_models():
            self._give_place(model, chosen)
            # While other requests run, a model can become idle for which a load before this one waits.
            if perf_counter() - started_at > MAX_SEARCH_S:
                searched_s += perf_counter() - started_at
                await asyncio.sleep(0)
                started_at = perf_counter()
        searched_s += perf_counter() - started_at
        if turns.callers:
            pause_s = max(RETRY_PAUSES * searched_s, RETRY_PAUSE_S)
            await asyncio.sleep(min(pause_s, MAX_RETRY_PAUSE_S))
        else:
            self._wants_places.clear()

    def _give_place(self, model: str, chosen: set[str]) -> None:
        """Give a load its place, unless there is none yet, or another load has just chosen the replica."""
        load = self._loads.get(model)
        if load is None or load.place is None or load.place.done():
            return
        place = self._choose_place(model, load)
        if isinstance(place, NoPlacement) and not place.is_final:
            load.obstacle = place
            return
        if isinstance(place, Placement):
            if place.replica in chosen or self.loader.is_locked(place.replica):
                return
            chosen.add(place.replica)
            self.loader.usage.turns.take(model)
        load.obstacle = None
        load.place.set_result(place)

    def _choose_place(self, model: str, load: SharedLoad) -> Placement | NoPlacement | None:
        if (
            self._pool.is_served(model)
            or not self._is_loadable(model)
            or self.loader.is_loading(model)
            or not self.loader.list_candidates(model)
        ):
            return None
        return self.loader.choose_placement(model, load.callers.keys())

    async def _load_once(self, model: str, replica: str, callers: Set[str]) -> bool:
        started_at = perf_counter()
        async with self._reconciler.lock_model(model):
            if self._pool.is_served(model) or not self._is_loadable(model):
                return True  # an administrator loaded or unloaded it
            try:
                is_loaded = await self.loader.load(model, replica, callers)
            except DeadlinePassed as exc:
                error = LoadFailed(model, "it did not become ready within GATEWAY_LOAD_TIMEOUT_S")
                self._record_failure(model, error)
                raise error from exc
            except LoadFailed as exc:
                self._record_failure(model, exc)
                raise
        if not is_loaded:
            return False
        self._failures.pop(model, None)
        duration_s = perf_counter() - started_at
        expected_s = self._load_times_s.get(model)
        self._load_times_s[model] = update_load_time(expected_s, duration_s)
        return True

    def _record_failure(self, model: str, error: LoadFailed) -> None:
        failure = self._failures.get(model, Backoff())
        self._failures[model] = failure.with_repetition(perf_counter(), error.reason)


def create_activator(
    pool: ReplicaPool,
    signatures: SignatureCache,
    repository: Repository,
    admission: AdmissionQueue,
    settings: OnDemandSettings,
    metrics: OnDemandMetrics,
) -> ModelActivator:
    state = repository.state
    reconciler = repository.reconciler
    loader = OnDemandLoader(
        pool,
        signatures,
        state,
        loader=repository.loader,
        reconciler=reconciler,
        admission=admission,
        settings=settings,
        metrics=metrics,
    )
    return ModelActivator(pool, loader, reconciler)


def build_load_error(model: str, reason: str) -> LoadFailed:
    """Return the error with the reason only for callers that may read it: it can name other models."""
    info = current_request_info.get()
    if info is None or Right.fleet in info.caller.rights:
        return LoadFailed(model, reason)
    return LoadFailed(model, "an administrator finds the reason in GET /v1/models, and in the log")


def build_no_room_error(model: str, obstacle: NoPlacement) -> NoRoom:
    """Return the error without the names of models that the caller cannot see."""
    info = current_request_info.get()
    visible = [name for name in obstacle.holders if info is None or info.caller.can_see(name)]
    has_hidden = len(visible) < len(obstacle.holders)
    protected_s = obstacle.protected_until - perf_counter()
    return NoRoom(model, visible, has_hidden=has_hidden, protected_s=protected_s)


def hold_charge() -> AbstractContextManager[None]:
    info = current_request_info.get()
    return nullcontext() if info is None or info.charge is None else info.charge.hold()


def get_caller_name() -> str:
    info = current_request_info.get()
    return "" if info is None else info.caller_name
