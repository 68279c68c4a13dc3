"""Which replica gets the next request: the less loaded of two that are picked at random.

Picking two and comparing does nearly as well as knowing the shortest queue, and does not send everybody
to the same replica (M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import random
from typing import Final, Protocol, TypeVar

WEIGHT: Final = 0.2  # of the newest answer
SLACK_S: Final = 0.005  # what a busy gateway adds to an answer by chance is not the replica's pace
MOST: Final = 20.0
LEAST: Final = 0.2
FORGETS: Final = 0.93  # a tick: of half a second


class Loaded(Protocol):
    """What is compared."""

    @property
    def load(self) -> float: ...


Candidate = TypeVar("Candidate", bound=Loaded)


def less_loaded(candidates: Sequence[Candidate]) -> Candidate:
    """One of a non-empty sequence."""
    count = len(candidates)
    if count == 1:
        return candidates[0]
    first = int(random() * count)  # noqa: S311 - no secret
    second = int(random() * (count - 1))  # noqa: S311
    if second >= first:
        second += 1
    one, other = candidates[first], candidates[second]
    return one if one.load <= other.load else other


@dataclass
class Pace:
    """How much slower a replica answers than the fleet does for the same model: 1 is like the others.

    Outstanding requests alone notice a slow replica only while the fleet is busy: an idle slow one looks
    as good as an idle fast one. What is learned fades, so that a replica that has recovered is tried.
    """

    slowness: float = 1.0

    def answered(self, took_s: float, usual_s: float) -> None:
        ratio = (took_s + SLACK_S) / (usual_s + SLACK_S)
        self.slowness += WEIGHT * (min(max(ratio, LEAST), MOST) - self.slowness)

    def tick(self) -> None:
        self.slowness = 1.0 + (self.slowness - 1.0) * FORGETS
