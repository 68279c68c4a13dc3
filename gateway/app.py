"""The application is a function of its settings; the wiring is below, in one table."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import logging
import os
import ssl
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from gateway import __version__, errors, logs
from gateway.auth import OPEN, Access
from gateway.decoding.decoders import Decoders
from gateway.draining import Drain
from gateway.fleet.declared import ModelsFile
from gateway.fleet.models import Models
from gateway.fleet.pool import Pool
from gateway.fleet.replica import Source, Wire, source
from gateway.fleet.repository import Repository, Terms
from gateway.fleet.view import FleetView, SourcesView, WatchedFile
from gateway.keys import KeysFile
from gateway.limits import Gate
from gateway.memory import MemoryBudget, default_budget
from gateway.metrics import Metrics
from gateway.rates import Rates
from gateway.routes import health, infer, models, page, repository
from gateway.routes import metrics as metrics_page
from gateway.routes.edge import Edge
from gateway.routes.services import Services
from gateway.settings import Settings
from gateway.state.store import store
from gateway.state.wishes import BadState, Store
from gateway.tensors import schema
from gateway.tracing import Tracer
from gateway.triton.grpc import Tls
from gateway.triton.restricted import parse_restricted_api

log = logging.getLogger(__name__)

TICK_S = 0.5
GIVES_WAY_S = 0.0005
PREFLIGHT_S = 600
# What a page of another origin may read of an answer's head.
EXPOSED = ("X-Request-ID", "Retry-After", "Location", "Inference-Header-Content-Length")
LAGS = 20  # ten seconds: a scrape every ten sees the worst

ROUTERS = (
    infer.router,
    models.router,
    repository.router,
    health.router,
    metrics_page.router,
    page.root,
    page.router,
)
HANDLED = (HTTPException, RequestValidationError, MemoryError, Exception)


def spare_the_collector() -> None:
    """What is alive now stays: looking at it again and again would take 30 ms each time.

    And collecting every 700 new objects is every few requests, whose objects have no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def spare_the_loop() -> None:
    """A thread that computes in Python gives way to the event loop after so long, and not after 5 ms."""
    sys.setswitchinterval(GIVES_WAY_S)


async def tick(metrics: Metrics, gate: Gate, memory: MemoryBudget) -> None:
    """See how late the event loop is; and pass on what was counted, for another worker's page."""
    loop = asyncio.get_running_loop()
    lags: deque[float] = deque(maxlen=LAGS)
    while True:
        due = loop.time() + TICK_S
        await asyncio.sleep(TICK_S)
        lags.append(max(loop.time() - due, 0.0))
        metrics.loop_lag.set(max(lags))
        metrics.waiting.set(gate.waiting)
        metrics.memory.set(memory.used_bytes)
        metrics.note_dropped_lines(logs.dropped_lines())
        metrics.flush()


def app_from_environment() -> ASGIApp:
    """For a worker process, which shares nothing with the one that started it."""
    settings = Settings()
    logs.configure(settings)
    return create_app(settings)


def tls_context(settings: Settings, sources: Sequence[Source]) -> ssl.SSLContext | None:
    """How `https://` replicas are trusted, and how the gateway shows itself to them."""
    if not any(source.address.tls for source in sources):
        return None
    context = ssl.create_default_context(cafile=settings.triton_ca_file)
    if settings.triton_cert_file is not None:
        context.load_cert_chain(settings.triton_cert_file, settings.triton_key_file)
    return context


def kept_by(settings: Settings) -> Store:
    """Where it is kept what the API loaded. Raises `BadState`."""
    if settings.state:
        return store(settings.state)
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    # A file for this fleet: what was loaded on another one does not concern it.
    fleet = hashlib.sha256(",".join(sorted(settings.triton_urls)).encode()).hexdigest()[:12]
    try:
        return store(f"file://{quote(str(folder / 'triton-gateway' / f'{fleet}.json'))}")
    except BadState as exc:
        log.warning("what is loaded by the API will be forgotten at the next start: %s", exc)
        return store("memory:")


class Framework(FastAPI):
    """Its document says how a key is sent."""

    keyed = False

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        document.setdefault("components", {})["securitySchemes"] = schema.SECURITY_SCHEMES
        if self.keyed:
            document["security"] = schema.SECURITY
            for path in OPEN & document["paths"].keys():
                for operation in document["paths"][path].values():
                    operation["security"] = []
        return document


class Parts(NamedTuple):
    """What the settings name, read and found usable, before anything runs."""

    sources: Sequence[Source]
    wire: Wire
    terms: Terms
    file: ModelsFile
    keys: KeysFile | None
    kept: Store
    tracer: Tracer | None


