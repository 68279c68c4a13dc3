"""The components that the application creates once and every request uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

from anyio import CapacityLimiter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway.access.auth import Authenticator
from gateway.access.quotas import CallerLimiter
from gateway.callers import Caller
from gateway.capacity.admission import AdmissionQueue, Slot
from gateway.capacity.decoding.executor import DecodeExecutor
from gateway.errors import Forbidden, GatewayError, MalformedRequest
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.index import Index
from gateway.fleet.inference import InferenceService
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.signatures import SignatureCache
from gateway.fleet.statistics import FleetStatistics
from gateway.http_client.connection import Headers
from gateway.memory import MemoryBudget, MemoryCharge, MemoryKind
from gateway.repository.load_parameters import UNLOAD_DEPENDENTS, check_load_parameters
from gateway.repository.maintenance import Maintenance
from gateway.repository.repository import Repository
from gateway.repository.resolver import ModelResolver
from gateway.settings import ModelUploads, Settings
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.refusals import RefusalLog
from gateway.telemetry.request_info import RequestInfo, RequestScope
from gateway.telemetry.tracing import Tracer
from gateway.tensors.payload import PayloadLimits
from gateway.tensors.schema import Schema
from gateway.tensors.signature import Signature

T = TypeVar("T")
# Each one occupies threads, which together would keep Python's global lock from the event loop.
MAX_METRICS_PAGES: Final = 4  # pages that are written at the same time
# A request that needs the signature only to count its rows waits no longer.
MAX_SIGNATURE_WAIT_S: Final = 1.0


class ModelDescriber:
    """Adds fields of a capability, which overrides some methods, to the descriptions of models."""

    # Schemas by the names of fields: of the list, of each model in it, and of the description of one model.
    list_fields: ClassVar[Mapping[str, Schema]] = {}
    listed_model_fields: ClassVar[Mapping[str, Schema]] = {}
    model_fields: ClassVar[Mapping[str, Schema]] = {}

    def describe_list(self, models: Iterable[str]) -> Mapping[str, Any]:
        return {}

    def complete_listed_model(
        self, services: Services, model: dict[str, Any], indexes: Mapping[str, Index]
    ) -> None:
        """Add fields to a model of the list, or change some."""

    def describe_model(self, services: Services, signature: Signature) -> Mapping[str, Any]:
        """Return fields of the description of a model, or of one of its versions."""
        return {}


@dataclass(frozen=True)
class Services:
    """The application's components, created once by its lifespan."""

    settings: Settings
    pool: ReplicaPool
    dispatcher: Dispatcher
    signatures: SignatureCache
    inference: InferenceService
    repository: Repository
    statistics: FleetStatistics
    decode_executor: DecodeExecutor
    admission: AdmissionQueue
    memory: MemoryBudget
    metrics: Metrics
    access: Authenticator
    resolver: ModelResolver
    limiter: CallerLimiter
    maintenance: Maintenance
    refusals: RefusalLog
    tracer: Tracer | None = None
    recorder: Recorder | None = None
    management_headers: Headers = field(default_factory=list)  # open Triton's own management API
    describers: list[ModelDescriber] = field(default_factory=list)
    # Counts of inferences that wait outside of the admission, and for which the fleet is needed.
    waiting_work: list[Callable[[], int]] = field(default_factory=list)
    _provided: dict[type, Any] = field(default_factory=dict)

    def provide(self, component: object) -> None:
        """Add a component of a capability, which `find` and `get` return by its class."""
        self._provided[type(component)] = component

    def find(self, kind: type[T]) -> T | None:
        return self._provided.get(kind)

    def get(self, kind: type[T]) -> T:
        component: T = self._provided[kind]
        return component

    def get_charge(self, info: RequestInfo, kind: MemoryKind = "body") -> MemoryCharge:
        charge = info.charge  # `GatewayMiddleware` releases it at the end of the request
        if charge is None:
            charge = info.charge = MemoryCharge(self.memory, kind)
        return charge

    def accepts_code(self, caller: Caller) -> bool:
        """Return whether the caller may upload configs and files with code, which can access every model."""
        return self.settings.accepted_uploads is ModelUploads.code and caller.can_see_all

    def record_model(self, info: RequestInfo, model: str, version: str = "") -> None:
        """Set the labels of the request's metrics; only models that exist become label values."""
        if self.pool.is_listed(model, version):
            info.model = model
            info.version = version

    @property
    def counts_rows(self) -> bool:
        return self.metrics.usage_listener is not None or bool(self.admission.batching_models)

    async def count_rows(self, slot: Slot, model: str, first_size: int) -> int:
        """Return the rows of an inference, and count them in its slot where they take places."""
        if slot.counts_rows:
            slot.weigh(first_size)
        return await self.measure_rows(model, first_size)

    async def measure_rows(self, model: str, first_size: int) -> int:
        """Return the rows of an inference by the first dimension of its first input, if usage is counted."""
        if first_size <= 1 or self.metrics.usage_listener is None:
            return 1
        signature = self.signatures.find_or_start_reading(model)
        if signature is None:
            reading = self.signatures.get_signature(model)
            try:
                signature = await asyncio.wait_for(reading, MAX_SIGNATURE_WAIT_S)
            except (GatewayError, asyncio.TimeoutError):
                return 1
        return min(first_size, max(signature.max_batch_size, 1))

    def accept_load_parameters(
        self, info: RequestInfo, model: str, parameters: Mapping[str, Any], *, can_upload: bool
    ) -> None:
        """Record a load or an unload, and check its parameters. Raises `Forbidden` or `MalformedRequest`."""
        self.record_model(info, model)
        if info.management_call is not None:
            info.management_call.record_parameters(parameters)
        check_load_parameters(parameters, can_upload=can_upload)
        caller = info.caller
        if parameters.get(UNLOAD_DEPENDENTS) and not caller.can_see_all:
            raise Forbidden(
                f"{UNLOAD_DEPENDENTS} requires access to all models; {caller.label} lacks it"
            )

    async def activate_model(self, model: str, version: str, timeout_s: float) -> float:
        """Wait until an on-demand model can be used; return the remaining seconds."""
        activator = self.pool.activator
        if activator is None or self.pool.has_cached_candidates(model, version):
            return timeout_s
        if self.dispatcher.continues_sequences(model, version):
            # A step of a running sequence goes to its replica; for any other request the dispatcher waits.
            return timeout_s
        return await activator.activate(model, timeout_s)

    @cached_property
    def large_body_turn(self) -> asyncio.Lock:
        """Held while a piece of a large body is checked on the event loop."""
        return asyncio.Lock()

    @cached_property
    def metrics_page_turns(self) -> asyncio.Semaphore:
        """Held while the replicas are scraped for a page and their pages are merged."""
        return asyncio.Semaphore(MAX_METRICS_PAGES)

    @cached_property
    def metrics_page_threads(self) -> CapacityLimiter:
        return CapacityLimiter(MAX_METRICS_PAGES)

    @cached_property
    def payload_limits(self) -> PayloadLimits:
        return PayloadLimits(
            max_bytes=self.settings.max_body_bytes,
            max_json_memory_bytes=self.decode_executor.max_process_bytes,
            max_image_pixels=self.settings.max_image_pixels,
            max_inferences=self.settings.max_request_inferences,
        )

    @cached_property
    def default_timeout_s(self) -> float:
        return self.settings.request_timeout_s

    def resolve_timeout_s(self, requested: str | None) -> float:
        """Return the request's timeout from its X-Request-Timeout header. Raises `MalformedRequest`."""
        if requested is None:
            return self.settings.request_timeout_s
        try:
            seconds = float(requested)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise MalformedRequest("X-Request-Timeout must be a positive number of seconds")
        return min(seconds, self.settings.max_request_timeout_s)


class RecordedBody(Protocol):
    """The body of a request or a response, which passes in pieces."""

    headers: Headers

    async def add(self, data: bytes, *, is_last: bool = True) -> None: ...


class Recording(Protocol):
    @property
    def request(self) -> RecordedBody: ...

    @property
    def response(self) -> RecordedBody: ...


class Recorder(Protocol):
    """Records requests and responses, over HTTP and gRPC."""

    def start(self, scope: RequestScope) -> Recording | None:
        """Return the recording of a request whose head has arrived; None if it is not recorded."""

    def end(self, scope: RequestScope, recording: Any, status: int) -> None:
        """End a request and its recording, which is what `start` returned."""


class InternalRequest(NamedTuple):
    """The services and the caller of a request that the gateway sends to itself."""

    services: Services
    caller: Caller


INTERNAL_REQUEST: Final = "internal_request"  # its key in the ASGI scope, which no client can set


class Deferral(Protocol):
    """Answers requests before their inference has run."""

    def matches(self, scope: Scope) -> bool:
        """Return whether the request is to be deferred, which its line and its headers decide."""

    async def handle(self, request: Request, services: Services) -> Response: ...

    def describe(self, document: dict[str, Any]) -> None:
        """Add its responses to the OpenAPI document."""
