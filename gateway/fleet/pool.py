"""The replicas: found, watched, chosen from, asked."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
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
from gateway.fleet.health import HealthState, RetryBudget, can_eject
from gateway.fleet.index import EMPTY_INDEX, Index, parse_index
from gateway.fleet.replica import Replica, ReplicaAddress, ReplicaConnectionOptions, ReplicaSource
from gateway.fleet.sequences import SequenceRouter
from gateway.metrics import Metrics
from gateway.request_info import RequestInfo, current_request_info
from gateway.tracing import ChildSpan, Trace
from gateway.triton.error_mapping import RequestTarget
from gateway.triton.grpc.management import GrpcUnreachable
from gateway.triton.http.client import MAX_METADATA_BYTES, UpstreamResponse
from gateway.triton.http.connection import Headers, RequestNotSent
from gateway.triton.http.response import read_complete_response, read_error_response

log = logging.getLogger(__name__)

UpstreamBody = bytes | AsyncIterator[bytes]
Resolver = Callable[[str], Awaitable[Iterable[str]]]

PROBE_TIMEOUT_S: Final = 1.0
MIN_PROBE_PAUSE_S: Final = 0.05
TIMER_RESOLUTION_S: Final = 0.001  # how exact timers are
DOWN_PROBE_INTERVAL_S: Final = 0.2
STARTUP_PROBE_TIMEOUT_S: Final = 2.0
CANCEL_RETRY_S: Final = 0.2
INDEX_PATH: Final = b"/v2/repository/index"
PROBE_STATUS_REASONS: Final = {
    403: "Triton restricts its repository API, and GATEWAY_TRITON_RESTRICTED_API does not open it"
}
MAX_CANDIDATE_LISTS: Final = 10_000
MEAN_LATENCY_WEIGHT: Final = 0.05
MAX_SEQUENCE_GUESSES: Final = 3  # where a sequence runs that another gateway started
FIRST_ATTEMPT_TIMEOUT_S: Final = 1.0  # for what may be asked twice, while there is another to ask
T = TypeVar("T")
StartCall = Callable[[Replica, Headers], Awaitable[T]]
# A replica that says so has not run the request.
NOT_EXECUTED_ERRORS: Final = (RequestNotSent, ModelNotReady, UnknownModel)
TRANSPORT_ERRORS: Final = (RequestNotSent, BadUpstream, DeadlinePassed)
ATTEMPT_OUTCOMES: Final = dict(
    zip(TRANSPORT_ERRORS, ("refused", "bad_answer", "deadline"), strict=True)
)


@dataclass
class AttemptHistory:
    """The replicas that one request was sent to in vain."""

    is_sequence_guessed: bool = False  # it is unknown where its sequence runs
    failed_replica: Replica | None = None
    refusing_replicas: list[Replica] = field(
        default_factory=list
    )  # the sequence does not run there


class NoReplica(Unavailable):
    code = "NO_REPLICA"

    def __init__(self) -> None:
        super().__init__("no Triton can be reached; GET /readyz says what is wrong with each")


async def resolve_host(name: str) -> list[str]:
    """The addresses that a name stands for. Raises `OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in found})


class ReplicaPool:
    """All replicas. Use it as a context manager: inside, they are watched."""

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
        self.changes = asyncio.Event()  # set when a replica's state or models are not as before
        self.metrics = metrics or Metrics()
        self._sources = sources
        self._connection_options = connection_options
        self._probe_interval_s = probe_interval_s
        self._dns_interval_s = dns_interval_s
        self._resolver = resolver
        self._loop = asyncio.get_running_loop()
        self._probe_tasks: dict[ReplicaAddress, asyncio.Task[None]] = {}
        self._addresses: dict[ReplicaSource, frozenset[ReplicaAddress]] = {}
        self._discovery_tasks: list[asyncio.Task[None]] = []
        self._candidates: dict[tuple[str, str], tuple[Replica, ...]] = {}
        self._mean_latency_s: dict[str, float] = {}
        self._retry_budget = RetryBudget()
        self._sequences = SequenceRouter(self._loop.time)

    async def __aenter__(self) -> ReplicaPool:
        for source in self._sources:
            if not source.is_dns_name:
                self._addresses[source] = frozenset((source.address,))
        self._update_replicas()
        named = [source for source in self._sources if source.is_dns_name]
        with anyio.move_on_after(STARTUP_PROBE_TIMEOUT_S):
            await asyncio.gather(*map(self._discover, named))
            await asyncio.gather(*map(self.probe, self.replicas.values()))
        self._discovery_tasks = [
            asyncio.create_task(self._discover_periodically(source)) for source in named
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_tasks([*self._discovery_tasks, *self._probe_tasks.values()])
        for replica in self.replicas.values():
            replica.close()

    # Who there is.

    async def _discover_periodically(self, source: ReplicaSource) -> None:
        while True:
            await asyncio.sleep(self._dns_interval_s)
            await self._discover(source)

    async def _discover(self, source: ReplicaSource) -> None:
        """What the name stands for now; the last good answer stays when there is none."""
        try:
            with anyio.fail_after(self._dns_interval_s):
                hosts = list(await self._resolver(source.address.host))
        except (OSError, UnicodeError) as exc:
            log.warning(
                "the name %s cannot be looked up: %s", source.address.host, exc or "timeout"
            )
            return
        if not hosts:
            log.warning("the name %s stands for no address", source.address.host)
            return
        name = source.address.host
        self._addresses[source] = frozenset(
            replace(source.address, host=host, server_name=name) for host in hosts
        )
        self._update_replicas()

    def _update_replicas(self) -> None:
        wanted = {address for found in self._addresses.values() for address in found}
        for address in self.replicas.keys() - wanted:
            log.warning("the replica %s is gone", address)
            self._probe_tasks.pop(address).cancel()
            gone = self.replicas.pop(address)
            gone.close()
            self.metrics.remove_replica(gone.name)
        for address in sorted(wanted - self.replicas.keys(), key=str):
            replica = self.replicas[address] = Replica(address, self._connection_options)
            self.metrics.add_replica(replica.name)
            self._probe_tasks[address] = asyncio.create_task(self._probe_periodically(replica))
        self._notify_change()

    # How they are.

    async def _probe_periodically(self, replica: Replica) -> None:
        while self.replicas.get(replica.address) is replica:  # see `ended`
            await self.probe(replica)
            await asyncio.sleep(MIN_PROBE_PAUSE_S)
            down = (
                self.replica_state(replica) is HealthState.DOWN
            )  # a refusal costs little, and its return counts
            pause_s = (
                min(self._probe_interval_s, DOWN_PROBE_INTERVAL_S)
                if down
                else self._probe_interval_s
            )
            # A timer: a cancel scope would cost a fifth of all that a look costs.
            tick = self._loop.call_later(pause_s - MIN_PROBE_PAUSE_S, replica.probe_requested.set)
            try:
                await replica.probe_requested.wait()
            finally:
                tick.cancel()
            replica.probe_requested.clear()
            replica.latency.decay()

    def replica_state(self, replica: Replica) -> HealthState:
        return replica.health.state(self._loop.time())

    def known_index(self, replica: Replica) -> Index:
        """Return what the replica has; of one that is `DOWN` nothing is known, whatever it had."""
        return EMPTY_INDEX if self.replica_state(replica) is HealthState.DOWN else replica.index

    def ejected_for_s(self, replica: Replica) -> float:
        return max(replica.health.ejected_until - self._loop.time(), 0.0)

    async def probe_all(self) -> None:
        """Look at all of them now."""
        await asyncio.gather(*map(self.probe, list(self.replicas.values())))

    async def probe(self, replica: Replica) -> None:
        """On a fresh connection: a Triton that is stopping answers on old ones as if well."""
        try:
            reply = await replica.http.request(
                b"POST",
                INDEX_PATH,
                headers=replica.management_headers,
                timeout_s=PROBE_TIMEOUT_S,
                fresh=True,
                max_bytes=MAX_METADATA_BYTES,
            )
        except GatewayError as exc:
            self._record_probe_failure(replica, exc)
            return
        try:
            if reply.status != 200:
                raise ValueError(
                    PROBE_STATUS_REASONS.get(reply.status, f"Triton answers {reply.status}")
                )
            changed = reply.body != replica.raw_index
            if changed:
                replica.index = parse_index(orjson.loads(reply.body))
                replica.raw_index = reply.body
        except ValueError as exc:
            self._record_probe_failure(replica, BadUpstream(str(exc)))
            return
        was = replica.health
        if was.is_down or was.missed_probes:
            replica.health = was.with_probe_answer()
            self._report_state_change(replica, was.state(self._loop.time()))
            changed = True
        replica.reason = ""
        if changed:
            self._notify_change()

    def _record_probe_failure(self, replica: Replica, error: GatewayError) -> None:
        was = replica.health.state(self._loop.time())
        refused = isinstance(error, RequestNotSent) and error.is_refused
        replica.health = (
            replica.health.with_refusal() if refused else replica.health.with_probe_timeout()
        )
        replica.reason = error.detail
        self._report_state_change(replica, was)

    def _report_state_change(self, replica: Replica, previous: HealthState) -> None:
        """Of a change of its state, once."""
        state = replica.health.state(self._loop.time())
        if state == previous:
            return
        replica.http.keep_alive = state in (HealthState.UP, HealthState.EJECTED)
        if not replica.http.keep_alive:
            replica.drop_idle()
            replica.raw_index = b""  # what comes back may be another
            log.warning("the replica %s is %s: %s", replica.address, state.name, replica.reason)
        else:
            log.info("the replica %s is %s", replica.address, state.name)
        self._notify_change()

    def _notify_change(self) -> None:
        self._candidates.clear()
        self.changes.set()

    # Which of them.

    def choose_replica(
        self, model: str = "", version: str = "", excluded: Replica | None = None
    ) -> Replica:
        """The less loaded of two that can serve the model. Raises `NoReplica`."""
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
        """As `choose`; for a step of a sequence the replica that has its state, or will have it. Raises
        `SequenceNotRunning` when it is lost."""
        model, version, step = request.model, request.version, request.sequence_step
        if step is None:
            return self.choose_replica(model, version, history.failed_replica)
        holding = (
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
        return self._sequences.choose_replica(model, step, candidates, holding)

    def _is_sequence_guessed(self, request: RequestTarget) -> bool:
        """Whether it is unknown where a sequence runs: another gateway started it."""
        step = request.sequence_step
        return step is not None and not self._sequences.is_known(request.model, step)

    def _can_run_elsewhere(
        self, request: RequestTarget, refusing_replicas: Sequence[Replica]
    ) -> bool:
        """Whether a sequence whose replica was guessed may run on another one than those that `refused`."""
        left = set(self._get_candidates(request.model, request.version, None)).difference(
            refusing_replicas
        )
        if (
            request.sequence_step is None
            or len(refusing_replicas) >= MAX_SEQUENCE_GUESSES
            or not left
        ):
            return False
        self._sequences.forget(request.model, request.sequence_step)
        return True

    def _update_candidates(self, model: str, version: str) -> tuple[Replica, ...]:
        """Those on which it is ready, the healthy before the others; where it is nowhere ready, Triton
        itself says why."""
        now = self._loop.time()
        states = {replica: replica.health.state(now) for replica in self.replicas.values()}
        alive = [replica for replica, state in states.items() if state != HealthState.DOWN]
        ready = [replica for replica in alive if replica.index.is_ready(model, version)]
        among = ready if model and ready else alive
        best = min((states[replica] for replica in among), default=HealthState.DOWN)
        if best != HealthState.UP:
            best = HealthState.SLOW  # in need: all that may live
        found = tuple(replica for replica in among if states[replica] <= best)
        if len(self._candidates) > MAX_CANDIDATE_LISTS:
            self._candidates.clear()
        self._candidates[model, version] = found
        return found

    def has_model(self, model: str, version: str = "") -> bool:
        """Whether a replica has it in its index: a name of a client's making is in none."""
        return any(
            model in replica.index.models
            and (not version or version in replica.index.models[model])
            for replica in self.replicas.values()
        )

    def _explain_unknown(self, error: GatewayError, request: RequestTarget) -> GatewayError:
        """`ModelNotReady` in place of `UnknownModel` for what is in the repository and not loaded: Triton
        has the same words for both. Any other error as it is."""
        model, version = request[:2]
        if not isinstance(error, UnknownModel) or not self.has_model(model):
            return error
        is_unloaded = not self.is_ready(model) or self.has_model(model, version)
        return ModelNotReady(model, version) if is_unloaded else error

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether at least one replica can serve it."""
        return any(replica.index.is_ready(model, version) for replica in self.replicas.values())

    # And asked.

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
        """Triton's answer to a request of the model `asked.model`, if it is a success.

        Asks a second replica when the first cannot have run it; what is `repeatable` also where it may
        have, or where the first is silent for `FIRST_TRY_S`. Raises what the failure means.
        """
        tries = AttemptHistory(self._is_sequence_guessed(request))
        left_s = request.timeout_s
        notes = current_request_info.get()
        while True:
            candidates = self._candidates.get(request[:2], ())
            alone = (
                len(candidates) == 1
                and tries.failed_replica is None
                and request.sequence_step is None
            )
            replica = candidates[0] if alone else self._choose_attempt_replica(request, tries)
            try_s = left_s
            if is_idempotent and not alone and not tries.failed_replica:
                try_s = min(left_s, FIRST_ATTEMPT_TIMEOUT_S)
            began = perf_counter()  # the loop's own time stands still for a millisecond
            try:
                if notes is None or notes.trace is None:
                    answer = await replica.http.send(method, target, headers, body, timeout_s=try_s)
                else:
                    with attempt_span(
                        notes.trace, replica, replica.address.port, method.decode()
                    ) as step:
                        answer = await replica.http.send(
                            method, target, step.inject_context(headers), body, timeout_s=try_s
                        )
                        step.set_response_status(answer.status)
                took_s = self._record_attempt(
                    replica, began, "answered", notes, is_internal=is_idempotent
                )
                if answer.status < 400:
                    if len(self.replicas) > 1 or request.sequence_step is not None:
                        self._record_success(replica, request, began, took_s)
                    return answer
                error = self._explain_unknown(await read_error_response(answer, request), request)
                if isinstance(error, (ModelNotReady, UnknownModel)):
                    self._mark_unloaded(replica, request)
            except asyncio.CancelledError:  # by the request's deadline, or a client that left
                self._record_attempt(replica, began, "given_up", notes, is_internal=is_idempotent)
                raise
            except TRANSPORT_ERRORS as exc:
                error = exc
                outcome = ATTEMPT_OUTCOMES.get(type(exc), "bad_answer")
                self._record_attempt(replica, began, outcome, notes, is_internal=is_idempotent)
                self._record_failure(replica, error, began)
            left_s -= perf_counter() - began
            if left_s <= 0 or not self._can_try_again(
                tries, error, replica, request, body, is_idempotent=is_idempotent
            ):
                raise error

    async def start_call(self, request: RequestTarget, headers: Headers, start: StartCall[T]) -> T:
        """What `start` begins on a replica, over another wire than HTTP; on a second one, when the first
        cannot have run it. It is given the headers that go with it. Raises what it raises."""
        tries = AttemptHistory(self._is_sequence_guessed(request))
        notes = current_request_info.get()
        while True:
            replica = self._choose_attempt_replica(request, tries)
            began = perf_counter()
            try:
                with trace_attempt(notes, replica, headers) as carried:
                    begun = await start(replica, carried)
            except asyncio.CancelledError:
                self._record_attempt(replica, began, "given_up", notes)
                raise
            except TRANSPORT_ERRORS as exc:
                error: GatewayError = exc
                self._record_attempt(
                    replica, began, ATTEMPT_OUTCOMES.get(type(exc), "bad_answer"), notes
                )
                if not isinstance(exc, GrpcUnreachable):  # which says nothing of its HTTP
                    self._record_failure(replica, error, began)
            except (ModelNotReady, UnknownModel, SequenceNotRunning) as exc:
                error = self._explain_unknown(exc, request)
                self._record_attempt(replica, began, "answered", notes)
                if not isinstance(exc, SequenceNotRunning):
                    self._mark_unloaded(replica, request)
            else:
                took_s = self._record_attempt(replica, began, "answered", notes)
                self._record_success(replica, request, began, took_s)
                return begun
            if not self._can_try_again(tries, error, replica, request, b""):
                raise error

    async def request_json(
        self, request: RequestTarget, method: bytes, path: str, body: bytes = b""
    ) -> Any:
        """A JSON answer of Triton's. Raises `BadUpstream` for one that is not."""
        headers = [(b"content-length", b"%d" % len(body))]
        answer = await self.send(
            request, method, path.encode(), headers, body, is_idempotent=method == b"GET"
        )
        text = (await read_complete_response(answer, MAX_METADATA_BYTES)).body
        try:
            return orjson.loads(text) if text else None
        except orjson.JSONDecodeError as exc:
            raise BadUpstream("the replica answered what is not JSON") from exc

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
        """Whether another replica is asked after this one failed; notes that it did."""
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
        log.warning("asking another replica than %s: %s", replica.name, error.detail)
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
        """Only what cannot have run, or may run twice; of a body that is being streamed nothing is left, and
        a sequence that runs has its state on one replica."""
        if request.sequence_step is not None and not request.sequence_step.is_start:
            return False
        if not isinstance(
            error,
            (*NOT_EXECUTED_ERRORS, *TRANSPORT_ERRORS) if is_idempotent else NOT_EXECUTED_ERRORS,
        ):
            return False
        if isinstance(error, TRANSPORT_ERRORS):
            others = any(
                other is not replica
                for other in self._update_candidates(request.model, request.version)
            )
        else:
            others = isinstance(body, bytes) and any(
                other is not replica and other.index.is_ready(request.model, request.version)
                for other in self._update_candidates(request.model, request.version)
            )
        return others and self._retry_budget.try_spend()

    def _record_attempt(
        self,
        replica: Replica,
        started_at: float,
        outcome: str,
        info: RequestInfo | None,
        *,
        is_internal: bool = False,
    ) -> float:
        """Note how long it took, in seconds. What the gateway reads for itself (`own`) is no attempt of the
        request that it is read for."""
        took_s = perf_counter() - started_at
        self.metrics.pending_attempts[replica.name, outcome] += 1
        if info is not None:
            info.replica = replica.name
            info.attempts += not is_internal
            info.upstream_s += took_s
        return took_s

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
            usual_s = self._mean_latency_s.get(model, duration_s)
            replica.latency.update(duration_s, usual_s)
            self._mean_latency_s[model] = usual_s + MEAN_LATENCY_WEIGHT * (duration_s - usual_s)

    def _record_failure(self, replica: Replica, error: GatewayError, started_at: float) -> None:
        """What requests experience. A deadline that passed while others were being answered is the model's,
        and one so short that not even a probe need have been answered says nothing."""
        now = self._loop.time()
        was = replica.health.state(now)
        telling_s = min(self._probe_interval_s + MIN_PROBE_PAUSE_S, PROBE_TIMEOUT_S)
        answers = perf_counter() - max(replica.http.last_response_at, started_at) < telling_s
        if isinstance(error, DeadlinePassed) and answers:
            return
        if isinstance(error, RequestNotSent) and error.is_refused:
            replica.health = replica.health.with_refusal()
            replica.reason = error.detail
        ejected = sum(other.health.ejected_until > now for other in self.replicas.values())
        allowed = can_eject(len(self.replicas), ejected)
        replica.health = replica.health.with_failure(now, can_eject=allowed)
        replica.probe_requested.set()
        if replica.health.ejected_until > now and was is not HealthState.EJECTED:
            replica.reason = error.detail
            self.metrics.ejections.labels(replica.name).inc()
            # A timer of uvloop's can be a hair early, when the replica would still be left out.
            self._loop.call_at(
                replica.health.ejected_until + TIMER_RESOLUTION_S, self._notify_change
            )
        self._report_state_change(replica, was)

    def _mark_unloaded(self, replica: Replica, request: RequestTarget) -> None:
        """It has not the model that its index promised: it was unloaded behind our back."""
        if replica.index.is_ready(request.model, request.version):
            replica.index = replica.index.with_model_unloaded(request.model)
            replica.raw_index = b""
            replica.probe_requested.set()
            self._notify_change()


@contextmanager
def trace_attempt(
    info: RequestInfo | None, replica: Replica, headers: Headers
) -> Iterator[Headers]:
    """A span of this attempt, where the request is traced: the parent of what Triton does."""
    if info is None or info.trace is None:
        yield headers
        return
    # ModelInfer and ModelStreamInfer are POSTs of HTTP/2.
    with attempt_span(info.trace, replica, replica.address.grpc_port, "POST") as step:
        yield step.inject_context(headers)


def attempt_span(
    trace: Trace, replica: Replica, port: int, method: str
) -> AbstractContextManager[ChildSpan]:
    """Return the client's span of an attempt on a replica."""
    return trace.start_span(
        "triton",
        client=True,
        http__request__method=method,
        server__address=replica.address.host,
        server__port=port,
        triton__replica=replica.name,
    )


async def cancel_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel them until they end: before Python 3.12, `asyncio.wait_for` can lose a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_RETRY_S)
