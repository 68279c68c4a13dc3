"""Model management on the whole fleet: a load applies to every replica, now and after its restart.

A request is stored as desired state first (`gateway.state`), then executed on all replicas in parallel,
then confirmed by their indexes. The reconciler does the rest: it continuously compares what each replica
has with what it should have.
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
from gateway.http_client.connection import RequestNotSent
from gateway.messages import join_names, quote_text
from gateway.state.desired import DesiredModel, StateStore
from gateway.state.loads import Loads, new_load_token, with_load
from gateway.triton.error_mapping import LoadFailed, RequestTarget, map_load_error, sanitize_message
from gateway.triton.grpc import management
from gateway.triton.grpc.management import GrpcTlsFiles, GrpcUnreachable
from gateway.triton.response import MAX_METADATA_BYTES

log = logging.getLogger(__name__)

RECONCILE_INTERVAL_S: Final = 1.0
MIN_RECONCILE_PAUSE_S: Final = 0.1
MAX_PARALLEL_ACTIONS: Final = 2  # loads by the reconciler, per replica
ACTION_POLL_S: Final = 0.1
MAX_PARALLEL_CONFIG_READS: Final = 16
CONFIG_TIMEOUT_S: Final = 5.0
REPLICA_UNREACHABLE: Final = "UNREACHABLE"
# The replica may be healthy, so these errors do not revert the desired state.
UNREACHABLE_ERRORS: Final = (RequestNotSent, BadUpstream, DeadlinePassed)


VisibilityCheck = Callable[[str], bool]
# Replica → the token of its load in progress, and the load that it had confirmed before.
StartedLoads = Mapping[Replica, tuple[str, str]]


def is_always_visible(model: str) -> bool:
    return True


@dataclass(frozen=True)
class Outcome:
    """The result of an operation on one replica; it succeeded if there is no error."""

    state: str
    error: GatewayError | None = None

    def to_dict(self) -> dict[str, str]:
        document = {"state": self.state}
        return document if self.error is None else {**document, "reason": self.error.detail}


@dataclass
class OperationReport:
    """A load or an unload on every replica; outcomes are added while it runs."""

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
        modes = (
            error for error in self.errors.values() if isinstance(error, ModelControlModeConflict)
        )
        return next(modes, None)

    @property
    def is_refused(self) -> bool:
        """Return whether the operation failed on every replica, and retries are pointless."""
        errors = self.errors
        all_reached = not any(isinstance(error, UNREACHABLE_ERRORS) for error in errors.values())
        is_final = all_reached or self.control_mode_error is not None
        return len(errors) == len(self.outcomes) and is_final

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
        replicas = {at: outcome.to_dict() for at, outcome in sorted(self.outcomes.items())}
        return {"model": self.model, "state": state, "replicas": replicas}

    def build_error(self) -> GatewayError:
        errors = self.errors
        if self.is_refused:
            error = self.control_mode_error or self._combine_errors(list(errors.values()))
        else:
            error = PartlyDone(self.model, self.is_load, len(self.outcomes), errors)
        error.report = self.to_dict()
        return error

    def _combine_errors(self, errors: Sequence[GatewayError]) -> GatewayError:
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
        state = "loaded" if is_load else "unloaded"
        address, error = next(iter(errors.items()))
        super().__init__(
            f"model {quote_text(model)} is {state} on {replica_count - len(errors)} of {replica_count} "
            f"replicas; the gateway keeps retrying; error on {address}: {error.detail}"
        )


@dataclass(frozen=True)
class ManagementOptions:
    """Options of model management."""

    load_timeout_s: float = 300.0
    tls: GrpcTlsFiles | None = None
    can_upload: bool = False  # whether a load may contain a config and files
    ready_quorum: int = 1  # replicas on which a declared model must be ready


class Repository:
    """Model management of the fleet. As a context manager it runs the reconciler."""

    def __init__(
        self,
        pool: ReplicaPool,
        models: ModelService,
        store: StateStore,
        models_file: ModelsFile,
        options: ManagementOptions,
    ) -> None:
        self.desired_models: Mapping[str, DesiredModel] = {}
        self.load_errors: dict[str, str] = {}  # model → where and why its last load failed
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
        # Model → why its desired state is ignored.
        self._ignored_models: dict[str, str] = {}
        # Replicas whose model control mode allows neither loads nor unloads.
        self._uncontrollable_replicas: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Repository:
        await self._read_state()
        if self.desired_models:
            log.info("restored desired state: %s", summarize_desired_models(self.desired_models))
        self._start_task(self._reconcile_periodically())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks([*self._tasks, *self._action_tasks.values()])
        await self._store.close()

    @property
    def declared_models(self) -> Mapping[str, Any]:
        return self._models_file.models

    # Operations for callers.

    def check_readiness(self, *, is_draining: bool) -> Readiness:
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
        """Probe all replicas, and return the indexes of the usable ones by address. Raises `NoReplica`."""
        await self._pool.probe_all()
        indexes = {
            str(replica.address): replica.index
            for replica in self._pool.replicas.values()
            if self._pool.replica_state(replica) <= HealthState.EJECTED
        }
        if not indexes:
            raise NoReplica
        return indexes

    async def load(self, model: str, parameters: Mapping[str, Any]) -> OperationReport:
        """Load the model on every replica. Raises the report's error if any of them fails."""
        report = OperationReport(model, True, 0)
        return await self._run_shielded(report, self._load(model, parameters, report))

    async def unload(
        self, model: str, unload_dependents: bool, is_visible: VisibilityCheck = is_always_visible
    ) -> OperationReport:
        """Unload the model from every replica. Errors do not name models that are not visible."""
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
        """Start a load or an unload in the background; return its id for `get_operation`."""
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
        reported_count = 0
        while not task.done():
            await asyncio.wait([task], timeout=ACTION_POLL_S)
            if len(report.outcomes) > reported_count:
                reported_count = len(report.outcomes)
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
        # A client disconnect must not leave the model loaded on a part of the fleet.
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
            # A model that exists only in the load request is in no index, so its state would be unknown.
            if model not in model_names((await self.read_indexes()).values()):
                raise UnknownModelToLoad(model)
            before = self.desired_models.get(model)
            replicas = list(self._pool.replicas.values())
            # Recorded before the desired state, so that another gateway's reconciler does not load it too.
            started_loads = {
                replica: await self._begin_load(replica, model) for replica in replicas
            }
            try:
                await self._set_desired_model(model, DesiredModel(True, dict(parameters)))
            except BaseException:
                for replica, (token, confirmed) in started_loads.items():
                    await self._end_load(replica, model, token, confirmed)
                raise
            desired = merge_declared_models(
                {model: self.desired_models[model]}, self.declared_models
            )[model]
            await self._run_on_replicas(
                report, ModelAction(model, True, desired.parameters, desired.load_id), started_loads
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
                    f"model {quote_text(model)} is declared in the models file; remove it there first"
                )
            if model not in model_names((await self.read_indexes()).values()):
                if model not in self.desired_models:
                    raise UnknownModel(model)
                await self._set_desired_model(model, None)
                return self._report_absent(report)
            if not unload_dependents and (dependents := await self._find_dependents(model)):
                visible = [quote_text(name) for name in dependents if is_visible(name)]
                if len(visible) < len(dependents):
                    visible.append("a model that this key cannot see")
                raise Conflict(
                    f"model {quote_text(model)} is needed by {join_names(visible)}; unload that first, "
                    'or send {"parameters": {"unload_dependents": true}}'
                )
            before = self.desired_models.get(model)
            await self._set_desired_model(model, DesiredModel(False, {}))
            parameters = {"unload_dependents": True} if unload_dependents else {}
            await self._run_on_replicas(report, ModelAction(model, False, parameters), {})
            if report.is_refused:
                await self._set_desired_model(model, before)
            return self._raise_errors(report)

    def _report_absent(self, report: OperationReport) -> OperationReport:
        self.load_errors.pop(report.model, None)
        report.replica_count = len(self._pool.replicas)
        report.outcomes = {str(at): Outcome(UNAVAILABLE) for at in self._pool.replicas}
        return report

    def _raise_errors(self, report: OperationReport) -> OperationReport:
        if report.errors:
            raise report.build_error()
        return report

    async def _find_dependents(self, model: str) -> list[str]:
        """Return the ready ensembles that have the model as a step."""
        replicas = list(self._pool.replicas.values())
        ready = {
            name
            for replica in replicas
            for name in replica.index.models
            if name != model and replica.index.is_ready(name)
        }
        semaphore = asyncio.Semaphore(MAX_PARALLEL_CONFIG_READS)

        async def read_steps(name: str) -> set[str]:
            async with semaphore:
                target = RequestTarget(name, timeout_s=CONFIG_TIMEOUT_S)
                try:
                    config = await self._pool.request_json(
                        target, b"GET", f"{triton_model_path(name)}/config"
                    )
                except GatewayError:
                    return set()  # the model was unloaded meanwhile
            steps = config.get("ensemble_scheduling", {}).get("step", ())
            return {step.get("model_name", "") for step in steps}

        names = sorted(ready)
        all_steps = await asyncio.gather(*map(read_steps, names))
        return [name for name, steps in zip(names, all_steps, strict=True) if model in steps]

    # Actions on replicas.

    async def _run_on_replicas(
        self, report: OperationReport, action: ModelAction, started_loads: StartedLoads
    ) -> None:
        """Run the action on all replicas and record every outcome, not only the first failure."""
        replicas = list(started_loads or self._pool.replicas.values())
        report.replica_count = len(replicas)

        async def run(replica: Replica) -> None:
            address = str(replica.address)
            try:
                await self._run_action(replica, action, "api", started_loads.get(replica))
                report.outcomes[address] = Outcome(READY if action.is_load else UNAVAILABLE)
            except GatewayError as exc:
                state = replica.index.model_state(action.model).state
                usable = self._pool.replica_state(replica) <= HealthState.EJECTED
                report.outcomes[address] = Outcome(state if usable else REPLICA_UNREACHABLE, exc)

        await asyncio.gather(*map(run, replicas))

    async def _run_action(
        self,
        replica: Replica,
        action: ModelAction,
        initiator: str,
        started_load: tuple[str, str] | None = None,
    ) -> None:
        """Run the action on a replica until its index confirms it. Raises the `GatewayError` of a failure."""
        verb = "load" if action.is_load else "unload"
        address, model = str(replica.address), action.model
        if action.is_load and started_load is None and action.load_id:
            started_load = await self._begin_load(replica, model)
        resulting_load = ""  # unknown
        try:
            if self._pool.replica_state(replica) is HealthState.DOWN:
                raise RequestNotSent(replica.reason)
            await self._wait_while_reachable(replica, self._apply_action(replica, action))
            resulting_load = action.load_id
        except GatewayError as exc:
            self._pool.metrics.model_actions.labels(verb, initiator, "failed").inc()
            if started_load is not None and not isinstance(exc, UNREACHABLE_ERRORS):
                resulting_load = started_load[1]  # a failed load leaves the previous one in place
            if isinstance(exc, ModelControlModeConflict):
                self._uncontrollable_replicas.add(address)
            elif action.is_load:
                self.load_errors[model] = f"on {address}: {exc.detail}"
            await self._pool.probe(replica)
            raise
        finally:
            self._models.invalidate(model)
            if started_load is not None:
                await self._end_load(replica, model, started_load[0], resulting_load)
        self._pool.metrics.model_actions.labels(verb, initiator, "done").inc()
        self._uncontrollable_replicas.discard(address)
        self.load_errors.pop(model, None)

    async def _begin_load(self, replica: Replica, model: str) -> tuple[str, str]:
        """Record a load in progress; return its token and the load that was confirmed before."""
        try:
            token, confirmed = await self._store.begin_load(replica.name, model)
        except StateUnavailable:  # load anyway; other gateways cannot see it then
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
            log.warning("%s; managing models over HTTP, which stalls inference", exc.detail)
            await self._send_action_over_http(replica, action)

    async def _send_action_over_http(self, replica: Replica, action: ModelAction) -> None:
        verb = "load" if action.is_load else "unload"
        path = f"/v2/repository/models/{quote(action.model, safe=UNQUOTED_PATH_CHARS)}/{verb}"
        body = orjson.dumps({"parameters": dict(action.parameters)})
        timeout_s = self._options.load_timeout_s
        response = await replica.http.request(
            b"POST",
            path.encode(),
            body,
            replica.management_headers,
            timeout_s=timeout_s,
            fresh=True,
            max_bytes=MAX_METADATA_BYTES,
        )
        if response.status != 200:
            raise map_load_error(response.status, response.body, action.model, verb)

    async def _wait_while_reachable(
        self, replica: Replica, work: Coroutine[Any, Any, None]
    ) -> None:
        """Wait for the action, which may take minutes, or until the replica is down or removed."""
        task = self._start_task(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=ACTION_POLL_S)
                is_member = self._pool.replicas.get(replica.address) is replica
                is_down = self._pool.replica_state(replica) is HealthState.DOWN
                if not task.done() and (is_down or not is_member):
                    reason = replica.reason or "its address was removed"
                    raise RequestNotSent(f"the replica became unavailable: {reason}")
            await task
        finally:
            task.cancel()

    async def _wait_for_index(
        self, replica: Replica, is_reached: Callable[[Index], bool], action: ModelAction
    ) -> None:
        """Probe until the index confirms the action: Triton responds before it is done."""
        with anyio.move_on_after(self._options.load_timeout_s):
            while True:
                await self._pool.probe(replica)
                if is_reached(replica.index):
                    return
                current = replica.index.model_state(action.model)
                if (
                    action.is_load
                    and current.state == UNAVAILABLE
                    and current.reason not in ("", UNLOADED)
                ):
                    raise LoadFailed(action.model, sanitize_message(current.reason))
                await asyncio.sleep(ACTION_POLL_S)
        raise DeadlinePassed(self._options.load_timeout_s)

    # Desired state and the reconciler.

    async def _set_desired_model(self, model: str, desired: DesiredModel | None) -> None:
        revision = await self._store.set_desired_model(model, desired)
        if desired is not None and not desired.revision:
            desired = replace(desired, revision=revision)
        others = {name: value for name, value in self.desired_models.items() if name != model}
        self.desired_models = others if desired is None else {**others, model: desired}
        for key in [key for key in self._backoffs if key[1] == model]:
            del self._backoffs[key]

    async def _read_state(self) -> None:
        with suppress(StateUnavailable):  # the store logs it; the last known state stays in use
            stored = await self._store.read_desired_models()
            self.desired_models, ignored = filter_uploads(
                stored, can_upload=self._options.can_upload
            )
            for model in ignored.keys() - self._ignored_models.keys():
                log.warning("desired state of model %s is ignored: %s", model, ignored[model])
            self._ignored_models = ignored
            self._loads = await self._store.read_loads()

    async def _reconcile_periodically(self) -> None:
        while True:
            await self._read_state()
            self._models_file.reload_if_changed()
            self._update_required_models()
            is_leader = await self._store.renew_leadership()
            await self._forget_removed_replicas(is_leader=is_leader)
            if is_leader:
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
        """Start the missing actions, a few per replica at a time, and none that is in backoff."""
        desired_models = merge_declared_models(self.desired_models, self.declared_models)
        for replica in list(self._pool.replicas.values()):
            address = replica.name
            if self._pool.replica_state(replica) > HealthState.EJECTED:
                # The replica may return as a new process, so earlier failures do not count.
                for key in [key for key in self._backoffs if key[0] == address]:
                    del self._backoffs[key]
                self._uncontrollable_replicas.discard(address)
                continue
            if address in self._uncontrollable_replicas:
                continue
            running = sum(key[0] == address for key in self._action_tasks)
            for action in plan_actions(desired_models, replica.index, self._loads.get(address, {})):
                if running >= MAX_PARALLEL_ACTIONS:
                    break
                if self._can_start_action(address, action.model):
                    running += 1
                    self._start_action(replica, action)

    async def _forget_removed_replicas(self, *, is_leader: bool) -> None:
        """Drop the state of removed replicas, and the loads of replicas whose process has exited."""
        current = {replica.name for replica in self._pool.replicas.values()}
        removed = self._known_replicas - current
        self._known_replicas = current
        self._uncontrollable_replicas &= current
        for key in [key for key in self._backoffs if key[0] not in current]:
            del self._backoffs[key]
        removed |= {
            replica.name for replica in self._pool.replicas.values() if replica.health.has_exited
        }
        for name in removed & self._loads.keys() if is_leader else ():
            with suppress(StateUnavailable):
                await self._store.forget_loads(name)
                self._loads = {
                    replica: models for replica, models in self._loads.items() if replica != name
                }

    def outdated_replicas(self, model: str) -> list[str]:
        """Return the replicas that have not confirmed the last load of a model."""
        desired = merge_declared_models(
            {name: desired for name, desired in self.desired_models.items() if name == model},
            {name: declared for name, declared in self.declared_models.items() if name == model},
        ).get(model)
        if desired is None:
            return []
        return [
            replica.name
            for replica in self._pool.replicas.values()
            if is_behind(desired, self._loads.get(replica.name, {}).get(model, ""))
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
        log.warning("%s model %s on %s to reach the desired state", verb, key[1], key[0])
        try:
            await self._run_action(replica, action, "reconciler")
        except GatewayError as exc:
            now = asyncio.get_running_loop().time()
            self._backoffs[key] = self._backoffs.get(key, Backoff()).with_failure(now)
            log.warning("%s model %s on %s failed: %s", verb, key[1], key[0], exc.detail)
        else:
            self._backoffs.pop(key, None)

    # Locks and tasks.

    @asynccontextmanager
    async def _lock_model(self, model: str) -> AsyncIterator[None]:
        """Serialize the calls for one model. The reconciler does not act on it meanwhile."""
        model_lock = self._locks.setdefault(model, ModelLock())
        model_lock.waiters += 1
        try:
            async with model_lock.lock:
                running = [task for key, task in self._action_tasks.items() if key[1] == model]
                if running:
                    await asyncio.wait(running)
                yield
        finally:
            model_lock.waiters -= 1
            if not model_lock.waiters:
                del self._locks[model]
                self._pool.changes.set()

    def _start_task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def summarize_desired_models(desired_models: Mapping[str, DesiredModel]) -> str:
    loaded = sorted(model for model, desired in desired_models.items() if desired.is_loaded)
    unloaded = sorted(desired_models.keys() - set(loaded))
    parts = [("load", loaded), ("unload", unloaded)]
    return "; ".join(
        f"{verb} {', '.join(map(quote_text, names))}" for verb, names in parts if names
    )


@dataclass
class ModelLock:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiters: int = 0


def build_operation_document(
    operation_id: str, report: OperationReport, state: str, error: GatewayError | None = None
) -> dict[str, Any]:
    document = {"id": operation_id, "action": report.action, **report.to_dict(), "operation": state}
    if error is not None:
        document |= {"error": error.detail, "code": error.code}
    return document


def build_index_entry(indexes: Mapping[str, Index], entry: Mapping[str, str]) -> dict[str, Any]:
    name, number = entry["name"], entry.get("version")
    if number is None:
        return dict(entry)
    missing = VersionState(UNAVAILABLE, "not loaded")
    states = {
        address: index.models.get(name, {}).get(number, missing)
        for address, index in indexes.items()
    }
    return {
        **entry,
        "replicas": {
            address: {"state": version.state}
            | ({"reason": version.reason} if version.reason else {})
            for address, version in states.items()
        },
    }
