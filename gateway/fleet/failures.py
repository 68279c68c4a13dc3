"""The failures of attempts as a table: what an error says of its request and of the replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from gateway.errors import (
    BadUpstream,
    DeadlinePassed,
    GatewayError,
    ModelFault,
    ModelNotReady,
    Unavailable,
    UnknownModel,
)
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.replica import Replica
from gateway.http_client.connection import RequestNotSent
from gateway.triton.error_mapping import ReplicaStopping
from gateway.triton.grpc.byte_channel import GrpcUnreachable
from gateway.triton.request_target import RequestTarget

UNSENT: Final = "refused"
# The failures of attempts after which the model has not run.
NOT_RUN_ERRORS: Final = (RequestNotSent, ModelNotReady, UnknownModel, ReplicaStopping)
Translate = Callable[[ReplicaPool, Replica, RequestTarget, GatewayError], GatewayError]


class Progress(Enum):
    """How far a request came on a replica, which decides whether another one may get it."""

    NOT_SENT = auto()
    NOT_RUN = auto()  # its body was sent
    UNKNOWN = auto()  # the model may have run
    RUN = auto()


class Blame(Enum):
    """The failure share of the replica in which a failure counts."""

    NONE = auto()
    TRANSPORT = auto()
    MODEL = auto()


@dataclass(frozen=True)
class FailureRule:
    """A row of the table. `translate` builds the error for the client, if it is another one."""

    kinds: tuple[type[GatewayError], ...]
    outcome: str  # in the metrics; empty if it is none of the replica
    progress: Progress
    blame: Blame
    is_index_outdated: bool = False  # the replica contradicts its index
    translate: Translate | None = None


def build_missing_error(
    pool: ReplicaPool, replica: Replica, target: RequestTarget, failure: GatewayError
) -> GatewayError:
    """Return the error of a model that the replica does not have; its message does not tell which.

    A model that is in the repository is not ready, and one whose files are removed is unknown.
    """
    model = target.model
    version = target.version
    is_listed = pool.is_listed(model)
    if isinstance(failure, UnknownModel):
        is_known = is_listed and (not pool.is_loaded(model) or pool.is_listed(model, version))
    else:
        # Triton remembers the models that it has unloaded or failed to load, and its index does not.
        is_known = is_listed or target.is_health_check or not replica.is_index_valid
    missing = ModelNotReady if is_known else target.not_found_error
    error = missing(model, version)
    error.is_from_triton = True
    return error


def build_deadline_error(
    pool: ReplicaPool, replica: Replica, target: RequestTarget, failure: GatewayError
) -> GatewayError:
    """Return the error with the timeout of the request instead of the timeout of the attempt."""
    error = DeadlinePassed(target.timeout_s)
    error.work_ended = failure.work_ended if isinstance(failure, DeadlinePassed) else None
    return error


# The first row of a kind counts.
TRANSPORT_FAILURES: Final = (
    # It says nothing of the replica's HTTP.
    FailureRule((GrpcUnreachable,), UNSENT, Progress.NOT_SENT, Blame.NONE),
    FailureRule((RequestNotSent,), UNSENT, Progress.NOT_SENT, Blame.TRANSPORT),
    FailureRule((BadUpstream,), "bad_answer", Progress.UNKNOWN, Blame.TRANSPORT),
    # Probes tell whether the whole replica hangs.
    FailureRule(
        (DeadlinePassed,),
        "deadline",
        Progress.UNKNOWN,
        Blame.MODEL,
        translate=build_deadline_error,
    ),
    # The client caused it while its body was sent.
    FailureRule((GatewayError,), "", Progress.RUN, Blame.NONE),
)
TRITON_FAILURES: Final = (
    FailureRule(
        (ModelNotReady, UnknownModel),
        "answered",
        Progress.NOT_RUN,
        Blame.NONE,
        is_index_outdated=True,
        translate=build_missing_error,
    ),
    FailureRule((ReplicaStopping,), "failed", Progress.NOT_RUN, Blame.MODEL),
    FailureRule((ModelFault, Unavailable, BadUpstream), "failed", Progress.RUN, Blame.MODEL),
    FailureRule((GatewayError,), "answered", Progress.RUN, Blame.NONE),
)


def find_failure_rule(error: GatewayError) -> FailureRule:
    rows = TRITON_FAILURES if error.is_from_triton else TRANSPORT_FAILURES
    return next(row for row in rows if isinstance(error, row.kinds))
