"""The outcomes of a load or an unload on every replica, and the error that sums them up."""

from __future__ import annotations

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
    is_in_progress: bool = False  # the replica still loads or unloads the model after the deadline

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
    is_retried: bool = True  # by the reconciler, on the replicas that failed

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
    def answers(self) -> list[GatewayError]:
        """The errors of replicas that were reached, and said why they do not do it."""
        return [each for each in self.errors.values() if not isinstance(each, TRANSPORT_ERRORS)]

    @property
    def is_refused(self) -> bool:
        """Return whether no replica has done it. What may still be done after the deadline is not refused."""
        outcomes = self.outcomes.values()
        is_in_progress = any(each.is_in_progress for each in outcomes) and not self.answers
        return len(self.errors) == len(outcomes) and not is_in_progress

    def to_dict(self) -> dict[str, Any]:
        failed = [outcome.state for outcome in self.outcomes.values() if outcome.error is not None]
        state = failed[0] if failed else "PENDING"
        if not failed and 0 < len(self.outcomes) == self.replica_count:
            state = READY if self.is_load else UNAVAILABLE
        replicas = {at: outcome.to_dict() for at, outcome in sorted(self.outcomes.items())}
        return {"model": self.model, "state": state, "replicas": replicas}

    def build_error(self) -> GatewayError:
        error = self._build_refusal() if self.is_refused else PartialFailure(self)
        error.report = self.to_dict()
        return error

    def _build_refusal(self) -> GatewayError:
        """Return the error that says most: of a replica that was reached, and about the model itself."""
        answers = self.answers
        if self.control_mode_error is not None:
            return self.control_mode_error
        if answers:
            return next((each for each in answers if isinstance(each, LoadFailed)), answers[0])
        return NothingDone(self)


class NothingDone(BadUpstream):
    """No replica could be reached. The error of the first gives the status and the code."""

    def __init__(self, report: OperationReport) -> None:
        address, first = next(iter(report.errors.items()))
        self.status, self.code = first.status, first.code  # type: ignore[misc]  # of the class elsewhere
        super().__init__(
            f"model {quote_text(report.model)} is {report.action}ed on 0 of {len(report.errors)} replicas, "
            f"and nothing is changed; error on {address}: {first.detail}",
            headers=dict(first.headers or {}),
        )


class PartialFailure(BadUpstream):
    code = "PARTLY_DONE"

    def __init__(self, report: OperationReport) -> None:
        errors, count = report.errors, len(report.outcomes)
        address, error = next(iter(errors.items()))
        next_step = "the gateway keeps retrying" if report.is_retried else "repeat the call"
        super().__init__(
            f"model {quote_text(report.model)} is {report.action}ed on {count - len(errors)} of {count} "
            f"replicas; {next_step}; error on {address}: {error.detail}"
        )
