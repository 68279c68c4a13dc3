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

from gateway.context import Notes, current
from gateway.errors import (
    BadUpstream,
    DeadlinePassed,
    GatewayError,
    ModelNotReady,
    SequenceNotRunning,
    Unavailable,
    UnknownModel,
)
from gateway.fleet.balance import less_loaded
from gateway.fleet.health import Budget, State, may_eject
from gateway.fleet.index import NOTHING, Index, index_of
from gateway.fleet.replica import Address, Replica, Source, Wire
from gateway.fleet.sequences import Sequences
from gateway.metrics import Metrics
from gateway.tracing import Step, Trace
from gateway.triton.answers import complained, whole
from gateway.triton.complaints import Asked
from gateway.triton.grpc import NoGrpc
from gateway.triton.http import MOST_DOCUMENT_BYTES, Answer
from gateway.triton.wire import Headers, NotSent

log = logging.getLogger(__name__)

Body = bytes | AsyncIterator[bytes]
Resolve = Callable[[str], Awaitable[Iterable[str]]]

PROBE_TIMEOUT_S: Final = 1.0
LEAST_PAUSE_S: Final = 0.05
TIMER_S: Final = 0.001  # how exact timers are
LOOK_FOR_THE_LOST_S: Final = 0.2
FIRST_LOOK_S: Final = 2.0
CANCEL_AGAIN_S: Final = 0.2
INDEX: Final = b"/v2/repository/index"
PROBE_REFUSALS: Final = {
    403: "Triton restricts its repository API, and GATEWAY_TRITON_RESTRICTED_API does not open it"
}
MAX_CANDIDATE_LISTS: Final = 10_000
USUAL_WEIGHT: Final = 0.05
MOST_GUESSES: Final = 3  # where a sequence runs that another gateway started
FIRST_TRY_S: Final = 1.0  # for what may be asked twice, while there is another to ask
T = TypeVar("T")
Start = Callable[[Replica, Headers], Awaitable[T]]
# A replica that says so has not run the request.
NOT_RUN: Final = (NotSent, ModelNotReady, UnknownModel)
ON_THE_WIRE: Final = (NotSent, BadUpstream, DeadlinePassed)
OUTCOMES: Final = dict(zip(ON_THE_WIRE, ("refused", "bad_answer", "deadline"), strict=True))


@dataclass
class Tries:
    """The replicas that one request was sent to in vain."""

    is_guess: bool = False  # it is unknown where its sequence runs
    failed: Replica | None = None
    refused: list[Replica] = field(default_factory=list)  # the sequence does not run there


class NoReplica(Unavailable):
    code = "NO_REPLICA"

    def __init__(self) -> None:
        super().__init__("no Triton can be reached; GET /readyz says what is wrong with each")


async def resolve(name: str) -> list[str]:
    """The addresses that a name stands for. Raises `OSError`."""
    found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in found})


