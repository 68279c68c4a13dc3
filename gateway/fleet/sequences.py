"""Which replica a sequence's requests go to: the one that has its state.

Where a sequence starts follows from its name alone, by rendezvous hashing (D. Thaler and C. Ravishankar,
Using Name-Based Mappings to Increase Hit Rates, 1998): gateways that see the same replicas choose the same
one and need not tell each other. A replica that joins would draw a share of the sequences that are running,
so those of this process are remembered until they end. Of one that another gateway started the replica is
guessed: where it does not run Triton refuses the step, which has not been executed then, and the next guess
is the replica that had it before the last one joined.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Final, Protocol, TypeVar

from gateway.errors import SequenceNotRunning
from gateway.tensors.sequence import SequenceStep

# Triton itself forgets an idle sequence after a second, unless the model's config says otherwise.
SEQUENCE_IDLE_S: Final = 3600.0
MAX_SEQUENCES: Final = 65_536

SequenceKey = tuple[str, int | str]


class NamedReplica(Protocol):
    @property
    def name(self) -> str: ...


ReplicaT = TypeVar("ReplicaT", bound=NamedReplica)


class SequenceRouter:
    """Those that run, by model and id, and where; the one that was idle longest is forgotten first."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        idle_s: float = SEQUENCE_IDLE_S,
        max_sequences: int = MAX_SEQUENCES,
    ) -> None:
        self._clock = clock
        self._idle_s = idle_s
        self._max_sequences = max_sequences
        self._running: OrderedDict[SequenceKey, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._running)

    def is_known(self, model: str, step: SequenceStep) -> bool:
        """Whether this process knows where the sequence runs, or decides it."""
        return step.is_start or (model, step.sequence_id) in self._running

    def forget(self, model: str, step: SequenceStep) -> None:
        """It does not run where it was guessed to."""
        self._running.pop((model, step.sequence_id), None)

    def choose_replica(
        self,
        model: str,
        step: SequenceStep,
        candidates: Iterable[ReplicaT],
        holders: Iterable[ReplicaT],
    ) -> ReplicaT:
        """Of some candidates, where the sequence starts or may run; of those that may be holding its state,
        the one that does. Raises `SequenceNotRunning` when that one is not among them."""
        key = model, step.sequence_id
        kept = None if step.is_start else self._running.get(key)
        if kept is None:
            chosen = choose_by_rendezvous(key, candidates)
        else:
            found = next((replica for replica in holders if replica.name == kept[0]), None)
            if found is None:
                raise SequenceNotRunning(model, step.sequence_id, f"its replica {kept[0]} is gone")
            chosen = found
        self._remember(key, chosen.name)
        return chosen

    def finish_step(self, model: str, step: SequenceStep) -> None:
        """A step has been made; after the last there is nothing to remember."""
        if step.is_end:
            self._running.pop((model, step.sequence_id), None)

    def _remember(self, key: SequenceKey, name: str) -> None:
        now = self._clock()
        self._running[key] = name, now
        self._running.move_to_end(key)
        while len(self._running) > self._max_sequences or self._oldest_use() < now - self._idle_s:
            self._running.popitem(last=False)

    def _oldest_use(self) -> float:
        return next(iter(self._running.values()))[1]


def choose_by_rendezvous(key: SequenceKey, replicas: Iterable[ReplicaT]) -> ReplicaT:
    """Each replica draws a number for this sequence, always the same; the highest has it."""
    model, sequence_id = key

    def drawn(replica: ReplicaT) -> bytes:
        return blake2b(f"{replica.name}\0{model}\0{sequence_id!r}".encode(), digest_size=8).digest()

    return max(replicas, key=drawn)
