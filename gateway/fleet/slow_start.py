"""Slow start: a replica that can serve a model again, or for the first time, gets few requests at first.

As in Envoy, its share grows linearly, so that caches, GPU memory and just-in-time compilers are warm before
it serves as many requests as the others. The share is that of one model: a model may be loaded on a replica
that has served others for days.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import random
from typing import Final, NamedTuple, Protocol, TypeVar

MIN_SHARE: Final = 0.1  # of the requests that the replica will get; Envoy's default
MAX_MODELS: Final = 10_000


class StartedReplica(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def up_since(self) -> float: ...


Candidate = TypeVar("Candidate", bound=StartedReplica)


class WarmUp(NamedTuple):
    """The candidates for a model version, and since when each one is a candidate."""

    since: dict[str, float]
    tracked_at: float
    until: float  # then all of them have their full share


@dataclass(eq=False, repr=False)
class SlowStart:
    """The warm-up of the replicas, by model version."""

    duration_s: float
    clock: Callable[[], float]
    _warm_ups: dict[tuple[str, str], WarmUp] = field(default_factory=dict)

    def track_candidates(
        self, model: str, version: str, candidates: Sequence[StartedReplica]
    ) -> None:
        """Note the replicas that are new among the candidates.

        The first ones of a model are equals, and none of them is noted.
        """
        now, key = self.clock(), (model, version)
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
        self, model: str, version: str, candidates: Sequence[Candidate]
    ) -> Sequence[Candidate]:
        """Return the candidates for one request: all, or those that are warmer than a random limit."""
        warm_up, now = self._warm_ups.get((model, version)), self.clock()
        if warm_up is None or now >= warm_up.until:
            return candidates
        shares = [
            compute_share(now - warm_up.since.get(replica.name, now), self.duration_s)
            for replica in candidates
        ]
        limit = max(shares) * random()  # noqa: S311 - not for security
        return [replica for replica, share in zip(candidates, shares, strict=True) if share > limit]


def find_start(previous: WarmUp, replica: StartedReplica, now: float) -> float:
    """Return since when the replica is a candidate: now, if its process is another one."""
    is_restarted = replica.up_since > previous.tracked_at
    return now if is_restarted else previous.since.get(replica.name, now)


def compute_share(age_s: float, duration_s: float) -> float:
    """Return the share of a replica's requests that it gets at this age."""
    return min(max(age_s / duration_s, MIN_SHARE), 1.0)
