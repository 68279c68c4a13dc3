"""The pool of replicas: selection and requests with retries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final, TypeVar

import anyio
import orjson

from gateway.errors import (
    BadUpstream,
    DeadlinePassed,
    GatewayError,
    ModelNotReady,
    SequenceNotRunning,
    Unavailable,
    UnknownModel,
)
from gateway.fleet.balancer import choose_less_loaded
from gateway.fleet.discovery import ReplicaDiscovery, Resolver, resolve_host
from gateway.fleet.health import HealthState, RetryBudget
from gateway.fleet.index import EMPTY_INDEX, Index
from gateway.fleet.probe import HealthMonitor
from gateway.fleet.replica import Replica, ReplicaAddress, ReplicaConnectionOptions, ReplicaSource
from gateway.fleet.sequences import SequenceRouter
from gateway.http_client.client import UpstreamResponse
from gateway.http_client.connection import Headers, RequestNotSent
from gateway.metrics import Metrics
from gateway.request_info import RequestInfo, current_request_info
from gateway.tracing import ChildSpan, Trace
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc.management import GrpcUnreachable
from gateway.triton.response import MAX_METADATA_BYTES, read_complete_response, read_error_response

log = logging.getLogger(__name__)

UpstreamBody = bytes | AsyncIterator[bytes]

STARTUP_PROBE_TIMEOUT_S: Final = 2.0
CANCEL_RETRY_S: Final = 0.2
MAX_CANDIDATE_LISTS: Final = 10_000
MEAN_LATENCY_WEIGHT: Final = 0.05
MAX_SEQUENCE_GUESSES: Final = 3  # replicas tried for a sequence that another gateway started
FIRST_ATTEMPT_TIMEOUT_S: Final = 1.0  # of an idempotent request, while another replica can be tried
T = TypeVar("T")
StartCall = Callable[[Replica, Headers], Awaitable[T]]
# After these errors the replica has not executed the request.
NOT_EXECUTED_ERRORS: Final = (RequestNotSent, ModelNotReady, UnknownModel)
TRANSPORT_ERRORS: Final = (RequestNotSent, BadUpstream, DeadlinePassed)
ATTEMPT_OUTCOMES: Final = dict(
    zip(TRANSPORT_ERRORS, ("refused", "bad_answer", "deadline"), strict=True)
)


@dataclass
class AttemptHistory:
    """The failed attempts of one request."""

    is_sequence_guessed: bool = False  # another gateway started its sequence
    failed_replica: Replica | None = None
    # The replicas that answered that they do not run the sequence.
    refusing_replicas: list[Replica] = field(default_factory=list)


class NoReplica(Unavailable):
    code = "NO_REPLICA"

    def __init__(self) -> None:
        super().__init__("no Triton is reachable; GET /readyz shows the reason for each replica")


class ReplicaPool:
    """All replicas. As a context manager it discovers and probes them in the background."""

    def __init__(
        self,
        sources: Sequence[ReplicaSource],
        connection_options: ReplicaConnectionOptions,
        *,
        metrics: Metrics | None = None,
        probe_interval_s: float = 0.5,
        dns_interval_s: float = 5.0,
        resolver: Resolver = resolve_host,
    ) -> None:
        self.replicas: dict[ReplicaAddress, Replica] = {}
        self.changes = asyncio.Event()  # set when a replica's state or models change
        self.metrics = metrics or Metrics()
        self.monitor = HealthMonitor(
            self.replicas, self._notify_change, probe_interval_s, self.metrics
        )
        self._discovery = ReplicaDiscovery(sources, self._update_replicas, dns_interval_s, resolver)
        self._connection_options = connection_options
        self._loop = asyncio.get_running_loop()
        self._probe_tasks: dict[ReplicaAddress, asyncio.Task[None]] = {}
        self._discovery_tasks: list[asyncio.Task[None]] = []
        self._candidates: dict[tuple[str, str], tuple[Replica, ...]] = {}
        self._mean_latency_s: dict[str, float] = {}
        self._retry_budget = RetryBudget()
        self._sequences = SequenceRouter(self._loop.time)

    async def __aenter__(self) -> ReplicaPool:
        self._update_replicas()
        with anyio.move_on_after(STARTUP_PROBE_TIMEOUT_S):
            await self._discovery.look_up_all()
            await self.monitor.probe_all()
        self._discovery_tasks = [asyncio.create_task(self._discovery.run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks([*self._discovery_tasks, *self._probe_tasks.values()])
        for replica in self.replicas.values():
            replica.close()

    def _update_replicas(self) -> None:
        current = self._discovery.addresses
        for address in self.replicas.keys() - current:
            log.warning("replica %s is removed: its DNS name no longer has this address", address)
            self._probe_tasks.pop(address).cancel()
            removed = self.replicas.pop(address)
            removed.close()
            self.metrics.remove_replica(removed.name)
        for address in sorted(current - self.replicas.keys(), key=str):
            replica = self.replicas[address] = Replica(address, self._connection_options)
            self.metrics.add_replica(replica.name)
            probing = self.monitor.probe_periodically(replica)
            self._probe_tasks[address] = asyncio.create_task(probing)
        self._notify_change()

    def _notify_change(self) -> None:
        self._candidates.clear()
        self.changes.set()

    def replica_state(self, replica: Replica) -> HealthState:
        return replica.health.state(self._loop.time())

    def known_index(self, replica: Replica) -> Index:
        """Return the index of the replica, or an empty one while it is `DOWN`."""
        return EMPTY_INDEX if self.replica_state(replica) is HealthState.DOWN else replica.index

    def ejected_for_s(self, replica: Replica) -> float:
        return max(replica.health.ejected_until - self._loop.time(), 0.0)

    # Selection.

    def choose_replica(
        self, model: str = "", version: str = "", excluded: Replica | None = None
    ) -> Replica:
        """Return the less loaded of two replicas that can serve the model. Raises `NoReplica`."""
        return choose_less_loaded(self._get_candidates(model, version, excluded))

    def _get_candidates(
        self, model: str, version: str, excluded: Replica | None
    ) -> tuple[Replica, ...]:
        candidates = self._candidates.get((model, version))
        if candidates is None:
            candidates = self._update_candidates(model, version)
        if excluded is not None:
            candidates = tuple(replica for replica in candidates if replica is not excluded)
        if not candidates:
            raise NoReplica
        return candidates

    def _choose_attempt_replica(self, request: RequestTarget, history: AttemptHistory) -> Replica:
        """Return the replica for the next attempt; for a sequence step, the one that holds its state.

        Raises `NoReplica`, or `SequenceNotRunning` if the state is lost.
        """
        model, version, step = request.model, request.version, request.sequence_step
        if step is None:
            return self.choose_replica(model, version, history.failed_replica)
        holders = (
            replica
            for replica in self.replicas.values()
            if self.replica_state(replica) is not HealthState.DOWN
            and replica.index.is_ready(model, version)
        )
        candidates = [
            replica
            for replica in self._get_candidates(model, version, history.failed_replica)
            if replica not in history.refusing_replicas
        ]
        return self._sequences.choose_replica(model, step, candidates, holders)

    def _is_sequence_guessed(self, request: RequestTarget) -> bool:
        step = request.sequence_step
        return step is not None and not self._sequences.is_known(request.model, step)

    def _can_run_elsewhere(
        self, request: RequestTarget, refusing_replicas: Sequence[Replica]
    ) -> bool:
        candidates = self._get_candidates(request.model, request.version, None)
        untried = set(candidates).difference(refusing_replicas)
        if (
            request.sequence_step is None
            or len(refusing_replicas) >= MAX_SEQUENCE_GUESSES
            or not untried
        ):
            return False
        self._sequences.forget(request.model, request.sequence_step)
        return True

    def _update_candidates(self, model: str, version: str) -> tuple[Replica, ...]:
        """Return the healthiest replicas on which the model is ready.

        If it is ready nowhere, return all that are not down, because Triton's error tells why.
        """
        now = self._loop.time()
        states = {replica: replica.health.state(now) for replica in self.replicas.values()}
        alive = [replica for replica, state in states.items() if state != HealthState.DOWN]
        ready = [replica for replica in alive if replica.index.is_ready(model, version)]
        usable = ready if model and ready else alive
        worst = HealthState.UP
        if not any(states[replica] == HealthState.UP for replica in usable):
            worst = HealthState.SLOW  # no healthy replica: accept any that may be alive
        candidates = tuple(replica for replica in usable if states[replica] <= worst)
        if len(self._candidates) > MAX_CANDIDATE_LISTS:
            self._candidates.clear()
        self._candidates[model, version] = candidates
        return candidates

    def has_model(self, model: str, version: str = "") -> bool:
        """Return whether the model is in the repository of any replica, ready or not."""
        return any(
            model in replica.index.models
            and (not version or version in replica.index.models[model])
            for replica in self.replicas.values()
        )

    def _explain_unknown(self, error: GatewayError, request: RequestTarget) -> GatewayError:
        """Replace `UnknownModel` with `ModelNotReady` if the model is in the repository but not loaded.

        Triton's message is the same for both. Other errors are returned unchanged.
        """
        model, version = request[:2]
        if not isinstance(error, UnknownModel) or not self.has_model(model):
            return error
        is_unloaded = not self.is_ready(model) or self.has_model(model, version)
        return ModelNotReady(model, version) if is_unloaded else error

    def is_ready(self, model: str, version: str = "") -> bool:
        return any(replica.index.is_ready(model, version) for replica in self.replicas.values())

    # Requests.

    async def send(
        self,
        request: RequestTarget,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: UpstreamBody = b"",
        *,
        is_idempotent: bool = False,
    ) -> UpstreamResponse:
        """Return Triton's response to a request for `request.model`, if it succeeded.

        Tries a second replica if the first cannot have executed the request. An idempotent request is also
        retried if it may have been executed, or got no response within `FIRST_ATTEMPT_TIMEOUT_S`.
        Raises the `GatewayError` of the failure.
        """
        history = AttemptHistory(self._is_sequence_guessed(request))
        remaining_s = request.timeout_s
        info = current_request_info.get()
        while True:
            candidates = self._candidates.get(request[:2], ())
            is_single = (
                len(candidates) == 1
                and history.failed_replica is None
                and request.sequence_step is None
            )
            replica = candidates[0] if is_single else self._choose_attempt_replica(request, history)
            attempt_s = remaining_s
            if is_idempotent and not is_single and not history.failed_replica:
                attempt_s = min(remaining_s, FIRST_ATTEMPT_TIMEOUT_S)
            started_at = perf_counter()  # the event loop's clock has a resolution of 1 ms
            try:
                if info is None or info.trace is None:
                    response = await replica.http.send(
                        method, target, headers, body, timeout_s=attempt_s
                    )
                else:
                    with attempt_span(
                        info.trace, replica, replica.address.port, method.decode()
                    ) as span:
                        response = await replica.http.send(
                            method, target, span.inject_context(headers), body, timeout_s=attempt_s
                        )
                        span.set_response_status(response.status)
                duration_s = self._record_attempt(
                    replica, started_at, "answered", info, is_internal=is_idempotent
                )
                if response.status < 400:
                    if len(self.replicas) > 1 or request.sequence_step is not None:
                        self._record_success(replica, request, started_at, duration_s)
                    return response
                error = self._explain_unknown(await read_error_response(response, request), request)
                if isinstance(error, (ModelNotReady, UnknownModel)):
                    self._mark_unloaded(replica, request)
            except asyncio.CancelledError:  # by the deadline, or a client disconnect
                self._record_attempt(
                    replica, started_at, "given_up", info, is_internal=is_idempotent
                )
                raise
            except TRANSPORT_ERRORS as exc:
                error = exc
                outcome = ATTEMPT_OUTCOMES.get(type(exc), "bad_answer")
                self._record_attempt(replica, started_at, outcome, info, is_internal=is_idempotent)
                self.monitor.record_failure(replica, error, started_at)
            remaining_s -= perf_counter() - started_at
            if remaining_s <= 0 or not self._can_try_again(
                history, error, replica, request, body, is_idempotent=is_idempotent
            ):
                raise error

    async def start_call(self, request: RequestTarget, headers: Headers, start: StartCall[T]) -> T:
        """Return the call that `start` begins on a replica over gRPC.

        Tries a second replica if the first cannot have executed it. `start` gets the replica and the headers
        to send; its errors are raised.
        """
        history = AttemptHistory(self._is_sequence_guessed(request))
        info = current_request_info.get()
        while True:
            replica = self._choose_attempt_replica(request, history)
            started_at = perf_counter()
            try:
                with trace_attempt(info, replica, headers) as attempt_headers:
                    call = await start(replica, attempt_headers)
            except asyncio.CancelledError:
                self._record_attempt(replica, started_at, "given_up", info)
                raise
            except TRANSPORT_ERRORS as exc:
                error: GatewayError = exc
                self._record_attempt(
                    replica, started_at, ATTEMPT_OUTCOMES.get(type(exc), "bad_answer"), info
                )
                if not isinstance(exc, GrpcUnreachable):  # it says nothing about the replica's HTTP
                    self.monitor.record_failure(replica, error, started_at)
            except (ModelNotReady, UnknownModel, SequenceNotRunning) as exc:
                error = self._explain_unknown(exc, request)
                self._record_attempt(replica, started_at, "answered", info)
                if not isinstance(exc, SequenceNotRunning):
                    self._mark_unloaded(replica, request)
            else:
                duration_s = self._record_attempt(replica, started_at, "answered", info)
                self._record_success(replica, request, started_at, duration_s)
                return call
            if not self._can_try_again(history, error, replica, request, b""):
                raise error

    async def request_json(
        self, request: RequestTarget, method: bytes, path: str, body: bytes = b""
    ) -> Any:
        """Return Triton's JSON response. Raises `BadUpstream` if it is not valid JSON."""
        headers = [(b"content-length", b"%d" % len(body))]
        response = await self.send(
            request, method, path.encode(), headers, body, is_idempotent=method == b"GET"
        )
        text = (await read_complete_response(response, MAX_METADATA_BYTES)).body
        try:
            return orjson.loads(text) if text else None
        except orjson.JSONDecodeError as exc:
            raise BadUpstream("the replica returned invalid JSON") from exc

    def _can_try_again(
        self,
        history: AttemptHistory,
        error: GatewayError,
        replica: Replica,
        request: RequestTarget,
        body: UpstreamBody,
        *,
        is_idempotent: bool = False,
    ) -> bool:
        """Record the failure of an attempt, and return whether another replica is tried."""
        if (
            history.is_sequence_guessed
            and isinstance(error, SequenceNotRunning)
            and isinstance(body, bytes)
        ):
            history.refusing_replicas.append(replica)
            return self._can_run_elsewhere(request, history.refusing_replicas)
        if history.failed_replica or not self._can_retry(
            error, replica, request, body, is_idempotent=is_idempotent
        ):
            return False
        log.warning("retrying on another replica than %s: %s", replica.name, error.detail)
        self.metrics.retries.labels(replica.name).inc()
        history.failed_replica = replica
        return True

    def _can_retry(
        self,
        error: GatewayError,
        replica: Replica,
        request: RequestTarget,
        body: UpstreamBody,
        *,
        is_idempotent: bool = False,
    ) -> bool:
        """Return whether a retry is safe, possible and within the budget.

        It is safe if the request was not executed, or is idempotent. A streamed body cannot be sent again,
        and a running sequence has its state on one replica.
        """
        if request.sequence_step is not None and not request.sequence_step.is_start:
            return False
        if not isinstance(
            error,
            (*NOT_EXECUTED_ERRORS, *TRANSPORT_ERRORS) if is_idempotent else NOT_EXECUTED_ERRORS,
        ):
            return False
        if isinstance(error, TRANSPORT_ERRORS):
            has_alternative = any(
                other is not replica
                for other in self._update_candidates(request.model, request.version)
            )
        else:
            has_alternative = isinstance(body, bytes) and any(
                other is not replica and other.index.is_ready(request.model, request.version)
                for other in self._update_candidates(request.model, request.version)
            )
        return has_alternative and self._retry_budget.try_spend()

    def _record_attempt(
        self,
        replica: Replica,
        started_at: float,
        outcome: str,
        info: RequestInfo | None,
        *,
        is_internal: bool = False,
    ) -> float:
        """Record an attempt and return its duration in seconds.

        Metadata that the gateway reads (`is_internal`) is not an attempt of the client's request.
        """
        duration_s = perf_counter() - started_at
        self.metrics.pending_attempts[replica.name, outcome] += 1
        if info is not None:
            info.replica = replica.name
            info.attempts += not is_internal
            info.upstream_s += duration_s
        return duration_s

    def _record_success(
        self, replica: Replica, request: RequestTarget, started_at: float, duration_s: float
    ) -> None:
        model = request.model
        if request.sequence_step is not None:
            self._sequences.finish_step(model, request.sequence_step)
        self._retry_budget.earn()
        if replica.health.consecutive_failures:
            replica.health = replica.health.with_success()
        if replica.latency.record_response(model, started_at, started_at + duration_s):
            mean_s = self._mean_latency_s.get(model, duration_s)
            replica.latency.update(duration_s, mean_s)
            self._mean_latency_s[model] = mean_s + MEAN_LATENCY_WEIGHT * (duration_s - mean_s)

    def _mark_unloaded(self, replica: Replica, request: RequestTarget) -> None:
        # Something else than the gateways has unloaded the model, so the index is outdated.
        if replica.index.is_ready(request.model, request.version):
            replica.index = replica.index.with_model_unloaded(request.model)
            replica.raw_index = b""
            replica.probe_requested.set()
            self._notify_change()


@contextmanager
def trace_attempt(
    info: RequestInfo | None, replica: Replica, headers: Headers
) -> Iterator[Headers]:
    """Yield the headers for an attempt. In a traced request they carry its span, the parent of Triton's."""
    if info is None or info.trace is None:
        yield headers
        return
    # gRPC calls are HTTP/2 POST requests.
    with attempt_span(info.trace, replica, replica.address.grpc_port, "POST") as span:
        yield span.inject_context(headers)


def attempt_span(
    trace: Trace, replica: Replica, port: int, method: str
) -> AbstractContextManager[ChildSpan]:
    return trace.start_span(
        "triton",
        client=True,
        http__request__method=method,
        server__address=replica.address.host,
        server__port=port,
        triton__replica=replica.name,
    )


async def cancel_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they end: before Python 3.12, `asyncio.wait_for` can lose a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_RETRY_S)