class Pool:
    """All replicas. Use it as a context manager: inside, they are watched."""

    def __init__(
        self,
        sources: Sequence[Source],
        wire: Wire,
        *,
        metrics: Metrics | None = None,
        poll_s: float = 0.5,
        dns_s: float = 5.0,
        resolve: Resolve = resolve,
    ) -> None:
        self.replicas: dict[Address, Replica] = {}
        self.changes = asyncio.Event()  # set when a replica's state or models are not as before
        self.metrics = metrics or Metrics()
        self._sources = sources
        self._wire = wire
        self._poll_s = poll_s
        self._dns_s = dns_s
        self._resolve = resolve
        self._loop = asyncio.get_running_loop()
        self._watches: dict[Address, asyncio.Task[None]] = {}
        self._found: dict[Source, frozenset[Address]] = {}
        self._finders: list[asyncio.Task[None]] = []
        self._candidates: dict[tuple[str, str], tuple[Replica, ...]] = {}
        self._usual_s: dict[str, float] = {}
        self._budget = Budget()
        self._sequences = Sequences(self._loop.time)

    async def __aenter__(self) -> Pool:
        for source in self._sources:
            if not source.by_dns:
                self._found[source] = frozenset((source.address,))
        self._replace()
        named = [source for source in self._sources if source.by_dns]
        with anyio.move_on_after(FIRST_LOOK_S):
            await asyncio.gather(*map(self._find, named))
            await asyncio.gather(*map(self.look, self.replicas.values()))
        self._finders = [asyncio.create_task(self._keep_finding(source)) for source in named]
        return self

    async def __aexit__(self, *_: object) -> None:
        await ended([*self._finders, *self._watches.values()])
        for replica in self.replicas.values():
            replica.close()

    # Who there is.

    async def _keep_finding(self, source: Source) -> None:
        while True:
            await asyncio.sleep(self._dns_s)
            await self._find(source)

    async def _find(self, source: Source) -> None:
        """What the name stands for now; the last good answer stays when there is none."""
        try:
            with anyio.fail_after(self._dns_s):
                hosts = list(await self._resolve(source.address.host))
        except (OSError, UnicodeError) as exc:
            log.warning(
                "the name %s cannot be looked up: %s", source.address.host, exc or "timeout"
            )
            return
        if not hosts:
            log.warning("the name %s stands for no address", source.address.host)
            return
        name = source.address.host
        self._found[source] = frozenset(
            replace(source.address, host=host, name=name) for host in hosts
        )
        self._replace()

    def _replace(self) -> None:
        wanted = {address for found in self._found.values() for address in found}
        for address in self.replicas.keys() - wanted:
            log.warning("the replica %s is gone", address)
            self._watches.pop(address).cancel()
            gone = self.replicas.pop(address)
            gone.close()
            self.metrics.forget_replica(gone.name)
        for address in sorted(wanted - self.replicas.keys(), key=str):
            replica = self.replicas[address] = Replica(address, self._wire)
            self.metrics.expect_replica(replica.name)
            self._watches[address] = asyncio.create_task(self._watch(replica))
        self._changed()

    # How they are.

    async def _watch(self, replica: Replica) -> None:
        while self.replicas.get(replica.address) is replica:  # see `ended`
            await self.look(replica)
            await asyncio.sleep(LEAST_PAUSE_S)
            down = (
                self.state(replica) is State.DOWN
            )  # a refusal costs little, and its return counts
            pause_s = min(self._poll_s, LOOK_FOR_THE_LOST_S) if down else self._poll_s
            # A timer: a cancel scope would cost a fifth of all that a look costs.
            tick = self._loop.call_later(pause_s - LEAST_PAUSE_S, replica.doubted.set)
            try:
                await replica.doubted.wait()
            finally:
                tick.cancel()
            replica.doubted.clear()
            replica.pace.tick()

    def state(self, replica: Replica) -> State:
        return replica.health.state(self._loop.time())

    def known_index(self, replica: Replica) -> Index:
        """Return what the replica has; of one that is `DOWN` nothing is known, whatever it had."""
        return NOTHING if self.state(replica) is State.DOWN else replica.index

    def ejected_for_s(self, replica: Replica) -> float:
        return max(replica.health.ejected_until - self._loop.time(), 0.0)

    async def refresh(self) -> None:
        """Look at all of them now."""
        await asyncio.gather(*map(self.look, list(self.replicas.values())))

    async def look(self, replica: Replica) -> None:
        """On a fresh connection: a Triton that is stopping answers on old ones as if well."""
        try:
            reply = await replica.http.ask(
                b"POST",
                INDEX,
                headers=replica.management_headers,
                timeout_s=PROBE_TIMEOUT_S,
                fresh=True,
                most_bytes=MOST_DOCUMENT_BYTES,
            )
        except GatewayError as exc:
            self._unwell(replica, exc)
            return
        try:
            if reply.status != 200:
                raise ValueError(PROBE_REFUSALS.get(reply.status, f"Triton answers {reply.status}"))
            changed = reply.body != replica.index_bytes
            if changed:
                replica.index = index_of(orjson.loads(reply.body))
                replica.index_bytes = reply.body
        except ValueError as exc:
            self._unwell(replica, BadUpstream(str(exc)))
            return
        was = replica.health
        if was.refuses or was.misses:
            replica.health = was.answered()
            self._told(replica, was.state(self._loop.time()))
            changed = True
        replica.reason = ""
        if changed:
            self._changed()

    def _unwell(self, replica: Replica, error: GatewayError) -> None:
        was = replica.health.state(self._loop.time())
        refused = isinstance(error, NotSent) and error.refused
        replica.health = replica.health.refused() if refused else replica.health.missed()
        replica.reason = error.detail
        self._told(replica, was)

    def _told(self, replica: Replica, was: State) -> None:
        """Of a change of its state, once."""
        state = replica.health.state(self._loop.time())
        if state == was:
            return
        replica.http.keeps = state in (State.UP, State.EJECTED)
        if not replica.http.keeps:
            replica.drop_idle()
            replica.index_bytes = b""  # what comes back may be another
            log.warning("the replica %s is %s: %s", replica.address, state.name, replica.reason)
        else:
            log.info("the replica %s is %s", replica.address, state.name)
        self._changed()

    def _changed(self) -> None:
        self._candidates.clear()
        self.changes.set()

    # Which of them.

    def choose(self, model: str = "", version: str = "", but: Replica | None = None) -> Replica:
        """The less loaded of two that can serve the model. Raises `NoReplica`."""
        return less_loaded(self._among(model, version, but))

    def _among(self, model: str, version: str, but: Replica | None) -> tuple[Replica, ...]:
        candidates = self._candidates.get((model, version))
        if candidates is None:
            candidates = self._look_up(model, version)
        if but is not None:
            candidates = tuple(replica for replica in candidates if replica is not but)
        if not candidates:
            raise NoReplica
        return candidates

    def _chosen(self, asked: Asked, tries: Tries) -> Replica:
        """As `choose`; for a step of a sequence the replica that has its state, or will have it. Raises
        `SequenceNotRunning` when it is lost."""
        model, version, step = asked.model, asked.version, asked.sequence
        if step is None:
            return self.choose(model, version, tries.failed)
        holding = (
            replica
            for replica in self.replicas.values()
            if self.state(replica) is not State.DOWN and replica.index.ready(model, version)
        )
        candidates = [
            replica
            for replica in self._among(model, version, tries.failed)
            if replica not in tries.refused
        ]
        return self._sequences.choose(model, step, candidates, holding)

    def _is_guessed(self, asked: Asked) -> bool:
        """Whether it is unknown where a sequence runs: another gateway started it."""
        step = asked.sequence
        return step is not None and not self._sequences.knows(asked.model, step)

    def _may_run_elsewhere(self, asked: Asked, refused: Sequence[Replica]) -> bool:
        """Whether a sequence whose replica was guessed may run on another one than those that `refused`."""
        left = set(self._among(asked.model, asked.version, None)).difference(refused)
        if asked.sequence is None or len(refused) >= MOST_GUESSES or not left:
            return False
        self._sequences.forget(asked.model, asked.sequence)
        return True

    def _look_up(self, model: str, version: str) -> tuple[Replica, ...]:
        """Those on which it is ready, the healthy before the others; where it is nowhere ready, Triton
        itself says why."""
        now = self._loop.time()
        states = {replica: replica.health.state(now) for replica in self.replicas.values()}
        alive = [replica for replica, state in states.items() if state != State.DOWN]
        ready = [replica for replica in alive if replica.index.ready(model, version)]
        among = ready if model and ready else alive
        best = min((states[replica] for replica in among), default=State.DOWN)
        if best != State.UP:
            best = State.SLOW  # in need: all that may live
        found = tuple(replica for replica in among if states[replica] <= best)
        if len(self._candidates) > MAX_CANDIDATE_LISTS:
            self._candidates.clear()
        self._candidates[model, version] = found
        return found

    def knows(self, model: str, version: str = "") -> bool:
        """Whether a replica has it in its index: a name of a client's making is in none."""
        return any(
            model in replica.index.models
            and (not version or version in replica.index.models[model])
            for replica in self.replicas.values()
        )

    def _explain_unknown(self, error: GatewayError, asked: Asked) -> GatewayError:
        """`ModelNotReady` in place of `UnknownModel` for what is in the repository and not loaded: Triton
        has the same words for both. Any other error as it is."""
        model, version = asked[:2]
        if not isinstance(error, UnknownModel) or not self.knows(model):
            return error
        is_unloaded = not self.is_ready(model) or self.knows(model, version)
        return ModelNotReady(model, version) if is_unloaded else error

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether at least one replica can serve it."""
        return any(replica.index.ready(model, version) for replica in self.replicas.values())

    # And asked.

    async def send(
        self,
        asked: Asked,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: Body = b"",
        *,
        repeatable: bool = False,
    ) -> Answer:
        """Triton's answer to a request of the model `asked.model`, if it is a success.

        Asks a second replica when the first cannot have run it; what is `repeatable` also where it may
        have, or where the first is silent for `FIRST_TRY_S`. Raises what the failure means.
        """
        tries = Tries(self._is_guessed(asked))
        left_s = asked.timeout_s
        notes = current.get()
        while True:
            candidates = self._candidates.get(asked[:2], ())
            alone = len(candidates) == 1 and tries.failed is None and asked.sequence is None
            replica = candidates[0] if alone else self._chosen(asked, tries)
            try_s = left_s
            if repeatable and not alone and not tries.failed:
                try_s = min(left_s, FIRST_TRY_S)
            began = perf_counter()  # the loop's own time stands still for a millisecond
            try:
                if notes is None or notes.trace is None:
                    answer = await replica.http.send(method, target, headers, body, timeout_s=try_s)
                else:
                    with attempt_span(
                        notes.trace, replica, replica.address.port, method.decode()
                    ) as step:
                        answer = await replica.http.send(
                            method, target, step.carried(headers), body, timeout_s=try_s
                        )
                        step.answered(answer.status)
                took_s = self._attempted(replica, began, "answered", notes, own=repeatable)
                if answer.status < 400:
                    if len(self.replicas) > 1 or asked.sequence is not None:
                        self._succeeded(replica, asked, began, took_s)
                    return answer
                error = self._explain_unknown(await complained(answer, asked), asked)
                if isinstance(error, (ModelNotReady, UnknownModel)):
                    self._contradicted(replica, asked)
            except asyncio.CancelledError:  # by the request's deadline, or a client that left
                self._attempted(replica, began, "given_up", notes, own=repeatable)
                raise
            except ON_THE_WIRE as exc:
                error = exc
                outcome = OUTCOMES.get(type(exc), "bad_answer")
                self._attempted(replica, began, outcome, notes, own=repeatable)
                self._failed(replica, error, began)
            left_s -= perf_counter() - began
            if left_s <= 0 or not self._may_try_again(
                tries, error, replica, asked, body, repeatable=repeatable
            ):
                raise error

    async def begin(self, asked: Asked, headers: Headers, start: Start[T]) -> T:
        """What `start` begins on a replica, over another wire than HTTP; on a second one, when the first
        cannot have run it. It is given the headers that go with it. Raises what it raises."""
        tries = Tries(self._is_guessed(asked))
        notes = current.get()
        while True:
            replica = self._chosen(asked, tries)
            began = perf_counter()
            try:
                with traced(notes, replica, headers) as carried:
                    begun = await start(replica, carried)
            except asyncio.CancelledError:
                self._attempted(replica, began, "given_up", notes)
                raise
            except ON_THE_WIRE as exc:
                error: GatewayError = exc
                self._attempted(replica, began, OUTCOMES.get(type(exc), "bad_answer"), notes)
                if not isinstance(exc, NoGrpc):  # which says nothing of its HTTP
                    self._failed(replica, error, began)
            except (ModelNotReady, UnknownModel, SequenceNotRunning) as exc:
                error = self._explain_unknown(exc, asked)
                self._attempted(replica, began, "answered", notes)
                if not isinstance(exc, SequenceNotRunning):
                    self._contradicted(replica, asked)
            else:
                took_s = self._attempted(replica, began, "answered", notes)
                self._succeeded(replica, asked, began, took_s)
                return begun
            if not self._may_try_again(tries, error, replica, asked, b""):
                raise error

    async def ask(self, asked: Asked, method: bytes, path: str, body: bytes = b"") -> Any:
        """A JSON answer of Triton's. Raises `BadUpstream` for one that is not."""
        headers = [(b"content-length", b"%d" % len(body))]
        answer = await self.send(
            asked, method, path.encode(), headers, body, repeatable=method == b"GET"
        )
        text = (await whole(answer, MOST_DOCUMENT_BYTES)).body
        try:
            return orjson.loads(text) if text else None
        except orjson.JSONDecodeError as exc:
            raise BadUpstream("the replica answered what is not JSON") from exc

    def _may_try_again(
        self,
        tries: Tries,
        error: GatewayError,
        replica: Replica,
        asked: Asked,
        body: Body,
        *,
        repeatable: bool = False,
    ) -> bool:
        """Whether another replica is asked after this one failed; notes that it did."""
        if tries.is_guess and isinstance(error, SequenceNotRunning) and isinstance(body, bytes):
            tries.refused.append(replica)
            return self._may_run_elsewhere(asked, tries.refused)
        if tries.failed or not self._may_retry(error, replica, asked, body, repeatable=repeatable):
            return False
        log.warning("asking another replica than %s: %s", replica.name, error.detail)
        self.metrics.retries.labels(replica.name).inc()
        tries.failed = replica
        return True

    def _may_retry(
        self,
        error: GatewayError,
        replica: Replica,
        asked: Asked,
        body: Body,
        *,
        repeatable: bool = False,
    ) -> bool:
        """Only what cannot have run, or may run twice; of a body that is being streamed nothing is left, and
        a sequence that runs has its state on one replica."""
        if asked.sequence is not None and not asked.sequence.start:
            return False
        if not isinstance(error, (*NOT_RUN, *ON_THE_WIRE) if repeatable else NOT_RUN):
            return False
        if isinstance(error, ON_THE_WIRE):
            others = any(
                other is not replica for other in self._look_up(asked.model, asked.version)
            )
        else:
            others = isinstance(body, bytes) and any(
                other is not replica and other.index.ready(asked.model, asked.version)
                for other in self._look_up(asked.model, asked.version)
            )
        return others and self._budget.spend()

    def _attempted(
        self,
        replica: Replica,
        began: float,
        outcome: str,
        notes: Notes | None,
        *,
        own: bool = False,
    ) -> float:
        """Note how long it took, in seconds. What the gateway reads for itself (`own`) is no attempt of the
        request that it is read for."""
        took_s = perf_counter() - began
        self.metrics.attempts_seen[replica.name, outcome] += 1
        if notes is not None:
            notes.replica = replica.name
            notes.attempts += not own
            notes.upstream_s += took_s
        return took_s

    def _succeeded(self, replica: Replica, asked: Asked, began: float, took_s: float) -> None:
        model = asked.model
        if asked.sequence is not None:
            self._sequences.answered(model, asked.sequence)
        self._budget.earn()
        if replica.health.failures:
            replica.health = replica.health.succeeded()
        if replica.pace.is_warm(model, began, began + took_s):
            usual_s = self._usual_s.get(model, took_s)
            replica.pace.learn(took_s, usual_s)
            self._usual_s[model] = usual_s + USUAL_WEIGHT * (took_s - usual_s)

    def _failed(self, replica: Replica, error: GatewayError, began: float) -> None:
        """What requests experience. A deadline that passed while others were being answered is the model's,
        and one so short that not even a probe need have been answered says nothing."""
        now = self._loop.time()
        was = replica.health.state(now)
        telling_s = min(self._poll_s + LEAST_PAUSE_S, PROBE_TIMEOUT_S)
        answers = perf_counter() - max(replica.http.last_answer, began) < telling_s
        if isinstance(error, DeadlinePassed) and answers:
            return
        if isinstance(error, NotSent) and error.refused:
            replica.health = replica.health.refused()
            replica.reason = error.detail
        ejected = sum(other.health.ejected_until > now for other in self.replicas.values())
        allowed = may_eject(len(self.replicas), ejected)
        replica.health = replica.health.failed(now, may_eject=allowed)
        replica.doubted.set()
        if replica.health.ejected_until > now and was is not State.EJECTED:
            replica.reason = error.detail
            self.metrics.ejections.labels(replica.name).inc()
            # A timer of uvloop's can be a hair early, when the replica would still be left out.
            self._loop.call_at(replica.health.ejected_until + TIMER_S, self._changed)
        self._told(replica, was)

    def _contradicted(self, replica: Replica, asked: Asked) -> None:
        """It has not the model that its index promised: it was unloaded behind our back."""
        if replica.index.ready(asked.model, asked.version):
            replica.index = replica.index.without(asked.model)
            replica.index_bytes = b""
            replica.doubted.set()
            self._changed()


@contextmanager
def traced(notes: Notes | None, replica: Replica, headers: Headers) -> Iterator[Headers]:
    """A span of this attempt, where the request is traced: the parent of what Triton does."""
    if notes is None or notes.trace is None:
        yield headers
        return
    # ModelInfer and ModelStreamInfer are POSTs of HTTP/2.
    with attempt_span(notes.trace, replica, replica.address.grpc_port, "POST") as step:
        yield step.carried(headers)


def attempt_span(
    trace: Trace, replica: Replica, port: int, method: str
) -> AbstractContextManager[Step]:
    """Return the client's span of an attempt on a replica."""
    return trace.step(
        "triton",
        client=True,
        http__request__method=method,
        server__address=replica.address.host,
        server__port=port,
        triton__replica=replica.name,
    )


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel them until they end: before Python 3.12, `asyncio.wait_for` can lose a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
