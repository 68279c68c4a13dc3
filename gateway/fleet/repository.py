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
    ModelControlMode,
    StateUnavailable,
    UnknownModel,
    UnknownModelToLoad,
)
from gateway.fleet.calls import UNQUOTED, model_path
from gateway.fleet.declared import ModelsFile
from gateway.fleet.health import State
from gateway.fleet.index import READY, UNAVAILABLE, UNLOADED, Index, Version, names
from gateway.fleet.models import Models
from gateway.fleet.plan import (
    Action,
    Backoff,
    Readiness,
    Seen,
    actions,
    is_behind,
    next_required,
    readiness,
    wanted,
    without_uploads,
)
from gateway.fleet.pool import NoReplica, Pool, ended
from gateway.fleet.replica import Replica
from gateway.state.loads import Loads, new_token, with_load
from gateway.state.wishes import Store, Wish
from gateway.triton import grpc
from gateway.triton.complaints import Asked, LoadFailed, refusal, scrubbed
from gateway.triton.grpc import NoGrpc, Tls
from gateway.triton.http import MOST_DOCUMENT_BYTES
from gateway.triton.wire import NotSent
from gateway.words import listed, quoted

log = logging.getLogger(__name__)

TICK_S: Final = 1.0
LEAST_PAUSE_S: Final = 0.1
AT_A_TIME: Final = 2  # loads by the reconciler, per replica
LOOK_EVERY_S: Final = 0.1
CONFIGS_AT_A_TIME: Final = 16
CONFIG_TIMEOUT_S: Final = 5.0
UNREACHABLE: Final = "UNREACHABLE"
# The replica may be well, but could not be asked: what was wished stays wished.
NOT_ASKED: Final = (NotSent, BadUpstream, DeadlinePassed)


Sees = Callable[[str], bool]
# Of replicas whose load has begun: its token, and what was confirmed before.
Begun = Mapping[Replica, tuple[str, str]]


def everything(model: str) -> bool:
    return True


@dataclass(frozen=True)
class Outcome:
    """What came of it on one replica; without an error it is done."""

    state: str
    error: GatewayError | None = None

    def told(self) -> dict[str, str]:
        found = {"state": self.state}
        return found if self.error is None else {**found, "reason": self.error.detail}


@dataclass
class Report:
    """A load or an unload on every replica; the outcomes come in as they are known."""

    model: str
    load: bool
    replicas: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def action(self) -> str:
        return "load" if self.load else "unload"

    @property
    def failed(self) -> dict[str, GatewayError]:
        return {
            address: outcome.error
            for address, outcome in self.outcomes.items()
            if outcome.error is not None
        }

    @property
    def by_mode(self) -> ModelControlMode | None:
        """What a replica said that takes neither loads nor unloads."""
        modes = (error for error in self.failed.values() if isinstance(error, ModelControlMode))
        return next(modes, None)

    @property
    def refused(self) -> bool:
        """None did it, and asking those again that could not be asked would help nobody."""
        failed = self.failed
        asked = not any(isinstance(error, NOT_ASKED) for error in failed.values())
        return len(failed) == len(self.outcomes) and (asked or self.by_mode is not None)

    def document(self) -> dict[str, Any]:
        done = bool(self.replicas) and not self.failed and len(self.outcomes) == self.replicas
        states = [outcome.state for outcome in self.outcomes.values() if outcome.error is not None]
        state = (
            (READY if self.load else UNAVAILABLE) if done else states[0] if states else "PENDING"
        )
        told = {address: outcome.told() for address, outcome in sorted(self.outcomes.items())}
        return {"model": self.model, "state": state, "replicas": told}

    def error(self) -> GatewayError:
        """What the caller is told when it was not done everywhere."""
        failed = self.failed
        if self.refused:
            error = self.by_mode or self._refusal(list(failed.values()))
        else:
            error = PartlyDone(self.model, self.load, len(self.outcomes), failed)
        error.report = self.document()
        return error

    def _refusal(self, errors: Sequence[GatewayError]) -> GatewayError:
        """The one error that stands for those of all replicas."""
        first = errors[0]
        if all(type(error) is type(first) for error in errors):
            return first
        failures = (error for error in errors if isinstance(error, LoadFailed))
        verb = "load" if self.load else "unload"
        return next(failures, None) or LoadFailed(self.model, first.detail, verb)


