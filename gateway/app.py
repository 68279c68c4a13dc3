"""The application factory: builds the services from the settings and wires them together."""

from __future__ import annotations

import asyncio
import gc
import logging
import ssl
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gateway import __version__, logs
from gateway.admission import AdmissionQueue
from gateway.auth import PUBLIC_PATHS, Authenticator
from gateway.decoding.executor import DecodeExecutor
from gateway.draining import Drain
from gateway.error_responses import render_error
from gateway.fleet.collector import FleetCollector, OnDemandCollector, StateCollector
from gateway.fleet.discovery import ReplicaSource, parse_replica_source
from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.label_router import LabelRouter
from gateway.fleet.labels import LabelManager
from gateway.fleet.loader import ManagementOptions
from gateway.fleet.maintenance import Maintenance
from gateway.fleet.models_file import ModelsFile
from gateway.fleet.on_demand_services import open_activator
from gateway.fleet.openai_servers import OpenAIServers
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.publisher import ModelPublisher
from gateway.fleet.replica import ReplicaConnectionOptions
from gateway.fleet.repository import Repository
from gateway.fleet.resolver import ModelResolver
from gateway.fleet.shadows import ShadowRunner
from gateway.fleet.signatures import ModelService
from gateway.keys import KeysFile
from gateway.memory import MemoryBudget, default_budget_bytes, limit_heap_growth
from gateway.metrics import Metrics
from gateway.model_files.bucket_store import BucketStore
from gateway.model_files.folder_store import FolderStore
from gateway.model_files.store import ModelStore
from gateway.openapi.openai import OPENAI_ERROR_SCHEMA
from gateway.openapi.repository import MANAGEMENT_ERROR_SCHEMA
from gateway.openapi.responses import ERROR_SCHEMA
from gateway.openapi.schemas import SECURITY, SECURITY_SCHEMES
from gateway.rate_limit import RateLimiter
from gateway.routes import (
    health,
    infer,
    labels,
    log_level,
    models,
    openai,
    replicas,
    repository,
    ui,
    uploads,
)
from gateway.routes import metrics as metrics_page
from gateway.routes.middleware import GatewayMiddleware
from gateway.services import Services
from gateway.settings import Settings
from gateway.settings.access import ModelUploads
from gateway.state.desired import StateStore
from gateway.state.store import open_configured_store
from gateway.tracing import Tracer
from gateway.triton.grpc.management import GrpcTlsFiles
from gateway.triton.restricted_api import parse_restricted_api

log = logging.getLogger(__name__)

METRICS_INTERVAL_S = 0.5
THREAD_SWITCH_INTERVAL_S = 0.0005
PREFLIGHT_MAX_AGE_S = 600
# Response headers that pages of other origins may read.
EXPOSED_HEADERS = (
    "X-Request-ID",
    "Retry-After",
    "Location",
    "Inference-Header-Content-Length",
    "X-Model-Version",
)
LAG_SAMPLES = 20  # of ten seconds, so that a scrape every ten seconds sees the maximum

# FastAPI would build a validator for each error of each route.
ERROR_SCHEMAS = {
    "Error": ERROR_SCHEMA,
    "ManagementError": MANAGEMENT_ERROR_SCHEMA,
    "OpenAIError": OPENAI_ERROR_SCHEMA,
}
ROUTE_MODULES = (
    infer,
    models,
    labels,
    openai,
    replicas,
    repository,
    uploads,
    log_level,
    health,
    metrics_page,
)
ROUTERS = (*(module.router for module in ROUTE_MODULES), ui.root_router, ui.router)
HANDLED_EXCEPTIONS = (HTTPException, RequestValidationError, MemoryError, Exception)


def tune_interpreter() -> None:
    # Scanning the objects of the start would take 50 ms each time. Hardly any of them is garbage.
    gc.freeze()
    # The default threshold of 700 new objects is reached every few requests, whose objects have no cycles.
    gc.set_threshold(10_000, 20, 50)
    # A thread that runs Python code yields to the event loop after this time instead of 5 ms.
    sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)
    limit_heap_growth()


async def update_metrics(metrics: Metrics, admission: AdmissionQueue, memory: MemoryBudget) -> None:
    """Measure the event loop's lag and flush the metrics, for the pages of other workers, for ever."""
    loop = asyncio.get_running_loop()
    lags: deque[float] = deque(maxlen=LAG_SAMPLES)
    while True:
        due = loop.time() + METRICS_INTERVAL_S
        await asyncio.sleep(METRICS_INTERVAL_S)
        lags.append(max(loop.time() - due, 0.0))
        metrics.loop_lag.set(max(lags))
        metrics.waiting.set(admission.waiting)
        metrics.request_memory.set(memory.used_bytes)
        metrics.update_dropped_lines(logs.count_dropped_lines())
        metrics.flush()


