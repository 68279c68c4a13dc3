"""Facts about a request, collected while it is served, for the log and the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any, Final, Protocol, TypedDict, TypeVar

from gateway.callers import Caller, Priority
from gateway.memory import MemoryCharge
from gateway.telemetry.tracing import Trace

T = TypeVar("T")
ScopeT = TypeVar("ScopeT", bound=Mapping[str, Any])
HEADER_FACTS: Final = "header_facts"  # key in the ASGI scope of a request with a repeated header
MAX_RECORDED_PARAMETERS: Final = 16
MAX_PARAMETER_CHARS: Final = 128
CLIENT_CLOSED_REQUEST: Final = 499  # the status of a request whose client left before the response


class ReplicaOutcome(Protocol):
    """The result of a change on one replica."""

    def to_dict(self) -> Mapping[str, str]: ...


@dataclass
class ManagementCall:
    """An administrative call, which becomes an event; its model may not exist."""

    model: str = ""
    client: str = ""  # the address of the client
    action: str = ""
    replica: str = ""  # the replica that is cordoned, uncordoned or drained
    parameters: tuple[str, ...] = ()  # the names of the parameters in the body
    operation: str = ""  # continues after the response
    version: str = ""  # the version that is uploaded or removed
    sha256: str = ""  # checksum of the uploaded file
    label: str = ""  # a version label
    changes: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # subject → before, after
    outcomes: Mapping[str, ReplicaOutcome] = field(default_factory=dict)  # replica → outcome
    started_at: float = field(default_factory=perf_counter)

    def record_parameters(self, names: Iterable[str]) -> None:
        """Record the names of the parameters, cut so that the line of the audit log stays short."""
        names = islice(names, MAX_RECORDED_PARAMETERS)
        self.parameters = tuple(name[:MAX_PARAMETER_CHARS] for name in names)

    def record_change(self, subject: str, before: Any, after: Any) -> None:
        """Record a change; one that was reverted leaves nothing."""
        first, _ = self.changes.pop(subject, (before, None))
        if first != after:
            self.changes[subject] = (first, after)


@dataclass(slots=True)
class Reservation:
    """The part of the limits of its caller that a request has taken."""

    caller: str
    is_inflight: bool = False  # it counts among the requests in progress
    periods: dict[str, int] = field(
        default_factory=dict
    )  # counted requests, by the period of a quota


@dataclass(slots=True)
class RequestInfo:
    """The facts about one request. Model and version are set only if they exist: they become label values."""

    request_id: str
    route: str = ""
    status: int = CLIENT_CLOSED_REQUEST  # until the response starts
    model: str = ""
    version: str = ""
    replica: str = ""  # address of the replica of the last attempt
    attempts: int = 0
    unsent_attempts: int = 0  # those that did not reach the replica
    timeout_s: float = 0.0  # the timeout of the request
    upstream_s: float = 0.0  # time spent waiting for Triton
    # The seconds spent in the other phases (`PHASES` of the metrics).
    phases: dict[str, float] | None = None
    bytes_in: int = 0  # length of the request body
    bytes_out: int = 0  # length of the response body
    key: str = ""  # the name of the caller's key, or of the rule for its token or certificate
    subject: str = ""  # whom the token or certificate names
    subject_id: str = (
        ""  # a hash of the subject and its issuer; empty if the token has no textual subject
    )
    opens_window: bool = False  # it was the first request in the window of the key's rate
    reservation: Reservation | None = None  # what the limits of its caller count
    caller_name: str = ""  # the name of the key, or without keys the client's network
    # The error response.
    error_code: str = ""
    error_reason: str = ""
    wanted_priority: Priority | None = None  # a request may ask for a lower one than its caller's
    management_call: ManagementCall | None = None
    trace: Trace | None = None
    charge: MemoryCharge | None = None  # the memory that the request holds
    caller: Caller = field(init=False, repr=False)  # set by the authentication

    @property
    def is_sent(self) -> bool:
        return self.attempts > self.unsent_attempts

    def add_phase(self, phase: str, seconds: float) -> None:
        phases = self.phases = self.phases or {}
        phases[phase] = phases.get(phase, 0.0) + seconds

    def keep_charge_until(self, end: asyncio.Task[Any]) -> None:
        """Keep the memory charged after the request, until a task ends that still has its message."""
        charge = self.charge
        if charge is not None and not end.done():
            self.charge = None
            end.add_done_callback(lambda _: charge.release())


class RequestScope(TypedDict):
    """The part of an ASGI scope that authentication, rights, labels, the log and traces read.

    The middleware completes the scope of an HTTP request, which has more; gRPC builds one of each call.
    """

    method: str
    path: str
    raw_path: bytes  # as it was sent
    scheme: str
    http_version: str
    headers: list[tuple[bytes, bytes]]
    client: tuple[str, int] | None
    server: tuple[str, int] | None  # None over gRPC, which never is local administration
    # Of the client's certificate, which is verified: pairs of URI, DNS or email and the name.
    certificate_names: tuple[tuple[str, str], ...]
    # By `time.time`; None without a certificate, and infinite if it is not known (gRPC).
    certificate_expires_at: float | None
    request_id: str
    request_info: RequestInfo


def read_head(scope: ScopeT, read: Callable[[ScopeT], T]) -> T:
    """Return `read(scope)`, which depends on the request line and the headers; read a repeated head once.

    The requests with that head share the result, which must not be changed.
    """
    facts: dict[Any, T] | None = scope.get(HEADER_FACTS)
    if facts is None:
        return read(scope)
    if read not in facts:
        facts[read] = read(scope)
    return facts[read]


current_request_info: ContextVar[RequestInfo | None] = ContextVar("request_info", default=None)


def find_management_call() -> ManagementCall | None:
    """Return the administrative call of the current request, or of a task that it started."""
    info = current_request_info.get()
    return None if info is None else info.management_call


def name_action(action: str) -> None:
    """Name the action of the current call, unless a larger one includes it."""
    call = find_management_call()
    if call is not None:
        call.action = call.action or action


def record_change(subject: str, before: Any, after: Any) -> None:
    """Record a change of the state by the current call. Values are JSON, and None is nothing."""
    call = find_management_call()
    if call is not None:
        call.record_change(subject, before, after)


@contextmanager
def measure_upstream_time() -> Iterator[None]:
    """Count the upstream time of parallel requests once, not once per request."""
    info = current_request_info.get()
    started_at = perf_counter()
    before_s = info.upstream_s if info is not None else 0.0
    try:
        yield
    finally:
        if info is not None:
            info.upstream_s = before_s + perf_counter() - started_at


@contextmanager
def measure_phase(phase: str) -> Iterator[None]:
    info = current_request_info.get()
    started_at = perf_counter()
    try:
        yield
    finally:
        if info is not None:
            info.add_phase(phase, perf_counter() - started_at)
