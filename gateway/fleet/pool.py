"""The replicas of the fleet, their states, and the candidates for a request."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final, NamedTuple, Protocol

import anyio

from gateway.config.settings import Settings
from gateway.errors import NotFound, Unavailable
from gateway.fleet.discovery import ReplicaDiscovery, ReplicaSource
from gateway.fleet.health import FailureShares, HealthState
from gateway.fleet.index import EMPTY_INDEX, Index
from gateway.fleet.probe import HealthMonitor
from gateway.fleet.replica import Replica, ReplicaAddress
from gateway.messages import quote_text
from gateway.tasks import ChangeSignal, TaskSet, cancel_tasks
from gateway.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

LOOKUP_PAUSE_S: Final = 0.1  # while requests wait for a replica
STARTUP_PROBE_TIMEOUT_S: Final = 2.0
# A replica that has answered no probe for this time is not responsive.
UNRESPONSIVE_AFTER_S: Final = 2.8
EVENT_LOOP_RESOLUTION_S: Final = 0.001
MAX_CANDIDATE_LISTS: Final = 10_000


class NoReplica(Unavailable):
    code = "NO_REPLICA"
    message = "no Triton is reachable; GET /readyz shows the reason for each replica"


class UnknownReplica(NotFound):
    code = "REPLICA_NOT_FOUND"

    def __init__(self, name: str) -> None:
        super().__init__(
            f"replica {quote_text(name)} not found; GET /v1/replicas lists the replicas"
        )


class Activator(Protocol):
    """Lets requests wait until a replica has their model ready."""

    def can_activate(self, model: str) -> bool: ...

    async def activate(self, model: str, timeout_s: float) -> float:
        """Wait until the model can be used; return the remaining seconds.

        Raises the `GatewayError` to respond with.
        """

    def matches(self, model: str) -> bool:
        """Return whether requests load the model, unless an administrator has loaded or unloaded it."""


class Candidates(NamedTuple):
    """The replicas for requests to a version of a model, until the next change of the fleet.

    Ejected ones are among them: time and requests change that, and not the fleet.
    """

    serving: tuple[Replica, ...]  # for new requests
    holders: tuple[Replica, ...]  # live ones that have it ready; sequences may be running there
    others: tuple[Replica, ...]  # for new requests while it is ready nowhere: the error tells why


class ReplicaPool:
    """All replicas. As a context manager it discovers and probes them in the background.

    Of a replica:
    `is_live`: it is not `DOWN`.
    `is_responsive`: it is live and has answered a probe lately, so that an action on it may end.
    `is_reachable`: it answers probes in time.
    `accepts_requests`: it is reachable and not cordoned.

    Of a model or its version:
    `is_listed`: a replica has it in its repository, ready or not.
    `is_loaded`: a replica has it ready.
    `is_served`: a live replica has it ready for new requests.
    `is_awaited`: it is not served, and requests wait until it is.
    """

    def __init__(
        self,
        sources: Sequence[ReplicaSource],
        settings: Settings,
        tls: ssl.SSLContext | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.replicas: dict[ReplicaAddress, Replica] = {}
        # The names of replicas that get no new requests.
        self.cordoned: frozenset[str] = frozenset()
        # Replicas that get a request only if no other can serve it: their pods end soon, or are not ready.
        self.avoided: frozenset[ReplicaAddress] = frozenset()
        # Changes of the replicas, their states and their models.
        self.changes = ChangeSignal()
        self.metrics = metrics or Metrics()
        self._loop = asyncio.get_running_loop()
        self.failures = FailureShares(self._loop.time)
        self.monitor = HealthMonitor(
            self.replicas, self._notify_change, settings.poll_interval_s, self.failures
        )
        # Tells the models that requests wait for while no replica has them ready. None: no request waits.
        self.activator: Activator | None = None
        self._discovery = ReplicaDiscovery(sources, self._update_replicas, settings.dns_interval_s)
        self._settings = settings
        self._tls = tls
        self._probe_tasks: dict[ReplicaAddress, asyncio.Task[None]] = {}
        self._tasks = TaskSet()
        self._lookup_task: asyncio.Task[None] | None = None
        # Pairs of a replica and a model that gets no new requests there before it is unloaded.
        self._draining: set[tuple[str, str]] = set()
        self._candidates: dict[tuple[str, str], Candidates] = {}

    async def __aenter__(self) -> ReplicaPool:
        self._update_replicas()
        with anyio.move_on_after(STARTUP_PROBE_TIMEOUT_S):
            await self._discovery.look_up_all()
            await self.monitor.probe_all()
        self._tasks.start(self._discovery.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks([*self._tasks, *self._probe_tasks.values()])
        await self.monitor.close()
        for replica in self.replicas.values():
            replica.close()

    def _update_replicas(self) -> None:
        current = self._discovery.addresses
        for address in self.replicas.keys() - current:
            log.warning("replica %s is removed: GATEWAY_TRITON_URLS no longer leads to it", address)
            self._probe_tasks.pop(address).cancel()
            removed = self.replicas.pop(address)
            removed.close()
            self.failures.forget_replica(removed.name)
            self.metrics.remove_replica(removed.name)
        for address in sorted(current - self.replicas.keys(), key=str):
            replica = self.replicas[address] = Replica(address, self._settings, self._tls)
            self.metrics.add_replica(replica.name)
            probing = self.monitor.probe_periodically(replica)
            self._probe_tasks[address] = asyncio.create_task(probing)
        self._set_avoided(self._discovery.avoided_addresses)
        self._notify_change()

    def _set_avoided(self, avoided: frozenset[ReplicaAddress]) -> None:
        for address in sorted(avoided ^ self.avoided, key=str):
            if address in avoided:
                log.info("replica %s is avoided: it is not at a preferred address", address)
            elif address in self.replicas:
                log.info("replica %s is at a preferred address", address)
        self.avoided = avoided

    def _notify_change(self) -> None:
        self._candidates.clear()
        self.changes.notify()

    def set_cordoned(self, names: frozenset[str]) -> None:
        for name in names ^ self.cordoned:
            action = "cordoned: it gets no new requests" if name in names else "uncordoned"
            log.warning("replica %s is %s", name, action)
        if names != self.cordoned:
            self.cordoned = names
            self._notify_change()

    def describe_lookups(self) -> list[str]:
        return self._discovery.describe_lookups()

    @property
    def has_live_replica(self) -> bool:
        return any(map(self.is_live, self.replicas.values()))

    def find_replica(self, name: str) -> Replica | None:
        return next((each for each in self.replicas.values() if each.name == name), None)

    async def look_up_replicas(self) -> None:
        """Look for new replicas before the next interval, and wait for a short time.

        All callers share one lookup.
        """
        if self._lookup_task is None or self._lookup_task.done():
            self._lookup_task = self._tasks.start(self._look_up_slowly())
        await asyncio.shield(self._lookup_task)

    async def _look_up_slowly(self) -> None:
        await asyncio.gather(self._discovery.look_up_all(), asyncio.sleep(LOOKUP_PAUSE_S))

    def replica_state(self, replica: Replica) -> HealthState:
        state = replica.health.state
        if state is HealthState.UP and self.failures.find_ejection(replica.name) is not None:
            return HealthState.EJECTED
        return state

    def get_replica(self, name: str) -> Replica:
        """Return the replica with this address. Raises `UnknownReplica`."""
        replica = self.find_replica(name)
        if replica is None:
            raise UnknownReplica(name)
        return replica

    def is_live(self, replica: Replica) -> bool:
        return not replica.health.is_down

    def is_reachable(self, replica: Replica) -> bool:
        return replica.health.state is HealthState.UP

    def is_responsive(self, replica: Replica) -> bool:
        is_missed = replica.health.missed_probes > 0
        is_late = is_missed and self._loop.time() - replica.answered_at > UNRESPONSIVE_AFTER_S
        return self.is_live(replica) and not is_late

    async def wait_while_responsive(self, replica: Replica) -> None:
        """Wait until the replica has left the fleet, is down or has been silent for too long."""
        seen = self.changes.count
        while self.replicas.get(replica.address) is replica and self.is_responsive(replica):
            wait_s = inf  # the first missed probe is a change
            if replica.health.missed_probes:
                silent_s = self._loop.time() - replica.answered_at
                wait_s = max(UNRESPONSIVE_AFTER_S - silent_s, 0.0) + EVENT_LOOP_RESOLUTION_S
            seen = await self.changes.wait(seen, wait_s)

    def accepts_requests(self, replica: Replica) -> bool:
        return replica.name not in self.cordoned and self.is_reachable(replica)

    def known_index(self, replica: Replica) -> Index:
        return replica.index if self.is_live(replica) else EMPTY_INDEX

    @property
    def ready_models(self) -> set[str]:
        return {name for each in self.replicas.values() for name in each.index.ready_models}

    def list_serving_indexes(self) -> dict[str, Index]:
        """Return the indexes of the replicas that can serve requests, by address. Raises `NoReplica`."""
        replicas = filter(self.accepts_requests, self.replicas.values())
        indexes = {replica.name: replica.index for replica in replicas}
        if not indexes:
            raise NoReplica
        return indexes

    def list_unread_replicas(self) -> list[Replica]:
        """Return the replicas that can serve requests, but whose last index could not be read."""
        return [
            replica
            for replica in self.replicas.values()
            if self.accepts_requests(replica)
            and (replica.health.missed_probes or replica.index_schedule.has_failed)
        ]

    def ejected_for_s(self, replica: Replica) -> float:
        ejection = self.failures.find_ejection(replica.name)
        return 0.0 if ejection is None else ejection.trial_at - self._loop.time()

    def explain_state(self, replica: Replica) -> str:
        """Return why the replica does not answer its probes, or is ejected; empty if it is well."""
        ejection = self.failures.find_ejection(replica.name)
        return replica.reason if ejection is None else ejection.reason

    def silent_for_s(self, replica: Replica) -> float:
        """Return the time since the replica answered a probe."""
        return self._loop.time() - replica.answered_at

    def is_listed(self, model: str, version: str = "") -> bool:
        return any(
            model in replica.index.models
            and (not version or version in replica.index.models[model])
            for replica in self.replicas.values()
        )

    def is_loaded(self, model: str, version: str = "") -> bool:
        return any(replica.index.is_ready(model, version) for replica in self.replicas.values())

    def is_held(self, model: str) -> bool:
        """Return whether a replica has the model, loads it, or unloads it."""
        return any(
            replica.index.is_ready(model) or replica.index.is_changing(model)
            for replica in filter(self.is_live, self.replicas.values())
        )

    def find_candidates(self, model: str, version: str = "") -> Candidates:
        """Return the candidates for a version, or without one, for any; without a model, all replicas."""
        candidates = self._candidates.get((model, version))
        if candidates is None:
            if len(self._candidates) > MAX_CANDIDATE_LISTS:
                self._candidates.clear()
            candidates = self._group_replicas(model, version)
            self._candidates[model, version] = candidates
        return candidates

    def _group_replicas(self, model: str, version: str) -> Candidates:
        live = [replica for replica in self.replicas.values() if self.is_live(replica)]
        holders = [each for each in live if not model or each.index.is_ready(model, version)]
        serving = (each for each in holders if (each.name, model) not in self._draining)
        return Candidates(self._choose_for_new(serving), tuple(holders), self._choose_for_new(live))

    def _choose_for_new(self, replicas: Iterable[Replica]) -> tuple[Replica, ...]:
        """Return the replicas for new requests: the healthiest, and avoided ones only if need be."""
        allowed = tuple(each for each in replicas if each.name not in self.cordoned)
        in_time = tuple(each for each in allowed if each.health.state is HealthState.UP)
        healthiest = in_time or allowed
        return tuple(each for each in healthiest if each.address not in self.avoided) or healthiest

    def is_awaited(self, model: str) -> bool:
        if self.activator is None or self.is_served(model):
            return False
        return self.activator.can_activate(model)

    def is_served(self, model: str, version: str = "") -> bool:
        return bool(self.find_candidates(model, version).serving)

    def set_draining(self, replica: Replica, model: str, *, is_draining: bool) -> None:
        if is_draining:
            self._draining.add((replica.name, model))
        else:
            self._draining.discard((replica.name, model))
        self._notify_change()