def parts_of(settings: Settings) -> Parts:
    """Raises `BadAddress`, `BadKeysFile`, `BadModelsFile`, `BadState` or `BadTracing`."""
    sources = [source(url) for url in settings.triton_urls]
    tls = Tls(settings.triton_ca_file, settings.triton_cert_file, settings.triton_key_file)
    secret = settings.triton_restricted_api
    wire = Wire(
        settings.connect_timeout_s,
        tls_context(settings, sources),
        tls,
        None if secret is None else parse_restricted_api(secret.get_secret_value()),
        max_answer_bytes=settings.max_answer_bytes,
    )
    file = ModelsFile(settings.models_file)
    file.open()
    keys = KeysFile(settings.keys_file) if settings.keys_file is not None else None
    if keys is not None:
        keys.open()
    tracer = None
    if settings.otlp_endpoint:
        tracer = Tracer(settings.otlp_endpoint, service="triton-gateway", version=__version__)
    return Parts(
        sources,
        wire,
        Terms(settings.load_timeout_s, tls, settings.allow_model_upload, settings.ready_quorum),
        file,
        keys,
        kept_by(settings),
        tracer,
    )


def watched_files(parts: Parts) -> dict[str, WatchedFile]:
    """Return the files of the settings that are read again when they change, by what they hold."""
    files: dict[str, WatchedFile] = {}
    if parts.keys is not None:
        files["keys"] = parts.keys
    if parts.file.path is not None:
        files["models"] = parts.file
    return files


@asynccontextmanager
async def running(settings: Settings, parts: Parts) -> AsyncIterator[Services]:
    """All that works while the application runs; what is opened last is closed first."""
    async with AsyncExitStack() as stack:
        stack.callback(logs.flush)  # a worker is ended by its own signal when this is over
        metrics = Metrics()
        pool = Pool(
            parts.sources,
            parts.wire,
            metrics=metrics,
            poll_s=settings.poll_interval_s,
            dns_s=settings.dns_interval_s,
        )
        await stack.enter_async_context(pool)
        models = Models(pool, settings.cancellable_models)
        stack.callback(models.close)
        repository = Repository(pool, models, parts.kept, parts.file, parts.terms)
        await stack.enter_async_context(repository)
        metrics.views.register(FleetView(pool, repository))
        metrics.views.register(SourcesView(parts.kept, watched_files(parts)))
        decoders = Decoders(settings.decode_threads, settings.max_pixels_in_flight, metrics)
        stack.push_async_callback(decoders.close)
        gate = Gate(
            settings.max_inflight,
            settings.max_model_inflight or max(settings.max_inflight // 2, 1),
            settings.max_queue,
            metrics,
        )
        memory = MemoryBudget(settings.max_bytes_in_flight or default_budget(), metrics)
        stack.callback(metrics.flush)
        stack.callback(asyncio.create_task(tick(metrics, gate, memory)).cancel)
        access = Access(parts.keys, settings.allowed_hosts, local_admin=settings.local_admin)
        stack.callback(asyncio.create_task(access.watch()).cancel)
        rates = Rates(metrics, parts.kept.windows())
        if parts.tracer is not None:
            stack.callback(parts.tracer.close)
        restricted = parts.wire.restricted_api
        spare_the_collector()
        spare_the_loop()
        yield Services(
            settings,
            pool,
            models,
            repository,
            decoders,
            gate,
            memory,
            metrics,
            access,
            rates,
            parts.tracer,
            [] if restricted is None else restricted.headers,
        )


def create_app(settings: Settings) -> ASGIApp:
    """The gateway before the Tritons of `settings.triton_urls`.

    Raises `BadAddress`, `BadKeysFile`, `BadModelsFile`, `BadState` or `BadTracing` for settings that
    cannot be used.
    """
    parts = parts_of(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with running(settings, parts) as services:
            edge.services = app.state.services = services
            with Drain(settings.drain_s, settings.shutdown_s) as drain:
                # For the server: what it counts, and whether it is to close connections.
                yield {
                    "connections": services.metrics.connections,
                    "refusals": services.metrics.refusals,
                    "drain": drain,
                }
            edge.services = None

    app = Framework(title="triton-gateway", version=__version__, lifespan=lifespan)
    app.keyed = parts.keys is not None
    edge = Edge(app)
    for router in ROUTERS:
        if router is not page.router or settings.page:
            app.include_router(router)
    for exception in HANDLED:
        app.add_exception_handler(exception, errors.render)
    if not settings.cors_origins:
        return edge
    return CORSMiddleware(
        edge,
        allow_origins=settings.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),  # those that are asked for; a key comes in one, and never in a cookie
        expose_headers=EXPOSED,
        max_age=PREFLIGHT_S,
    )
