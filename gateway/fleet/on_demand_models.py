"""The models that are loaded on demand: those of the models file, and those that match a pattern."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf
from typing import Any, Final

from gateway.admission import AdmissionQueue
from gateway.errors import GatewayError, Unavailable
from gateway.fleet.on_demand_plan import CopyLimits
from gateway.fleet.shared_state import SharedState
from gateway.messages import join_names, quote_text

MAX_REPORTED_NUMBER: Final = 1e12
# With more times of use than this, those of models that do not exist are dropped.
MAX_USED_MODELS: Final = 1000


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

    def __init__(self, model: str, holders: Collection[str], *, has_hidden: bool) -> None:
        names = [quote_text(name) for name in holders]
        if has_hidden:
            names.append("models that this key cannot see")
        held = f"; its memory is held by {join_names(names)}" if names else ""
        super().__init__(f"no replica has room for model {quote_text(model)}{held}")


@dataclass(eq=False, repr=False)
class OnDemandModels:
    """The rules by which a model is loaded on demand and may be evicted."""

    _state: SharedState
    _patterns: tuple[str, ...]

    @property
    def is_enabled(self) -> bool:
        return bool(self._patterns or self._state.on_demand_models)

    def is_on_demand(self, model: str) -> bool:
        """Return whether requests load the model. The models file and the API take precedence."""
        if model in self._state.declared_models or model in self._state.desired_models:
            return False
        return self.matches(model)

    def matches(self, model: str) -> bool:
        """Return whether the models file or a pattern names the model as one to load on demand."""
        return model in self._state.on_demand_models or any(
            fnmatchcase(model, pattern) for pattern in self._patterns
        )

    def get_copy_limits(self, model: str) -> CopyLimits:
        entry = self._state.on_demand_models.get(model)
        return CopyLimits() if entry is None or entry.copies is None else entry.copies

    def get_load_parameters(self, model: str) -> dict[str, Any]:
        entry = self._state.on_demand_models.get(model)
        return {} if entry is None else entry.load_parameters


@dataclass(eq=False, repr=False)
class ModelUsage:
    """The last use of each model, and the requests in progress."""

    admission: AdmissionQueue
    _clock: Callable[[], float]

    def __post_init__(self) -> None:
        # The end of the last request, by the clock; the admission queue adds to it.
        self.last_used: dict[str, float] = {}
        self.admission.last_used = self.last_used
        self._started_at = self._clock()
        # The same of the other gateways, as they last reported.
        self._others_last_used: dict[str, float] = {}
        self._others_requests: dict[str, int] = {}
        self._others_demand = 0
        self.held_requests = 0  # that wait for a replica or a load

    def get_last_used(self, model: str) -> float:
        """Return the time of the last use; the start of this process for a model without any."""
        own = self.last_used.get(model, self._started_at)
        return max(own, self._others_last_used.get(model, own))

    def build_report(self) -> dict[str, Any]:
        """Return the report for other gateways: times are ages, because their clocks differ."""
        now = self._clock()
        ages = {model: round(now - at, 3) for model, at in self.last_used.items()}
        return {
            "ages": ages,
            "requests": self.admission.count_all_requests(),
            "demand": {"requests": self.count_own_demand()},
        }

    def read_reports(self, reports: Iterable[Mapping[str, Any]]) -> None:
        """Take over what other gateways reported."""
        now = self._clock()
        self._others_requests, self._others_demand = {}, 0
        for report in reports:
            self._others_demand += int(sum(parse_numbers(report.get("demand")).values()))
            for model, age_s in parse_numbers(report.get("ages")).items():
                self.record_use_by_others(model, now - age_s)
            for model, count in parse_numbers(report.get("requests")).items():
                others = self._others_requests.get(model, 0)
                self._others_requests[model] = others + int(count)

    def record_use(self, model: str) -> None:
        self.last_used[model] = self._clock()

    def record_use_by_others(self, model: str, used_at: float) -> None:
        self._others_last_used[model] = max(self._others_last_used.get(model, used_at), used_at)

    def drop_unknown_models(self, has_model: Callable[[str], bool]) -> None:
        """Drop the times of models that no replica has, if there are many: clients can invent names.

        The last use stays, because the scaler reports it.
        """
        for times in (self.last_used, self._others_last_used):
            if len(times) > MAX_USED_MODELS:
                latest = max(times, key=times.__getitem__)
                unknown = [name for name in times if name != latest and not has_model(name)]
                for name in unknown:
                    del times[name]

    def count_requests(self, model: str) -> int:
        """Return the number of requests that run or wait for a slot, on all gateways."""
        return self.admission.count_requests(model) + self._others_requests.get(model, 0)

    def count_demand(self) -> int:
        """Return the number of inferences that run or wait, on all gateways that share a state."""
        return self.count_own_demand() + self._others_demand

    def count_own_demand(self) -> int:
        """Return the number of inferences of this gateway that run or wait."""
        return self.admission.running + self.admission.waiting + self.held_requests

    @property
    def idle_s(self) -> float:
        """Return the time since the last request ended on any gateway; infinite before the first."""
        times = (*self.last_used.values(), *self._others_last_used.values())
        return self._clock() - max(times, default=-inf)


def parse_numbers(document: Any) -> dict[str, float]:
    """Return the numbers of a report by name, without anything else: others can write to the state."""
    if not isinstance(document, dict):
        return {}
    return {
        name: value
        for name, value in document.items()
        if isinstance(value, (int, float)) and 0 <= value < MAX_REPORTED_NUMBER
    }
