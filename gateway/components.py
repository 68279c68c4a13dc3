"""The components of the application: built from the settings, run and closed in order."""

from __future__ import annotations

import asyncio
import gc
import ssl
import sys
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway import __version__
from gateway.access.auth import CORE_PATHS, Authenticator, PathRules
from gateway.access.keys import NO_RULES, KeysFile, RuleParsers
from gateway.access.quotas import CallerLimiter
from gateway.access.rate_limit import RateLimiter
from gateway.callers import Priority
from gateway.capacity.admission import AdmissionQueue
from gateway.capacity.decoding.executor import DecodeExecutor
from gateway.fleet.discovery import ReplicaSource, create_tls_context, parse_replica_source
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.inference import InferenceService
from gateway.fleet.model_limits import ModelLimits
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.signatures import SignatureCache
from gateway.fleet.statistics import FleetStatistics
from gateway.memory import (
    MAX_FREE_HEAP_BYTES,
    MemoryBudget,
    default_budget_bytes,
    find_max_pixels,
    limit_heap_growth,
    resident_bytes,
    return_free_memory,
)
from gateway.repository.collector import FleetCollector, StateCollector
from gateway.repository.maintenance import Maintenance
from gateway.repository.models_file import NO_KEYS, KeyParsers, ModelsFile
from gateway.repository.repository import Repository, build_repository
from gateway.repository.resolver import ModelResolver
from gateway.repository.state.desired import StateStore
from gateway.repository.state.store import open_configured_store
from gateway.services import Recorder, Services
from gateway.settings import Settings
from gateway.tasks import repeat
from gateway.telemetry import logs
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.refusals import RefusalLog
from gateway.telemetry.tracing import Tracer
from gateway.triton.restricted_api import read_restricted_api

METRICS_INTERVAL_S = 0.5
# Much memory that became free is returned at the next check, less after the last one. Checks wake a process.
BUSY_CHECK_PERIOD_S = 0.1
IDLE_CHECK_PERIOD_S = 1.0
TRIM_PERIOD_S = 4.0
MUCH_FREE_MEMORY_BYTES = 64 << 20
UNKNOWN_MODEL_LIMIT = 32  # concurrent inferences, until the gateway has read the config
THREAD_SWITCH_INTERVAL_S = 0.0005
LAG_SAMPLES = 20  # ten seconds, so that a scrape every ten seconds sees the maximum


def tune_interpreter() -> None:
    # Scanning the objects of the start would take 50 ms each time. Hardly any of them is garbage.
    gc.freeze()
    # The default threshold of 700 new objects is reached every few requests, whose objects have no cycles.
    gc.set_threshold(10_000, 20, 50)
    # A thread that runs Python code yields to the event loop after this time instead of 5 ms.
    sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
    limit_heap_growth()


def find_model_limit(settings: Settings) -> int:
    limit = settings.max_model_inflight
    if limit == "auto":
        return min(UNKNOWN_MODEL_LIMIT, settings.max_inflight)
    return limit or max(settings.max_inflight // 2, 1)


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


def open_admission(
    settings: Settings,
    fleet: FleetComponents,
    statistics: FleetStatistics,
    metrics: Metrics,
    stack: AsyncExitStack,
) -> AdmissionQueue:
    """Return the queue of inferences, whose limits of models follow Triton if they are `auto`."""
    admission = AdmissionQueue(
        settings.max_inflight,
        find_model_limit(settings),
        settings.max_queue,
        metrics=metrics,
        find_model_priority=partial(find_model_priority, fleet.pool, fleet.signatures),
    )
    if settings.max_model_inflight == "auto":
        limits = ModelLimits(
            admission,
            fleet.pool,
            statistics,
            fleet.signatures,
            default_limit=max(settings.max_inflight // 2, 1),
        )
        run_in_background(limits.run(), stack)
    return admission


@asynccontextmanager
async def run_services(
    settings: Settings,
    components: AppComponents,
    paths: PathRules = CORE_PATHS,
    recorder: Recorder | None = None,
) -> AsyncIterator[Services]:
    async with AsyncExitStack() as stack:
        stack.callback(logs.flush)  # a worker is killed by its own signal right afterwards
        metrics = Metrics(counts_callers=settings.metrics_callers)
        fleet = await open_fleet(settings, components, metrics, stack)
        budget_bytes = settings.max_bytes_in_flight or default_budget_bytes()
        max_pixels = min(settings.max_pixels_in_flight, find_max_pixels(budget_bytes))
        decoders = DecodeExecutor(settings.decode_threads, max_pixels, metrics)
        stack.push_async_callback(decoders.close)
        restricted = read_restricted_api(settings)
        statistics = FleetStatistics(fleet.pool)
        admission = open_admission(settings, fleet, statistics, metrics, stack)
        memory = MemoryBudget(budget_bytes, metrics.shed)
        stack.callback(metrics.flush)
        authenticator = Authenticator(
            components.keys_file, settings.allowed_hosts, paths, local_admin=settings.local_admin
        )
        if components.keys_file is not None:
            fleet.repository.state.events.watch(components.keys_file, "keys file", "key")
        maintenance = Maintenance(fleet.pool, fleet.dispatcher, fleet.repository.state)
        for work in (
            update_metrics(metrics, admission, memory),
            trim_heaps(memory),
            authenticator.watch_keys_file(),
            maintenance.report_work(),
        ):
            run_in_background(work, stack)
        refusals = RefusalLog()
        stack.callback(refusals.close)
        if components.tracer is not None:
            stack.callback(components.tracer.close)
        tune_interpreter()
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
            maintenance=maintenance,
            refusals=refusals,
            tracer=components.tracer,
            recorder=recorder,
            management_headers=[] if restricted is None else restricted.headers,
        )
