"""The rules of health, without I/O; the docstring of `gateway.fleet` explains them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final, Protocol, TypeVar

from gateway.messages import quote_text

log = logging.getLogger(__name__)

SLOW_AFTER_MISSES: Final = 2  # probes missed in a row
# Triton lists its repository for each index: in a bucket with S3, it makes two requests for each model.
# An index that takes longer than this is read beside the probes, after pauses that grow with its duration.
SLOW_INDEX_S: Final = 0.5
SLOW_INDEX_PAUSES: Final = 10  # times the duration of a read
MAX_INDEX_PAUSE_S: Final = 10.0
TRANSPORT: Final = ""  # takes the place of a model in `FailureShares`
MEMORY_S: Final = 30.0  # a counted request loses 63 % of its weight in this time
LATER_WEIGHT: Final = 0.95  # and at least a twentieth with each later one, whatever happened before
MIN_FAILURES: Final = 4.5  # five within a few seconds
MIN_FAILURE_SHARE: Final = 0.5
MAX_RELATIVE_SHARE: Final = 0.5  # failure share of the others, divided by the share of the outlier
EJECTION_S: Final = 5.0
# The longest ejection and the trials after it end within 30 s of the recovery.
MAX_EJECTION_S: Final = 25.0
EJECTION_RESET_S: Final = 300.0  # a pause without ejections, after which they start short again
NEXT_TRIAL_S: Final = 1.0  # pause after a successful trial
MIN_TRIAL_SUCCESSES: Final = 3  # consecutive successful trials that end an ejection
MAX_MODELS: Final = 1000


class HealthState(IntEnum):
    """Health states from best to worst. No requests are sent to a `DOWN` replica."""

    UP = 0
    EJECTED = 1  # answers its probes, and requests to it fail
    SLOW = 2  # does not answer probes in time
    DOWN = 3  # refuses connections, or has never answered a probe


@dataclass(frozen=True)
class Health:
    """The results of the probes of a replica, which is down until it answers the first one."""

    is_down: bool = True
    has_exited: bool = False  # it refused a connection: a new process will replace it
    missed_probes: int = 0

    def with_probe_answer(self) -> Health:
        return Health(is_down=False)

    def with_probe_timeout(self) -> Health:
        return replace(self, missed_probes=self.missed_probes + 1)

    def with_refusal(self) -> Health:
        return replace(self, is_down=True, has_exited=True)

    @property
    def state(self) -> HealthState:
        if self.is_down:
            return HealthState.DOWN
        return HealthState.SLOW if self.missed_probes >= SLOW_AFTER_MISSES else HealthState.UP


@dataclass(frozen=True)
class IndexSchedule:
    """When to read a replica's index next, by the clock of the caller."""

    duration_s: float = 0.0  # how long the last read took
    due_at: float = 0.0
    has_failed: bool = False  # the last read timed out

    @property
    def is_slow(self) -> bool:
        return self.duration_s >= SLOW_INDEX_S

    def with_read(self, now: float, duration_s: float) -> IndexSchedule:
        # The first read after one that failed may have waited for a Triton that hung.
        pause_s = 0.0 if self.has_failed else min(SLOW_INDEX_PAUSES * duration_s, MAX_INDEX_PAUSE_S)
        return IndexSchedule(duration_s, now + pause_s)

    def with_timeout(self, timeout_s: float) -> IndexSchedule:
        return IndexSchedule(timeout_s, has_failed=True)

    def with_request(self) -> IndexSchedule:
        """Read it at the next probe, because it is known to be outdated."""
        return replace(self, due_at=0.0)


@dataclass
class RetryBudget:
    """A token bucket that limits retries to a share of the requests, to not overload a failing fleet.

    Up to ten retries are saved, for a fleet with little traffic.
    """

    ratio: float = 0.2
    tokens: float = 10.0

    def earn(self) -> None:
        if self.tokens < 10.0:
            self.tokens += self.ratio

    def try_spend(self) -> bool:
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True


class NamedReplica(Protocol):
    @property
    def name(self) -> str: ...


Candidate = TypeVar("Candidate", bound=NamedReplica)


@dataclass
class FailureShare:
    """The requests of one model to one replica, and the failed ones; recent requests weigh most."""

    requests: float = 0.0
    failures: float = 0.0
    updated_at: float = -math.inf
    reason: str = ""  # of the last failure
    ejections: int = 0  # in a row
    is_ejected: bool = False
    is_on_trial: bool = False  # a request tests whether the replica has recovered
    trial_at: float = -math.inf  # when the next one may do so
    successes: int = 0  # consecutive successful trials

    def add(self, now: float, failure: str) -> None:
        weight = min(math.exp((self.updated_at - now) / MEMORY_S), LATER_WEIGHT)
        self.requests = self.requests * weight + 1
        self.failures = self.failures * weight + bool(failure)
        self.updated_at = now
        self.reason = failure or self.reason

    def is_outlier(self, others: Sequence[FailureShare]) -> bool:
        """Return whether the replica fails often, and the others far less often, or have had no requests."""
        is_frequent = self.failures >= max(MIN_FAILURES, MIN_FAILURE_SHARE * self.requests)
        return is_frequent and self.is_worse_than(others)

    def is_worse_than(self, others: Sequence[FailureShare]) -> bool:
        requests = sum(each.requests for each in others)
        failures = sum(each.failures for each in others)
        return failures <= MAX_RELATIVE_SHARE * self.failures / self.requests * requests

    def is_forgotten(self, now: float) -> bool:
        failures = self.failures * math.exp((self.updated_at - now) / MEMORY_S)
        is_reset = now - self.trial_at > EJECTION_RESET_S
        return failures < MIN_FAILURES / 10 and not self.is_ejected and is_reset

    @property
    def pause_s(self) -> float:
        return min(EJECTION_S * self.ejections, MAX_EJECTION_S)

    def eject(self, now: float) -> None:
        is_reset = now - self.trial_at > EJECTION_RESET_S
        self.ejections = 1 if is_reset else self.ejections + 1
        self.is_ejected = True
        self.is_on_trial = False
        self.trial_at = now + self.pause_s
        self.successes = 0

    def start_trial(self, now: float) -> None:
        self.is_on_trial = True
        self.trial_at = now + self.pause_s

    def end_trial(self, now: float, *, is_failure: bool) -> None:
        """Record the result of a trial: a failure prolongs the ejection, the last success ends it."""
        if is_failure:
            self.eject(now)
            return
        self.is_on_trial = False
        self.trial_at = now + NEXT_TRIAL_S
        self.successes += 1
        if self.successes >= MIN_TRIAL_SUCCESSES:
            self.readmit()

    def readmit(self) -> None:
        self.is_ejected = self.is_on_trial = False
        self.requests = self.failures = 0.0


