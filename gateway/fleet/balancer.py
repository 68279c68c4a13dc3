"""The choice of a replica: the less loaded of two randomly picked ones, or the one with the sequence.

The power of two choices performs nearly as well as choosing the shortest queue, and does not send all traffic
to one replica (M. Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001).

Sequences: the replica of a new one is chosen by rendezvous hashing of its id (D. Thaler and C. Ravishankar,
Using Name-Based Mappings to Increase Hit Rates, 1998), so that gateways with the same replicas choose the
same one without communication. A new replica would take over a share of the running sequences, so this
process remembers where the sequences run that it has seen. A sequence that another gateway started is
expected where its id leads; if a replica has joined since, Triton may reject its next step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set
from hashlib import blake2b
from random import random
from typing import Final, Protocol, TypeVar

from gateway.errors import SequenceNotRunning
from gateway.fleet.health import NamedReplica
from gateway.triton.sequence import SequenceStep

# Triton drops an idle sequence after one second, unless the model's config changes that.
SEQUENCE_IDLE_S: Final = 3600.0
ACTIVE_S: Final = 60.0  # a sequence that is idle for longer holds up no drain
MAX_SEQUENCES: Final = 65_536
SequenceKey = tuple[str, int | str]


class BalancerTarget(Protocol):
    @property
    def outstanding(self) -> int: ...


Candidate = TypeVar("Candidate", bound=BalancerTarget)


def choose_less_loaded(candidates: Sequence[Candidate]) -> Candidate:
    """Return the less loaded of two random candidates; `candidates` must not be empty."""
    count = len(candidates)
    if count == 1:
        return candidates[0]
    first = int(random() * count)  # noqa: S311 - not for security
    second = int(random() * (count - 1))  # noqa: S311 - not for security
    if second >= first:
        second += 1
    one = candidates[first]
    other = candidates[second]
    return one if one.outstanding <= other.outstanding else other


# Sequences.


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
