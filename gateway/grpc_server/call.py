"""One gRPC call: its caller, deadline and message, and its line in the log and the metrics."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any, Final, NamedTuple, cast
from urllib.parse import unquote

import grpc

from gateway.auth import ANONYMOUS, UNAUTHENTICATED, authorize, authorize_all_models
from gateway.errors import Forbidden, MalformedRequest, RequestTooSlow, Unavailable, UnknownModel
from gateway.fleet.resolver import ModelTarget
from gateway.grpc_server.status import CallStatus, describe_failure
from gateway.http_client.connection import Headers
from gateway.keys import Right
from gateway.memory import MemoryBudgetExceeded
from gateway.metrics import CLIENT_CLOSED_REQUEST
from gateway.passthrough.headers import NOT_FORWARDED
from gateway.request_info import RequestInfo, current_request_info
from gateway.routes.middleware import end_trace, log_request
from gateway.services import Services
from gateway.tracing import choose_request_id
from gateway.triton.grpc.byte_channel import Metadata
from gateway.triton.restricted_api import GRPC_KEY_PREFIX

GRPC_ROUTE: Final = "grpc"  # the label of `gateway_requests_in_flight`
OK_STATUS: Final = 200
UNCOUNTED_STATUSES: Final = (OK_STATUS, CLIENT_CLOSED_REQUEST)
# Larger messages count against the memory budget, like the bodies of /v2.
MIN_CHARGED_BYTES: Final = 64 << 10
# A message that takes longer to arrive is large or slow, and may use the memory budget.
FAST_RECEIVE_S: Final = 0.1
# With `triton_grpc_error`, tritonserver 2.51 crashes when it ends a stream with an error.
DROPPED_METADATA: Final = frozenset(name.decode() for name in NOT_FORWARDED) | {
    "user-agent",
    "content-type",
    "triton_grpc_error",
}
DROPPED_PREFIXES: Final = ("grpc-", GRPC_KEY_PREFIX)


class ShuttingDown(Unavailable):
    message = "the gateway is shutting down; open the stream again"


class ReceiveSlots:
    """Limits how many messages that are large or slow are received at the same time.

    gRPC tells the size of a message only when it is complete, so each of them counts as one of maximum size.
    """

    def __init__(self, budget_bytes: int, message_bytes: int) -> None:
        self.free = max(budget_bytes // message_bytes, 1)

    def try_acquire(self) -> bool:
        if not self.free:
            return False
        self.free -= 1
        return True

    def release(self) -> None:
        self.free += 1


class MethodAccess(NamedTuple):
    """The access rules of a method, and how its calls are counted."""

    route: str  # in the log and the metrics
    is_public: bool = False  # needs no key
    is_unlimited: bool = False  # does not count against the rate of the key
    is_container: bool = False  # a stream: its requests are counted, itself only if it fails
    http_method: str = "POST"  # of the same call over HTTP; a read takes no turn of a split


class CallEnvironment(NamedTuple):
    """The objects that all calls share."""

    services: Services
    receive_slots: ReceiveSlots
    stopping: asyncio.Event  # set when the server stops accepting calls


class IncomingCall:
    """One call of a client, or one request of a stream."""

    def __init__(
        self, environment: CallEnvironment, context: Any, path: str, access: MethodAccess
    ) -> None:
        self.environment = environment
        self.services = services = environment.services
        self.context = context
        self.metadata: Metadata = context.invocation_metadata() or ()
        self._access = access
        self._started_at = perf_counter()
        self._status = CLIENT_CLOSED_REQUEST
        headers = encode_headers(self.metadata)
        self.info = info = RequestInfo(choose_request_id(headers))
        info.route = access.route
        current_request_info.set(info)
        # The keys of an ASGI scope that authentication, authorization, the log and traces read.
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": access.http_method,
            "path": path,
            "scheme": "grpc",
            "http_version": "2",
            "headers": headers,
            "request_id": info.request_id,
            "request_info": info,
            "client": parse_peer(context.peer()),
        }
        if services.tracer is not None and not access.is_public:
            info.trace = services.tracer.start_trace(access.http_method, headers)
        services.metrics.in_flight[GRPC_ROUTE] += 1

    # The caller, and what it may do.

    async def identify_caller(self) -> None:
        """Raises `Unauthenticated`, `Forbidden` or `RateLimitExceeded`."""
        info, services = self.info, self.services
        if self._access.is_public:
            info.caller = UNAUTHENTICATED
            return
        info.caller = caller = services.access.authenticate(self.scope)
        info.key = caller.name
        if caller.requests_per_second is not None and not self._access.is_unlimited:
            await services.rate_limiter.count_request(caller.name, caller.requests_per_second)

    def resolve(
        self,
        right: Right,
        model: str,
        version: str = "",
        not_found_error: type[UnknownModel] = UnknownModel,
    ) -> ModelTarget:
        """Raises `Forbidden`, or `not_found_error` for a model that the caller cannot see."""
        self._check_administrator(right)
        if not model:
            raise MalformedRequest("the request names no model")
        resolve = self.services.resolver.resolve
        return resolve(self.scope, right, model, version, not_found_error)

    def authorize(self, right: Right) -> None:
        """Raises `Forbidden`."""
        self._check_administrator(right)
        authorize(self.scope, right)

    def authorize_all_models(self, right: Right) -> None:
        self._check_administrator(right)
        authorize_all_models(self.scope, right)

    def _check_administrator(self, right: Right) -> None:
        # A proxy on this machine can forward gRPC without leaving a trace in the call.
        if right is Right.manage and self.info.caller is ANONYMOUS:
            raise Forbidden(
                "administration over gRPC requires an admin key (GATEWAY_KEYS_FILE); without keys, local "
                "programs administer over HTTP"
            )

    # The request.

    def find_timeout_s(self) -> float:
        """Return the timeout: the call's own deadline, and X-Request-Timeout or the default."""
        requested = find_metadata(self.metadata, "x-request-timeout")
        services = self.services
        timeout_s = (
            services.default_timeout_s
            if requested is None
            else services.resolve_timeout_s(requested)
        )
        remaining_s: float | None = self.context.time_remaining()
        if remaining_s is not None:
            limit_s = services.settings.max_request_timeout_s if requested is None else timeout_s
            timeout_s = min(max(remaining_s, 0.0), limit_s)
        self.info.timeout_s = timeout_s
        return timeout_s

    async def read_message(self, timeout_s: float) -> bytes:
        """Return the request. Raises `RequestTooSlow`, or `MemoryBudgetExceeded` if too many are received."""
        reader = MessageReader(self.context, self.environment.receive_slots, timeout_s)
        try:
            message = await reader.read()
        except MemoryBudgetExceeded:
            self.services.metrics.shed.labels("memory").inc()
            raise
        if message is grpc.aio.EOF:
            raise MalformedRequest("the call ended without a request")
        self.count_message(cast(bytes, message))
        return cast(bytes, message)

    def count_message(self, message: bytes) -> None:
        """Raises `MemoryBudgetExceeded`."""
        self.info.bytes_in = size = len(message)
        if size > MIN_CHARGED_BYTES:
            self.services.get_charge(self.info).add(size)

    def select_metadata(self) -> Metadata:
        """Return the metadata for Triton, which can turn it into parameters of the request."""
        return tuple(pair for pair in self.metadata if is_forwarded(pair[0]))

    # The end.

    def succeed(self, response: bytes) -> None:
        if self._status == CLIENT_CLOSED_REQUEST:  # a stream may have failed before
            self._status = OK_STATUS
        self.info.bytes_out += len(response)

    def fail(self, exc: Exception) -> CallStatus:
        status = describe_failure(exc, self.info.request_id)
        self._status = status.http_status
        return status

    def end(self) -> None:
        info, metrics = self.info, self.services.metrics
        if info.charge is not None:
            info.charge.release()
        metrics.in_flight[GRPC_ROUTE] -= 1
        if self._access.is_container and self._status in UNCOUNTED_STATUSES:
            return
        duration_s = perf_counter() - self._started_at
        metrics.observe(info, self._status, duration_s)
        log_request(self.scope, info, self._status, duration_s)
        if info.trace is not None:
            end_trace(info.trace, self.scope, info, self._status)


