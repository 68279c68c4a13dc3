"""The last uses of models and their requests in progress, on all gateways that share a state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from gateway.capacity.admission import AdmissionQueue

MAX_REPORTED_NUMBER: Final = 1e12
# From this number of used models on, the times of models that do not exist are dropped.
MAX_USED_MODELS: Final = 1000


class ModelUsage:
    """The last use of each model, and the requests that run or wait."""

    def __init__(self, admission: AdmissionQueue, clock: Callable[[], float]) -> None:
        self.admission = admission
        # By model: requests that wait for a replica or a load.
        self._held_requests: Counter[str] = Counter()
        self._clock = clock
        self._started_at = clock()
        self._last_used: dict[str, float] = {}  # the ends of requests
        # By the last reports of the other gateways.
        self._others_last_used: dict[str, float] = {}
        self._others_requests: Counter[str] = Counter()

    @contextmanager
    def hold(self, model: str) -> Iterator[None]:
        """Count a request that waits for a replica or for a load."""
        self._held_requests[model] += 1
        try:
            yield
        finally:
            self._held_requests[model] -= 1
            self._held_requests += Counter()  # drops what is zero

    @property
    def held_count(self) -> int:
        return self._held_requests.total()

    def was_used(self, model: str) -> bool:
        return model in self._last_used or model in self._others_last_used

    def record_use(self, model: str) -> None:
        self._last_used[model] = self._clock()

    def get_last_used(self, model: str) -> float:
        """Return the time of the last use; the start of this process for a model without any."""
        own = self._last_used.get(model, self._started_at)
        return max(own, self._others_last_used.get(model, own))

    def count_requests(self, model: str) -> int:
        """Return the number of requests that run or wait, on all gateways."""
        own = self.admission.count_requests(model) + self._held_requests[model]
        return own + self._others_requests[model]

    def count_demand(self) -> int:
        """Return the number of inferences that run or wait on this gateway."""
        return self.admission.running + self.admission.waiting + self.held_count

    def build_report(self) -> dict[str, Any]:
        """Return the report for other gateways: times are ages, because their clocks differ."""
        now = self._clock()
        ages = {name: round(now - at, 3) for name, at in self._last_used.items()}
        requests = Counter(self.admission.count_all_requests()) + self._held_requests
        return {"ages": ages, "requests": requests}

    def apply_reports(self, reports: Iterable[Mapping[str, Any]]) -> None:
        now = self._clock()
        self._others_requests.clear()
        for report in reports:
            for model, age_s in parse_numbers(report.get("ages")).items():
                known = self._others_last_used.get(model, now - age_s)
                self._others_last_used[model] = max(known, now - age_s)
            for model, count in parse_numbers(report.get("requests")).items():
                self._others_requests[model] += int(count)

    def drop_unknown_models(self, has_model: Callable[[str], bool]) -> None:
        """Drop the times of models that no replica has, if there are many: clients can invent names."""
        for times in (self._last_used, self._others_last_used):
            if len(times) > MAX_USED_MODELS:
                for name in [name for name in times if not has_model(name)]:
                    del times[name]


def parse_numbers(document: Any) -> dict[str, float]:
    """Return the numbers of a report by name, without anything else: others can write to the state."""
    if not isinstance(document, dict):
        return {}
    return {
        name: value
        for name, value in document.items()
        if isinstance(value, (int, float)) and 0 <= value < MAX_REPORTED_NUMBER
    }
