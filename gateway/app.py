"""The application is a function of its settings; the wiring is below, in one table."""

from __future__ import annotations

import gc
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from gateway import errors, logs
from gateway.fleet.pool import Fleet, Wire
from gateway.fleet.replica import Address, address
from gateway.limits import Decoders
from gateway.metrics import Metrics
from gateway.routes import health, infer, metrics, models, repository
from gateway.routes.edge import Edge
from gateway.routes.services import Services
from gateway.settings import Settings

ROUTERS = (infer.router, models.router, repository.router, health.router, metrics.router)
HANDLED = (HTTPException, RequestValidationError, Exception)


def spare_the_collector() -> None:
    """What is alive now stays: looking at it again and again would take 30 ms each time.

    And collecting every 700 new objects is every few requests, whose objects have no cycles.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


def app_from_environment() -> ASGIApp:
    """For a worker process, which shares nothing with the one that started it."""
    settings = Settings()
    logs.configure(settings)
    return create_app(settings)


def tls_context(settings: Settings, addresses: Sequence[Address]) -> ssl.SSLContext | None:
    """How `https://` replicas are trusted, and how the gateway shows itself to them."""
    if not any(address.tls for address in addresses):
        return None
    context = ssl.create_default_context(cafile=settings.triton_ca_file)
    if settings.triton_cert_file is not None:
        context.load_cert_chain(settings.triton_cert_file, settings.triton_key_file)
    return context


def create_app(settings: Settings) -> ASGIApp:
    """The gateway before the Tritons of `settings.triton_urls`. Raises `BadAddress`."""
    addresses = [address(url) for url in settings.triton_urls]
    wire = Wire(settings.connect_timeout_s, tls_context(settings, addresses))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            fleet = Fleet(addresses, wire)
            stack.callback(fleet.close)
            decoders = Decoders(settings.decode_threads, settings.max_pixels_in_flight)
            stack.callback(decoders.close)
            spare_the_collector()
            edge.services = app.state.services = Services(settings, fleet, decoders, Metrics())
            yield
            edge.services = None

    app = FastAPI(title="triton-gateway", version=version("triton-gateway"), lifespan=lifespan)
    edge = Edge(app)
    for router in ROUTERS:
        app.include_router(router)
    for exception in HANDLED:
        app.add_exception_handler(exception, errors.render)
    return edge
