"""Maintenance of a replica: a cordoned one gets no new requests, and a drained one has finished the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import anyio

from gateway.errors import Conflict, GatewayError, StateUnavailable
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.repository.shared_state import SharedState
from gateway.tasks import repeat
from gateway.telemetry.request_info import find_management_call, name_action

DRAIN_POLL_S: Final = 0.1  # an event would cost something for each request that ends
REPORT_INTERVAL_S: Final = 0.5
LEASE_NAME: Final = "cordons"
# Until every gateway has read the cordon (once a second) and reported the work that it still has.
NOTICE_S: Final = 2.5


class DrainTimeout(GatewayError):
    """The replica stays cordoned, so that the call can be repeated."""

    status = 504
    code = "DRAIN_TIMEOUT"

    def __init__(self, replica: str, progress: DrainProgress) -> None:
        super().__init__(
            f"replica {replica} is cordoned, but {progress.outstanding} requests and "
            f"{progress.sequences} sequences of this gateway, and those of {progress.other_gateways} "
            "others, are still running; drain it again to wait longer"
        )


@dataclass(frozen=True)
class DrainProgress:
    """The work that the gateways still have on a replica."""

    outstanding: int
    sequences: int
    other_gateways: int = 0

    @property
    def is_finished(self) -> bool:
        return not (self.outstanding or self.sequences or self.other_gateways)


@dataclass(frozen=True)
class Maintenance:
    """Cordons, uncordons and drains replicas. A cordon applies to all gateways that share the state."""

    pool: ReplicaPool
    dispatcher: Dispatcher
    state: SharedState

    async def cordon(self, name: str) -> DrainProgress:
        """Send no new requests to the replica. Raises `UnknownReplica`, or `Conflict` if it is the last."""
        record_call("cordon", name)
        replica = self.pool.get_replica(name)
        async with self._lock_cordons():
            if name not in self.pool.cordoned:
                self._check_others(replica)
                await self._set_cordon(name, is_cordoned=True)
        return self._measure_progress(replica)

    async def uncordon(self, name: str) -> DrainProgress:
        """Send requests to the replica again, also when it returns. Raises `UnknownReplica`."""
        record_call("uncordon", name)
        if name not in self.pool.cordoned:
            self.pool.get_replica(name)
        await self._set_cordon(name, is_cordoned=False)
        replica = self.pool.find_replica(name)
        return DrainProgress(0, 0) if replica is None else self._measure_progress(replica)

    async def drain(self, name: str, timeout_s: float) -> DrainProgress:
        """Cordon the replica and wait for its requests and sequences. Raises `DrainTimeout`."""
        record_call("drain", name)
        progress = await self.cordon(name)
        is_finished = False
        with anyio.move_on_after(timeout_s):
            if self.state.store.is_shared:
                await asyncio.sleep(NOTICE_S)
            while not is_finished:
                measured = self._measure_progress(self.pool.get_replica(name))
                if measured.is_finished:
                    others = count_busy_gateways(await self._exchange_reports(), name)
                    measured = replace(measured, other_gateways=others)
                progress = measured
                is_finished = measured.is_finished
                await asyncio.sleep(0 if is_finished else DRAIN_POLL_S)
        if not is_finished:
            raise DrainTimeout(name, progress)
        return progress

    async def report_work(self) -> None:
        """Tell the other gateways on which cordoned replicas this one still has work, until cancelled."""

        async def report() -> None:
            await asyncio.sleep(REPORT_INTERVAL_S)
            if self.pool.cordoned:
                with suppress(StateUnavailable):  # the store logs it
                    await self._exchange_reports()

        await repeat("maintenance", report)

    async def _exchange_reports(self) -> list[Mapping[str, Any]]:
        busy = [
            replica.name
            for replica in self.pool.replicas.values()
            if replica.name in self.pool.cordoned
            and not self._measure_progress(replica).is_finished
        ]
        return await self.state.exchange_reports(busy_replicas=busy)

    @asynccontextmanager
    async def _lock_cordons(self) -> AsyncIterator[None]:
        """Hold the cordon lease of all gateways, and load the current cordons first."""
        async with self.state.wait_for_lease(LEASE_NAME):
            await self.state.refresh()
            self.pool.set_cordoned(self.state.cordoned)
            yield

    async def _set_cordon(self, name: str, *, is_cordoned: bool) -> None:
        await self.state.set_cordon(name, is_cordoned=is_cordoned)
        self.pool.set_cordoned(self.state.cordoned)

    def _check_others(self, replica: Replica) -> None:
        others = (other for other in self.pool.replicas.values() if other is not replica)
        if not any(map(self.pool.accepts_requests, others)):
            raise Conflict(
                f"replica {replica.name} is the last one that can serve requests; add or uncordon another "
                "first"
            )

    def _measure_progress(self, replica: Replica) -> DrainProgress:
        sequences = self.dispatcher.count_sequences(replica.name)
        return DrainProgress(replica.outstanding, sequences)


def record_call(action: str, replica: str) -> None:
    name_action(action)
    if (call := find_management_call()) is not None:
        call.replica = replica


def count_busy_gateways(reports: Iterable[Mapping[str, Any]], replica: str) -> int:
    """Return how many reports name a replica, whatever else they contain: others can write to the state."""
    lists = (report.get("busy_replicas") for report in reports)
    return sum(isinstance(names, list) and replica in names for names in lists)
