"""Requests to the fleet: the attempts at replicas, retries, and their records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final, TypeVar, cast

from gateway.errors import (
    BadUpstream,
    DeadlinePassed,
    GatewayError,
    ModelFault,
    ModelNotReady,
    Unavailable,
    UnknownModel,
)
from gateway.fleet.balancer import SequenceRouter, choose_less_loaded
from gateway.fleet.health import RetryBudget
from gateway.fleet.pool import NoReplica, ReplicaPool
from gateway.fleet.replica import Replica
from gateway.fleet.transports import (
    TRANSPORT_ERRORS,
    FailedResponse,
    HttpCall,
    UpstreamCall,
    decode_json,
)
from gateway.http_client.connection import RequestNotSent
from gateway.telemetry.request_info import RequestInfo, current_request_info
from gateway.triton.error_mapping import MAX_METADATA_BYTES, ReplicaStopping
from gateway.triton.grpc.byte_channel import GrpcUnreachable
from gateway.triton.request_target import RequestTarget, VersionFallback

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_ACTIVATIONS: Final = 3  # loads that one request waits for
# Applies to an idempotent request, while another replica can be tried.
FIRST_ATTEMPT_TIMEOUT_S: Final = 1.0
EMPTY_BODY_HEADERS: Final = [(b"content-length", b"0")]
# After these errors the replica has not executed the request.
NOT_EXECUTED_ERRORS: Final = (RequestNotSent, ModelNotReady, UnknownModel, ReplicaStopping)
# Errors of Triton that other replicas may not have.
REPLICA_FAILURES: Final = (ModelFault, Unavailable, BadUpstream)
UNSENT: Final = "refused"
ATTEMPT_OUTCOMES: Final = tuple(
    zip(TRANSPORT_ERRORS, (UNSENT, "bad_answer", "deadline"), strict=True)
)


@dataclass(frozen=True)
class AttemptHistory:
    """The failed attempts of one request."""

    failed_replica: Replica | None = None
    activations: int = 0  # loads that the request waited for


NO_ATTEMPTS: Final = AttemptHistory()


class Dispatcher:
    """Sends each request to a replica that can serve it, and tries another where that is safe."""

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self._metrics = pool.metrics
        self._retry_budget = RetryBudget()
        self._sequences = SequenceRouter(asyncio.get_running_loop().time)

    def send(self, call: UpstreamCall[T], timeout_s: float) -> Awaitable[T]:
        """Return the result of the first attempt that succeeds.

        Tries a second replica if the first cannot have executed the request. An idempotent request is also
        retried if it may have been executed, or got no response within `FIRST_ATTEMPT_TIMEOUT_S`. A request
        to a version that was unloaded goes to another one, if its target names one.
        A response that begins with an error of the model is a result: the model has run, and can go on.
        Raises the `GatewayError` of the failure.
        """
        if call.target.fallback is None:
            return self._send_to_version(call, timeout_s)
        return self._send_to_versions(call, call.target.fallback, timeout_s)

    async def _send_to_versions(
        self, call: UpstreamCall[T], fallback: VersionFallback, timeout_s: float
    ) -> T:
        started_at = perf_counter()
        try:
            return await self._send_to_version(call, timeout_s)
        except (ModelNotReady, UnknownModel):
            if not call.is_resendable:
                raise
            target = call.target
            version = fallback.choose_other_version(target.version, target.sequence_step)
            if not version:
                raise
        remaining_s = timeout_s - (perf_counter() - started_at)
        return await self._send_to_version(call.with_version(version), remaining_s)

    async def _send_to_version(self, call: UpstreamCall[T], timeout_s: float) -> T:
        target = call.target
        remaining_s = timeout_s
        step = target.sequence_step
        history = NO_ATTEMPTS
        info = current_request_info.get()
        trace = None if info is None else info.trace
        while True:
            try:
                candidates = self._find_candidates(call, history.failed_replica)
            except NoReplica:
                remaining_s = await self._wait_for_model(target, remaining_s)
                continue
            replica = (
                candidates[0]
                if step is None and len(candidates) == 1
                else self._choose_replica(target, candidates)
            )
            can_try_another = call.is_idempotent and history is NO_ATTEMPTS and len(candidates) > 1
            attempt_s = (
                min(remaining_s, FIRST_ATTEMPT_TIMEOUT_S) if can_try_another else remaining_s
            )
            started_at = perf_counter()  # the event loop's clock has a resolution of 1 ms
            try:
                result = await call.send(replica, attempt_s, trace)
            except asyncio.CancelledError:  # the deadline has passed, or the client has left
                self._record_attempt(call, replica, started_at, "given_up", info=info)
                raise
            except FailedResponse as failed:
                outcome = "failed" if is_replica_failure(failed.error) else "answered"
                self._record_attempt(call, replica, started_at, outcome, info=info)
                self._record_model_failure(replica, call, failed.error)
                return cast(T, failed.response)
            except GatewayError as failure:
                failure_outcome = get_failure_outcome(failure)
                if failure_outcome is None:  # the client caused it while its body was sent
                    raise
                remaining_s -= self._record_attempt(
                    call, replica, started_at, failure_outcome, info=info
                )
                error = self._translate_failure(replica, call, failure)
                self._record_failure(replica, call, failure, started_at=started_at)
            else:
                self._record_attempt(call, replica, started_at, "answered", info=info)
                if step is not None or len(self._pool.replicas) > 1:
                    self._record_success(replica, call)
                return result
            can_retry = remaining_s > 0
            retry = self._plan_retry(call, replica, error, history=history) if can_retry else None
            if retry is None:
                try:
                    raise error
                finally:
                    # The error's traceback has this frame, and those with the request and its message: as a
                    # cycle, they would stay until a garbage collection.
                    del error
            history = retry

    def count_sequences(self, replica: str) -> int:
        return self._sequences.count_on(replica)

    def continues_sequences(self, model: str, version: str) -> bool:
        """Return whether sequences of the model go on, on cordoned replicas."""
        if not self._pool.cordoned:
            return False
        holders = self._pool.list_cordoned_holders(model, version)
        return bool(holders) and self._sequences.runs_on(model, holders)

    async def request_json(self, target: RequestTarget, path: str) -> Any:
        """Return Triton's JSON response to a GET. Raises `BadUpstream` if it is not valid JSON."""
        call = HttpCall(target, b"GET", path.encode(), EMPTY_BODY_HEADERS, is_idempotent=True)
        response = await self.send(call, target.timeout_s)
        return decode_json((await response.read_complete(MAX_METADATA_BYTES)).body)

    def _find_candidates(
        self, call: UpstreamCall[T], failed_replica: Replica | None
    ) -> Sequence[Replica]:
        target = call.target
        step = target.sequence_step
        pool = self._pool
        if call.is_idempotent:
            find = pool.get_metadata_candidates
        elif step is None or step.is_start:
            find = pool.get_candidates
        else:
            find = pool.get_sequence_candidates
        candidates = find(target.model, target.version, failed_replica)
        return prefer_grpc(candidates) if call.needs_grpc else candidates

    def _choose_replica(self, target: RequestTarget, candidates: Sequence[Replica]) -> Replica:
        """Return a replica for the next attempt; for a sequence step, the one that holds its state.

        Raises `SequenceNotRunning` if the state is lost.
        """
        pool = self._pool
        step = target.sequence_step
        if step is None or step.is_start:
            candidates = pool.outliers.limit_candidates(target.model, candidates)
        if step is None:
            return choose_less_loaded(candidates)
        holders = pool.list_holders(target.model, target.version)
        return self._sequences.choose_replica(target.model, step, candidates, holders)

    async def _wait_for_model(self, target: RequestTarget, timeout_s: float) -> float:
        activator = self._pool.activator
        model = target.model
        version = target.version
        if activator is None or self._pool.is_served(model):
            raise NoReplica
        if target.can_activate and activator.can_activate(model):
            return await activator.activate(model, timeout_s)
        if not self._pool.has_live_replica:
            raise NoReplica
        known = self._pool.is_listed(model)
        raise ModelNotReady(model, version) if known else UnknownModel(model, version)

    def _plan_retry(
        self,
        call: UpstreamCall[T],
        replica: Replica,
        error: GatewayError,
        *,
        history: AttemptHistory,
    ) -> AttemptHistory | None:
        if self._can_activate_again(call, error, history):
            return replace(history, activations=history.activations + 1)
        if history.failed_replica or not self._can_retry(call, replica, error):
            return None
        log.warning("retrying on a different replica (%s failed): %s", replica.name, error.detail)
        self._metrics.count_event(self._metrics.retries, replica.name)
        return replace(history, failed_replica=replica)

    def _can_activate_again(
        self, call: UpstreamCall[T], error: GatewayError, history: AttemptHistory
    ) -> bool:
        """Return whether the model is on no replica any longer, so that the request can wait for it again."""
        activator = self._pool.activator
        target = call.target
        return (
            activator is not None
            and target.can_activate
            and isinstance(error, NOT_EXECUTED_ERRORS)
            and call.is_resendable
            and history.activations < MAX_ACTIVATIONS
            and not self._pool.is_served(target.model)
            and activator.can_activate(target.model)
        )

    def _can_retry(self, call: UpstreamCall[T], replica: Replica, error: GatewayError) -> bool:
        """Return whether a retry is safe, possible and within the budget.

        It is safe if the request was not executed, or is idempotent. A streamed body cannot be sent again,
        and a running sequence has its state on one replica.
        """
        model = call.target.model
        version = call.target.version
        step = call.target.sequence_step
        if step is not None and not step.is_start:
            return False
        is_transport_error = isinstance(error, TRANSPORT_ERRORS)
        if not isinstance(error, NOT_EXECUTED_ERRORS) and not (
            call.is_idempotent and is_transport_error
        ):
            return False
        others = [
            other
            for other in self._pool.update_candidates(model, version)
            if other is not replica
            and (
                is_transport_error or (call.is_resendable and other.index.is_ready(model, version))
            )
        ]
        return bool(others) and self._retry_budget.try_spend()

    def _record_attempt(
        self,
        call: UpstreamCall[T],
        replica: Replica,
        started_at: float,
        outcome: str,
        *,
        info: RequestInfo | None,
    ) -> float:
        """Record an attempt and return its duration in seconds.

        Metadata that the gateway reads is idempotent, and not an attempt of the client's request.
        """
        duration_s = perf_counter() - started_at
        self._metrics.count_attempt(replica.name, outcome)
        if info is not None:
            info.replica = replica.name
            if not call.is_idempotent:
                info.attempts += 1
                if outcome == UNSENT:
                    info.unsent_attempts += 1
            info.upstream_s += duration_s
        return duration_s

    def _record_success(self, replica: Replica, call: UpstreamCall[T]) -> None:
        target = call.target
        model = target.model
        if self._pool.outliers.is_tracked(model) and not call.is_idempotent:
            self._pool.outliers.record(model, replica.name, (), is_failure=False)
        if target.sequence_step is not None:
            self._sequences.finish_step(model, target.sequence_step)
        self._retry_budget.earn()
        if replica.health.consecutive_failures:
            replica.health = replica.health.with_success()

    def _record_failure(
        self, replica: Replica, call: UpstreamCall[T], failure: GatewayError, *, started_at: float
    ) -> None:
        if not failure.is_from_triton:
            if not isinstance(failure, GrpcUnreachable):  # it says nothing about the replica's HTTP
                self._pool.monitor.record_failure(replica, failure, started_at)
            return
        if isinstance(failure, (ModelNotReady, UnknownModel)):
            self._pool.mark_unloaded(replica, call.target.model, call.target.version)
        self._record_model_failure(replica, call, failure)

    def _translate_failure(
        self, replica: Replica, call: UpstreamCall[T], failure: GatewayError
    ) -> GatewayError:
        """Return the error for the client; often it is the failure itself.

        `DeadlinePassed` names the timeout of the request instead of the attempt's. `UnknownModel` is
        replaced with `ModelNotReady` if the model is in the repository but not loaded, and the other way
        round if its files are removed: Triton's messages do not tell which.
        """
        target = call.target
        pool = self._pool
        model = target.model
        version = target.version
        if not failure.is_from_triton:
            if isinstance(failure, DeadlinePassed) and not call.is_idempotent:
                error = DeadlinePassed(target.timeout_s)
                error.work_ended = failure.work_ended
                return with_cause(error, failure)
            return failure
        is_known = pool.is_listed(model)
        if (
            isinstance(failure, UnknownModel)
            and is_known
            and (not pool.is_loaded(model) or pool.is_listed(model, version))
        ):
            return with_cause(ModelNotReady(model, version), failure)
        if (
            isinstance(failure, ModelNotReady)
            and not (is_known or target.is_health_check)
            and replica.is_index_valid
        ):
            # Triton remembers the models that it has unloaded or failed to load, and its index does not.
            return with_cause(target.not_found_error(model, version), failure)
        return failure

    def _record_model_failure(
        self, replica: Replica, call: UpstreamCall[T], error: GatewayError
    ) -> None:
        """Count an error of Triton against the model on this replica, unless the request caused it."""
        if is_replica_failure(error) and not call.is_idempotent:
            model = call.target.model
            version = call.target.version
            others = self._pool.update_candidates(model, version)
            self._pool.outliers.record(model, replica.name, others, is_failure=True)


def with_cause(error: GatewayError, cause: GatewayError) -> GatewayError:
    """Return the error as `raise error from cause` would raise it."""
    error.__cause__ = cause
    return error


def prefer_grpc(candidates: Sequence[Replica]) -> Sequence[Replica]:
    """Return the replicas whose gRPC port was not found unreachable lately; all, if there are none."""
    usable = [replica for replica in candidates if not replica.byte_channel.is_unavailable]
    return usable or candidates


def is_replica_failure(error: GatewayError) -> bool:
    return error.is_from_triton and isinstance(error, REPLICA_FAILURES)


def get_failure_outcome(error: GatewayError) -> str | None:
    """Return the outcome of a failed attempt in the metrics; None if the replica did not cause it."""
    if error.is_from_triton:
        return "failed" if is_replica_failure(error) else "answered"
    return next((outcome for kind, outcome in ATTEMPT_OUTCOMES if isinstance(error, kind)), None)
