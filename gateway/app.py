"""The application is a function of its settings; the wiring is below, in one table."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from gateway import errors
from gateway.fleet.pool import Fleet
from gateway.fleet.replica import address
from gateway.limits import Decoders
from gateway.metrics import Metrics
from gateway.routes import health, infer, metrics, models, repository
from gateway.routes.edge import Edge
from gateway.routes.services import Services
from gateway.settings import Settings

ROUTERS = (infer.router, models.router, repository.router, health.router, metrics.router)
HANDLED = (HTTPException, RequestValidationError, Exception)


def create_app(settings: Settings) -> ASGIApp:
    """The gateway before the Tritons of `settings.triton_urls`. Raises `BadAddress`."""
    addresses = [address(url) for url in settings.triton_urls]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            fleet = Fleet(addresses, settings.connect_timeout_s)
            stack.callback(fleet.close)
            decoders = Decoders(settings.decode_threads, settings.max_pixels_in_flight)
            stack.callback(decoders.close)
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
