"""The health of replicas, and of single models on them, and the retry budget, without I/O.

Probes on fresh connections decide whether a replica is alive. The results of requests decide whether it
is avoided for a while (outlier ejection, as in Envoy): entirely, if its transport fails, or by one model, if
it fails the requests of the model while other replicas serve it. A replica whose GPU or model instance is
broken answers its probes, and each inference with an error at once: it would look less loaded than the others
and attract their requests. As with Envoy's failure percentage, the share of failures is compared with that of
the other replicas: a model that fails everywhere has no outlier.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, Protocol, TypeVar

from gateway.messages import quote_text

log = logging.getLogger(__name__)

SLOW_AFTER_MISSES: Final = 2  # probes missed in a row
EJECT_AFTER_FAILURES: Final = 5  # failed requests in a row
EJECTION_S: Final = 5.0
MAX_EJECTION_S: Final = 300.0
EJECTION_RESET_S: Final = 300.0  # a pause without ejections, after which they start short again
# Triton lists its repository for each index: in a bucket with S3, it makes two requests for each model.
# An index that takes longer than this is read beside the probes, after pauses that grow with its duration.
SLOW_INDEX_S: Final = 0.5
SLOW_INDEX_PAUSES: Final = 10  # times the duration of a read
MAX_INDEX_PAUSE_S: Final = 10.0
# Failed requests of one model.
MEMORY_S: Final = 30.0  # a counted request loses 63 % of its weight in this time
MIN_FAILURES: Final = 4.5  # five within a few seconds
MIN_FAILURE_SHARE: Final = 0.5
MAX_RELATIVE_SHARE: Final = 0.5  # failure share of the others, divided by the outlier's share
TRIAL_INTERVAL_S: Final = 10.0  # pause between requests that test whether an outlier has recovered
NEXT_TRIAL_S: Final = 1.0  # pause after a successful trial
MIN_TRIAL_SUCCESSES: Final = 3  # consecutive successful trials that end the outlier's state
MAX_MODELS: Final = 1000


class HealthState(IntEnum):
    """Health states from best to worst. No requests are sent to a `DOWN` replica."""

    UP = 0
    EJECTED = 1
    SLOW = 2  # does not answer probes in time
    DOWN = 3  # refuses connections, or has never answered a probe


@dataclass(frozen=True)
class Health:
    """The health of a replica, which is down until it answers its first probe."""

    is_down: bool = True
    has_exited: bool = False  # it refused a connection: a new process will replace it
    missed_probes: int = 0
    consecutive_failures: int = 0
    ejections: int = 0
    ejected_until: float = 0.0

    def with_probe_answer(self) -> Health:
        return replace(self, is_down=False, has_exited=False, missed_probes=0)

    def with_probe_timeout(self) -> Health:
        return replace(self, missed_probes=self.missed_probes + 1)

    def with_refusal(self) -> Health:
        return replace(self, is_down=True, has_exited=True)

    def with_success(self) -> Health:
        return replace(self, consecutive_failures=0)

    def with_failure(self, now: float, *, can_eject: bool) -> Health:
        """Record a transport failure; `EJECT_AFTER_FAILURES` in a row eject the replica."""
        failures = self.consecutive_failures + 1
        if failures < EJECT_AFTER_FAILURES or not can_eject or now < self.ejected_until:
            return replace(self, consecutive_failures=failures)
        is_reset = now - self.ejected_until > EJECTION_RESET_S
        ejections = 1 if is_reset else self.ejections + 1
        until = now + min(EJECTION_S * ejections, MAX_EJECTION_S)
        failures = EJECT_AFTER_FAILURES - 1  # one failure after its return ejects it again
        return replace(
            self, consecutive_failures=failures, ejections=ejections, ejected_until=until
        )

    def state(self, now: float) -> HealthState:
        if self.is_down:
            return HealthState.DOWN
        if self.missed_probes >= SLOW_AFTER_MISSES:
            return HealthState.SLOW
        return HealthState.EJECTED if now < self.ejected_until else HealthState.UP


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


def can_eject(replica_count: int, ejected_count: int) -> bool:
    """Return whether one more replica may be ejected.

    Half of the fleet at most: if more replicas fail, the replicas are not the cause.
    """
    return 2 * (ejected_count + 1) <= replica_count


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


# The health of single models: their outliers.


class StartedReplica(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def up_since(self) -> float: ...


Candidate = TypeVar("Candidate", bound=StartedReplica)


@dataclass
class RequestCounts:
    """The requests of a model to a replica, and the failed ones; recent requests weigh most."""

    requests: float = 0.0
    failures: float = 0.0
    updated_at: float = 0.0

    def add(self, now: float, *, is_failure: bool) -> None:
        weight = math.exp((self.updated_at - now) / MEMORY_S)
        self.requests = self.requests * weight + 1
        self.failures = self.failures * weight + (1 if is_failure else 0)
        self.updated_at = now


@dataclass
class Outlier:
    """A replica that gets a request of the model only now and then, as a trial."""

    since: float
    trial_at: float
    successes: int = 0  # consecutive successful trials


class OutlierDetector:
    """The outliers of each model. Models without a recent failure cost nothing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._counts: dict[str, dict[str, RequestCounts]] = {}
        self._outliers: dict[str, dict[str, Outlier]] = {}

    def is_tracked(self, model: str) -> bool:
        """Return whether requests of the model have failed lately, so that successes count as well."""
        return model in self._counts

    def list_models(self, replica: str) -> list[str]:
        return sorted(model for model, outliers in self._outliers.items() if replica in outliers)

    def record(
        self, model: str, replica: str, others: Sequence[StartedReplica], *, is_failure: bool
    ) -> None:
        """Count a request that the replica answered; `others` are replicas that can serve the model too."""
        now = self.clock()
        counts = self._counts.get(model)
        if counts is None:
            if not is_failure:
                return
            if len(self._counts) >= MAX_MODELS:
                self._counts.clear()
                self._outliers.clear()
            counts = self._counts[model] = {}
        counts.setdefault(replica, RequestCounts()).add(now, is_failure=is_failure)
        outliers = self._outliers.setdefault(model, {})
        if outlier := outliers.get(replica):
            self._record_trial(model, replica, outlier, is_failure=is_failure)
        elif is_failure:
            self._detect(model, replica, [other.name for other in others])
        elif all(each.failures < MIN_FAILURES / 10 for each in counts.values()) and not outliers:
            del self._counts[model], self._outliers[model]

    def limit_candidates(self, model: str, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates without outliers, or one outlier whose trial is due."""
        outliers = self._outliers.get(model)
        if not outliers:
            return candidates
        now = self.clock()
        for replica in candidates:
            outlier = outliers.get(replica.name)
            if outlier is None:
                continue
            if replica.up_since > outlier.since:
                self._remove(model, replica.name, "its Triton was started again")
                del self._counts[model][replica.name]
            elif now >= outlier.trial_at:
                outlier.trial_at = now + TRIAL_INTERVAL_S
                return [replica]
        return [each for each in candidates if each.name not in outliers] or candidates

    def _record_trial(
        self, model: str, replica: str, outlier: Outlier, *, is_failure: bool
    ) -> None:
        now = self.clock()
        outlier.successes = 0 if is_failure else outlier.successes + 1
        outlier.trial_at = now + (TRIAL_INTERVAL_S if is_failure else NEXT_TRIAL_S)
        if outlier.successes >= MIN_TRIAL_SUCCESSES:
            self._remove(model, replica, f"{MIN_TRIAL_SUCCESSES} requests in a row succeeded")
            del self._counts[model][replica]

    def _detect(self, model: str, replica: str, others: Sequence[str]) -> None:
        """Make the replica an outlier if the others do not fail; if they do, none is one."""
        counts = self._counts[model]
        outliers = self._outliers[model]
        own = counts[replica]
        if own.failures < MIN_FAILURES:
            return
        healthy = [name for name in others if name != replica and name not in outliers]
        known = [counts[name] for name in healthy if name in counts]
        for name in list(outliers):
            if not is_outlier(counts[name], [own, *known]):
                self._remove(model, name, "the other replicas fail as well")
        if not healthy or not is_outlier(own, known):
            return
        now = self.clock()
        outliers[replica] = Outlier(now, now + TRIAL_INTERVAL_S)
        log.warning(
            "replica %s gets only trial requests of model %s: %.0f %% of its last requests failed",
            replica,
            quote_text(model),
            100 * own.failures / own.requests,
        )

    def _remove(self, model: str, replica: str, reason: str) -> None:
        del self._outliers[model][replica]
        log.warning(
            "replica %s gets requests of model %s again: %s", replica, quote_text(model), reason
        )


def is_outlier(own: RequestCounts, others: Sequence[RequestCounts]) -> bool:
    """Return whether a replica fails often, and the others far less often, or have had no requests."""
    if own.failures < MIN_FAILURES or own.failures < MIN_FAILURE_SHARE * own.requests:
        return False
    requests = sum(each.requests for each in others)
    failures = sum(each.failures for each in others)
    own_share = own.failures / own.requests
    return failures <= MAX_RELATIVE_SHARE * own_share * requests
