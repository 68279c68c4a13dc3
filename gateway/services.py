"""The components that the application creates once and every request uses.

They are built from the settings, and opened and closed in order. Capabilities add components of their own.
"""

from __future__ import annotations

import asyncio
import gc
import ssl
import sys
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

from anyio import CapacityLimiter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from gateway import __version__
from gateway.access.auth import CORE_PATHS, Authenticator, PathRules
from gateway.access.keys import NO_RULES, KeysFile, RuleParsers
from gateway.access.limits import CallerLimiter, RateLimiter
from gateway.callers import Caller, Priority
from gateway.capacity.admission import AdmissionQueue
from gateway.capacity.decoding import DecodeExecutor
from gateway.config.settings import ModelUploads, Settings
from gateway.errors import Forbidden, MalformedRequest
from gateway.fleet.discovery import ReplicaSource, create_tls_context, parse_replica_source
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.index import Index
from gateway.fleet.inference import InferenceService
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.signatures import SignatureCache
from gateway.fleet.statistics import FleetStatistics
from gateway.http_client.response import Headers
from gateway.memory import (
    MAX_FREE_HEAP_BYTES,
    MemoryBudget,
    MemoryCharge,
    MemoryKind,
    default_budget_bytes,
    limit_heap_growth,
    resident_bytes,
    return_free_memory,
)
from gateway.repository.collector import FleetCollector, StateCollector
from gateway.repository.load_parameters import UNLOAD_DEPENDENTS, check_load_parameters
from gateway.repository.maintenance import Maintenance
from gateway.repository.models_file import NO_KEYS, KeyParsers, ModelsFile
from gateway.repository.repository import Repository, build_repository
from gateway.repository.resolver import ModelResolver
from gateway.repository.state.places import open_configured_store
from gateway.repository.state.store import StateStore
from gateway.tasks import repeat
from gateway.telemetry import logs
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.recording import Recorder
from gateway.telemetry.refusals import RefusalLog
from gateway.telemetry.request_info import RequestInfo
from gateway.telemetry.tracing import Tracer
from gateway.tensors.outputs import InferResult
from gateway.tensors.payload import PayloadLimits
from gateway.tensors.signature import Signature
from gateway.triton.inference import InferRequest
from gateway.triton.restricted_api import read_restricted_api

T = TypeVar("T")
# Each one occupies threads, which together would keep Python's global lock from the event loop.
MAX_METRICS_PAGES: Final = 4  # pages that are written at the same time
# A request that needs the signature only to count its rows waits no longer.
METRICS_INTERVAL_S = 0.5
# Much memory that became free is returned at the next check, less after the last one. Checks wake a process.
BUSY_CHECK_PERIOD_S = 0.1
IDLE_CHECK_PERIOD_S = 1.0
TRIM_PERIOD_S = 4.0
MUCH_FREE_MEMORY_BYTES = 64 << 20
THREAD_SWITCH_INTERVAL_S = 0.0005
LAG_SAMPLES = 20  # ten seconds, so that a scrape every ten seconds sees the maximum


class ModelDescriber:
    """Adds fields of a capability, which overrides some methods, to the descriptions of models."""

    # Schemas by the names of fields: of the list, of each model in it, and of the description of one model.
    list_fields: ClassVar[Mapping[str, dict[str, Any]]] = {}
    listed_model_fields: ClassVar[Mapping[str, dict[str, Any]]] = {}
    model_fields: ClassVar[Mapping[str, dict[str, Any]]] = {}

    def describe_list(self, models: Iterable[str]) -> Mapping[str, Any]:
        return {}

    def complete_listed_model(
        self, services: Services, model: dict[str, Any], indexes: Mapping[str, Index]
    ) -> None:
        """Add fields to a model of the list, or change some."""

    def describe_model(self, services: Services, signature: Signature) -> Mapping[str, Any]:
        """Return fields of the description of a model, or of one of its versions."""
        return {}


class Inference(Protocol):
    """A place where inferences run."""

    async def infer(self, request: InferRequest) -> InferResult: ...


class InternalRequest(NamedTuple):
    """The services and the caller of a request that the gateway sends to itself, and where it runs."""

    services: Services
    caller: Caller
    run: Inference | None = None  # None: on the fleet


INTERNAL_REQUEST: Final = "internal_request"  # its key in the ASGI scope, which no client can set


