"""The reconciler: compares the desired state with each replica's index, and repairs the difference."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final
from weakref import WeakValueDictionary

from gateway.errors import GatewayError, StateUnavailable
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.repository.ensembles import EnsembleSteps
from gateway.repository.loader import ModelLoader
from gateway.repository.readiness import ReadinessMonitor
from gateway.repository.reconcile_plan import (
    CONFLICT_CORRECTIONS,
    CORRECTION_MEMORY_S,
    Backoff,
    ModelAction,
    PlannedAction,
    StepTable,
    find_needed_models,
    plan_actions,
    with_correction,
)
from gateway.repository.shared_state import SharedState
from gateway.repository.state.content import DesiredModel
from gateway.tasks import repeat
from gateway.telemetry.audit import SUCCEEDED, Event, list_changes

log = logging.getLogger(__name__)

RECONCILE_INTERVAL_S: Final = 1.0
MIN_RECONCILE_PAUSE_S: Final = 0.1
# Until the state of a replica that this gateway has never seen is deleted: another one may find it first.
MAX_ABSENCE_S: Final = 60.0
MAX_PARALLEL_ACTIONS: Final = 2  # loads by the reconciler, per replica

LEADER_LEASE: Final = "leader"
ActionKey = tuple[str, str]  # replica, model


def read_load_errors(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the load errors in the report of another gateway, which can be of any form."""
    table = report.get("load_errors")
    entries = table.items() if isinstance(table, dict) else ()
    return {model: error for model, error in entries if isinstance(error, str)}


def build_removal_event(replica: str) -> Event:
    changes = list_changes([(f"replica {replica}", {"cordoned": True}, None)])
    message = f"the cordon of replica {replica} ended, because it left the fleet"
    return Event(message, "uncordon", SUCCEEDED, caller="gateway", changes=changes, replica=replica)


