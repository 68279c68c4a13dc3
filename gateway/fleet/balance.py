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

WEIGHT: Final = 0.2  # of the newest answer
SLACK_S: Final = 0.005  # what a busy gateway adds to an answer by chance is not the replica's pace
MOST: Final = 20.0
LEAST: Final = 0.2
MOST_GROWTH: Final = 2.0  # of the pace by which one answer counts: a single outlier changes little
FORGETS: Final = 0.93  # a tick: of half a second
SIMILAR: Final = 1.5  # paces that differ by less are taken for equal
IDLE_S: Final = 5.0  # after which a replica may be cold


class Loaded(Protocol):
    """What is compared."""

    @property
    def outstanding(self) -> int: ...
    @property
    def slowness(self) -> float: ...


Candidate = TypeVar("Candidate", bound=Loaded)


def less_loaded(candidates: Sequence[Candidate]) -> Candidate:
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
    ratio = one.slowness / other.slowness
    if 1 / SIMILAR <= ratio <= SIMILAR:
        return one if one.outstanding <= other.outstanding else other
    return one if (one.outstanding + 1) * ratio <= other.outstanding + 1 else other


@dataclass
class Pace:
    """How much slower a replica answers than the fleet does for the same model: 1 is like the others.

    Outstanding requests alone notice a slow replica only while the fleet is busy: an idle slow one looks
    as good as an idle fast one. What is learned fades, so that a replica that has recovered is tried.
    """

    slowness: float = 1.0
    # By model: the time of the first answer since the replica was idle, and of the last.
    _answers: dict[str, tuple[float, float]] = field(default_factory=dict)

    def is_warm(self, model: str, began: float, now: float) -> bool:
        """Note an answer, and return whether it says how fast the replica is: the first after idleness
        does not, and nor do those that were under way with it."""
        first, last = self._answers.get(model, (now, -math.inf))
        if now - last > IDLE_S:
            first = now
        self._answers[model] = first, now
        return began >= first

    def learn(self, took_s: float, usual_s: float) -> None:
        """Take an answer's time into account; `usual_s` is that of the fleet."""
        ratio = (took_s + SLACK_S) / (usual_s + SLACK_S)
        ratio = min(max(ratio, LEAST), MOST, MOST_GROWTH * self.slowness)
        self.slowness += WEIGHT * (ratio - self.slowness)

    def tick(self) -> None:
        self.slowness = 1.0 + (self.slowness - 1.0) * FORGETS