class Deferral(Protocol):
    """Answers requests before their inference has run."""

    def matches(self, scope: Scope) -> bool:
        """Return whether the request is to be deferred, which its line and its headers decide."""

    async def handle(self, request: Request, services: Services) -> Response: ...

    def describe(self, document: dict[str, Any]) -> None:
        """Add its responses to the OpenAPI document."""


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
    management_headers: Headers = field(default_factory=list)  # open Triton's own management API
    describers: list[ModelDescriber] = field(default_factory=list)
    recorders: list[Recorder] = field(default_factory=list)
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
        return self.settings.model_uploads is ModelUploads.code and caller.can_see_all

    def record_model(self, info: RequestInfo, model: str, version: str = "") -> None:
        """Set the labels of the request's metrics; only models that exist become label values."""
        if self.pool.is_listed(model, version):
            info.model = model
            info.version = version

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


def tune_interpreter() -> None:
    # Scanning the objects of the start would take 50 ms each time. Hardly any of them is garbage.
    gc.freeze()
    # The default threshold of 700 new objects is reached every few requests, whose objects have no cycles.
    gc.set_threshold(10_000, 20, 50)
    # A thread that runs Python code yields to the event loop after this time instead of 5 ms.
    sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
    limit_heap_growth()


def find_model_priority(
    pool: ReplicaPool, signatures: SignatureCache, model: str
) -> Priority | None:
    """Return the priority in the config of a model; None until it was read."""
    signature = signatures.find_or_start_reading(model) if pool.is_listed(model) else None
    return None if signature is None else signature.priority


async def update_metrics(metrics: Metrics, admission: AdmissionQueue, memory: MemoryBudget) -> None:
    """Measure the event loop's lag, and flush the metrics that other workers serve, until cancelled."""
    loop = asyncio.get_running_loop()
    lags: deque[float] = deque(maxlen=LAG_SAMPLES)

    async def update() -> None:
        due = loop.time() + METRICS_INTERVAL_S
        await asyncio.sleep(METRICS_INTERVAL_S)
        lags.append(max(loop.time() - due, 0.0))
        metrics.loop_lag.set(max(lags))
        metrics.waiting.set(admission.waiting)
        for priority in Priority:
            metrics.queue_length.labels(priority.name).set(admission.queue.count(priority))
        for kind, size in memory.bytes_by_kind.items():
            metrics.request_memory.labels(kind).set(size)
        connections = metrics.open_connections
        metrics.limits.labels("connections").set(connections.count / connections.maximum)
        metrics.limits.labels("inferences").set(admission.running_ratio)
        metrics.limits.labels("memory").set(memory.used_ratio)
        metrics.limits.labels("queue").set(admission.waiting_ratio)
        metrics.update_dropped_lines(logs.count_dropped_lines())
        metrics.flush()

    await repeat("metrics", update)


async def trim_heaps(memory: MemoryBudget) -> None:
    """Return free memory to the system when the budget shrank or the process has grown, until cancelled."""
    loop = asyncio.get_running_loop()
    trimmed_bytes = resident_bytes()
    memory.update_excess(trimmed_bytes)

    async def trim() -> None:
        nonlocal trimmed_bytes
        end = loop.time() + TRIM_PERIOD_S
        is_due = False
        while not is_due and loop.time() < end:
            is_busy = memory.used_bytes or memory.excess_bytes
            await asyncio.sleep(BUSY_CHECK_PERIOD_S if is_busy else IDLE_CHECK_PERIOD_S)
            now_bytes = resident_bytes()
            memory.update_excess(now_bytes)
            trimmed_bytes = min(trimmed_bytes, now_bytes)
            has_grown = now_bytes - trimmed_bytes > MUCH_FREE_MEMORY_BYTES
            is_due = has_grown or memory.has_shrunk(MUCH_FREE_MEMORY_BYTES)
        if is_due or memory.has_shrunk(MAX_FREE_HEAP_BYTES) or memory.excess_bytes:
            # A failed request can be in a cycle with its error, and so its body.
            gc.collect(2 if has_grown else 1)
            await asyncio.to_thread(return_free_memory)
            trimmed_bytes = resident_bytes()

    await repeat("heaps", trim)


@dataclass(frozen=True)
class AppComponents:
    """The validated components that the settings name, before anything runs."""

    sources: Sequence[ReplicaSource]
    tls: ssl.SSLContext | None
    models_file: ModelsFile
    keys_file: KeysFile | None
    store: StateStore
    tracer: Tracer | None


