"""The state that gateways share, as this one knows it: desired models, and what each replica confirmed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from time import monotonic
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

import anyio

from gateway.errors import ChangeInProgress, GatewayError, StateUnavailable
from gateway.messages import describe_difference, join_names, quote_text
from gateway.repository.events import EventLog
from gateway.repository.models_file import DeclaredModel, ModelsFile
from gateway.repository.plan import find_ignored_models, merge_declared_models
from gateway.repository.state.content import (
    CONFIRMED,
    CORDONS,
    DEMAND,
    LOAD_ERRORS,
    MAX_ERROR_CHARS,
    MODELS,
    Confirmed,
    DesiredModel,
    Origin,
    with_entry,
)
from gateway.repository.state.store import StateNotShared, StateStore
from gateway.tasks import cancel_tasks, repeat
from gateway.telemetry.request_info import record_change

log = logging.getLogger(__name__)

LEASE_RENEWAL_S: Final = 1.5
LEASE_POLL_S: Final = 0.1
MAX_CHANGE_WAIT_S: Final = 5.0  # how long a change waits for another one of the same model
OUTAGE_PAUSE_S: Final = 2.0
T = TypeVar("T")


class CircuitBreaker:
    """Calls of a store that may be down. After a failure, one call in each pause tries it.

    The others fail at once: a load makes about ten calls, and each would wait for a store that hangs.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._failure: StateUnavailable | None = None  # set while the last call failed
        self._retry_at = 0.0

    async def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of the call. Raises `StateUnavailable`."""
        if self._failure is not None:
            now = monotonic()
            if now < self._retry_at:
                raise StateUnavailable(self._failure.action, self._failure.reason)
            self._retry_at = now + self._pause_s
        try:
            result = await call()
        except StateUnavailable as exc:
            self._failure = exc
            self._retry_at = monotonic() + self._pause_s
            raise
        self._failure = None
        return result


class SharedState:
    """A copy of the stored state, with the models file. Changes are stored first."""

    def __init__(self, store: StateStore, models_file: ModelsFile, *, can_upload: bool) -> None:
        self.store = store
        self.events = EventLog(store, self.wait_for_lease)
        if models_file.file is not None:
            self.events.watch(models_file.file, "models file", "model")
        self.desired_models: Mapping[str, DesiredModel] = {}  # by the API
        self.confirmed: Confirmed = {}
        self.refresh_listeners: list[Callable[[], None]] = []
        self.find_loading_replicas: Callable[[str], list[str]] = lambda _: []
        self._models_file = models_file
        self._can_upload = can_upload
        self._ignored_models: dict[str, str] = {}  # model → why its desired state is ignored
        # What the store does not have, because it could not be written.
        self._unrecorded: dict[tuple[str, str], str] = {}  # replica and model → generation
        self._own_demand: dict[str, DesiredModel] = {}
        # For the calls that coordinate gateways: leases, reports and confirmed loads.
        self._breaker = CircuitBreaker(OUTAGE_PAUSE_S)
        self._is_known = False  # the stored state was read
        self._lease_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def declared_models(self) -> Mapping[str, DeclaredModel]:
        return self._models_file.models

    @property
    def capability_models(self) -> Mapping[str, DeclaredModel]:
        """The models of the models file that capabilities load."""
        return self._models_file.capability_models

    async def refresh(self) -> None:
        await self.refresh_tables()
        await self._models_file.reload_if_changed()
        for notify in self.refresh_listeners:
            notify()

    @property
    def cordoned(self) -> frozenset[str]:
        return frozenset(self.store.get(CORDONS))

    async def refresh_tables(self) -> None:
        with suppress(StateUnavailable):  # the store logs it; the last known state stays in use
            await self.store.refresh()
            previous = self.desired_models
            self._update_desired_models()
            if self._is_known and self.desired_models != previous:
                difference = describe_difference(previous, self.desired_models)
                log.info("the desired state has changed: %s", difference)
            self._is_known = True
            await self._forget_unrecorded()
            self.confirmed = self.store.get(CONFIRMED)

    def _update_desired_models(self) -> None:
        """Take over what the API desires, and may."""
        stored = self.store.get(MODELS)
        ignored = find_ignored_models(stored, can_upload=self._can_upload)
        self.desired_models = {
            model: desired
            for model, desired in stored.items()
            if desired.origin is Origin.api and model not in ignored
        }
        for model in ignored.keys() - self._ignored_models.keys():
            log.warning("desired state of model %s is ignored: %s", model, ignored[model])
        self._ignored_models = ignored

    def get_stored_model(self, model: str) -> DesiredModel | None:
        """Return the stored desired model with its revision, also one that is ignored."""
        return self.store.get(MODELS).get(model)

    async def set_desired_model(
        self, model: str, desired: DesiredModel | None, expected_revision: int
    ) -> bool:
        """Store the desired state of a model, unless the stored one has another revision than expected.

        Returns whether it was stored.
        """
        before = self.get_stored_model(model)
        revision = await self.store.set_desired_model(model, desired, expected_revision)
        if not revision:
            return False
        described = (None if each is None else each.describe() for each in (before, desired))
        record_change(f"model {model}", *described)
        self._update_desired_models()
        return True

    def merge_models(self) -> dict[str, DesiredModel]:
        """Return the models that the models file and the API desire."""
        return merge_declared_models(self.desired_models, self.declared_models)

    def merge_model(self, model: str) -> DesiredModel | None:
        desired = self.desired_models
        declared = self.declared_models
        return merge_declared_models(
            {model: desired[model]} if model in desired else {},
            {model: declared[model]} if model in declared else {},
        ).get(model)

    def is_desired(self, model: str) -> bool:
        desired = self.merge_model(model)
        return desired is not None and desired.is_loaded

    def summarize_desired_models(self) -> str:
        loaded = sorted(name for name, model in self.desired_models.items() if model.is_loaded)
        unloaded = sorted(self.desired_models.keys() - set(loaded))
        parts = [("load", loaded), ("unload", unloaded)]
        return "; ".join(
            f"{verb} {', '.join(map(quote_text, names))}" for verb, names in parts if names
        )

    @property
    def demanded_models(self) -> Mapping[str, DesiredModel]:
        """The models that requests desire."""
        stored = self.store.get(MODELS).items()
        return {
            **self._own_demand,
            **{model: desired for model, desired in stored if desired.origin is Origin.demand},
        }

    async def begin_demand(self, model: str) -> None:
        """Store that requests desire a model on one replica, unless it is desired already."""
        if model in self.demanded_models:
            return
        try:
            await self._breaker.run(lambda: self.store.set_desired_model(model, DEMAND, 0))
        except (StateUnavailable, StateNotShared):  # it is loaded all the same
            self._own_demand[model] = DEMAND

    async def end_demand(self, model: str) -> None:
        self._own_demand.pop(model, None)
        stored = self.get_stored_model(model)
        if stored is not None and stored.origin is Origin.demand:
            with suppress(StateUnavailable):
                await self._breaker.run(
                    lambda: self.store.set_desired_model(model, None, stored.revision)
                )

    async def set_cordon(self, replica: str, *, is_cordoned: bool) -> None:
        before = replica in self.cordoned
        await self.store.write(CORDONS, (replica,), is_cordoned or None)
        record_change(f"replica {replica}", *({"cordoned": each} for each in (before, is_cordoned)))

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncIterator[bool]:
        """Yield whether no other gateway has the lease, and keep it in the block, for one task at a time."""
        async with self._lease_locks.setdefault(name, asyncio.Lock()):
            if not await self.renew_lease(name):
                yield False
                return
            renewal = asyncio.create_task(self._renew_lease_periodically(name))
            try:
                yield True
            finally:
                await cancel_tasks([renewal])
                with suppress(StateUnavailable):
                    await self._breaker.run(lambda: self.store.release_lease(name))

    @asynccontextmanager
    async def wait_for_lease(self, name: str) -> AsyncIterator[None]:
        """Wait until no other gateway has the lease, and keep it in the block."""
        while True:
            async with self.lease(name) as is_granted:
                if is_granted:
                    yield
                    return
            await asyncio.sleep(LEASE_POLL_S)  # a store tells nobody that a lease has ended

    @asynccontextmanager
    async def lock_model(self, model: str) -> AsyncIterator[None]:
        """Exclude other changes of a model, by all gateways that share this state, and read the last one.

        Raises `ChangeInProgress` after some seconds.
        """
        async with AsyncExitStack() as stack:
            with anyio.move_on_after(MAX_CHANGE_WAIT_S) as wait:
                await stack.enter_async_context(self.wait_for_lease(f"model:{model}"))
            await self.refresh()
            if wait.cancelled_caught:
                raise ChangeInProgress(model, self.describe_change(model))
            yield

    def describe_change(self, model: str) -> str:
        """Return what a change of the model waits for, or may wait for."""
        if replicas := self.find_loading_replicas(model):
            return f"a load on {join_names(replicas)} is in progress"
        desired = self.desired_models.get(model)
        if desired is not None and not desired.is_loaded:
            return "it is being unloaded, or was unloaded meanwhile"
        return "an upload, a removal, a load or a change of its labels"

    async def renew_lease(self, name: str) -> bool:
        """Take or renew a lease, and return whether no other gateway has it.

        Without the store, gateways cannot agree: each gets the lease then, and the indexes decide. With
        several leaders, a replica only gets the same loads several times; without any, it would stay empty.
        """
        try:
            return await self._breaker.run(lambda: self.store.acquire_lease(name))
        except StateUnavailable:
            return True

    async def renew_presence(self) -> None:
        """Show the other gateways that this one is alive. Raises `StateUnavailable`."""
        await self._breaker.run(self.store.renew_presence)

    async def _renew_lease_periodically(self, name: str) -> None:
        async def renew() -> None:
            await asyncio.sleep(LEASE_RENEWAL_S)
            await self.renew_lease(name)

        await repeat("lease", renew)

    async def exchange_reports(self, report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Publish this gateway's report; return the reports of the others. Raises `StateUnavailable`."""
        return await self._breaker.run(lambda: self.store.exchange_reports(report))

    async def confirm(self, replica: str, model: str, generation: str) -> None:
        """Record the load of a model that a replica has; empty if that is unknown, or any is sufficient."""
        keys = (replica, model)
        known = self.confirmed.get(replica, {}).get(model, "")
        if known == generation and keys not in self._unrecorded:
            return
        self.confirmed = with_entry(self.confirmed, keys, generation or None)
        try:
            await self._breaker.run(lambda: self.store.write(CONFIRMED, keys, generation or None))
            self._unrecorded.pop(keys, None)
        except StateUnavailable:  # go on, though other gateways cannot see it
            self._unrecorded[keys] = generation

    async def _forget_unrecorded(self) -> None:
        """Delete what the store has of loads that ended while it was not available: they are unknown."""
        for keys in list(self._unrecorded):
            if keys in self._unrecorded:  # another task may have recorded it meanwhile
                await self.store.write(CONFIRMED, keys, None)
                self._unrecorded.pop(keys, None)

    async def forget_replica(self, replica: str) -> None:
        """Delete what a replica confirmed, because its process has ended. Raises `StateUnavailable`."""
        for table in (CONFIRMED, LOAD_ERRORS):
            await self.store.forget_replica(table, replica)
        self.confirmed = self.store.get(CONFIRMED)

    async def forget_load_errors(self, model: str) -> None:
        for replica in list(self.store.get(LOAD_ERRORS)):
            await self.record_load_error(replica, model, "")

    def list_load_errors(self) -> dict[str, str]:
        """Return where and why the last load of each model failed, on any gateway."""
        return {
            model: f"on {replica}: {error}"
            for replica, errors in self.store.get(LOAD_ERRORS).items()
            for model, error in errors.items()
        }

    async def record_load_error(self, replica: str, model: str, error: str) -> None:
        """Record why the last load of a model failed on a replica; empty if it succeeded."""
        keys = (replica, model)
        value = error[:MAX_ERROR_CHARS] or None
        if self.store.get(LOAD_ERRORS).get(replica, {}).get(model) != value:
            with suppress(GatewayError):  # the caller has the error, and the log
                await self._breaker.run(lambda: self.store.write(LOAD_ERRORS, keys, value))
