"""Maintenance of a replica: a cordoned one gets no new requests, and a drained one has finished the last."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import anyio

from gateway.errors import Conflict, GatewayError
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.repository.shared_state import SharedState
from gateway.telemetry.request_info import find_management_call, name_action

DRAIN_POLL_S: Final = 0.1  # an event would cost something for each request that ends
LEASE_NAME: Final = "cordons"
# Until every gateway that shares the state has read the cordon, once a second.
NOTICE_S: Final = 2.0


class DrainTimeout(GatewayError):
    """The replica stays cordoned, so that the call can be repeated."""

    status = 504
    code = "DRAIN_TIMEOUT"

    def __init__(self, replica: str, progress: DrainProgress) -> None:
        super().__init__(
            f"replica {replica} is cordoned, but {progress.outstanding} requests and "
            f"{progress.sequences} sequences are still running; drain it again to wait longer"
        )


@dataclass(frozen=True)
class DrainProgress:
    """The work that this gateway still has on a replica."""

    outstanding: int
    sequences: int

    @property
    def is_finished(self) -> bool:
        return not (self.outstanding or self.sequences)


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
        """Cordon the replica, and wait for this gateway's requests and sequences. Raises `DrainTimeout`.

        When it returns, the other gateways send no new requests there.
        """
        record_call("drain", name)
        progress = await self.cordon(name)
        with anyio.move_on_after(timeout_s):
            while not progress.is_finished:
                await asyncio.sleep(DRAIN_POLL_S)
                progress = self._measure_progress(self.pool.get_replica(name))
        if not progress.is_finished:
            raise DrainTimeout(name, progress)
        if self.state.store.is_shared:
            await asyncio.sleep(NOTICE_S)
        return progress

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