def build_components(
    settings: Settings, model_keys: KeyParsers = NO_KEYS, rule_parsers: RuleParsers = NO_RULES
) -> AppComponents:
    """Build the components. Raises the `CommandError` of an invalid address, file or state."""
    sources = [parse_replica_source(url) for url in settings.triton_urls]
    tracer = None
    if settings.otlp_endpoint:
        tracer = Tracer(settings.otlp_endpoint, service="triton-gateway", version=__version__)
    return AppComponents(
        sources,
        create_tls_context(settings, sources),
        ModelsFile(settings.models_file, model_keys),
        keys_file=None
        if settings.keys_file is None
        else KeysFile(settings.keys_file, rule_parsers),
        store=open_configured_store(settings),
        tracer=tracer,
    )


@dataclass(frozen=True)
class FleetComponents:
    """The components that know the replicas and their models."""

    pool: ReplicaPool
    dispatcher: Dispatcher
    signatures: SignatureCache
    inference: InferenceService
    repository: Repository


async def open_fleet(
    settings: Settings, components: AppComponents, metrics: Metrics, stack: AsyncExitStack
) -> FleetComponents:
    pool = ReplicaPool(components.sources, settings, components.tls, metrics=metrics)
    await stack.enter_async_context(pool)
    dispatcher = Dispatcher(pool)
    signatures = SignatureCache(dispatcher)
    stack.callback(signatures.close)
    inference = InferenceService(dispatcher, signatures, settings.cancellable_models)
    repository = build_repository(
        pool,
        signatures,
        components.store,
        models_file=components.models_file,
        settings=settings,
    )
    await stack.enter_async_context(repository)
    metrics.collector_registry.register(FleetCollector(pool, repository))
    metrics.collector_registry.register(StateCollector(components.store))
    return FleetComponents(pool, dispatcher, signatures, inference=inference, repository=repository)


def run_in_background(work: Coroutine[Any, Any, object], stack: AsyncExitStack) -> None:
    stack.callback(asyncio.create_task(work).cancel)


@asynccontextmanager
async def run_services(
    settings: Settings,
    components: AppComponents,
    paths: PathRules = CORE_PATHS,
) -> AsyncIterator[Services]:
    async with AsyncExitStack() as stack:
        stack.callback(logs.flush)  # a worker is killed by its own signal right afterwards
        metrics = Metrics()
        fleet = await open_fleet(settings, components, metrics, stack)
        budget_bytes = settings.max_bytes_in_flight or default_budget_bytes()
        decoders = DecodeExecutor(metrics)
        stack.push_async_callback(decoders.close)
        warming = asyncio.create_task(decoders.start_process())
        restricted = read_restricted_api(settings)
        statistics = FleetStatistics(fleet.pool)
        admission = AdmissionQueue(
            settings.max_inflight,
            settings.max_model_inflight or max(settings.max_inflight // 2, 1),
            settings.max_queue,
            metrics=metrics,
            find_model_priority=partial(find_model_priority, fleet.pool, fleet.signatures),
        )
        memory = MemoryBudget(budget_bytes, metrics.shed)
        stack.callback(metrics.flush)
        authenticator = Authenticator(
            components.keys_file, settings.allowed_hosts, paths, local_admin=settings.local_admin
        )
        if components.keys_file is not None:
            fleet.repository.state.events.watch(components.keys_file, "keys file", "key")
        for work in (
            update_metrics(metrics, admission, memory),
            trim_heaps(memory),
            authenticator.watch_keys_file(),
        ):
            run_in_background(work, stack)
        refusals = RefusalLog()
        stack.callback(refusals.close)
        if components.tracer is not None:
            stack.callback(components.tracer.close)
        tune_interpreter()
        await warming  # so that no request waits for the first process
        yield Services(
            settings=settings,
            pool=fleet.pool,
            dispatcher=fleet.dispatcher,
            signatures=fleet.signatures,
            inference=fleet.inference,
            repository=fleet.repository,
            statistics=statistics,
            decode_executor=decoders,
            admission=admission,
            memory=memory,
            metrics=metrics,
            access=authenticator,
            resolver=ModelResolver(),
            limiter=CallerLimiter(
                RateLimiter(metrics, components.store.rate_windows), components.store.quotas
            ),
            maintenance=Maintenance(fleet.pool, fleet.dispatcher, fleet.repository.state),
            refusals=refusals,
            tracer=components.tracer,
            management_headers=[] if restricted is None else restricted.headers,
        )
