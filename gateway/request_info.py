"""What becomes known of a request while it is served: for its line in the log, and for the metrics."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gateway.keys import Caller
    from gateway.memory import MemoryCharge
    from gateway.tracing import Trace


@dataclass
class ManagementCall:
    """An administrative call, for the audit log: what it names, whether or not it exists."""

    model: str = ""
    parameters: tuple[str, ...] = ()  # the names of those that the body holds
    operation: str = ""  # that goes on after the answer


class RequestInfo:
    """Of one request. Model and version only when Triton knows them: they become label values."""

    __slots__ = (
        "attempts",
        "bytes_in",
        "bytes_out",
        "caller",
        "charge",
        "key",
        "management_call",
        "model",
        "replica",
        "request_id",
        "route",
        "timeout_s",
        "trace",
        "upstream_s",
        "version",
    )

    caller: Caller  # as soon as that is known; see gateway.auth

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.route = ""
        self.model = ""
        self.version = ""
        self.replica = ""  # that was asked last
        self.attempts = 0
        self.timeout_s = 0.0  # that the request may take
        self.upstream_s = 0.0  # waited for Triton
        self.bytes_in = 0  # of the request's body
        self.bytes_out = 0
        self.key = ""  # the name of the caller's key
        self.management_call: ManagementCall | None = None
        self.trace: Trace | None = None
        self.charge: MemoryCharge | None = None  # the memory that the request holds


current_request_info: ContextVar[RequestInfo | None] = ContextVar("request_info", default=None)
