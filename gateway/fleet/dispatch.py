"""Requests to the fleet: the attempts at replicas, and their records."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from time import perf_counter
from typing import Any, Final, TypeVar, cast

from gateway.errors import GatewayError, ModelNotReady, UnknownModel
from gateway.fleet.attempts import Attempts
from gateway.fleet.balancer import SequenceRouter, choose_less_loaded
from gateway.fleet.failures import NOT_RUN_ERRORS, FailureRule, Progress
from gateway.fleet.health import TRANSPORT
from gateway.fleet.pool import NoReplica, ReplicaPool
from gateway.fleet.replica import Replica
from gateway.fleet.transports import FailedResponse, HttpCall, UpstreamCall, decode_json
from gateway.telemetry.request_info import current_request_info
from gateway.triton.error_mapping import MAX_METADATA_BYTES
from gateway.triton.request_target import RequestTarget, VersionFallback

T = TypeVar("T")
MAX_LOADS: Final = 4  # that one request waits for
MAX_ATTEMPTS: Final = 2
# Applies to an idempotent request, while another replica can be tried.
FIRST_ATTEMPT_TIMEOUT_S: Final = 1.0
EMPTY_BODY_HEADERS: Final = [(b"content-length", b"0")]


class Dispatcher:
    """Sends each request to a replica that can serve it, and tries another where that is safe."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self._failures = pool.failures
        self._sequences = SequenceRouter(asyncio.get_running_loop().time)
        self._attempts = Attempts(pool, self._sequences)

    def send(self, call: UpstreamCall[T], timeout_s: float) -> Awaitable[T]:
        """Return the result of the first attempt that succeeds.

        A response that begins with an error of the model is a result: the model has run, and can go on.
        Raises the `GatewayError` of the failure.
        """
        if call.target.fallback is not None:
            return self._send_to_versions(call, call.target.fallback, timeout_s)
        if self._pool.activator is None or not call.target.can_activate:
            return self._send_to_replicas(call, timeout_s)
        return self._send_when_loaded(call, timeout_s)

    async def request_json(self, target: RequestTarget, path: str) -> Any:
        """Return Triton's JSON response to a GET. Raises `BadUpstream` if it is not valid JSON."""
        call = HttpCall(target, b"GET", path.encode(), EMPTY_BODY_HEADERS, is_idempotent=True)
        response = await self.send(call, target.timeout_s)
        return decode_json((await response.read_complete(MAX_METADATA_BYTES)).body)

    async def wait_for_model(self, model: str, version: str, timeout_s: float) -> float:
        """Wait until a model that is loaded on demand can be used; return the remaining seconds.

        A request may be a step of a sequence, which does not wait while the model is on a cordoned replica.
        """
        activator = self._pool.activator
        found = self._pool.find_candidates(model, version)
        if found.serving or activator is None:
            return timeout_s
        if self._sequences.runs_on(model, {replica.name for replica in found.holders}):
            return timeout_s
        return await activator.activate(model, timeout_s)

    def count_sequences(self, replica: str) -> int:
        return self._sequences.count_on(replica)

    # Each of these loops has one concern.

    async def _send_to_versions(
        self, call: UpstreamCall[T], fallback: VersionFallback, timeout_s: float
    ) -> T:
        """Send the request to another version if the first was unloaded, and its label has others."""
        target = call.target
        started_at = perf_counter()
        try:
            return await self._send_when_loaded(call, timeout_s)
        except (ModelNotReady, UnknownModel):
            if not call.is_resendable:
                raise
            version = fallback.choose_other_version(target.version, target.sequence_step)
            if not version:
                raise
        remaining_s = timeout_s - (perf_counter() - started_at)
        return await self._send_when_loaded(call.with_version(version), remaining_s)

    async def _send_when_loaded(self, call: UpstreamCall[T], timeout_s: float) -> T:
        """Wait for a model that is loaded on demand, and again if it is unloaded before it runs."""
        model = call.target.model
        for _ in range(MAX_LOADS):
            started_at = perf_counter()
            try:
                return await self._send_to_replicas(call, timeout_s)
            except (*NOT_RUN_ERRORS, NoReplica) as error:
                is_sendable = call.is_resendable or not error.is_from_triton
                activator = self._pool.activator if call.target.can_activate else None
                if activator is None or not (is_sendable and self._pool.is_awaited(model)):
                    raise
            remaining_s = timeout_s - (perf_counter() - started_at)
            timeout_s = await activator.activate(model, remaining_s)
        return await self._send_to_replicas(call, timeout_s)

    async def _send_to_replicas(self, call: UpstreamCall[T], timeout_s: float) -> T:
        """Send the request to a replica, and to another one if that is safe after its failure."""
        tried: tuple[Replica, ...] = ()
        info = current_request_info.get()
        trace = None if info is None else info.trace
        while True:
            candidates = self._list_candidates(call)
            if not candidates or tried or call.needs_grpc or self._failures.by_model:
                candidates = self._select_candidates(call, candidates, tried)
            replica = self._choose_replica(call.target, candidates)
            started_at = perf_counter()  # the event loop's clock has a resolution of 1 ms
            attempt_s = timeout_s
            if call.is_idempotent and not tried and len(candidates) > 1:
                attempt_s = min(timeout_s, FIRST_ATTEMPT_TIMEOUT_S)
            try:
                result = await call.send(replica, attempt_s, trace)
            except asyncio.CancelledError:
                # The deadline has passed, or the client has left.
                self._attempts.record(call, replica, started_at, "given_up")
                raise
            except FailedResponse as failed:
                self._attempts.record_failure(call, replica, started_at, failed.error)
                return cast(T, failed.response)
            except GatewayError as failure:
                rule = self._attempts.record_failure(call, replica, started_at, failure)
                tried += (replica,)
                timeout_s -= perf_counter() - started_at
                if timeout_s > 0 and self._can_retry(call, rule, tried):
                    self._attempts.record_retry(replica, failure)
                    continue
                if rule.translate is None:
                    raise
                # In a variable, the error and this frame, which has the request, would be a cycle.
                raise rule.translate(self._pool, replica, call.target, failure) from failure
            self._attempts.record(call, replica, started_at, "answered")
            if call.target.sequence_step is not None or len(self._pool.replicas) > 1:
                self._attempts.record_success(call, replica)
            return result

    # Replicas.

    def _list_candidates(self, call: UpstreamCall[T]) -> Sequence[Replica]:
        """Return the replicas that have what the request needs; none if the model is ready nowhere."""
        target = call.target
        found = self._pool.find_candidates(target.model, target.version)
        step = target.sequence_step
        if step is not None and not step.is_start:
            return found.holders
        return found.serving or (found.holders if call.is_idempotent else ())

    def _select_candidates(
        self, call: UpstreamCall[T], candidates: Sequence[Replica], tried: tuple[Replica, ...]
    ) -> Sequence[Replica]:
        """Return the best candidates for the next attempt, without ejected ones.

        Raises the error of a model that can run nowhere.
        """
        target = call.target
        candidates = candidates or self._list_others(target)
        if tried:
            candidates = [replica for replica in candidates if replica not in tried]
        if not candidates:
            raise NoReplica
        if call.needs_grpc:
            usable = [each for each in candidates if not each.byte_channel.is_unavailable]
            candidates = usable or candidates
        candidates = self._failures.select(TRANSPORT, candidates)
        return candidates if call.is_idempotent else self._failures.select(target.model, candidates)

    def _list_others(self, target: RequestTarget) -> Sequence[Replica]:
        """Return the replicas whose error tells why the model is ready nowhere."""
        model = target.model
        version = target.version
        if not self._pool.is_awaited(model):
            return self._pool.find_candidates(model, version).others
        if not self._pool.has_live_replica:
            raise NoReplica
        known = self._pool.is_listed(model)
        raise ModelNotReady(model, version) if known else UnknownModel(model, version)

    def _choose_replica(self, target: RequestTarget, candidates: Sequence[Replica]) -> Replica:
        """Return one of the replicas; for a sequence step, the one that holds its state.

        Raises `SequenceNotRunning` if the state is lost.
        """
        step = target.sequence_step
        if step is None:
            return candidates[0] if len(candidates) == 1 else choose_less_loaded(candidates)
        holders = self._pool.find_candidates(target.model, target.version).holders
        return self._sequences.choose_replica(target.model, step, candidates, holders)

    def _can_retry(
        self, call: UpstreamCall[T], rule: FailureRule, tried: tuple[Replica, ...]
    ) -> bool:
        """Return whether a retry is safe, possible and within the budget.

        A running sequence has its state on one replica, and a streamed body cannot be sent again.
        """
        target = call.target
        step = target.sequence_step
        is_safe = rule.progress is Progress.NOT_SENT or (
            call.is_resendable
            if rule.progress is Progress.NOT_RUN
            else call.is_idempotent and rule.progress is Progress.UNKNOWN
        )
        if not is_safe or len(tried) == MAX_ATTEMPTS or (step is not None and not step.is_start):
            return False
        others = self._list_candidates(call)
        if not others and rule.progress is not Progress.NOT_RUN:
            others = self._pool.find_candidates(target.model, target.version).others
        return any(each not in tried for each in others) and self._attempts.retry_budget.try_spend()
