"""Model management on the whole fleet: a load applies to every replica, now and after its restart.

A call takes the lease of its model, stores what it desires, runs it on every replica, and reports what each
one confirmed. The reconciler does the rest: it compares what each replica has with what it should have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from math import inf
from typing import Any, Final

import anyio

from gateway.config.settings import ModelUploads, Settings
from gateway.errors import (
    ChangeInProgress,
    Conflict,
    GatewayError,
    UnknownModel,
    UnknownModelToLoad,
)
from gateway.fleet.index import UNAVAILABLE, Index, model_names
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.signatures import SignatureCache
from gateway.messages import join_names, quote_text
from gateway.repository.load_parameters import UNLOAD_DEPENDENTS
from gateway.repository.loader import ACTION_POLL_S, ModelLoader
from gateway.repository.model_facts import FactsReader
from gateway.repository.models_file import ModelsFile
from gateway.repository.operations import OperationReport, OperationRunner, Outcome
from gateway.repository.plan import StepTable, find_all_steps, find_dependents, is_outdated
from gateway.repository.readiness import ReadinessMonitor
from gateway.repository.reconciler import Reconciler
from gateway.repository.shared_state import SharedState
from gateway.repository.state.content import ALL, DesiredModel
from gateway.repository.state.store import StateStore
from gateway.tasks import cancel_tasks

log = logging.getLogger(__name__)

MAX_INDEX_WAIT_S: Final = 2.0  # limit for replicas that stop answering, or whose index is slow
MAX_LOAD_WAIT_S: Final = 30.0  # how long a change of a model's files waits for its loads
MAX_ACTION_DELAY_S: Final = 0.9  # how long a load waits for indexes if one has the model already

VisibilityCheck = Callable[[str], bool]


def is_always_visible(model: str) -> bool:
    return True


class Repository:
    """Model management of the fleet. As a context manager it runs the reconciler."""

    def __init__(
        self,
        pool: ReplicaPool,
        state: SharedState,
        *,
        loader: ModelLoader,
        readiness: ReadinessMonitor,
        reconciler: Reconciler,
        operations: OperationRunner,
        facts: FactsReader,
    ) -> None:
        self._pool = pool
        self.facts = facts
        self.state = state
        self.loader = loader
        self.readiness = readiness
        self.reconciler = reconciler
        self.operations = operations

    async def __aenter__(self) -> Repository:
        await self.state.refresh()
        self._pool.set_cordoned(self.state.cordoned)
        if self.state.desired_models:
            log.info("restored desired state: %s", self.state.summarize_desired_models())
        self.operations.tasks.start(self.reconciler.run())
        self.operations.tasks.start(self.state.events.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks(self.operations.tasks)
        await self.state.events.flush()
        await self.state.store.close()

    def outdated_replicas(self, model: str) -> list[str]:
        """Return the replicas that have not confirmed the desired load of the model."""
        desired = self.state.merge_model(model)
        confirmed = self.state.confirmed
        if desired is None:
            return []
        names = (replica.name for replica in self._pool.replicas.values())
        return [
            name for name in names if is_outdated(desired, confirmed.get(name, {}).get(model, ""))
        ]

    async def read_indexes(self) -> dict[str, Index]:
        """Probe all replicas, and return the indexes of the usable ones by address. Raises `NoReplica`."""
        await self._pool.monitor.probe_all(MAX_INDEX_WAIT_S)
        return self._pool.list_serving_indexes()

    async def _has_model(self, model: str) -> bool:
        """Return whether a usable replica has the model in its repository. Raises `NoReplica`."""
        pool = self._pool
        for max_wait_s in (MAX_ACTION_DELAY_S, inf):
            await pool.monitor.probe_all(max_wait_s)
            if model in model_names(pool.list_serving_indexes().values()):
                return True
        # An index that came too late once may take longer now. Without it, its replica does not serve.
        await asyncio.gather(*map(pool.monitor.probe, pool.list_unread_replicas()))
        return model in model_names(pool.list_serving_indexes().values())

    async def load(
        self,
        model: str,
        parameters: Mapping[str, Any],
        is_visible: VisibilityCheck = is_always_visible,
    ) -> OperationReport:
        """Load the model on every replica. Raises the report's error if any of them fails."""
        report = OperationReport(model, True)
        return await self.operations.run(report, self._change(report, parameters, is_visible))

    async def unload(
        self,
        model: str,
        parameters: Mapping[str, Any],
        is_visible: VisibilityCheck = is_always_visible,
    ) -> OperationReport:
        """Unload the model from every replica. Errors do not name models that are not visible."""
        report = OperationReport(model, False)
        return await self.operations.run(report, self._change(report, parameters, is_visible))

    async def forget(self, model: str) -> None:
        """Delete the desired state of a model whose files were removed."""
        async with self._lock_model(model) as stored:
            await self._forget(model, stored)

    async def end_removal(self, model: str) -> None:
        """Forget a model without files that is still to be unloaded. Raises `UnknownModel` for others."""
        async with self._lock_model(model) as stored:
            if stored is None or stored.is_loaded or await self._has_model(model):
                raise UnknownModel(model)
            await self._forget(model, stored)

    async def _forget(self, model: str, stored: DesiredModel | None) -> None:
        if stored is not None:
            await self._set_desired_model(model, None, stored)
        await self.state.forget_load_errors(model)

    @asynccontextmanager
    async def pause_loads(self, model: str) -> AsyncIterator[None]:
        """Wait until no replica that answers loads the model, and start no load of it in the block.

        A Triton whose files are moved during a load may never end it. Raises `ChangeInProgress`.
        """
        max_wait_s = min(MAX_LOAD_WAIT_S, self.loader.load_timeout_s)
        async with AsyncExitStack() as stack:
            with anyio.move_on_after(max_wait_s) as wait:
                await stack.enter_async_context(self._lock_model(model))
                while await self._is_loading(model):  # noqa: ASYNC110 - the indexes tell the end
                    await asyncio.sleep(ACTION_POLL_S)
            if wait.cancelled_caught:
                raise ChangeInProgress(model, self.state.describe_change(model))
            yield

    async def _is_loading(self, model: str) -> bool:
        """Return whether a replica that answers loads the model."""
        pool = self._pool
        await pool.monitor.probe_all(MAX_INDEX_WAIT_S)
        return any(
            pool.is_reachable(replica)
            and pool.is_responsive(replica)
            and replica.index.is_loading(model)
            for replica in pool.replicas.values()
        )

    def is_wanted(self, model: str) -> bool:
        return self.state.is_desired(model) or self._pool.is_loaded(model)

    async def start_operation(
        self,
        model: str,
        is_load: bool,
        parameters: Mapping[str, Any],
        is_visible: VisibilityCheck = is_always_visible,
    ) -> str:
        """Start a load or an unload in the background; return its id for `operations.read`."""
        report = OperationReport(model, is_load)
        work = partial(self._change, report, parameters, is_visible)
        return await self.operations.start(report, work)

    async def _change(
        self, report: OperationReport, parameters: Mapping[str, Any], is_visible: VisibilityCheck
    ) -> OperationReport:
        change = self._load if report.is_load else self._unload
        return await change(report, parameters, is_visible)

    async def _load(
        self, report: OperationReport, parameters: Mapping[str, Any], is_visible: VisibilityCheck
    ) -> OperationReport:
        model = report.model
        async with self._lock_model(model) as before:
            # A model that exists only in the load request is in no index, so its state would be unknown.
            if not await self._has_model(model):
                raise UnknownModelToLoad(model)
            stored = await self._set_desired_model(model, DesiredModel(ALL, parameters), before)
            desired = self.state.merge_models()[model]
            await self.reconciler.apply(desired, report)
            if not report.is_refused:
                await self._forget_unloaded_steps(report, is_visible)
            return await self._conclude(report, before, stored)

    async def _forget_unloaded_steps(
        self, report: OperationReport, is_visible: VisibilityCheck
    ) -> None:
        """Delete the desired states of steps that were unloaded: this load has brought them back."""
        await self.state.refresh_tables()
        steps = await self.facts.read_steps(max_age_s=0)
        for model in sorted(find_all_steps((report.model,), steps)):
            stored = self.state.get_stored_model(model)
            if stored is not None and not stored.is_loaded:
                with suppress(ChangeInProgress):  # a later change stays
                    await self._set_desired_model(model, None, stored)
                    report.forgotten_unloads += [model] if is_visible(model) else []

    async def _unload(
        self, report: OperationReport, parameters: Mapping[str, Any], is_visible: VisibilityCheck
    ) -> OperationReport:
        with_dependents = bool(parameters.get(UNLOAD_DEPENDENTS))
        if with_dependents:
            await self._unload_dependents(report, is_visible)
        try:
            return await self._unload_alone(report, is_visible, with_dependents=with_dependents)
        except GatewayError as exc:
            if report.unloaded_dependents:  # these stay unloaded
                exc.report = report.to_dict()
            raise

    async def _unload_alone(
        self, report: OperationReport, is_visible: VisibilityCheck, *, with_dependents: bool
    ) -> OperationReport:
        model = report.model
        async with self._lock_model(model) as before:
            if model in self.state.declared_models:
                raise ModelDeclared(model)
            has_model, steps = await asyncio.gather(  # each may wait for a replica that hangs
                self._has_model(model),
                self.facts.read_steps(max_age_s=0),
            )
            if not has_model:
                return await self._unload_absent(report, before)
            if dependents := self._find_dependents(model, steps):
                raise ModelNeeded(model, dependents, is_visible)
            # Without the desired state, the next request loads an on-demand model again, and the reconciler
            # leaves it alone.
            activator = self._pool.activator
            report.is_retried = activator is None or not activator.matches(model)
            desired = DesiredModel(0) if report.is_retried else None
            stored = await self._set_desired_model(model, desired, before)
            # An ensemble may have been loaded since the check. A load that ends later sees this unload.
            await self.state.refresh_tables()
            steps = await self.facts.read_steps()
            if dependents := self._find_dependents(model, steps):
                await self._set_desired_model(model, before, stored)
                raise ModelNeeded(model, dependents, is_visible)
            # Triton unloads the steps that it loaded for this model alone. It does not know the wanted ones.
            has_wanted_steps = any(map(self.state.is_desired, find_all_steps((model,), steps)))
            accepted = {UNLOAD_DEPENDENTS: True} if with_dependents and not has_wanted_steps else {}
            await self.reconciler.apply(DesiredModel(0, accepted), report)
            return await self._conclude(report, before, stored)

    async def _unload_dependents(
        self, report: OperationReport, is_visible: VisibilityCheck
    ) -> None:
        """Unload the models whose step this model is: Triton takes them down with it."""
        await self.state.refresh()
        steps = await self.facts.read_steps(max_age_s=0)
        dependents = self._find_dependents(report.model, steps)
        declared = self.state.declared_models
        if report.model in declared:
            raise ModelDeclared(report.model)
        if kept := [name for name in dependents if name in declared or not is_visible(name)]:
            raise DependentsKept(report.model, kept, is_visible)
        for model in dependents:
            await self._unload(OperationReport(model, False), {}, is_visible)
            report.unloaded_dependents.append(model)

    def _find_dependents(self, model: str, steps: StepTable) -> list[str]:
        """Return the models that need this one as a step, and are loaded or should be."""
        return [name for name in find_dependents(model, steps) if self.is_wanted(name)]

    async def _unload_absent(
        self, report: OperationReport, stored: DesiredModel | None
    ) -> OperationReport:
        if stored is None:
            raise UnknownModel(report.model)
        await self._forget(report.model, stored)
        report.replica_count = len(self._pool.replicas)
        for address in self._pool.replicas:
            report.record(str(address), Outcome(UNAVAILABLE))
        return report

    @asynccontextmanager
    async def _lock_model(self, model: str) -> AsyncIterator[DesiredModel | None]:
        """Exclude other changes of the model, and yield its stored desired state.

        Raises `ChangeInProgress`.
        """
        async with self.reconciler.lock_model(model):
            yield self.state.get_stored_model(model)

    async def _set_desired_model(
        self, model: str, desired: DesiredModel | None, expected: DesiredModel | None
    ) -> DesiredModel | None:
        """Store the desired model in place of the expected one, and return it with its revision.

        Raises `ChangeInProgress` if the state has another revision than expected: another gateway can get the
        lease while this process is stopped.
        """
        revision = 0 if expected is None else expected.revision
        if not await self.state.set_desired_model(model, desired, revision):
            await self.state.refresh()
            raise ChangeInProgress(model, self.state.describe_change(model))
        return self.state.get_stored_model(model)

    async def _conclude(
        self, report: OperationReport, before: DesiredModel | None, stored: DesiredModel | None
    ) -> OperationReport:
        """Restore the desired state if no replica has done it. Raises the report's error."""
        if report.is_refused:
            with suppress(ChangeInProgress):  # a later change stays
                await self._set_desired_model(report.model, before, stored)
        if report.errors:
            raise report.build_error()
        return report


