"""A load or an unload of one model on one replica, until the replica's index confirms it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final

import anyio
import orjson

from gateway.errors import DeadlinePassed, GatewayError, ModelControlModeConflict
from gateway.fleet.health import HealthState
from gateway.fleet.index import UNAVAILABLE, UNLOADED, Index
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.fleet.signatures import SignatureCache
from gateway.fleet.transports import TRANSPORT_ERRORS
from gateway.http_client.connection import RequestNotSent
from gateway.messages import quote_path_segment, quote_text
from gateway.repository.plan import ModelAction
from gateway.repository.shared_state import SharedState
from gateway.tasks import cancel_tasks
from gateway.triton.error_mapping import (
    MAX_METADATA_BYTES,
    LoadFailed,
    map_load_error,
    sanitize_message,
)
from gateway.triton.grpc.byte_channel import GrpcUnreachable
from gateway.triton.grpc.management import (
    build_load_request,
    build_unload_request,
    call_management_api,
)

log = logging.getLogger(__name__)

ACTION_POLL_S: Final = 0.1
UNLOAD_START_S: Final = 2.0  # time until the index shows an unload that Triton has accepted
# Consecutive indexes after a load that show the model unloaded; a single one may be older than the load.
MAX_UNLOADED_PROBES: Final = 3


@dataclass
class ActionProgress:
    """The state of an action that Triton has accepted, by successive indexes.

    What another client has reversed since is not waited for: a load is done, an unload raises `LoadFailed`.
    """

    action: ModelAction
    accepted_at: float  # a time of perf_counter
    has_unload_begun: bool = False
    unloaded_count: int = 0  # consecutive indexes that show the model unloaded

    def observe(self, index: Index, *, is_current: bool) -> bool:
        """Take the next index into account, and return whether the action is done. Raises `LoadFailed`.

        Without `is_current`, the replica did not answer the last probe, and the index is an earlier one.
        """
        if self.action.is_load:
            return self._observe_load(index)
        return self._observe_unload(index, is_current=is_current)

    def _observe_load(self, index: Index) -> bool:
        model = self.action.model
        if index.is_ready(model):
            return True
        current = index.model_state(model)
        is_unloaded = current.state == UNAVAILABLE and current.reason == UNLOADED
        if current.state == UNAVAILABLE and current.reason and not is_unloaded:
            raise LoadFailed(model, sanitize_message(current.reason))
        self.unloaded_count = self.unloaded_count + 1 if is_unloaded else 0
        return self.unloaded_count == MAX_UNLOADED_PROBES

    def _observe_unload(self, index: Index, *, is_current: bool) -> bool:
        model = self.action.model
        if index.is_unloaded(model):
            return True
        if is_current:
            is_ready = index.is_ready(model)
            self.has_unload_begun = self.has_unload_begun or not is_ready
            is_late = perf_counter() - self.accepted_at > UNLOAD_START_S
            if is_ready and (self.has_unload_begun or is_late):
                raise LoadFailed(model, "it was loaded again", "unload")
        return False


class LoadTimedOut(DeadlinePassed):
    """The action may still end in Triton. No header of the request sets this limit."""

    def __init__(self, action: ModelAction, limit_s: float) -> None:
        GatewayError.__init__(
            self,
            f"model {quote_text(action.model)} was not {action.verb}ed within {limit_s:g} s, the limit that "
            "GATEWAY_LOAD_TIMEOUT_S sets",
        )


class ModelLoader:
    """Runs actions on replicas, and records what these have then, and why an action failed."""

    def __init__(
        self,
        pool: ReplicaPool,
        signatures: SignatureCache,
        state: SharedState,
        *,
        load_timeout_s: float,
    ) -> None:
        self._pool = pool
        self._signatures = signatures
        self._state = state
        self.load_timeout_s = load_timeout_s
        # Replicas whose model control mode allows neither loads nor unloads.
        self.uncontrollable_replicas: set[str] = set()
        # Called with the model of each action that has ended.
        self.change_listeners: list[Callable[[str], None]] = []

    async def run(self, replica: Replica, action: ModelAction, initiator: str) -> None:
        """Run the action until the replica's index confirms it, and record that. Raises `GatewayError`.

        The caller has the lease of the model.
        """
        model = action.model
        previous = self._state.confirmed.get(replica.name, {}).get(model, "")
        try:
            if not self._pool.is_responsive(replica):
                raise RequestNotSent(replica.reason)
            await self._state.confirm(replica.name, model, "")
            await self._wait_while_reachable(replica, self._apply_action(replica, action))
        except GatewayError as exc:
            if not isinstance(exc, TRANSPORT_ERRORS):  # the replica has what it had before
                await self._state.confirm(replica.name, model, previous)
            await self._record_failure(replica, action, initiator, exc)
            raise
        finally:
            for notify in (self._signatures.invalidate, *self.change_listeners):
                notify(model)
        await self._state.confirm(replica.name, model, action.generation)
        await self._state.record_load_error(replica.name, model, "")
        self._count_action(action, initiator, "done")
        self.uncontrollable_replicas.discard(replica.name)

    def _count_action(self, action: ModelAction, initiator: str, outcome: str) -> None:
        model = action.model if self._pool.is_listed(action.model) else ""
        self._pool.metrics.model_actions.labels(action.verb, initiator, outcome, model).inc()

    async def _record_failure(
        self, replica: Replica, action: ModelAction, initiator: str, error: GatewayError
    ) -> None:
        self._count_action(action, initiator, "failed")
        if isinstance(error, ModelControlModeConflict):
            self.uncontrollable_replicas.add(replica.name)
        elif action.is_load:
            await self._state.record_load_error(replica.name, action.model, error.detail)
        if self._pool.is_responsive(replica):
            await self._pool.monitor.probe(replica)

    async def _wait_while_reachable(
        self, replica: Replica, work: Coroutine[Any, Any, None]
    ) -> None:
        """Wait for the action, which may take minutes, or until the replica is gone or does not respond."""
        task = asyncio.create_task(work)
        watch = asyncio.create_task(self._pool.wait_while_responsive(replica))
        try:
            await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                reason = replica.reason or "its address was removed"
                raise RequestNotSent(f"the replica became unavailable: {reason}")
            await task
        finally:
            await cancel_tasks([each for each in (task, watch) if not each.done()])

    async def _apply_action(self, replica: Replica, action: ModelAction) -> None:
        if not action.is_load:
            await self._wait_for_load(replica, action)
        await self._send_action(replica, action)
        await self._wait_for_index(replica, action)

    async def _wait_for_load(self, replica: Replica, action: ModelAction) -> None:
        """Wait until the model is not being loaded: some Tritons do not survive an unload during a load."""
        with anyio.move_on_after(self.load_timeout_s):
            while replica.index.is_loading(action.model):
                await asyncio.sleep(ACTION_POLL_S)
                await self._pool.monitor.probe(replica)
            return
        raise LoadTimedOut(action, self.load_timeout_s)

    async def _send_action(self, replica: Replica, action: ModelAction) -> None:
        grpc_target = replica.address.grpc_target
        build = build_load_request if action.is_load else build_unload_request
        try:
            await call_management_api(
                grpc_target,
                build(action.model, action.parameters),
                self.load_timeout_s,
                tls=replica.grpc_tls,
                metadata=replica.management_metadata,
            )
        except DeadlinePassed as exc:
            raise LoadTimedOut(action, self.load_timeout_s) from exc
        except GrpcUnreachable as exc:
            await self._pool.monitor.probe(replica)
            if self._pool.replica_state(replica) is not HealthState.UP:
                raise
            log.warning(
                "replica %s: %s (%s); managing models over HTTP, which stalls inference",
                replica.name,
                exc.detail,
                grpc_target,
            )
            await self._send_action_over_http(replica, action)

    async def _send_action_over_http(self, replica: Replica, action: ModelAction) -> None:
        model = quote_path_segment(action.model)
        response = await replica.http.request(
            b"POST",
            f"/v2/repository/models/{model}/{action.verb}".encode(),
            headers=replica.management_headers,
            body=orjson.dumps({"parameters": dict(action.parameters)}),
            timeout_s=self.load_timeout_s,
            fresh=True,
            max_bytes=MAX_METADATA_BYTES,
        )
        if response.status != 200:
            raise map_load_error(response.status, response.body, action.model, action.verb)

    async def _wait_for_index(self, replica: Replica, action: ModelAction) -> None:
        """Probe until the index confirms the action: Triton responds before it is done."""
        progress = ActionProgress(action, perf_counter())
        with anyio.move_on_after(self.load_timeout_s):
            while True:
                await self._pool.monitor.probe(replica)
                is_up = self._pool.replica_state(replica) is HealthState.UP
                if progress.observe(replica.index, is_current=is_up):
                    return
                await asyncio.sleep(max(ACTION_POLL_S, replica.index_schedule.duration_s))
        raise LoadTimedOut(action, self.load_timeout_s)
