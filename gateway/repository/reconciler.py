"""The reconciler: compares what is desired with each replica's index, and repairs the difference.

Every gateway does so. Whoever has the lease of a model acts on it: a call of the API, a load on demand, or
the reconciler of one of the gateways.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final
from weakref import WeakValueDictionary

from gateway.errors import DeadlinePassed, GatewayError, StateUnavailable
from gateway.fleet.index import EMPTY_INDEX, READY, UNAVAILABLE
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.repository.loader import ModelLoader
from gateway.repository.model_facts import FactsReader
from gateway.repository.operations import OperationReport, Outcome
from gateway.repository.plan import (
    CONFLICT_SUCCESSES,
    Backoff,
    ModelAction,
    ReplicaView,
    find_needed_models,
    plan_actions,
)
from gateway.repository.readiness import ReadinessMonitor
from gateway.repository.shared_state import SharedState
from gateway.repository.state.content import DesiredModel
from gateway.tasks import TaskSet, cancel_tasks, repeat
from gateway.telemetry.audit import SUCCEEDED, Event, list_changes

log = logging.getLogger(__name__)

RECONCILE_INTERVAL_S: Final = 1.0
MIN_RECONCILE_PAUSE_S: Final = 0.1
# Until the state of a replica that this gateway has never seen is deleted: another one may find it first.
MAX_ABSENCE_S: Final = 60.0
MAX_PARALLEL_ACTIONS: Final = 2  # by the reconciler, per replica

REPLICA_UNREACHABLE: Final = "UNREACHABLE"
FLEET_LEASE: Final = "fleet"
ActionKey = tuple[str, str]  # replica, model


def build_removal_event(replica: str) -> Event:
    changes = list_changes([(f"replica {replica}", {"cordoned": True}, None)])
    message = f"the cordon of replica {replica} ended, because it left the fleet"
    return Event(message, "uncordon", SUCCEEDED, caller="gateway", changes=changes, replica=replica)


class Reconciler:
    def __init__(
        self,
        pool: ReplicaPool,
        state: SharedState,
        loader: ModelLoader,
        *,
        readiness: ReadinessMonitor,
        facts: FactsReader,
    ) -> None:
        self._pool = pool
        self._state = state
        self._loader = loader
        self._readiness = readiness
        self._facts = facts
        # Of the models that this gateway acts on.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._tasks = TaskSet()  # one for each model
        self._running: dict[ActionKey, asyncio.Task[None]] = {}
        self._backoffs: dict[ActionKey, Backoff] = {}
        self._seen_changes = 0
        # Of the replicas that were seen: the exits after which their loads were forgotten.
        self._exit_counts: dict[str, int] = {}
        self._absent_since: dict[str, float] = {}  # replicas that have stored state
        state.find_loading_replicas = self._find_loading_replicas

    async def run(self) -> None:
        try:
            await repeat("reconciler", self._reconcile)
        finally:
            await cancel_tasks(self._tasks)

    async def _reconcile(self) -> None:
        await self._state.refresh()
        self._pool.set_cordoned(self._state.cordoned)
        self._readiness.update()
        self._forget_failures()
        with suppress(StateUnavailable):  # the store logs it
            await self._state.renew_presence()
            await self._forget_ended_replicas()
        for model in self._choose_models(await self._plan(self._state.merge_models())):
            self._tasks.start(self._reconcile_model(model))
        await asyncio.sleep(MIN_RECONCILE_PAUSE_S)
        pause_s = RECONCILE_INTERVAL_S - MIN_RECONCILE_PAUSE_S
        self._seen_changes = await self._pool.changes.wait(self._seen_changes, pause_s)

    # The leases of models

    @asynccontextmanager
    async def lock_model(self, model: str) -> AsyncIterator[None]:
        """Wait for the lease of a model, and keep it in the block. Raises `ChangeInProgress`."""
        try:
            async with self._find_lock(model), self._state.lock_model(model):
                yield
        finally:
            self._pool.changes.notify()

    @asynccontextmanager
    async def try_lock_model(self, model: str) -> AsyncIterator[bool]:
        """Yield whether nobody else acts on the model; if so, nobody does in the block."""
        lock = self._find_lock(model)
        if lock.locked():
            yield False
            return
        async with lock, self._state.lease(f"model:{model}") as is_granted:
            yield is_granted

    def _find_loading_replicas(self, model: str) -> list[str]:
        """Return the replicas that load the model, by their indexes, or have confirmed no load of it."""
        desired = self._state.merge_model(model)
        is_awaited = desired is not None and desired.is_loaded and desired.generation
        return sorted(
            replica.name
            for replica in self._pool.replicas.values()
            if self._pool.is_reachable(replica)
            and (
                replica.index.is_loading(model)
                or (is_awaited and model not in self._state.confirmed.get(replica.name, {}))
            )
        )

    def is_locked(self, model: str) -> bool:
        lock = self._locks.get(model)
        return lock is not None and lock.locked()

    def _find_lock(self, model: str) -> asyncio.Lock:
        return self._locks.setdefault(model, asyncio.Lock())

    # Plans and actions

    async def _plan(self, desired_models: Mapping[str, DesiredModel]) -> list[ModelAction]:
        """Return what is to be done now for these models."""
        replicas = [
            self._view(replica)
            for replica in self._pool.replicas.values()
            if self._pool.is_reachable(replica)
            and replica.name not in self._loader.uncontrollable_replicas
        ]
        needed = {}
        unwanted = {name for name, desired in desired_models.items() if not desired.is_loaded}
        if any(not unwanted.isdisjoint(replica.index.ready_models) for replica in replicas):
            merged = self._state.merge_models()
            steps = await self._facts.read_steps()
            needed = {each.name: find_needed_models(merged, each, steps) for each in replicas}
        return plan_actions(desired_models, replicas, needed)

    def _view(self, replica: Replica) -> ReplicaView:
        name = replica.name
        now = asyncio.get_running_loop().time()
        backoffs = {model: each for (at, model), each in self._backoffs.items() if at == name}
        desired = {model: self._state.merge_model(model) for model in backoffs}
        return ReplicaView(
            name,
            replica.index if self._pool.is_reachable(replica) else EMPTY_INDEX,
            confirmed=self._state.confirmed.get(name, {}),
            running={model for at, model in self._running if at == name},
            paused={
                model
                for model, each in backoffs.items()
                if now < each.not_before and each.generation == find_generation(desired[model])
            },
            failed={model for model, each in backoffs.items() if each.reason},
        )

    async def _reconcile_model(self, model: str) -> None:
        """Repair a model everywhere, unless another gateway does."""
        async with self.try_lock_model(model) as is_granted:
            while is_granted:
                await self._state.refresh_tables()
                desired = self._state.merge_model(model)
                plan = [] if desired is None else await self._plan({model: desired})
                for action in plan:
                    replica = self._pool.find_replica(action.replica)
                    count = sum(at == action.replica for at, _ in self._running)
                    if replica is not None and count < MAX_PARALLEL_ACTIONS:
                        self._start_action(replica, action)
                if not await self._wait_for_action(model):
                    break

    async def apply(self, desired: DesiredModel, report: OperationReport) -> None:
        """Load or unload a model on every replica, and report each outcome, not only the first failure.

        The caller has the lease of the model, and has checked that nothing needs what it unloads.
        """
        model = report.model
        # One that hangs comes last, so that the others do not wait for it.
        replicas = sorted(self._pool.replicas.values(), key=lambda each: -each.answered_at)
        report.replica_count = len(replicas)
        by_name = {replica.name: replica for replica in replicas}
        try:
            while pending := [each for each in replicas if each.name not in report.outcomes]:
                views = [self._view(replica) for replica in pending]
                for action in plan_actions({model: desired}, views, {}, is_call=True):
                    self._start_action(by_name[action.replica], action, report)
                await self._wait_for_action(model)
        finally:
            await cancel_tasks(self._list_running(model))  # the lease ends with a cancelled call

    def _start_action(
        self, replica: Replica, action: ModelAction, report: OperationReport | None = None
    ) -> None:
        task = self._tasks.start(self._act(replica, action, report))
        self._running[replica.name, action.model] = task

    def _list_running(self, model: str) -> list[asyncio.Task[None]]:
        return [task for (_, name), task in self._running.items() if name == model]

    async def _wait_for_action(self, model: str) -> bool:
        """Wait until an action of the model ends, or for a second; return whether there was one."""
        running = self._list_running(model)
        if running:
            done, _ = await asyncio.wait(
                running, timeout=RECONCILE_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()  # raises what is not a failure of the replica
        return bool(running)

    def _choose_models(self, actions: Iterable[ModelAction]) -> set[str]:
        """Return the models of which an action can start now."""
        models = set()
        counts = Counter(replica for replica, _ in self._running)
        for action in actions:
            if counts[action.replica] < MAX_PARALLEL_ACTIONS and not self.is_locked(action.model):
                counts[action.replica] += 1
                models.add(action.model)
        return models

    async def _act(
        self, replica: Replica, action: ModelAction, report: OperationReport | None
    ) -> None:
        key = (replica.name, action.model)
        what = f"{action.verb}ing model {action.model} on {replica.name}"
        started_at = asyncio.get_running_loop().time()
        error: GatewayError | None = None
        try:
            if report is None:
                log.warning("%s to reach the desired state: %s", what, action.reason)
            await self._loader.run(replica, action, "reconciler" if report is None else "api")
        except GatewayError as exc:
            error = exc
        finally:
            del self._running[key]
            self._pool.changes.notify()
        if report is not None:
            report.record(replica.name, self._describe_outcome(replica, action, error))
        elif error is not None:
            log.warning("%s failed: %s", what, error.detail)
        if report is not None and error is None:
            self._backoffs.pop(key, None)
        else:
            self._back_off(key, started_at, "" if error is None else error.detail)

    def _describe_outcome(
        self, replica: Replica, action: ModelAction, error: GatewayError | None
    ) -> Outcome:
        if error is None:
            return Outcome(READY if action.is_load else UNAVAILABLE)
        if not (self._pool.is_reachable(replica) and self._pool.is_responsive(replica)):
            return Outcome(REPLICA_UNREACHABLE, error)
        is_late = isinstance(error, DeadlinePassed) and replica.index.is_changing(action.model)
        state = replica.index.model_state(action.model).state
        return Outcome(state, error, is_in_progress=is_late)

    def _back_off(self, key: ActionKey, started_at: float, failure: str) -> None:
        """Let the next action wait, also after a success: something else may undo it each time."""
        replica, model = key
        generation = find_generation(self._state.merge_model(model))
        last = self._backoffs.get(key, Backoff())
        if last.is_over(started_at) or last.generation != generation:
            last = Backoff()
        now = asyncio.get_running_loop().time()
        backoff = self._backoffs[key] = last.with_repetition(now, failure, generation)
        if not failure and backoff.successes == CONFLICT_SUCCESSES:
            log.warning(
                "something else loads or unloads model %s on %s against the desired state: another "
                "program, or a gateway with another GATEWAY_STATE; corrections are made less often",
                model,
                replica,
            )

    # Replicas that leave or end

    def _forget_failures(self) -> None:
        """Forget the failures of replicas that are not reachable: they may return as new processes."""
        replicas = self._pool.replicas.values()
        reachable = {replica.name for replica in replicas if self._pool.is_reachable(replica)}
        self._backoffs = {key: each for key, each in self._backoffs.items() if key[0] in reachable}
        self._loader.uncontrollable_replicas &= reachable

    async def _forget_ended_replicas(self) -> None:
        """Forget what replicas confirmed whose process has ended, and all of those that left the fleet.

        Raises `StateUnavailable`.
        """
        replicas = {replica.name: replica for replica in self._pool.replicas.values()}
        for name, replica in replicas.items():
            exit_count = replica.exit_count
            if exit_count != self._exit_counts.setdefault(name, 0):
                await self._state.forget_replica(name)
                self._exit_counts[name] = exit_count
        removed = self._find_removed_replicas(frozenset(replicas))
        if removed and await self._state.renew_lease(FLEET_LEASE):
            for name in removed:
                await self._state.forget_replica(name)
                if name in self._state.cordoned:  # another replica may get the address
                    await self._state.set_cordon(name, is_cordoned=False)
                    self._state.events.record(build_removal_event(name))
                self._exit_counts.pop(name, None)

    def _find_removed_replicas(self, current: frozenset[str]) -> set[str]:
        """Return the replicas that have stored state, and have left, or were absent for a while.

        The gateway that saw them leave may have exited before it could delete that.
        """
        now = asyncio.get_running_loop().time()
        since = self._absent_since
        stored = self._state.cordoned | self._state.confirmed.keys()
        self._absent_since = {name: since.get(name, now) for name in stored - current}
        return {
            name
            for name, at in self._absent_since.items()
            if name in self._exit_counts or now - at >= MAX_ABSENCE_S
        }


def find_generation(desired: DesiredModel | None) -> str:
    return "" if desired is None else desired.generation
