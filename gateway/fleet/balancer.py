"""Which replica gets the next request: the less loaded of two that are picked at random.

Picking two and comparing does nearly as well as knowing the shortest queue, and does not send everybody
to the same replica (M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import random
from typing import Final, Protocol, TypeVar

LATENCY_WEIGHT: Final = 0.2  # of the newest answer
LATENCY_SLACK_S: Final = (
    0.005  # what a busy gateway adds to an answer by chance is not the replica's pace
)
MAX_RELATIVE_LATENCY: Final = 20.0
MIN_RELATIVE_LATENCY: Final = 0.2
MAX_LATENCY_GROWTH: Final = (
    2.0  # of the pace by which one answer counts: a single outlier changes little
)
DECAY_PER_TICK: Final = 0.93  # a tick: of half a second
SIMILAR_RATIO: Final = 1.5  # paces that differ by less are taken for equal
COLD_AFTER_S: Final = 5.0  # after which a replica may be cold


class BalancerTarget(Protocol):
    """What is compared."""

    @property
    def outstanding(self) -> int: ...
    @property
    def relative_latency(self) -> float: ...


Candidate = TypeVar("Candidate", bound=BalancerTarget)


def choose_less_loaded(candidates: Sequence[Candidate]) -> Candidate:
    """Return one of a non-empty sequence: of two at random the one that has less to do, or of two that are
    not equally fast the one that is expected to answer first. Ties are broken at random."""
    count = len(candidates)
    if count == 1:
        return candidates[0]
    first = int(random() * count)  # noqa: S311 - no secret
    second = int(random() * (count - 1))  # noqa: S311
    if second >= first:
        second += 1
    one, other = candidates[first], candidates[second]
    ratio = one.relative_latency / other.relative_latency
    if 1 / SIMILAR_RATIO <= ratio <= SIMILAR_RATIO:
        return one if one.outstanding <= other.outstanding else other
    return one if (one.outstanding + 1) * ratio <= other.outstanding + 1 else other


@dataclass
class RelativeLatency:
    """How much slower a replica answers than the fleet does for the same model: 1 is like the others.

    Outstanding requests alone notice a slow replica only while the fleet is busy: an idle slow one looks
    as good as an idle fast one. What is learned fades, so that a replica that has recovered is tried.
    """

    ratio: float = 1.0
    # By model: the time of the first answer since the replica was idle, and of the last.
    _response_times: dict[str, tuple[float, float]] = field(default_factory=dict)

    def record_response(self, model: str, started_at: float, now: float) -> bool:
        """Note an answer, and return whether it says how fast the replica is: the first after idleness
        does not, and nor do those that were under way with it."""
        first, last = self._response_times.get(model, (now, -math.inf))
        if now - last > COLD_AFTER_S:
            first = now
        self._response_times[model] = first, now
        return started_at >= first

    def update(self, duration_s: float, fleet_mean_s: float) -> None:
        """Take an answer's time into account; `usual_s` is that of the fleet."""
        ratio = (duration_s + LATENCY_SLACK_S) / (fleet_mean_s + LATENCY_SLACK_S)
        ratio = min(
            max(ratio, MIN_RELATIVE_LATENCY), MAX_RELATIVE_LATENCY, MAX_LATENCY_GROWTH * self.ratio
        )
        self.ratio += LATENCY_WEIGHT * (ratio - self.ratio)

    def decay(self) -> None:
        self.ratio = 1.0 + (self.ratio - 1.0) * DECAY_PER_TICK
