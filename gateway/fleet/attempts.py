"""The records of attempts: metrics, facts of the request, failure shares, sequences, the retry budget."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TypeVar

from gateway.errors import GatewayError
from gateway.fleet.balancer import SequenceRouter
from gateway.fleet.failures import UNSENT, Blame, FailureRule, find_failure_rule
from gateway.fleet.health import TRANSPORT, RetryBudget
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.fleet.transports import UpstreamCall
from gateway.telemetry.request_info import current_request_info
from gateway.triton.request_target import RequestTarget

log = logging.getLogger(__name__)

T = TypeVar("T")


class Attempts:
    """Records the outcomes of attempts in all that depends on them."""

    def __init__(self, pool: ReplicaPool, sequences: SequenceRouter) -> None:
        self.retry_budget = RetryBudget()
        self._pool = pool
        self._failures = pool.failures
        self._metrics = pool.metrics
        self._sequences = sequences

    def record(
        self, call: UpstreamCall[T], replica: Replica, started_at: float, outcome: str
    ) -> None:
        """Count an attempt; metadata that the gateway reads is not one of the client's request."""
        self._metrics.count_attempt(replica.name, outcome)
        info = current_request_info.get()
        if info is None:
            return
        info.replica = replica.name
        info.upstream_s += perf_counter() - started_at
        if not call.is_idempotent:
            info.attempts += 1
            if outcome == UNSENT:
                info.unsent_attempts += 1

    def record_retry(self, replica: Replica, failure: GatewayError) -> None:
        log.warning("retrying on a different replica (%s failed): %s", replica.name, failure.detail)
        self._metrics.count_event(self._metrics.retries, replica.name)

    def record_success(self, call: UpstreamCall[T], replica: Replica) -> None:
        target = call.target
        if self._failures.by_model:
            self._failures.record_success(TRANSPORT, replica.name)
            if not call.is_idempotent:
                self._failures.record_success(target.model, replica.name)
        if target.sequence_step is not None:
            self._sequences.finish_step(target.model, target.sequence_step)
        self.retry_budget.earn()

    def record_failure(
        self, call: UpstreamCall[T], replica: Replica, started_at: float, failure: GatewayError
    ) -> FailureRule:
        """Record what a failure says of the replica, and return its row of the table."""
        rule = find_failure_rule(failure)
        if rule.outcome:
            self.record(call, replica, started_at, rule.outcome)
        target = call.target
        if rule.is_index_outdated:
            self._pool.monitor.mark_unloaded(replica, target.model, target.version)
        if rule.blame is Blame.TRANSPORT:
            self._pool.monitor.report_transport_failure(replica, failure)
            self._count_failure(TRANSPORT, target, replica, failure)
        elif failure.is_from_triton:
            self._failures.record_success(TRANSPORT, replica.name)
        if rule.blame is Blame.MODEL and not call.is_idempotent:
            self._count_failure(target.model, target, replica, failure)
        return rule

    def _count_failure(
        self, model: str, target: RequestTarget, replica: Replica, failure: GatewayError
    ) -> None:
        serving = self._pool.find_candidates(target.model, target.version).serving
        others = [each.name for each in serving]
        is_ejected = self._failures.record_failure(model, replica.name, others, failure.detail)
        if is_ejected and model == TRANSPORT:
            self._metrics.count_event(self._metrics.ejections, replica.name)
