"""The choice of a replica: the less loaded of two randomly picked ones, or the one with the sequence.

The power of two choices performs nearly as well as choosing the shortest queue, and does not send all traffic
to one replica (M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).

Slow start: a replica that can serve a model again, or for the first time, gets few requests at first. As in
Envoy, its share grows linearly, so that caches, GPU memory and just-in-time compilers are warm before it
serves as many requests as the others. Each model has its own share: it may be loaded on a replica that
has served others for days.

Sequences: the replica of a new one is chosen by rendezvous hashing of its id (D. Thaler and C. Ravishankar,
Using Name-Based Mappings to Increase Hit Rates, 1998), so that gateways with the same replicas choose the
same one without communication. A new replica would take over a share of the running sequences, so this
process remembers where its own sequences run. For a sequence that another gateway started, the replica is
guessed: if the sequence does not run there, Triton rejects the step without executing it, and the next guess
is the replica that was chosen before the last one joined.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from random import random
from typing import Final, Protocol, TypeVar

from gateway.errors import SequenceNotRunning
from gateway.tensors.sequence import SequenceStep

LATENCY_WEIGHT: Final = 0.2  # weight of the newest response in the moving average
LATENCY_SLACK_S: Final = 0.005  # jitter that a busy gateway itself adds
MAX_RELATIVE_LATENCY: Final = 20.0
MIN_RELATIVE_LATENCY: Final = 0.2
MAX_LATENCY_GROWTH: Final = 2.0  # factor per response, so that a single outlier changes little
DECAY_PER_TICK: Final = 0.93  # a tick is a probe interval, by default half a second
SIMILAR_RATIO: Final = 1.5  # latencies within this ratio count as equal
COLD_AFTER_S: Final = 5.0  # a replica that was idle for longer may be cold
MIN_SHARE: Final = 0.1  # first share of a replica's full number of requests; Envoy's default
MAX_MODELS: Final = 10_000  # model versions whose warm-up is tracked
# Triton drops an idle sequence after one second, unless the model's config changes that.
SEQUENCE_IDLE_S: Final = 3600.0
ACTIVE_S: Final = 60.0  # a sequence that is idle for longer holds up no drain
MAX_SEQUENCES: Final = 65_536
SequenceKey = tuple[str, int | str]


class BalancerTarget(Protocol):
    """The load figures that the balancer compares."""

    @property
    def outstanding(self) -> int: ...
    @property
    def relative_latency(self) -> float: ...


Candidate = TypeVar("Candidate", bound=BalancerTarget)


def choose_less_loaded(candidates: Sequence[Candidate]) -> Candidate:
    """Return the less loaded of two random candidates; `candidates` must not be empty.

    If their latencies differ, return the one expected to respond first. Ties are broken at random.
    """
    count = len(candidates)
    if count == 1:
        return candidates[0]
    first = int(random() * count)  # noqa: S311 - not for security
    second = int(random() * (count - 1))  # noqa: S311 - not for security
    if second >= first:
        second += 1
    one = candidates[first]
    other = candidates[second]
    ratio = one.relative_latency / other.relative_latency
    if 1 / SIMILAR_RATIO <= ratio <= SIMILAR_RATIO:
        return one if one.outstanding <= other.outstanding else other
    return one if (one.outstanding + 1) * ratio <= other.outstanding + 1 else other


@dataclass
class RelativeLatency:
    """A replica's latency relative to the fleet's mean for the same model; 1 means equal.

    Outstanding requests alone reveal a slow replica only while the fleet is busy: an idle slow one looks
    as good as an idle fast one. The ratio decays to 1, so that a recovered replica gets requests again.
    """

    ratio: float = 1.0
    # Model → time of the first response since the replica was idle, and of the last response.
    _response_times: dict[str, tuple[float, float]] = field(default_factory=dict)

    def record_response(self, model: str, started_at: float, now: float) -> bool:
        """Record a response and return whether its latency is representative.

        The first response after an idle time is not, nor are responses to requests in flight with it.
        """
        first, last = self._response_times.get(model, (now, -math.inf))
        if now - last > COLD_AFTER_S:
            first = now
        self._response_times[model] = first, now
        return started_at >= first

    def update(self, duration_s: float, fleet_mean_s: float) -> None:
        ratio = (duration_s + LATENCY_SLACK_S) / (fleet_mean_s + LATENCY_SLACK_S)
        maximum = min(MAX_RELATIVE_LATENCY, MAX_LATENCY_GROWTH * self.ratio)
        ratio = min(max(ratio, MIN_RELATIVE_LATENCY), maximum)
        self.ratio += LATENCY_WEIGHT * (ratio - self.ratio)

    def decay(self) -> None:
        self.ratio = 1.0 + (self.ratio - 1.0) * DECAY_PER_TICK


class StartedReplica(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def up_since(self) -> float: ...


WarmingCandidate = TypeVar("WarmingCandidate", bound=StartedReplica)


@dataclass(frozen=True)
class WarmUp:
    """The candidates for a model version, and since when each one is a candidate."""

    since: dict[str, float]
    tracked_at: float
    until: float  # when all of them have their full share


class SlowStart:
    """The warm-up of the replicas, by model version."""

    def __init__(self, duration_s: float, clock: Callable[[], float]) -> None:
        self.duration_s = duration_s
        self.clock = clock
        self._warm_ups: dict[tuple[str, str], WarmUp] = {}

    def track_candidates(
        self, model: str, version: str, candidates: Sequence[StartedReplica]
    ) -> None:
        """Note the replicas that are new among the candidates.

        The first ones of a model are equals, and none of them is noted.
        """
        now = self.clock()
        key = (model, version)
        previous = self._warm_ups.get(key)
        if previous is None:
            if len(self._warm_ups) >= MAX_MODELS:
                self._warm_ups.clear()
            since = {replica.name: -math.inf for replica in candidates}
        else:
            since = {replica.name: find_start(previous, replica, now) for replica in candidates}
        until = max(since.values(), default=-math.inf) + self.duration_s
        self._warm_ups[key] = WarmUp(since, now, until)

    def limit_candidates(
        self, model: str, version: str, candidates: Sequence[WarmingCandidate]
    ) -> Sequence[WarmingCandidate]:
        """Return the candidates for one request: all, or the ones that are warmer than a random limit."""
        warm_up = self._warm_ups.get((model, version))
        now = self.clock()
        if warm_up is None or now >= warm_up.until:
            return candidates
        shares = [
            compute_share(now - warm_up.since.get(replica.name, now), self.duration_s)
            for replica in candidates
        ]
        limit = max(shares) * random()  # noqa: S311 - not for security
        return [replica for replica, share in zip(candidates, shares, strict=True) if share > limit]


def find_start(previous: WarmUp, replica: StartedReplica, now: float) -> float:
    is_restarted = replica.up_since > previous.tracked_at
    return now if is_restarted else previous.since.get(replica.name, now)


def compute_share(age_s: float, duration_s: float) -> float:
    return min(max(age_s / duration_s, MIN_SHARE), 1.0)


# Sequences.


class NamedReplica(Protocol):
    @property
    def name(self) -> str: ...


ReplicaT = TypeVar("ReplicaT", bound=NamedReplica)


class SequenceRouter:
    """The running sequences and their replicas. The sequence that was idle longest is dropped first."""

    def __init__(
        self,
        clock: Callable[[], float],
        idle_s: float = SEQUENCE_IDLE_S,
        max_sequences: int = MAX_SEQUENCES,
    ) -> None:
        self.clock = clock
        self.idle_s = idle_s
        self.max_sequences = max_sequences
        self._running: OrderedDict[SequenceKey, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    def count_on(self, replica: str) -> int:
        """Return the number of sequences on a replica that were used in the last minute.

        One that was abandoned, or that another gateway ended, is never ended here.
        """
        oldest = self.clock() - ACTIVE_S
        return sum(name == replica and used >= oldest for name, used in self._running.values())

    def runs_on(self, model: str, replicas: Set[str]) -> bool:
        return any(key[0] == model and name in replicas for key, (name, _) in self._running.items())

    def is_known(self, model: str, step: SequenceStep) -> bool:
        """Return whether this process knows the replica of the sequence, or chooses it in this step."""
        return step.is_start or (model, step.sequence_id) in self._running

    def forget(self, model: str, step: SequenceStep) -> None:
        self._running.pop((model, step.sequence_id), None)

    def choose_replica(
        self,
        model: str,
        step: SequenceStep,
        candidates: Iterable[ReplicaT],
        holders: Iterable[ReplicaT],
    ) -> ReplicaT:
        """Return the replica for a step of a sequence.

        If the sequence starts, or its replica is unknown, choose one of the `candidates`.
        Raises `SequenceNotRunning` if its known replica is not among the `holders`.
        """
        key = model, step.sequence_id
        known = None if step.is_start else self._running.get(key)
        if known is None:
            chosen = choose_by_rendezvous(key, candidates)
        else:
            holder = next((replica for replica in holders if replica.name == known[0]), None)
            if holder is None:
                raise SequenceNotRunning(
                    model, step.sequence_id, "its replica is no longer available"
                )
            chosen = holder
        self._remember(key, chosen.name)
        return chosen

    def finish_step(self, model: str, step: SequenceStep) -> None:
        if step.is_end:
            self._running.pop((model, step.sequence_id), None)

    def _remember(self, key: SequenceKey, name: str) -> None:
        now = self.clock()
        self._running[key] = name, now
        self._running.move_to_end(key)
        while len(self._running) > self.max_sequences or self._oldest_use() < now - self.idle_s:
            self._running.popitem(last=False)

    def _oldest_use(self) -> float:
        return next(iter(self._running.values()))[1]


def choose_by_rendezvous(key: SequenceKey, replicas: Iterable[ReplicaT]) -> ReplicaT:
    model, sequence_id = key

    def weight(replica: ReplicaT) -> bytes:
        return blake2b(f"{replica.name}\0{model}\0{sequence_id!r}".encode(), digest_size=8).digest()

    return max(replicas, key=weight)
