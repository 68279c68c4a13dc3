"""Power-of-two-choices load balancing: the less loaded of two randomly picked replicas.

It performs nearly as well as choosing the shortest queue, and does not send all traffic to one replica
(M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).

Slow start: a replica that can serve a model again, or for the first time, gets few requests at first. As in
Envoy, its share grows linearly, so that caches, GPU memory and just-in-time compilers are warm before it
serves as many requests as the others. Each model has its own share: it may be loaded on a replica that
has served others for days.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import random
from typing import Final, Protocol, TypeVar

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