class Reconciler:
    """Starts the actions that replicas need, while this gateway holds the lease."""

    def __init__(
        self,
        pool: ReplicaPool,
        state: SharedState,
        loader: ModelLoader,
        *,
        readiness: ReadinessMonitor,
        ensemble_steps: EnsembleSteps,
    ) -> None:
        self._pool = pool
        self._state = state
        self._loader = loader
        self._readiness = readiness
        self._ensemble_steps = ensemble_steps
        self.is_leader = False
        self.action_tasks: dict[ActionKey, asyncio.Task[None]] = {}
        # Of the models that a call changes, or waits to change.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._backoffs: dict[ActionKey, Backoff] = {}
        # Successful actions that something else undoes again and again.
        self._corrections: dict[ActionKey, Backoff] = {}
        self._done_actions: dict[str, list[PlannedAction]] = {}  # by replica, of the last minute
        self._published_load_errors: dict[str, str] = {}
        self._known_replicas: set[str] = set()
        self._seen_changes = 0
        self._absent_since: dict[str, float] = {}  # replicas that have stored state

    async def run(self) -> None:
        await repeat("reconciler", self._reconcile)

    async def _reconcile(self) -> None:
        await self._state.refresh()
        self._pool.set_cordoned(self._state.cordoned)
        self._readiness.update()
        self.is_leader = await self._state.renew_lease(LEADER_LEASE)
        await self._forget_removed_replicas()
        if self.is_leader:
            await self._start_missing_actions()
        await self._publish_load_errors()
        await asyncio.sleep(MIN_RECONCILE_PAUSE_S)
        pause_s = RECONCILE_INTERVAL_S - MIN_RECONCILE_PAUSE_S
        self._seen_changes = await self._pool.changes.wait(self._seen_changes, pause_s)

    @asynccontextmanager
    async def lock_model(self, model: str) -> AsyncIterator[None]:
        """Serialize the calls for one model. In the block, the reconciler does not act on it."""
        try:
            async with self._locks.setdefault(model, asyncio.Lock()):
                running = [task for key, task in self.action_tasks.items() if key[1] == model]
                if running:
                    await asyncio.wait(running)
                yield
        finally:
            self._pool.changes.notify()

    def is_locked(self, model: str) -> bool:
        return self._has_call(model) or any(key[1] == model for key in self.action_tasks)

    def _has_call(self, model: str) -> bool:
        lock = self._locks.get(model)
        return lock is not None and lock.locked()

    def run_action(
        self, replica: Replica, action: ModelAction, initiator: str
    ) -> asyncio.Task[None]:
        """Start an action of another component. Calls for its model wait until it is done."""
        task = self._start_action(replica, action, self._loader.run(replica, action, initiator))
        # The component may have stopped waiting.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    def forget_failures(self, *, replica: str | None = None, model: str | None = None) -> None:
        for table in (self._backoffs, self._corrections):
            for key in list(table):
                if key[0] == replica or key[1] == model:
                    del table[key]
        if replica is not None:
            self._done_actions.pop(replica, None)

    async def _publish_load_errors(self) -> None:
        load_errors = self._loader.list_errors()
        if load_errors or self._published_load_errors:
            with suppress(StateUnavailable):  # the store logs it
                await self._state.exchange_reports(load_errors=load_errors)
                self._published_load_errors = load_errors

    async def collect_load_errors(self) -> dict[str, str]:
        """Return where and why the last load of each model failed, on any gateway."""
        load_errors: dict[str, str] = {}
        with suppress(StateUnavailable):
            for report in await self._state.exchange_reports():
                load_errors |= read_load_errors(report)
        return load_errors | self._loader.list_errors()

    async def _forget_removed_replicas(self) -> None:
        """Drop the state of removed replicas, and the loads of replicas whose process has exited."""
        replicas = list(self._pool.replicas.values())
        current = {replica.name for replica in replicas}
        removed = (self._known_replicas - current) | self._find_absent_replicas(current)
        self._known_replicas = current
        self._loader.uncontrollable_replicas &= current
        for name in {key[0] for key in (*self._backoffs, *self._corrections)} - current:
            self.forget_failures(replica=name)
        for name in removed & self._state.cordoned if self.is_leader else ():
            with suppress(StateUnavailable):  # another replica may get the address
                await self._state.set_cordon(name, is_cordoned=False)
                self._state.events.record(build_removal_event(name))
        removed |= {replica.name for replica in replicas if replica.health.has_exited}
        for name in removed & self._state.loads.keys() if self.is_leader else ():
            await self._state.forget_loads(name)

    def _find_absent_replicas(self, current: set[str]) -> set[str]:
        """Return the replicas that have stored state, and have not been part of the fleet for a while.

        The gateway that saw them leave may have exited before it could delete that.
        """
        now = asyncio.get_running_loop().time()
        since = self._absent_since
        stored = self._state.cordoned | self._state.loads.keys()
        self._absent_since = {name: since.get(name, now) for name in stored - current}
        return {name for name, at in self._absent_since.items() if now - at >= MAX_ABSENCE_S}

    async def _start_missing_actions(self) -> None:
        desired_models = self._state.merge_models()
        replicas = list(self._pool.replicas.values())
        steps = None
        if any(has_unwanted_model(desired_models, replica) for replica in replicas):
            steps = await self._ensemble_steps.read(desired_models)
        for replica in replicas:
            name = replica.name
            if not self._pool.is_reachable(replica):
                # The replica may return as a new process, so earlier failures do not count.
                self.forget_failures(replica=name)
                self._loader.uncontrollable_replicas.discard(name)
                continue
            if name in self._loader.uncontrollable_replicas:
                continue
            running = sum(key[0] == name for key in self.action_tasks)
            for action in self._plan_actions(replica, desired_models, steps):
                if running >= MAX_PARALLEL_ACTIONS:
                    break
                if self._can_start_action((name, action.model)):
                    running += 1
                    self._start_action(replica, action, self._run_action(replica, action))

    def _plan_actions(
        self,
        replica: Replica,
        desired_models: Mapping[str, DesiredModel],
        steps: StepTable | None,
    ) -> Iterator[ModelAction]:
        """Yield the actions of a replica; without the steps of the models, only loads."""
        loads = self._state.loads.get(replica.name, {})
        needed = None
        if steps is not None:
            failed = {model for name, model in self._backoffs if name == replica.name}
            needed = find_needed_models(
                desired_models, replica.index, loads, steps=steps, failed=failed
            )
        return plan_actions(desired_models, replica.index, loads, needed)

    def _can_start_action(self, key: ActionKey) -> bool:
        if key in self.action_tasks or self._has_call(key[1]):
            return False
        now = asyncio.get_running_loop().time()
        tables = (self._backoffs, self._corrections)
        return all(now >= table.get(key, Backoff()).not_before for table in tables)

    def _start_action(
        self, replica: Replica, action: ModelAction, work: Coroutine[Any, Any, None]
    ) -> asyncio.Task[None]:
        key = (replica.name, action.model)
        task = self.action_tasks[key] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._finish_action(key))
        return task

    def _finish_action(self, key: ActionKey) -> None:
        self.action_tasks.pop(key, None)
        self._pool.changes.notify()

    async def _run_action(self, replica: Replica, action: ModelAction) -> None:
        key = (replica.name, action.model)
        desired_models = self._state.merge_models()
        what = f"{action.verb}ing model {action.model} on {replica.name}"
        try:
            if not await self._run_if_needed(replica, action, what):
                return
        except GatewayError as exc:
            now = asyncio.get_running_loop().time()
            self._backoffs[key] = self._backoffs.get(key, Backoff()).with_repetition(now)
            log.warning("%s failed: %s", what, exc.detail)
        else:
            self._backoffs.pop(key, None)
            await self._record_done_action(replica, action, desired_models)

    async def _run_if_needed(self, replica: Replica, action: ModelAction, what: str) -> bool:
        """Run the action, unless another gateway has changed the desired state; return whether it ran.

        A load is recorded before the desired state is read again, and an unload by another gateway changes
        the desired state before it looks for loads: one of them notices the other.
        """
        model = action.model
        async with AsyncExitStack() as stack:
            started_load = None
            if action.is_load and action.load_id:
                started_load = await self._state.begin_load(replica.name, model)
            elif not action.is_load:
                lease = self._state.lease(f"model:{model}")
                if not await stack.enter_async_context(lease):
                    return False
            await self._state.refresh_desired_models()
            load = "" if started_load is None else started_load.confirmed_load
            if not await self._is_needed(replica, action, load):
                if started_load is not None:
                    await self._state.end_load(replica.name, model, started_load, load)
                return False
            log.warning("%s to reach the desired state: %s", what, action.reason)
            await self._loader.run(replica, action, "reconciler", started_load)
        return True

    async def _is_needed(self, replica: Replica, action: ModelAction, confirmed_load: str) -> bool:
        """Return whether a plan of now has the action, if the replica confirmed this load of its model."""
        desired_models = self._state.merge_models()
        wanted = {name: each for name, each in desired_models.items() if name == action.model}
        if action.is_load:
            return action in plan_actions(wanted, replica.index, {action.model: confirmed_load})
        steps = await self._ensemble_steps.read(desired_models)
        return action in self._plan_actions(replica, desired_models, steps)

    async def _record_done_action(
        self, replica: Replica, action: ModelAction, desired_models: Mapping[str, DesiredModel]
    ) -> None:
        """Count a correction, and plans that contradict each other, which would go on for ever."""
        now = asyncio.get_running_loop().time()
        done = PlannedAction(action, desired_models, now)
        earlier = [
            each
            for each in self._done_actions.get(replica.name, [])
            if now - each.done_at <= CORRECTION_MEMORY_S
        ]
        self._done_actions[replica.name] = [*earlier, done]
        reversed_action = None
        if any(each.action.is_load != action.is_load for each in earlier):
            steps = await self._ensemble_steps.read(desired_models)
            reversed_action = next((each for each in earlier if done.reverses(each, steps)), None)
        if reversed_action is None:
            self._record_correction((replica.name, action.model))
        else:
            self._record_reversal(replica, action, reversed_action.action)

    def _record_reversal(self, replica: Replica, action: ModelAction, earlier: ModelAction) -> None:
        key = (replica.name, action.model)
        corrections = self._corrections.get(key, Backoff())
        now = asyncio.get_running_loop().time()
        self._corrections[key] = corrections.with_repetition(now)
        self._pool.metrics.reconcile_reversals.labels(action.model, replica.name).inc()
        log.error(
            "two plans for %s contradict each other: %s of model %s (%s) undid the %s of model %s (%s); "
            "this is a defect of the gateway, please report it",
            replica.name,
            action.verb,
            action.model,
            action.reason,
            earlier.verb,
            earlier.model,
            earlier.reason,
        )

    def _record_correction(self, key: ActionKey) -> None:
        """Count the corrections that something else undoes; each waits longer than the one before."""
        now = asyncio.get_running_loop().time()
        corrections = with_correction(self._corrections.get(key), now)
        self._corrections[key] = corrections
        if corrections.repetitions == CONFLICT_CORRECTIONS:
            replica, model = key
            log.warning(
                "something else loads or unloads model %s on %s against the desired state: another "
                "program, or a gateway with another GATEWAY_STATE; corrections are made less often",
                model,
                replica,
            )


def has_unwanted_model(desired_models: Mapping[str, DesiredModel], replica: Replica) -> bool:
    """Return whether the replica has a model that is to be unloaded."""
    return any(
        not desired.is_loaded and replica.index.is_ready(model)
        for model, desired in desired_models.items()
    )
