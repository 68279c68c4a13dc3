"""Power-of-two-choices load balancing: the less loaded of two randomly picked replicas.

It performs nearly as well as choosing the shortest queue, and does not send all traffic to one replica
(M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import random
from typing import Final, Protocol, TypeVar

LATENCY_WEIGHT: Final = 0.2  # weight of the newest response in the moving average
LATENCY_SLACK_S: Final = 0.005  # jitter that a busy gateway itself adds
MAX_RELATIVE_LATENCY: Final = 20.0
MIN_RELATIVE_LATENCY: Final = 0.2
MAX_LATENCY_GROWTH: Final = 2.0  # per response, so that a single outlier changes little
DECAY_PER_TICK: Final = 0.93  # a tick is a probe interval, by default half a second
SIMILAR_RATIO: Final = 1.5  # latencies within this ratio count as equal
COLD_AFTER_S: Final = 5.0  # a replica that was idle for longer may be cold


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
    one, other = candidates[first], candidates[second]
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

        The first response after an idle time is not, nor are those of requests in flight with it.
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