@dataclass
class FailureShares:
    """The ejected replicas: of each model, and, with `TRANSPORT` as the model, of all.

    Requests of a model without a recent failure cost nothing here.
    """

    clock: Callable[[], float]
    by_model: dict[str, dict[str, FailureShare]] = field(default_factory=dict)

    def find_ejection(self, replica: str, model: str = TRANSPORT) -> FailureShare | None:
        """Return the share for which the replica gets no requests of the model now."""
        share = self.by_model.get(model, {}).get(replica)
        is_ejected = share is not None and share.is_ejected and self.clock() < share.trial_at
        return share if is_ejected else None

    def list_models(self, replica: str) -> list[str]:
        """Return the models of which the replica gets only trial requests."""
        return sorted(
            model
            for model, shares in self.by_model.items()
            if model != TRANSPORT and replica in shares and shares[replica].is_ejected
        )

    def forget_replica(self, replica: str) -> None:
        """Forget what a process did that has ended."""
        for model in list(self.by_model):
            self.by_model[model].pop(replica, None)
            if not self.by_model[model]:
                del self.by_model[model]

    def record_success(self, model: str, replica: str) -> None:
        if (shares := self.by_model.get(model)) is None:
            return
        now = self.clock()
        share = shares.setdefault(replica, FailureShare())
        share.add(now, "")
        if share.is_on_trial:
            share.end_trial(now, is_failure=False)
            if not share.is_ejected:
                log_readmission(
                    model, replica, f"{MIN_TRIAL_SUCCESSES} requests in a row succeeded"
                )
        if all(each.is_forgotten(now) for each in shares.values()):
            del self.by_model[model]

    def record_failure(
        self, model: str, replica: str, others: Collection[str], failure: str
    ) -> bool:
        """Count a failed request, and return whether the replica is ejected for it.

        The `others` can serve the model as well, the replica itself may be among them.
        """
        if model not in self.by_model and len(self.by_model) >= MAX_MODELS:
            self.by_model.clear()
        shares = self.by_model.setdefault(model, {})
        now = self.clock()
        share = shares.setdefault(replica, FailureShare())
        share.add(now, failure)
        if share.is_ejected:
            # Requests that were sent before the ejection do not prolong it.
            if share.is_on_trial:
                share.end_trial(now, is_failure=True)
            return False
        if share.failures < MIN_FAILURES:
            return False
        healthy = [
            name
            for name in others
            if name != replica and not (name in shares and shares[name].is_ejected)
        ]
        known = [shares[name] for name in healthy if name in shares]
        readmit_normal(model, shares, [share, *known])
        is_possible = bool(healthy) and (model != TRANSPORT or can_eject(shares, others))
        if not is_possible or not share.is_outlier(known):
            return False
        share.eject(now)
        log.warning(
            "replica %s is ejected%s for %.0f s: %.0f %% of its last requests failed: %s",
            replica,
            describe_model(model),
            share.pause_s,
            100 * share.failures / share.requests,
            failure,
        )
        return True

    def select(self, model: str, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates that are not ejected, or one that is, for a trial that is due.

        If all are ejected, all are returned.
        """
        shares = self.by_model.get(model)
        if shares is None:
            return candidates
        now = self.clock()
        allowed = []
        for replica in candidates:
            share = shares.get(replica.name)
            if share is None or not share.is_ejected:
                allowed.append(replica)
            elif now >= share.trial_at:
                share.start_trial(now)
                return [replica]
        return allowed or candidates


def can_eject(shares: Mapping[str, FailureShare], fleet: Collection[str]) -> bool:
    """Return whether one more replica may be ejected entirely.

    Half of the fleet at most: if more replicas fail, the replicas are not the cause.
    """
    ejected_count = sum(share.is_ejected for share in shares.values())
    return 2 * (ejected_count + 1) <= len(fleet)


def readmit_normal(
    model: str, shares: Mapping[str, FailureShare], others: Sequence[FailureShare]
) -> None:
    """End the ejections of replicas that fail as often as the others do now."""
    for name, share in shares.items():
        if share.is_ejected and not share.is_worse_than(others):
            share.readmit()
            log_readmission(model, name, "the other replicas fail as well")


def log_readmission(model: str, replica: str, reason: str) -> None:
    log.warning("replica %s gets requests%s again: %s", replica, describe_model(model), reason)


def describe_model(model: str) -> str:
    return f" of model {quote_text(model)}" if model else ""
