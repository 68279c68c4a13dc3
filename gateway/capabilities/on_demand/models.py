"""The models that are loaded on demand, because the models file or a pattern names them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from fnmatch import fnmatchcase
from math import ceil, inf
from typing import Any, Final

from gateway.capabilities.on_demand.plan import LoadTurns
from gateway.capabilities.on_demand.settings import ON_DEMAND, CopyLimits
from gateway.capacity.admission import AdmissionQueue
from gateway.errors import GatewayError, Unavailable
from gateway.messages import join_names, quote_text
from gateway.repository.shared_state import SharedState

MAX_REPORTED_NUMBER: Final = 1e12
# From this number of used models on, the times of models that do not exist are dropped.
MAX_USED_MODELS: Final = 1000
# Of more callers that used a model, the earliest ones are one unknown caller.
MAX_KNOWN_CALLERS: Final = 16
# Stands for callers that are not known. It is neither the name of a key nor an address.
UNKNOWN_CALLER: Final = "?"


class ModelLoading(Unavailable):
    code = "MODEL_LOADING"

    def __init__(self, model: str, retry_after_s: int) -> None:
        GatewayError.__init__(
            self,
            f"model {quote_text(model)} is being loaded; try again, or set a longer timeout with "
            "X-Request-Timeout, in seconds",
            headers={"Retry-After": str(retry_after_s)},
        )


class NoRoom(Unavailable):
    code = "NO_ROOM"

    def __init__(
        self,
        model: str,
        holders: Collection[str],
        *,
        has_hidden: bool,
        protected_s: float = -inf,
    ) -> None:
        headers: dict[str, str] = {}
        names = [quote_text(name) for name in holders]
        if has_hidden:
            names.append("models that this key cannot see")
        held = f"; its memory is held by {join_names(names)}" if names else ""
        if protected_s > 0:
            retry_after_s = ceil(protected_s)
            held += f", and other callers use it; try again in {retry_after_s} s"
            headers["Retry-After"] = str(retry_after_s)
        super().__init__(
            f"no replica has room for model {quote_text(model)}{held}", headers=headers
        )


class OnDemandModels:
    """The rules by which a model is loaded on demand and may be evicted."""

    def __init__(self, state: SharedState, patterns: tuple[str, ...]) -> None:
        self._state = state
        self._patterns = patterns

    @property
    def is_enabled(self) -> bool:
        return bool(self._patterns or self._state.capability_models)

    def is_on_demand(self, model: str) -> bool:
        """Return whether requests load the model. The models file and the API take precedence."""
        if model in self._state.declared_models or model in self._state.desired_models:
            return False
        return self.matches(model)

    def matches(self, model: str) -> bool:
        return model in self._state.capability_models or any(
            fnmatchcase(model, pattern) for pattern in self._patterns
        )

    def get_copy_limits(self, model: str) -> CopyLimits:
        entry = self._state.capability_models.get(model)
        if entry is None:
            return CopyLimits()
        limits: CopyLimits = entry.capability_values[ON_DEMAND]
        return limits

    def get_load_parameters(self, model: str) -> dict[str, Any]:
        entry = self._state.capability_models.get(model)
        return {} if entry is None else entry.load_parameters


class UseTimes:
    """The times when models were used last, and by which callers."""

    def __init__(self) -> None:
        self.last_used: dict[str, float] = {}
        self._by_caller: dict[str, dict[str, float]] = {}

    def record(self, model: str, caller: str, used_at: float) -> None:
        if used_at > self.last_used.get(model, -inf):
            self.last_used[model] = used_at
        times = self._by_caller.setdefault(model, {})
        if used_at > times.get(caller, -inf):
            times[caller] = used_at
        if len(times) > MAX_KNOWN_CALLERS:
            unknown_at = times.pop(UNKNOWN_CALLER, -inf)
            earliest = min(times, key=times.__getitem__)
            times[UNKNOWN_CALLER] = max(times.pop(earliest), unknown_at)

    def find_callers(self, model: str, since: float) -> dict[str, float]:
        times = self._by_caller.get(model, {})
        return {caller: used_at for caller, used_at in times.items() if used_at > since}

    def drop_unknown_models(self, has_model: Callable[[str], bool]) -> None:
        if len(self.last_used) > MAX_USED_MODELS:
            latest = max(self.last_used, key=self.last_used.__getitem__)
            unknown = [name for name in self.last_used if name != latest and not has_model(name)]
            for name in unknown:
                del self.last_used[name], self._by_caller[name]


class ModelUsage:
    """The last uses of each model, the requests in progress, and the callers that wait for loads."""

    def __init__(
        self, admission: AdmissionQueue, clock: Callable[[], float], protection_s: float
    ) -> None:
        self.admission = admission
        self._clock = clock
        self._protection_s = protection_s
        self._started_at = clock()
        self._uses = UseTimes()  # the ends of requests
        admission.record_use = self.record_use
        self.turns = LoadTurns()
        # The last reports of the other gateways.
        self._others_uses = UseTimes()
        self._others_waiting: set[str] = set()
        self._others_requests: dict[str, int] = {}
        self._others_demand = 0
        self.held_requests = 0  # requests that wait for a replica or a load

    def get_last_used(self, model: str) -> float:
        """Return the time of the last use; the start of this process for a model without any."""
        own = self._uses.last_used.get(model, self._started_at)
        return max(own, self._others_uses.last_used.get(model, own))

    def find_users(self, model: str) -> dict[str, float]:
        """Return the callers for whom the model is protected, each with the end of its protection."""
        since = self._clock() - self._protection_s
        own, others = (each.find_callers(model, since) for each in (self._uses, self._others_uses))
        return {
            caller: max(own.get(caller, since), others.get(caller, since)) + self._protection_s
            for caller in own.keys() | others.keys()
        }

    @property
    def waiting_callers(self) -> Set[str]:
        return self.turns.callers | self._others_waiting

    def build_report(self) -> dict[str, Any]:
        """Return the report for other gateways: times are ages, because their clocks differ."""
        now = self._clock()
        since = now - self._protection_s
        last_used = self._uses.last_used
        return {
            "ages": compute_ages(last_used, now),
            "callers": {
                model: compute_ages(self._uses.find_callers(model, since), now)
                for model, used_at in last_used.items()
                if used_at > since
            },
            "waiting": list(self.turns.callers),
            "requests": self.admission.count_all_requests(),
            "demand": {"requests": self.count_own_demand()},
        }

    def apply_reports(self, reports: Iterable[Mapping[str, Any]]) -> None:
        now = self._clock()
        self._others_requests = {}
        self._others_demand = 0
        self._others_waiting = set()
        for report in reports:
            self._others_demand += int(sum(parse_numbers(report.get("demand")).values()))
            self._others_waiting |= parse_waiting(report)
            for model, age_s in parse_numbers(report.get("ages")).items():
                for caller, caller_age_s in parse_callers(report, model, age_s).items():
                    self.record_use_by_others(model, now - caller_age_s, caller)
            for model, count in parse_numbers(report.get("requests")).items():
                others = self._others_requests.get(model, 0)
                self._others_requests[model] = others + int(count)

    def record_use(self, model: str, caller: str) -> None:
        self._uses.record(model, caller, self._clock())

    def record_use_by_others(
        self, model: str, used_at: float, caller: str = UNKNOWN_CALLER
    ) -> None:
        self._others_uses.record(model, caller, used_at)

    def drop_unknown_models(self, has_model: Callable[[str], bool]) -> None:
        """Drop the times of models that no replica has, if there are many: clients can invent names.

        The last use stays, because the scaler reports it.
        """
        for uses in (self._uses, self._others_uses):
            uses.drop_unknown_models(has_model)

    def count_requests(self, model: str) -> int:
        """Return the number of requests that run or wait for a slot, on all gateways."""
        return self.admission.count_requests(model) + self._others_requests.get(model, 0)

    def count_demand(self) -> int:
        """Return the number of inferences that run or wait, on all gateways that share a state."""
        return self.count_own_demand() + self._others_demand

    def count_own_demand(self) -> int:
        return self.admission.running + self.admission.waiting + self.held_requests

    @property
    def idle_s(self) -> float:
        """Return the time since the last request ended on any gateway; infinite before the first."""
        times = (*self._uses.last_used.values(), *self._others_uses.last_used.values())
        return self._clock() - max(times, default=-inf)


def compute_ages(times: Mapping[str, float], now: float) -> dict[str, float]:
    return {name: round(now - at, 3) for name, at in times.items()}


def parse_callers(report: Mapping[str, Any], model: str, age_s: float) -> dict[str, float]:
    """Return the age of each caller's last use by a report, which names only those that used it lately."""
    callers = report.get("callers")
    known = parse_numbers(callers.get(model)) if isinstance(callers, dict) else {}
    return known or {UNKNOWN_CALLER: age_s}


def parse_waiting(report: Mapping[str, Any]) -> set[str]:
    waiting = report.get("waiting")
    names = waiting if isinstance(waiting, list) else []
    return {name for name in names if isinstance(name, str)}


def parse_numbers(document: Any) -> dict[str, float]:
    """Return the numbers of a report by name, without anything else: others can write to the state."""
    if not isinstance(document, dict):
        return {}
    return {
        name: value
        for name, value in document.items()
        if isinstance(value, (int, float)) and 0 <= value < MAX_REPORTED_NUMBER
    }
