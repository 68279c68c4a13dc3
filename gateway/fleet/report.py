"""The outcomes of a load or an unload on every replica, and the error that sums them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.errors import BadUpstream, GatewayError, ModelControlModeConflict
from gateway.fleet.index import READY, UNAVAILABLE
from gateway.fleet.transports import TRANSPORT_ERRORS
from gateway.messages import quote_text
from gateway.triton.error_mapping import LoadFailed


@dataclass(frozen=True)
class Outcome:
    """The result of an operation on one replica; it succeeded if there is no error."""

    state: str
    error: GatewayError | None = None

    def to_dict(self) -> dict[str, str]:
        document = {"state": self.state}
        return document if self.error is None else {**document, "reason": self.error.detail}


@dataclass
class OperationReport:
    """A load or an unload on every replica; outcomes are added while it runs."""

    model: str
    is_load: bool
    replica_count: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def action(self) -> str:
        return "load" if self.is_load else "unload"

    @property
    def errors(self) -> dict[str, GatewayError]:
        return {at: each.error for at, each in self.outcomes.items() if each.error is not None}

    @property
    def control_mode_error(self) -> ModelControlModeConflict | None:
        errors = self.errors.values()
        return next((each for each in errors if isinstance(each, ModelControlModeConflict)), None)

    @property
    def is_refused(self) -> bool:
        """Return whether the operation failed on every replica, and retries are pointless."""
        errors = self.errors
        all_reached = not any(isinstance(error, TRANSPORT_ERRORS) for error in errors.values())
        is_final = all_reached or self.control_mode_error is not None
        return len(errors) == len(self.outcomes) and is_final

    def to_dict(self) -> dict[str, Any]:
        failed = [outcome.state for outcome in self.outcomes.values() if outcome.error is not None]
        state = failed[0] if failed else "PENDING"
        if not failed and 0 < len(self.outcomes) == self.replica_count:
            state = READY if self.is_load else UNAVAILABLE
        replicas = {at: outcome.to_dict() for at, outcome in sorted(self.outcomes.items())}
        return {"model": self.model, "state": state, "replicas": replicas}

    def build_error(self) -> GatewayError:
        errors = self.errors
        if self.is_refused:
            error = self.control_mode_error or self._combine_errors(list(errors.values()))
        else:
            error = PartialFailure(self)
        error.report = self.to_dict()
        return error

    def _combine_errors(self, errors: Sequence[GatewayError]) -> GatewayError:
        first = errors[0]
        if all(type(error) is type(first) for error in errors):
            return first
        failures = (error for error in errors if isinstance(error, LoadFailed))
        return next(failures, None) or LoadFailed(self.model, first.detail, self.action)


class PartialFailure(BadUpstream):
    code = "PARTLY_DONE"

    def __init__(self, report: OperationReport) -> None:
        errors, count = report.errors, len(report.outcomes)
        address, error = next(iter(errors.items()))
        super().__init__(
            f"model {quote_text(report.model)} is {report.action}ed on {count - len(errors)} of {count} "
            f"replicas; the gateway keeps retrying; error on {address}: {error.detail}"
        )