class PartlyDone(BadUpstream):
    code = "PARTLY_DONE"

    def __init__(
        self, model: str, load: bool, count: int, failed: Mapping[str, GatewayError]
    ) -> None:
        what = "loaded" if load else "unloaded"
        address, error = next(iter(failed.items()))
        super().__init__(
            f"model {quoted(model)} is {what} on {count - len(failed)} of {count} replicas; the gateway "
            f"goes on trying; on {address}: {error.detail}"
        )


@dataclass(frozen=True)
class Terms:
    """How models are managed."""

    load_timeout_s: float = 300.0
    tls: Tls | None = None
    uploads: bool = False  # whether a load may bring a config and files
    ready_quorum: int = 1  # on how many replicas a declared model must be ready


class Repository:
    """The fleet's model management. Use it as a context manager: inside, it reconciles."""

    def __init__(
        self, pool: Pool, models: Models, store: Store, file: ModelsFile, terms: Terms
    ) -> None:
        self.wishes: Mapping[str, Wish] = {}
        self.errors: dict[str, str] = {}  # of a model: why its last load failed, and where
        self._pool = pool
        self._models = models
        self._store = store
        self._file = file
        self._terms = terms
        self._required = dict(file.models)
        self._turns: dict[str, Turn] = {}
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._backoff: dict[tuple[str, str], Backoff] = {}
        self._loads: Loads = {}
        self._known_replicas: set[str] = set()
        self._ignored: dict[
            str, str
        ] = {}  # of a model: why what the state wishes of it is not done
        self._by_themselves: set[str] = set()  # replicas that take neither loads nor unloads
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Repository:
        await self._read_wishes()
        if self.wishes:
            log.info("the state that was kept: %s", summary(self.wishes))
        self._spawn(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        await ended([*self._tasks, *self._running.values()])
        await self._store.close()

    @property
    def declared(self) -> Mapping[str, Any]:
        return self._file.models

    # What callers ask.

    def readiness(self, *, draining: bool) -> Readiness:
        """Return whether requests can be served, and what is missing where. Asks nobody."""
        quorum = self._terms.ready_quorum
        return readiness(self._seen(), self.declared, self._required, quorum, draining=draining)

    def _seen(self) -> list[Seen]:
        return [
            Seen(str(replica.address), self._pool.state(replica), replica.index, replica.reason)
            for replica in self._pool.replicas.values()
        ]

    async def index(self) -> dict[str, Index]:
        """The index of every replica that can be asked, by address. Raises `NoReplica`."""
        await self._pool.refresh()
        found = {
            str(replica.address): replica.index
            for replica in self._pool.replicas.values()
            if self._pool.state(replica) <= State.EJECTED
        }
        if not found:
            raise NoReplica
        return found

    async def load(self, model: str, parameters: Mapping[str, Any]) -> Report:
        """Load it on every replica. Raises what the report means when that is not everywhere."""
        report = Report(model, True, 0)
        return await self._whole(report, self._load(model, parameters, report))

    async def unload(self, model: str, unload_dependents: bool, sees: Sees = everything) -> Report:
        """Unload it from every replica. Raises as `load` does, and names no model that is not seen."""
        report = Report(model, False, 0)
        return await self._whole(report, self._unload(model, unload_dependents, report, sees))

    async def begin(
        self, model: str, load: bool, parameters: Mapping[str, Any], sees: Sees = everything
    ) -> str:
        """Do it without being waited for: the name of the operation, for `operation`."""
        operation = secrets.token_hex(16)
        report = Report(model, load, 0)
        await self._store.record(operation, progress(operation, report, "running"))
        work = (
            self._load(model, parameters, report)
            if load
            else self._unload(model, bool(parameters.get("unload_dependents")), report, sees)
        )
        self._spawn(self._recorded(operation, report, work))
        return operation

    async def operation(self, operation: str) -> Mapping[str, Any] | None:
        return await self._store.operation(operation)

    async def _recorded(
        self, operation: str, report: Report, work: Coroutine[Any, Any, Report]
    ) -> None:
        task = self._spawn(work)
        told = 0
        while not task.done():
            await asyncio.wait([task], timeout=LOOK_EVERY_S)
            if len(report.outcomes) > told:
                told = len(report.outcomes)
                await self._store.record(operation, progress(operation, report, "running"))
        audit.log_result(report.action, report.model, task, operation)
        error = task.exception()
        if error is None:
            document = progress(operation, report, "succeeded")
        elif isinstance(error, GatewayError):
            document = progress(operation, report, "failed", error)
        else:
            raise error
        await self._store.record(operation, document)

    async def _whole(self, report: Report, work: Coroutine[Any, Any, Report]) -> Report:
        """A caller who leaves does not leave a model loaded on half of the fleet."""
        task = self._spawn(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(partial(audit.log_result, report.action, report.model))
            raise

    async def _load(self, model: str, parameters: Mapping[str, Any], report: Report) -> Report:
        async with self._turn(model):
            # One that a load brings altogether would be in no index: nobody could tell how it is.
            if model not in names((await self.index()).values()):
                raise UnknownModelToLoad(model)
            before = self.wishes.get(model)
            replicas = list(self._pool.replicas.values())
            # Before the wish: another gateway that leads must not take this load for a lack of one.
            begun = {replica: await self._begin_load(replica, model) for replica in replicas}
            try:
                await self._wish(model, Wish(True, dict(parameters)))
            except BaseException:
                for replica, (token, confirmed) in begun.items():
                    await self._end_load(replica, model, token, confirmed)
                raise
            wish = wanted({model: self.wishes[model]}, self.declared)[model]
            await self._everywhere(
                report, Action(model, True, wish.parameters, wish.load_id), begun
            )
            if report.refused:
                await self._wish(model, before)
            return self._finished(report)

    async def _unload(
        self, model: str, unload_dependents: bool, report: Report, sees: Sees
    ) -> Report:
        async with self._turn(model):
            if model in self.declared:
                raise Conflict(
                    f"model {quoted(model)} is declared in the models file; take it out there first"
                )
            if model not in names((await self.index()).values()):
                if model not in self.wishes:
                    raise UnknownModel(model)
                await self._wish(model, None)
                return self._absent(report)
            if not unload_dependents and (needing := await self._needing(model)):
                seen = [quoted(name) for name in needing if sees(name)]
                unseen = ["a model that this key does not see"] if len(seen) < len(needing) else []
                raise Conflict(
                    f"model {quoted(model)} is needed by {listed([*seen, *unseen])}; unload that "
                    'first, or say {"parameters": {"unload_dependents": true}}'
                )
            before = self.wishes.get(model)
            await self._wish(model, Wish(False, {}))
            parameters = {"unload_dependents": True} if unload_dependents else {}
            await self._everywhere(report, Action(model, False, parameters), {})
            if report.refused:
                await self._wish(model, before)
            return self._finished(report)

    def _absent(self, report: Report) -> Report:
        """The report of a model that no replica has any more: it is unloaded everywhere."""
        self.errors.pop(report.model, None)
        report.replicas = len(self._pool.replicas)
        report.outcomes = {str(at): Outcome(UNAVAILABLE) for at in self._pool.replicas}
        return report

    def _finished(self, report: Report) -> Report:
        if report.failed:
            raise report.error()
        return report

    async def _needing(self, model: str) -> list[str]:
        """The ensembles that are ready and have the model as a step."""
        replicas = list(self._pool.replicas.values())
        ready = {
            name
            for replica in replicas
            for name in replica.index.models
            if name != model and replica.index.ready(name)
        }
        gate = asyncio.Semaphore(CONFIGS_AT_A_TIME)

        async def steps(name: str) -> set[str]:
            async with gate:
                asked = Asked(name, timeout_s=CONFIG_TIMEOUT_S)
                try:
                    config = await self._pool.ask(asked, b"GET", f"{model_path(name)}/config")
                except GatewayError:
                    return set()  # it was unloaded meanwhile
            steps = config.get("ensemble_scheduling", {}).get("step", ())
            return {step.get("model_name", "") for step in steps}

        ordered = sorted(ready)
        found = await asyncio.gather(*map(steps, ordered))
        return [name for name, needed in zip(ordered, found, strict=True) if model in needed]

    # What is done.

    async def _everywhere(self, report: Report, action: Action, begun: Begun) -> None:
        """Every outcome, never only the first failure. Loads that have `begun` go on."""
        replicas = list(begun or self._pool.replicas.values())
        report.replicas = len(replicas)

        async def one(replica: Replica) -> None:
            address = str(replica.address)
            try:
                await self._do(replica, action, "api", begun.get(replica))
                report.outcomes[address] = Outcome(READY if action.load else UNAVAILABLE)
            except GatewayError as exc:
                state = replica.index.state(action.model).state
                reached = self._pool.state(replica) <= State.EJECTED
                report.outcomes[address] = Outcome(state if reached else UNREACHABLE, exc)

        await asyncio.gather(*map(one, replicas))

    async def _do(
        self, replica: Replica, action: Action, by: str, begun: tuple[str, str] | None = None
    ) -> None:
        """On one replica, and until its index says so. Raises what went wrong."""
        verb = "load" if action.load else "unload"
        address, model = str(replica.address), action.model
        if action.load and begun is None and action.load_id:
            begun = await self._begin_load(replica, model)
        left = ""  # on the replica, as far as is known
        try:
            if self._pool.state(replica) is State.DOWN:
                raise NotSent(replica.reason)
            await self._unless_gone(replica, self._done(replica, action))
            left = action.load_id
        except GatewayError as exc:
            self._pool.metrics.model_actions.labels(verb, by, "failed").inc()
            if begun is not None and not isinstance(exc, NOT_ASKED):
                left = begun[1]  # a load that fails leaves what was there
            if isinstance(exc, ModelControlMode):
                self._by_themselves.add(address)
            elif action.load:
                self.errors[model] = f"on {address}: {exc.detail}"
            await self._pool.look(replica)
            raise
        finally:
            self._models.forget(model)
            if begun is not None:
                await self._end_load(replica, model, begun[0], left)
        self._pool.metrics.model_actions.labels(verb, by, "done").inc()
        self._by_themselves.discard(address)
        self.errors.pop(model, None)

    async def _begin_load(self, replica: Replica, model: str) -> tuple[str, str]:
        """Note that a load is under way: its token, and what the replica had confirmed."""
        try:
            token, confirmed = await self._store.begin_load(replica.name, model)
        except StateUnavailable:  # nobody else can know then: it is done all the same
            token, confirmed = new_token(""), self._loads.get(replica.name, {}).get(model, "")
        self._loads = with_load(self._loads, replica.name, model, token)
        return token, confirmed

    async def _end_load(self, replica: Replica, model: str, token: str, left: str) -> None:
        self._loads = with_load(self._loads, replica.name, model, left)
        with suppress(StateUnavailable):
            await self._store.end_load(replica.name, model, token, left)

    async def _done(self, replica: Replica, action: Action) -> None:
        await self._asked(replica, action)
        holds = Index.ready if action.load else Index.settled
        await self._until(replica, lambda index: holds(index, action.model), action)

    async def _asked(self, replica: Replica, action: Action) -> None:
        address, timeout_s = replica.address, self._terms.load_timeout_s
        tls = self._terms.tls if address.tls else None
        restricted = replica.restricted_api
        metadata = None if restricted is None else restricted.metadata
        try:
            if action.load:
                await grpc.load(
                    address.grpc, action.model, action.parameters, timeout_s, tls, metadata
                )
            else:
                dependents = bool(action.parameters.get("unload_dependents"))
                await grpc.unload(address.grpc, action.model, dependents, timeout_s, tls, metadata)
        except NoGrpc as exc:
            await self._pool.look(replica)
            if self._pool.state(replica) is not State.UP:
                raise
            log.warning("%s: managing models over HTTP, which stalls inference", exc.detail)
            await self._asked_over_http(replica, action)

    async def _asked_over_http(self, replica: Replica, action: Action) -> None:
        verb = "load" if action.load else "unload"
        path = f"/v2/repository/models/{quote(action.model, safe=UNQUOTED)}/{verb}"
        body = orjson.dumps({"parameters": dict(action.parameters)})
        timeout_s = self._terms.load_timeout_s
        reply = await replica.http.ask(
            b"POST",
            path.encode(),
            body,
            replica.management_headers,
            timeout_s=timeout_s,
            fresh=True,
            most_bytes=MOST_DOCUMENT_BYTES,
        )
        if reply.status != 200:
            raise refusal(reply.status, reply.body, action.model, verb)

    async def _unless_gone(self, replica: Replica, work: Coroutine[Any, Any, None]) -> None:
        """A load may take minutes; one on a replica that is gone is not waited for."""
        task = self._spawn(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=LOOK_EVERY_S)
                here = self._pool.replicas.get(replica.address) is replica
                if not task.done() and (not here or self._pool.state(replica) is State.DOWN):
                    reason = replica.reason or "its address is gone"
                    raise NotSent(f"the replica went away meanwhile: {reason}")
            await task
        finally:
            task.cancel()

    async def _until(
        self, replica: Replica, holds: Callable[[Index], bool], action: Action
    ) -> None:
        """Triton says done before it is: look until it is true."""
        with anyio.move_on_after(self._terms.load_timeout_s):
            while True:
                await self._pool.look(replica)
                if holds(replica.index):
                    return
                found = replica.index.state(action.model)
                if (
                    action.load
                    and found.state == UNAVAILABLE
                    and found.reason not in ("", UNLOADED)
                ):
                    raise LoadFailed(action.model, scrubbed(found.reason))
                await asyncio.sleep(LOOK_EVERY_S)
        raise DeadlinePassed(self._terms.load_timeout_s)

    # What is wished, and kept up.

    async def _wish(self, model: str, wish: Wish | None) -> None:
        revision = await self._store.wish(model, wish)
        if wish is not None and not wish.revision:
            wish = replace(wish, revision=revision)
        wishes = {name: found for name, found in self.wishes.items() if name != model}
        self.wishes = wishes if wish is None else {**wishes, model: wish}
        for key in [key for key in self._backoff if key[1] == model]:
            del self._backoff[key]

    async def _read_wishes(self) -> None:
        with suppress(StateUnavailable):  # of which the store tells; what was known stays
            found = await self._store.wishes()
            self.wishes, ignored = without_uploads(found, uploads=self._terms.uploads)
            for model in ignored.keys() - self._ignored.keys():
                log.warning(
                    "what the state wishes of model %s is ignored: %s", model, ignored[model]
                )
            self._ignored = ignored
            self._loads = await self._store.loads()

    async def _keep(self) -> None:
        while True:
            await self._read_wishes()
            self._file.look()
            self._require_what_is_ready()
            leads = await self._store.leads()
            await self._forget_the_gone(leads=leads)
            if leads:
                self._reconcile()
            await asyncio.sleep(LEAST_PAUSE_S)
            with anyio.move_on_after(TICK_S - LEAST_PAUSE_S):
                await self._pool.changes.wait()
            self._pool.changes.clear()

    def _require_what_is_ready(self) -> None:
        if self._required != self.declared:
            quorum = self._terms.ready_quorum
            self._required = next_required(self._required, self.declared, self._seen(), quorum)

    def _reconcile(self) -> None:
        """Start what is lacking; a little at a time, and nothing that failed a moment ago."""
        wishes = wanted(self.wishes, self.declared)
        for replica in list(self._pool.replicas.values()):
            address = replica.name
            if self._pool.state(replica) > State.EJECTED:
                # What comes back is another process: what failed before says nothing of it.
                for key in [key for key in self._backoff if key[0] == address]:
                    del self._backoff[key]
                self._by_themselves.discard(address)
                continue
            if address in self._by_themselves:
                continue
            running = sum(key[0] == address for key in self._running)
            for action in actions(wishes, replica.index, self._loads.get(address, {})):
                if running >= AT_A_TIME:
                    break
                if self._may_start(address, action.model):
                    running += 1
                    self._start(replica, action)

    async def _forget_the_gone(self, *, leads: bool) -> None:
        """What was known of addresses that come and go does not stay for ever; and what a replica had
        loaded is gone with its process."""
        there = {replica.name for replica in self._pool.replicas.values()}
        gone = self._known_replicas - there
        self._known_replicas = there
        self._by_themselves &= there
        for key in [key for key in self._backoff if key[0] not in there]:
            del self._backoff[key]
        gone |= {replica.name for replica in self._pool.replicas.values() if replica.health.gone}
        for name in gone & self._loads.keys() if leads else ():
            with suppress(StateUnavailable):
                await self._store.forget_loads(name)
                self._loads = {at: models for at, models in self._loads.items() if at != name}

    def behind(self, model: str) -> list[str]:
        """Return the replicas that have not confirmed the last load of a model."""
        wish = wanted(
            {name: wish for name, wish in self.wishes.items() if name == model},
            {name: found for name, found in self.declared.items() if name == model},
        ).get(model)
        if wish is None:
            return []
        return [
            replica.name
            for replica in self._pool.replicas.values()
            if is_behind(wish, self._loads.get(replica.name, {}).get(model, ""))
        ]

    def _may_start(self, address: str, model: str) -> bool:
        key = (address, model)
        if key in self._running or model in self._turns:
            return False
        backoff = self._backoff.get(key)
        return backoff is None or asyncio.get_running_loop().time() >= backoff.not_before

    def _start(self, replica: Replica, action: Action) -> None:
        key = (str(replica.address), action.model)
        self._running[key] = asyncio.create_task(self._reconciled(key, replica, action))
        self._running[key].add_done_callback(lambda _: self._ended(key))

    def _ended(self, key: tuple[str, str]) -> None:
        self._running.pop(key, None)
        self._pool.changes.set()

    async def _reconciled(self, key: tuple[str, str], replica: Replica, action: Action) -> None:
        verb = "loading" if action.load else "unloading"
        log.warning("%s model %s on %s, as was asked for all replicas", verb, key[1], key[0])
        try:
            await self._do(replica, action, "reconciler")
        except GatewayError as exc:
            now = asyncio.get_running_loop().time()
            self._backoff[key] = self._backoff.get(key, Backoff()).failed(now)
            log.warning("%s model %s on %s failed: %s", verb, key[1], key[0], exc.detail)
        else:
            self._backoff.pop(key, None)

    # One at a time.

    @asynccontextmanager
    async def _turn(self, model: str) -> AsyncIterator[None]:
        """Calls for one model follow one another, and the reconciler lets them."""
        turn = self._turns.setdefault(model, Turn())
        turn.waiting += 1
        try:
            async with turn.lock:
                running = [task for key, task in self._running.items() if key[1] == model]
                if running:
                    await asyncio.wait(running)
                yield
        finally:
            turn.waiting -= 1
            if not turn.waiting:
                del self._turns[model]
                self._pool.changes.set()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def summary(wishes: Mapping[str, Wish]) -> str:
    """What is wished, in half a sentence."""
    loaded = sorted(model for model, wish in wishes.items() if wish.loaded)
    unloaded = sorted(wishes.keys() - set(loaded))
    parts = [("to be loaded", loaded), ("to be unloaded", unloaded)]
    return "; ".join(f"{what}: {', '.join(map(quoted, of))}" for what, of in parts if of)


@dataclass
class Turn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: int = 0


def progress(
    operation: str, report: Report, state: str, error: GatewayError | None = None
) -> dict[str, Any]:
    """What `GET /v1/operations/{id}` answers."""
    document = {"id": operation, "action": report.action, **report.document(), "operation": state}
    if error is not None:
        document |= {"error": error.detail, "code": error.code}
    return document


def merged_detail(indexes: Mapping[str, Index], entry: Mapping[str, str]) -> dict[str, Any]:
    """An entry of the merged index with each replica's own state."""
    name, number = entry["name"], entry.get("version")
    if number is None:
        return dict(entry)
    missing = Version(UNAVAILABLE, "not loaded")
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