def create_tls_context(
    settings: Settings, sources: Sequence[ReplicaSource]
) -> ssl.SSLContext | None:
    if not any(source.tls for source in sources):
        return None
    context = ssl.create_default_context(cafile=settings.triton_ca_file)
    if settings.triton_cert_file is not None:
        context.load_cert_chain(settings.triton_cert_file, settings.triton_key_file)
    return context


class GatewayFastAPI(FastAPI):
    """A FastAPI whose OpenAPI document describes the errors, and how to send a key."""

    requires_key = False

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        document["components"] = {"schemas": ERROR_SCHEMAS, "securitySchemes": SECURITY_SCHEMES}
        if self.requires_key:
            document["security"] = SECURITY
            for path in PUBLIC_PATHS & document["paths"].keys():
                for operation in document["paths"][path].values():
                    operation["security"] = []
        return document


class AppComponents(NamedTuple):
    """The validated components that the settings name, before anything runs."""

    sources: Sequence[ReplicaSource]
    connection_options: ReplicaConnectionOptions
    management_options: ManagementOptions
    models_file: ModelsFile
    keys_file: KeysFile | None
    store: StateStore
    tracer: Tracer | None
    model_store: ModelStore | None


def build_components(settings: Settings) -> AppComponents:
    """Raises `BadAddress`, `BadKeysFile`, `BadModelsFile`, `BadState`, `BadTracing` or `CannotUseBucket`."""
    sources = [parse_replica_source(url) for url in settings.triton_urls]
    tls = GrpcTlsFiles(settings.triton_ca_file, settings.triton_cert_file, settings.triton_key_file)
    secret = settings.triton_restricted_api
    connection_options = ReplicaConnectionOptions(
        settings.connect_timeout_s,
        create_tls_context(settings, sources),
        tls,
        None if secret is None else parse_restricted_api(secret.get_secret_value()),
        max_response_bytes=settings.max_answer_bytes,
    )
    tracer = None
    if settings.otlp_endpoint:
        tracer = Tracer(settings.otlp_endpoint, service="triton-gateway", version=__version__)
    return AppComponents(
        sources,
        connection_options,
        ManagementOptions(
            settings.load_timeout_s,
            tls,
            settings.accepted_uploads is ModelUploads.code,
            settings.ready_quorum,
            settings.hold_s,
        ),
        ModelsFile(settings.models_file),
        None if settings.keys_file is None else KeysFile(settings.keys_file),
        open_configured_store(settings),
        tracer,
        create_model_store(settings),
    )


def create_model_store(settings: Settings) -> ModelStore | None:
    """Return the store of GATEWAY_REPOSITORY; None without it. Raises `CannotUseBucket`."""
    can_write = settings.accepted_uploads is not ModelUploads.off
    max_bytes = settings.max_repository_bytes
    if (folder := settings.repository_folder) is not None:
        return FolderStore(folder, can_write=can_write, max_bytes=max_bytes)
    if (bucket := settings.repository_bucket) is not None:
        return BucketStore(bucket, can_write=can_write, max_bytes=max_bytes)
    return None


async def open_publisher(
    files: ModelStore | None, repository: Repository, stack: AsyncExitStack
) -> ModelPublisher | None:
    """Return the publisher of uploaded models; None without GATEWAY_REPOSITORY."""
    if files is None:
        return None
    publisher = ModelPublisher(files, repository)
    await files.run(files.open)
    stack.callback(files.close)
    stack.push_async_callback(publisher.close)
    publisher.start()
    return publisher


def open_openai_servers(
    settings: Settings, options: ReplicaConnectionOptions, stack: AsyncExitStack
) -> OpenAIServers | None:
    if not settings.openai_urls:
        return None
    servers = OpenAIServers(settings.openai_urls, options)
    stack.callback(servers.close)
    return servers