def build_repository(
    pool: ReplicaPool,
    signatures: SignatureCache,
    store: StateStore,
    *,
    models_file: ModelsFile,
    settings: Settings,
) -> Repository:
    can_upload = settings.model_uploads is ModelUploads.code  # a config and files in a load
    state = SharedState(store, models_file, can_upload=can_upload)
    loader = ModelLoader(pool, signatures, state, load_timeout_s=settings.load_timeout_s)
    readiness = ReadinessMonitor(pool, state, settings.ready_quorum)
    facts = FactsReader(pool, signatures, state)
    loader.change_listeners.append(facts.invalidate)
    return Repository(
        pool,
        state,
        loader=loader,
        readiness=readiness,
        reconciler=Reconciler(pool, state, loader, readiness=readiness, facts=facts),
        operations=OperationRunner(store, state.events),
        facts=facts,
    )


class ModelNeeded(Conflict):
    """The model is a step of ensembles that are loaded, or should be."""

    remedy = 'unload that first, or send {"parameters": {"unload_dependents": true}}'

    def __init__(self, model: str, dependents: list[str], is_visible: VisibilityCheck) -> None:
        visible = [quote_text(name) for name in dependents if is_visible(name)]
        if len(visible) < len(dependents):
            visible.append("a model that this key cannot see")
        super().__init__(
            f"model {quote_text(model)} is needed by {join_names(visible)}; {self.remedy}"
        )


class DependentsKept(ModelNeeded):
    remedy = "unload_dependents unloads neither what the models file declares nor what the key cannot see"


class ModelDeclared(Conflict):
    def __init__(self, model: str) -> None:
        super().__init__(
            f"model {quote_text(model)} is declared in the models file; remove it there first"
        )