class MessageReader:
    """Receives one message. A timer, and no task of its own, ends what takes too long."""

    def __init__(self, context: Any, slots: ReceiveSlots, timeout_s: float) -> None:
        self._context = context
        self._slots = slots
        self._timeout_s = timeout_s
        self._has_slot = False
        self._failure: Exception | None = None
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def read(self) -> Any:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(loop)
        self._timer = loop.call_later(min(FAST_RECEIVE_S, self._timeout_s), self._take_slot)
        try:
            return await self._context.read()
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            raise self._failure from None
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._has_slot:
                self._slots.release()

    def _take_slot(self) -> None:
        if not self._slots.try_acquire():
            self._stop(MemoryBudgetExceeded())
            return
        self._has_slot = True
        remaining_s = max(self._timeout_s - FAST_RECEIVE_S, 0)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(remaining_s, self._stop, RequestTooSlow())

    def _stop(self, failure: Exception) -> None:
        self._failure = failure
        if self._task is not None:
            self._task.cancel()


def encode_headers(metadata: Metadata) -> Headers:
    """Return the metadata as headers, without the authority, which gRPC does not report."""
    return [
        (name.encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in metadata
    ]


def find_metadata(metadata: Metadata, name: str) -> str | None:
    for key, value in metadata:
        if key == name and isinstance(value, str):
            return value
    return None


def is_forwarded(name: str) -> bool:
    return name not in DROPPED_METADATA and not name.startswith(DROPPED_PREFIXES)


def parse_peer(peer: str) -> tuple[str, int] | None:
    """Return the address of a peer such as `ipv4:127.0.0.1:4711` or `ipv6:%5B::1%5D:4711`."""
    family, _, address = peer.partition(":")
    host, _, port = address.rpartition(":")
    if family not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return unquote(host).strip("[]"), int(port)