@asynccontextmanager
async def run_services(settings: Settings, components: AppComponents) -> AsyncIterator[Services]:
    """Run the services; they are closed in reverse order."""
    async with AsyncExitStack() as stack:
        stack.callback(logs.flush)  # a worker is killed by its own signal right afterwards
        metrics = Metrics()
        pool = ReplicaPool(
            components.sources,
            components.connection_options,
            metrics=metrics,
            probe_interval_s=settings.poll_interval_s,
            dns_interval_s=settings.dns_interval_s,
        )
        await stack.enter_async_context(pool)
        dispatcher = Dispatcher(pool)
        models = ModelService(dispatcher, settings.cancellable_models)
        stack.callback(models.close)
        repository = Repository(
            pool, models, components.store, components.models_file, components.management_options
        )
        await stack.enter_async_context(repository)
        metrics.collector_registry.register(FleetCollector(pool, repository))
        # By their label in `gateway_file_valid`.
        files = {"keys": components.keys_file, "models": components.models_file.file}
        metrics.collector_registry.register(StateCollector(components.store, files))
        decoders = DecodeExecutor(settings.decode_threads, settings.max_pixels_in_flight, metrics)
        stack.push_async_callback(decoders.close)
        admission = AdmissionQueue(
            settings.max_inflight,
            settings.max_model_inflight or max(settings.max_inflight // 2, 1),
            settings.max_queue,
            metrics,
        )
        shadows = ShadowRunner(pool, admission, metrics, settings.max_shadow_bytes)
        stack.push_async_callback(shadows.close)
        activator = await open_activator(settings, dispatcher, repository, admission, stack)
        metrics.collector_registry.register(OnDemandCollector(pool, activator))
        memory = MemoryBudget(settings.max_bytes_in_flight or default_budget_bytes(), metrics.shed)
        stack.callback(metrics.flush)
        stack.callback(asyncio.create_task(update_metrics(metrics, admission, memory)).cancel)
        authenticator = Authenticator(
            components.keys_file, settings.allowed_hosts, local_admin=settings.local_admin
        )
        stack.callback(asyncio.create_task(authenticator.watch_keys_file()).cancel)
        rates = RateLimiter(metrics, components.store.rate_windows())
        if components.tracer is not None:
            stack.callback(components.tracer.close)
        restricted = components.connection_options.restricted_api
        tune_interpreter()
        maintenance = Maintenance(pool, dispatcher, repository)
        stack.callback(asyncio.create_task(maintenance.mark_activity()).cancel)
        yield Services(
            settings,
            pool,
            dispatcher,
            models,
            repository,
            decoders,
            admission,
            memory,
            metrics,
            authenticator,
            ModelResolver(LabelRouter(pool, repository.state)),
            LabelManager(pool, repository.state, settings.ready_quorum),
            shadows,
            rates,
            components.tracer,
            open_openai_servers(settings, components.connection_options, stack),
            activator,
            await open_publisher(components.model_store, repository, stack),
            [] if restricted is None else restricted.headers,
        )


@asynccontextmanager
async def serve_grpc(services: Services, drain: Drain) -> AsyncIterator[None]:
    """Serve gRPC, if it has a port."""
    if not services.settings.grpc_port:
        yield
        return
    # Imported here, because most gateways serve HTTP only.
    from gateway.grpc_server.server import run_grpc_server  # noqa: PLC0415

    async with run_grpc_server(services, drain):
        yield


def create_app(settings: Settings, on_open: Callable[[Services], None] | None = None) -> ASGIApp:
    """Return the ASGI application for the replicas of `settings.triton_urls`; `on_open` gets its services.

    Raises `BadAddress`, `BadKeysFile`, `BadModelsFile`, `BadState`, `BadTracing` or
    `CannotUseBucket` for invalid settings.
    """
    components = build_components(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with run_services(settings, components) as services:
            edge.services = app.state.services = services
            if on_open is not None:
                on_open(services)
            with Drain(settings.drain_s, settings.shutdown_s) as drain:
                async with serve_grpc(services, drain):
                    # The HTTP server counts connections and closes them while draining.
                    yield {
                        "connections": services.metrics.connections,
                        "refusals": services.metrics.refusals,
                        "drain": drain,
                    }
            edge.services = None

    app = GatewayFastAPI(
        title="triton-gateway",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.requires_key = components.keys_file is not None
    edge = GatewayMiddleware(app)
    for router in ROUTERS:
        if router is not ui.router or settings.page:
            app.include_router(router)
    for exception in HANDLED_EXCEPTIONS:
        app.add_exception_handler(exception, render_error)
    if not settings.cors_origins:
        return edge
    return CORSMiddleware(
        edge,
        allow_origins=settings.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),  # safe, because a key is sent in a header and never in a cookie
        expose_headers=EXPOSED_HEADERS,
        max_age=PREFLIGHT_MAX_AGE_S,
    )
