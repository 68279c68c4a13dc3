"""Models, managed on the whole fleet: a load means loaded on every replica, now and after its restart.

What is asked is written down first (`state`), then done on every replica side by side, then looked at
until it is true. What could not be done then, the reconciler does: it compares what each replica has
with what it should have, for ever.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import anyio
import orjson

from gateway import audit
from gateway.errors import (
    BadUpstream,
    Conflict,
    DeadlinePassed,
    GatewayError,
    ModelControlModeConflict,
    StateUnavailable,
    UnknownModel,
    UnknownModelToLoad,
)
from gateway.fleet.health import HealthState
from gateway.fleet.index import READY, UNAVAILABLE, UNLOADED, Index, VersionState, model_names
from gateway.fleet.models_file import ModelsFile
from gateway.fleet.pool import NoReplica, ReplicaPool, cancel_tasks
from gateway.fleet.reconcile_plan import (
    Backoff,
    ModelAction,
    Readiness,
    ReplicaStatus,
    check_readiness,
    filter_uploads,
    is_behind,
    merge_declared_models,
    plan_actions,
    update_required_models,
)
from gateway.fleet.replica import Replica
from gateway.fleet.signatures import ModelService
from gateway.fleet.transports import UNQUOTED_PATH_CHARS, triton_model_path
from gateway.messages import join_names, quote_text
from gateway.state.desired import DesiredModel, StateStore
from gateway.state.loads import Loads, new_load_token, with_load
from gateway.triton.error_mapping import LoadFailed, RequestTarget, map_load_error, sanitize_message
from gateway.triton.grpc import management
from gateway.triton.grpc.management import GrpcTlsFiles, GrpcUnreachable
from gateway.triton.http.client import MAX_METADATA_BYTES
from gateway.triton.http.connection import RequestNotSent

log = logging.getLogger(__name__)

RECONCILE_INTERVAL_S: Final = 1.0
MIN_RECONCILE_PAUSE_S: Final = 0.1
MAX_PARALLEL_ACTIONS: Final = 2  # loads by the reconciler, per replica
ACTION_POLL_S: Final = 0.1
MAX_PARALLEL_CONFIG_READS: Final = 16
CONFIG_TIMEOUT_S: Final = 5.0
REPLICA_UNREACHABLE: Final = "UNREACHABLE"
# The replica may be well, but could not be asked: what was wished stays wished.
UNREACHABLE_ERRORS: Final = (RequestNotSent, BadUpstream, DeadlinePassed)


VisibilityCheck = Callable[[str], bool]
# Of replicas whose load has begun: its token, and what was confirmed before.
StartedLoads = Mapping[Replica, tuple[str, str]]


def is_always_visible(model: str) -> bool:
    return True


@dataclass(frozen=True)
class Outcome:
    """What came of it on one replica; without an error it is done."""

    state: str
    error: GatewayError | None = None

    def to_dict(self) -> dict[str, str]:
        found = {"state": self.state}
        return found if self.error is None else {**found, "reason": self.error.detail}


@dataclass
class OperationReport:
    """A load or an unload on every replica; the outcomes come in as they are known."""

    model: str
    is_load: bool
    replica_count: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def action(self) -> str:
        return "load" if self.is_load else "unload"

    @property
    def errors(self) -> dict[str, GatewayError]:
        return {
            address: outcome.error
            for address, outcome in self.outcomes.items()
            if outcome.error is not None
        }

    @property
    def control_mode_error(self) -> ModelControlModeConflict | None:
        """What a replica said that takes neither loads nor unloads."""
        modes = (
            error for error in self.errors.values() if isinstance(error, ModelControlModeConflict)
        )
        return next(modes, None)

    @property
    def is_refused(self) -> bool:
        """None did it, and asking those again that could not be asked would help nobody."""
        failed = self.errors
        asked = not any(isinstance(error, UNREACHABLE_ERRORS) for error in failed.values())
        return len(failed) == len(self.outcomes) and (asked or self.control_mode_error is not None)

    def to_dict(self) -> dict[str, Any]:
        done = (
            bool(self.replica_count)
            and not self.errors
            and len(self.outcomes) == self.replica_count
        )
        states = [outcome.state for outcome in self.outcomes.values() if outcome.error is not None]
        state = (
            (READY if self.is_load else UNAVAILABLE) if done else states[0] if states else "PENDING"
        )
        told = {address: outcome.to_dict() for address, outcome in sorted(self.outcomes.items())}
        return {"model": self.model, "state": state, "replicas": told}

    def build_error(self) -> GatewayError:
        """What the caller is told when it was not done everywhere."""
        failed = self.errors
        if self.is_refused:
            error = self.control_mode_error or self._combine_errors(list(failed.values()))
        else:
            error = PartlyDone(self.model, self.is_load, len(self.outcomes), failed)
        error.report = self.to_dict()
        return error

    def _combine_errors(self, errors: Sequence[GatewayError]) -> GatewayError:
        """The one error that stands for those of all replicas."""
        first = errors[0]
        if all(type(error) is type(first) for error in errors):
            return first
        failures = (error for error in errors if isinstance(error, LoadFailed))
        verb = "load" if self.is_load else "unload"
        return next(failures, None) or LoadFailed(self.model, first.detail, verb)


class PartlyDone(BadUpstream):
    code = "PARTLY_DONE"

    def __init__(
        self, model: str, is_load: bool, replica_count: int, errors: Mapping[str, GatewayError]
    ) -> None:
        what = "loaded" if is_load else "unloaded"
        address, error = next(iter(errors.items()))
        super().__init__(
            f"model {quote_text(model)} is {what} on {replica_count - len(errors)} of "
            f"{replica_count} replicas; the gateway "
            f"goes on trying; on {address}: {error.detail}"
        )


@dataclass(frozen=True)
class ManagementOptions:
    """How models are managed."""

    load_timeout_s: float = 300.0
    tls: GrpcTlsFiles | None = None
    can_upload: bool = False  # whether a load may bring a config and files
    ready_quorum: int = 1  # on how many replicas a declared model must be ready


class Repository:
    """The fleet's model management. Use it as a context manager: inside, it reconciles."""

    def __init__(
        self,
        pool: ReplicaPool,
        models: ModelService,
        store: StateStore,
        models_file: ModelsFile,
        options: ManagementOptions,
    ) -> None:
        self.desired_models: Mapping[str, DesiredModel] = {}
        self.load_errors: dict[str, str] = {}  # of a model: why its last load failed, and where
        self._pool = pool
        self._models = models
        self._store = store
        self._models_file = models_file
        self._options = options
        self._required_models = dict(models_file.models)
        self._locks: dict[str, ModelLock] = {}
        self._action_tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._backoffs: dict[tuple[str, str], Backoff] = {}
        self._loads: Loads = {}
        self._known_replicas: set[str] = set()
        self._ignored_models: dict[
            str, str
        ] = {}  # of a model: why what the state wishes of it is not done
        self._uncontrollable_replicas: set[str] = (
            set()
        )  # replicas that take neither loads nor unloads
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Repository:
        await self._read_state()
        if self.desired_models:
            log.info("the state that was kept: %s", summarize_desired_models(self.desired_models))
        self._start_task(self._reconcile_periodically())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks([*self._tasks, *self._action_tasks.values()])
        await self._store.close()

    @property
    def declared_models(self) -> Mapping[str, Any]:
        return self._models_file.models

    # What callers ask.

    def check_readiness(self, *, is_draining: bool) -> Readiness:
        """Return whether requests can be served, and what is missing where. Asks nobody."""
        quorum = self._options.ready_quorum
        return check_readiness(
            self._replica_statuses(),
            self.declared_models,
            self._required_models,
            quorum,
            is_draining=is_draining,
        )

    def _replica_statuses(self) -> list[ReplicaStatus]:
        return [
            ReplicaStatus(
                str(replica.address),
                self._pool.replica_state(replica),
                replica.index,
                replica.reason,
            )
            for replica in self._pool.replicas.values()
        ]

    async def read_indexes(self) -> dict[str, Index]:
        """The index of every replica that can be asked, by address. Raises `NoReplica`."""
        await self._pool.probe_all()
        found = {
            str(replica.address): replica.index
            for replica in self._pool.replicas.values()
            if self._pool.replica_state(replica) <= HealthState.EJECTED
        }
        if not found:
            raise NoReplica
        return found

    async def load(self, model: str, parameters: Mapping[str, Any]) -> OperationReport:
        """Load it on every replica. Raises what the report means when that is not everywhere."""
        report = OperationReport(model, True, 0)
        return await self._run_shielded(report, self._load(model, parameters, report))

    async def unload(
        self, model: str, unload_dependents: bool, is_visible: VisibilityCheck = is_always_visible
    ) -> OperationReport:
        """Unload it from every replica. Raises as `load` does, and names no model that is not seen."""
        report = OperationReport(model, False, 0)
        return await self._run_shielded(
            report, self._unload(model, unload_dependents, report, is_visible)
        )

    async def start_operation(
        self,
        model: str,
        is_load: bool,
        parameters: Mapping[str, Any],
        is_visible: VisibilityCheck = is_always_visible,
    ) -> str:
        """Do it without being waited for: the name of the operation, for `operation`."""
        operation = secrets.token_hex(16)
        report = OperationReport(model, is_load, 0)
        await self._store.record_operation(
            operation, build_operation_document(operation, report, "running")
        )
        work = (
            self._load(model, parameters, report)
            if is_load
            else self._unload(model, bool(parameters.get("unload_dependents")), report, is_visible)
        )
        self._start_task(self._run_operation(operation, report, work))
        return operation

    async def get_operation(self, operation_id: str) -> Mapping[str, Any] | None:
        return await self._store.read_operation(operation_id)

    async def _run_operation(
        self, operation_id: str, report: OperationReport, work: Coroutine[Any, Any, OperationReport]
    ) -> None:
        task = self._start_task(work)
        told = 0
        while not task.done():
            await asyncio.wait([task], timeout=ACTION_POLL_S)
            if len(report.outcomes) > told:
                told = len(report.outcomes)
                await self._store.record_operation(
                    operation_id, build_operation_document(operation_id, report, "running")
                )
        audit.log_result(report.action, report.model, task, operation_id)
        error = task.exception()
        if error is None:
            document = build_operation_document(operation_id, report, "succeeded")
        elif isinstance(error, GatewayError):
            document = build_operation_document(operation_id, report, "failed", error)
        else:
            raise error
        await self._store.record_operation(operation_id, document)

    async def _run_shielded(
        self, report: OperationReport, work: Coroutine[Any, Any, OperationReport]
    ) -> OperationReport:
        """A caller who leaves does not leave a model loaded on half of the fleet."""
        task = self._start_task(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(audit.log_result, report.action, report.model))
            raise

    async def _load(
        self, model: str, parameters: Mapping[str, Any], report: OperationReport
    ) -> OperationReport:
        async with self._lock_model(model):
            # One that a load brings altogether would be in no index: nobody could tell how it is.
            if model not in model_names((await self.read_indexes()).values()):
                raise UnknownModelToLoad(model)
            before = self.desired_models.get(model)
            replicas = list(self._pool.replicas.values())
            # Before the wish: another gateway that leads must not take this load for a lack of one.
            begun = {replica: await self._begin_load(replica, model) for replica in replicas}
            try:
                await self._set_desired_model(model, DesiredModel(True, dict(parameters)))
            except BaseException:
                for replica, (token, confirmed) in begun.items():
                    await self._end_load(replica, model, token, confirmed)
                raise
            wish = merge_declared_models({model: self.desired_models[model]}, self.declared_models)[
                model
            ]
            await self._run_on_replicas(
                report, ModelAction(model, True, wish.parameters, wish.load_id), begun
            )
            if report.is_refused:
                await self._set_desired_model(model, before)
            return self._raise_errors(report)

    async def _unload(
        self,
        model: str,
        unload_dependents: bool,
        report: OperationReport,
        is_visible: VisibilityCheck,
    ) -> OperationReport:
        async with self._lock_model(model):
            if model in self.declared_models:
                raise Conflict(
                    f"model {quote_text(model)} is declared in the models file; take it out there first"
                )
            if model not in model_names((await self.read_indexes()).values()):
                if model not in self.desired_models:
                    raise UnknownModel(model)
                await self._set_desired_model(model, None)
                return self._report_absent(report)
            if not unload_dependents and (needing := await self._find_dependents(model)):
                seen = [quote_text(name) for name in needing if is_visible(name)]
                unseen = ["a model that this key does not see"] if len(seen) < len(needing) else []
                raise Conflict(
                    f"model {quote_text(model)} is needed by {join_names([*seen, *unseen])}; unload that "
                    'first, or say {"parameters": {"unload_dependents": true}}'
                )
            before = self.desired_models.get(model)
            await self._set_desired_model(model, DesiredModel(False, {}))
            parameters = {"unload_dependents": True} if unload_dependents else {}
            await self._run_on_replicas(report, ModelAction(model, False, parameters), {})
            if report.is_refused:
                await self._set_desired_model(model, before)
            return self._raise_errors(report)

    def _report_absent(self, report: OperationReport) -> OperationReport:
        """The report of a model that no replica has any more: it is unloaded everywhere."""
        self.load_errors.pop(report.model, None)
        report.replica_count = len(self._pool.replicas)
        report.outcomes = {str(at): Outcome(UNAVAILABLE) for at in self._pool.replicas}
        return report

    def _raise_errors(self, report: OperationReport) -> OperationReport:
        if report.errors:
            raise report.build_error()
        return report

    async def _find_dependents(self, model: str) -> list[str]:
        """The ensembles that are ready and have the model as a step."""
        replicas = list(self._pool.replicas.values())
        ready = {
            name
            for replica in replicas
            for name in replica.index.models
            if name != model and replica.index.is_ready(name)
        }
        gate = asyncio.Semaphore(MAX_PARALLEL_CONFIG_READS)

        async def steps(name: str) -> set[str]:
            async with gate:
                asked = RequestTarget(name, timeout_s=CONFIG_TIMEOUT_S)
                try:
                    config = await self._pool.request_json(
                        asked, b"GET", f"{triton_model_path(name)}/config"
                    )
                except GatewayError:
                    return set()  # it was unloaded meanwhile
            steps = config.get("ensemble_scheduling", {}).get("step", ())
            return {step.get("model_name", "") for step in steps}

        ordered = sorted(ready)
        found = await asyncio.gather(*map(steps, ordered))
        return [name for name, needed in zip(ordered, found, strict=True) if model in needed]

    # What is done.

    async def _run_on_replicas(
        self, report: OperationReport, action: ModelAction, started_loads: StartedLoads
    ) -> None:
        """Every outcome, never only the first failure. Loads that have `begun` go on."""
        replicas = list(started_loads or self._pool.replicas.values())
        report.replica_count = len(replicas)

        async def one(replica: Replica) -> None:
            address = str(replica.address)
            try:
                await self._run_action(replica, action, "api", started_loads.get(replica))
                report.outcomes[address] = Outcome(READY if action.is_load else UNAVAILABLE)
            except GatewayError as exc:
                state = replica.index.model_state(action.model).state
                reached = self._pool.replica_state(replica) <= HealthState.EJECTED
                report.outcomes[address] = Outcome(state if reached else REPLICA_UNREACHABLE, exc)

        await asyncio.gather(*map(one, replicas))

    async def _run_action(
        self,
        replica: Replica,
        action: ModelAction,
        initiator: str,
        started_load: tuple[str, str] | None = None,
    ) -> None:
        """On one replica, and until its index says so. Raises what went wrong."""
        verb = "load" if action.is_load else "unload"
        address, model = str(replica.address), action.model
        if action.is_load and started_load is None and action.load_id:
            started_load = await self._begin_load(replica, model)
        left = ""  # on the replica, as far as is known
        try:
            if self._pool.replica_state(replica) is HealthState.DOWN:
                raise RequestNotSent(replica.reason)
            await self._wait_while_reachable(replica, self._apply_action(replica, action))
            left = action.load_id
        except GatewayError as exc:
            self._pool.metrics.model_actions.labels(verb, initiator, "failed").inc()
            if started_load is not None and not isinstance(exc, UNREACHABLE_ERRORS):
                left = started_load[1]  # a load that fails leaves what was there
            if isinstance(exc, ModelControlModeConflict):
                self._uncontrollable_replicas.add(address)
            elif action.is_load:
                self.load_errors[model] = f"on {address}: {exc.detail}"
            await self._pool.probe(replica)
            raise
        finally:
            self._models.invalidate(model)
            if started_load is not None:
                await self._end_load(replica, model, started_load[0], left)
        self._pool.metrics.model_actions.labels(verb, initiator, "done").inc()
        self._uncontrollable_replicas.discard(address)
        self.load_errors.pop(model, None)

    async def _begin_load(self, replica: Replica, model: str) -> tuple[str, str]:
        """Note that a load is under way: its token, and what the replica had confirmed."""
        try:
            token, confirmed = await self._store.begin_load(replica.name, model)
        except StateUnavailable:  # nobody else can know then: it is done all the same
            token, confirmed = new_load_token(""), self._loads.get(replica.name, {}).get(model, "")
        self._loads = with_load(self._loads, replica.name, model, token)
        return token, confirmed

    async def _end_load(
        self, replica: Replica, model: str, token: str, resulting_load: str
    ) -> None:
        self._loads = with_load(self._loads, replica.name, model, resulting_load)
        with suppress(StateUnavailable):
            await self._store.end_load(replica.name, model, token, resulting_load)

    async def _apply_action(self, replica: Replica, action: ModelAction) -> None:
        await self._send_action(replica, action)
        holds = Index.is_ready if action.is_load else Index.is_unloaded
        await self._wait_for_index(replica, lambda index: holds(index, action.model), action)

    async def _send_action(self, replica: Replica, action: ModelAction) -> None:
        address, timeout_s = replica.address, self._options.load_timeout_s
        tls = self._options.tls if address.tls else None
        restricted = replica.restricted_api
        metadata = None if restricted is None else restricted.metadata
        try:
            if action.is_load:
                await management.load_model_via_grpc(
                    address.grpc_target, action.model, action.parameters, timeout_s, tls, metadata
                )
            else:
                dependents = bool(action.parameters.get("unload_dependents"))
                await management.unload_model_via_grpc(
                    address.grpc_target, action.model, dependents, timeout_s, tls, metadata
                )
        except GrpcUnreachable as exc:
            await self._pool.probe(replica)
            if self._pool.replica_state(replica) is not HealthState.UP:
                raise
            log.warning("%s: managing models over HTTP, which stalls inference", exc.detail)
            await self._send_action_over_http(replica, action)

    async def _send_action_over_http(self, replica: Replica, action: ModelAction) -> None:
        verb = "load" if action.is_load else "unload"
        path = f"/v2/repository/models/{quote(action.model, safe=UNQUOTED_PATH_CHARS)}/{verb}"
        body = orjson.dumps({"parameters": dict(action.parameters)})
        timeout_s = self._options.load_timeout_s
        reply = await replica.http.request(
            b"POST",
            path.encode(),
            body,
            replica.management_headers,
            timeout_s=timeout_s,
            fresh=True,
            max_bytes=MAX_METADATA_BYTES,
        )
        if reply.status != 200:
            raise map_load_error(reply.status, reply.body, action.model, verb)

    async def _wait_while_reachable(
        self, replica: Replica, work: Coroutine[Any, Any, None]
    ) -> None:
        """A load may take minutes; one on a replica that is gone is not waited for."""
        task = self._start_task(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=ACTION_POLL_S)
                here = self._pool.replicas.get(replica.address) is replica
                if not task.done() and (
                    not here or self._pool.replica_state(replica) is HealthState.DOWN
                ):
                    reason = replica.reason or "its address is gone"
                    raise RequestNotSent(f"the replica went away meanwhile: {reason}")
            await task
        finally:
            task.cancel()

    async def _wait_for_index(
        self, replica: Replica, is_reached: Callable[[Index], bool], action: ModelAction
    ) -> None:
        """Triton says done before it is: look until it is true."""
        with anyio.move_on_after(self._options.load_timeout_s):
            while True:
                await self._pool.probe(replica)
                if is_reached(replica.index):
                    return
                found = replica.index.model_state(action.model)
                if (
                    action.is_load
                    and found.state == UNAVAILABLE
                    and found.reason not in ("", UNLOADED)
                ):
                    raise LoadFailed(action.model, sanitize_message(found.reason))
                await asyncio.sleep(ACTION_POLL_S)
        raise DeadlinePassed(self._options.load_timeout_s)

    # What is wished, and kept up.

    async def _set_desired_model(self, model: str, desired: DesiredModel | None) -> None:
        revision = await self._store.set_desired_model(model, desired)
        if desired is not None and not desired.revision:
            desired = replace(desired, revision=revision)
        wishes = {name: found for name, found in self.desired_models.items() if name != model}
        self.desired_models = wishes if desired is None else {**wishes, model: desired}
        for key in [key for key in self._backoffs if key[1] == model]:
            del self._backoffs[key]

    async def _read_state(self) -> None:
        with suppress(StateUnavailable):  # of which the store tells; what was known stays
            found = await self._store.read_desired_models()
            self.desired_models, ignored = filter_uploads(
                found, can_upload=self._options.can_upload
            )
            for model in ignored.keys() - self._ignored_models.keys():
                log.warning(
                    "what the state wishes of model %s is ignored: %s", model, ignored[model]
                )
            self._ignored_models = ignored
            self._loads = await self._store.read_loads()

    async def _reconcile_periodically(self) -> None:
        while True:
            await self._read_state()
            self._models_file.reload_if_changed()
            self._update_required_models()
            leads = await self._store.renew_leadership()
            await self._forget_removed_replicas(is_leader=leads)
            if leads:
                self._reconcile()
            await asyncio.sleep(MIN_RECONCILE_PAUSE_S)
            with anyio.move_on_after(RECONCILE_INTERVAL_S - MIN_RECONCILE_PAUSE_S):
                await self._pool.changes.wait()
            self._pool.changes.clear()

    def _update_required_models(self) -> None:
        if self._required_models != self.declared_models:
            quorum = self._options.ready_quorum
            self._required_models = update_required_models(
                self._required_models, self.declared_models, self._replica_statuses(), quorum
            )

    def _reconcile(self) -> None:
        """Start what is lacking; a little at a time, and nothing that failed a moment ago."""
        wishes = merge_declared_models(self.desired_models, self.declared_models)
        for replica in list(self._pool.replicas.values()):
            address = replica.name
            if self._pool.replica_state(replica) > HealthState.EJECTED:
                # What comes back is another process: what failed before says nothing of it.
                for key in [key for key in self._backoffs if key[0] == address]:
                    del self._backoffs[key]
                self._uncontrollable_replicas.discard(address)
                continue
            if address in self._uncontrollable_replicas:
                continue
            running = sum(key[0] == address for key in self._action_tasks)
            for action in plan_actions(wishes, replica.index, self._loads.get(address, {})):
                if running >= MAX_PARALLEL_ACTIONS:
                    break
                if self._can_start_action(address, action.model):
                    running += 1
                    self._start_action(replica, action)

    async def _forget_removed_replicas(self, *, is_leader: bool) -> None:
        """What was known of addresses that come and go does not stay for ever; and what a replica had
        loaded is gone with its process."""
        there = {replica.name for replica in self._pool.replicas.values()}
        gone = self._known_replicas - there
        self._known_replicas = there
        self._uncontrollable_replicas &= there
        for key in [key for key in self._backoffs if key[0] not in there]:
            del self._backoffs[key]
        gone |= {
            replica.name for replica in self._pool.replicas.values() if replica.health.has_exited
        }
        for name in gone & self._loads.keys() if is_leader else ():
            with suppress(StateUnavailable):
                await self._store.forget_loads(name)
                self._loads = {at: models for at, models in self._loads.items() if at != name}

    def outdated_replicas(self, model: str) -> list[str]:
        """Return the replicas that have not confirmed the last load of a model."""
        wish = merge_declared_models(
            {name: wish for name, wish in self.desired_models.items() if name == model},
            {name: found for name, found in self.declared_models.items() if name == model},
        ).get(model)
        if wish is None:
            return []
        return [
            replica.name
            for replica in self._pool.replicas.values()
            if is_behind(wish, self._loads.get(replica.name, {}).get(model, ""))
        ]

    def _can_start_action(self, address: str, model: str) -> bool:
        key = (address, model)
        if key in self._action_tasks or model in self._locks:
            return False
        backoff = self._backoffs.get(key)
        return backoff is None or asyncio.get_running_loop().time() >= backoff.not_before

    def _start_action(self, replica: Replica, action: ModelAction) -> None:
        key = (str(replica.address), action.model)
        self._action_tasks[key] = asyncio.create_task(
            self._run_reconciler_action(key, replica, action)
        )
        self._action_tasks[key].add_done_callback(lambda _: self._finish_action(key))

    def _finish_action(self, key: tuple[str, str]) -> None:
        self._action_tasks.pop(key, None)
        self._pool.changes.set()

    async def _run_reconciler_action(
        self, key: tuple[str, str], replica: Replica, action: ModelAction
    ) -> None:
        verb = "loading" if action.is_load else "unloading"
        log.warning("%s model %s on %s, as was asked for all replicas", verb, key[1], key[0])
        try:
            await self._run_action(replica, action, "reconciler")
        except GatewayError as exc:
            now = asyncio.get_running_loop().time()
            self._backoffs[key] = self._backoffs.get(key, Backoff()).with_failure(now)
            log.warning("%s model %s on %s failed: %s", verb, key[1], key[0], exc.detail)
        else:
            self._backoffs.pop(key, None)

    # One at a time.

    @asynccontextmanager
    async def _lock_model(self, model: str) -> AsyncIterator[None]:
        """Calls for one model follow one another, and the reconciler lets them."""
        turn = self._locks.setdefault(model, ModelLock())
        turn.waiters += 1
        try:
            async with turn.lock:
                running = [task for key, task in self._action_tasks.items() if key[1] == model]
                if running:
                    await asyncio.wait(running)
                yield
        finally:
            turn.waiters -= 1
            if not turn.waiters:
                del self._locks[model]
                self._pool.changes.set()

    def _start_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def summarize_desired_models(desired_models: Mapping[str, DesiredModel]) -> str:
    """What is wished, in half a sentence."""
    loaded = sorted(model for model, wish in desired_models.items() if wish.is_loaded)
    unloaded = sorted(desired_models.keys() - set(loaded))
    parts = [("to be loaded", loaded), ("to be unloaded", unloaded)]
    return "; ".join(f"{what}: {', '.join(map(quote_text, of))}" for what, of in parts if of)


@dataclass
class ModelLock:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiters: int = 0


def build_operation_document(
    operation_id: str, report: OperationReport, state: str, error: GatewayError | None = None
) -> dict[str, Any]:
    """What `GET /v1/operations/{id}` answers."""
    document = {"id": operation_id, "action": report.action, **report.to_dict(), "operation": state}
    if error is not None:
        document |= {"error": error.detail, "code": error.code}
    return document


def build_index_entry(indexes: Mapping[str, Index], entry: Mapping[str, str]) -> dict[str, Any]:
    """An entry of the merged index with each replica's own state."""
    name, number = entry["name"], entry.get("version")
    if number is None:
        return dict(entry)
    missing = VersionState(UNAVAILABLE, "not loaded")
    found = {
        address: index.models.get(name, {}).get(number, missing)
        for address, index in indexes.items()
    }
    return {
        **entry,
        "replicas": {
            address: {"state": version.state}
            | ({"reason": version.reason} if version.reason else {})
            for address, version in found.items()
        },
    }
