"""The application factory: FastAPI, its routes and the middleware around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
from anyio import to_thread
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from gateway import __version__
from gateway.access.auth import CORE_PATHS
from gateway.capabilities.capability import SignIn
from gateway.capabilities.installed import INSTALLED, MODEL_KEYS, RULE_PARSERS
from gateway.config.settings import Settings
from gateway.media_types import JSON
from gateway.process_exit import Drain
from gateway.routes import administration, assets, health, infer, models, replicas, repository
from gateway.routes import metrics as metrics_page
from gateway.routes.dependencies import DeferralRoute, InferenceRoute
from gateway.routes.error_responses import ErrorBoundary, ErrorSerializer
from gateway.routes.middleware import GatewayMiddleware
from gateway.routes.openapi import (
    ERROR_SCHEMA,
    LICENSE,
    SECURITY_SCHEMES,
    SERVERS,
    build_security,
    name_schemas,
)
from gateway.routes.passthrough.handler import PassThroughRoute
from gateway.routes.repository import MANAGEMENT_ERROR_SCHEMA
from gateway.services import Deferral, Services, build_components, run_services

PREFLIGHT_MAX_AGE_S = 600
# Response headers that pages of other origins may read.
EXPOSED_HEADERS = (
    "X-Request-ID",
    "Retry-After",
    "Location",
    "Inference-Header-Content-Length",
    "X-Model-Version",
)

# FastAPI would build a validator for each error of each route.
ERROR_SCHEMAS = {
    "Error": ERROR_SCHEMA,
    "ManagementError": MANAGEMENT_ERROR_SCHEMA,
}
FASTAPI_ERROR_SCHEMAS = ("HTTPValidationError", "ValidationError")  # of its own error responses
ROUTE_MODULES = (
    models,
    replicas,
    repository,
    administration,
    health,
    metrics_page,
)


class GatewayFastAPI(FastAPI):
    """A FastAPI whose OpenAPI document describes the errors, and how to send a key."""

    requires_key = False
    sign_in: SignIn | None = None
    paths = CORE_PATHS
    deferral: Deferral | None = None
    _serialized_document = b""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            openapi_url=None,
            docs_url=None,
            redoc_url=None,
            # A redirect would have the scheme and the path of this connection, not those of a proxy's client.
            redirect_slashes=False,
            **options,
        )
        self.error_schemas: dict[str, Mapping[str, Any]] = dict(ERROR_SCHEMAS)
        self._document_turn = asyncio.Lock()
        self.add_route("/openapi.json", self.get_document, include_in_schema=False)

    async def get_document(self, _: Request) -> Response:
        """Return the OpenAPI document. It takes half a second to build, and anyone may ask for it."""
        async with self._document_turn:
            if not self._serialized_document:
                document = await to_thread.run_sync(self.openapi)
                self._serialized_document = orjson.dumps(document)
        return Response(self._serialized_document, media_type=JSON)

    def openapi(self) -> dict[str, Any]:
        is_new = self.openapi_schema is None
        document = super().openapi()
        if is_new and self.deferral is not None:
            self.deferral.describe(document)
        components = document.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for unused in FASTAPI_ERROR_SCHEMAS:
            schemas.pop(unused, None)
        schemas.update(self.error_schemas)
        name_schemas(document)
        components["securitySchemes"] = SECURITY_SCHEMES
        document["servers"] = SERVERS
        document["security"] = build_security(requires_key=self.requires_key)
        if self.requires_key:
            for path in self.paths.public & document["paths"].keys():
                for operation in document["paths"][path].values():
                    operation["security"] = []
        return document


def create_app(settings: Settings, on_open: Callable[[Services], None] | None = None) -> ASGIApp:
    """Return the application; `on_open` gets its services.

    Raises the errors of `build_components`, and of the capabilities' `attach`.
    """
    components = build_components(settings, MODEL_KEYS, RULE_PARSERS)
    attached = (capability.attach(settings) for capability in INSTALLED)
    attachments = [attachment for attachment in attached if attachment is not None]
    describers = [each.describer for each in attachments if each.describer is not None]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Any]]:
        async with run_services(settings, components, paths) as services:
            middleware.services = services
            services.describers.extend(describers)
            if on_open is not None:
                on_open(services)
            with Drain(settings.drain_s) as drain:
                services.provide(drain)
                services.provide(boundary)
                services.provide(middleware)
                async with AsyncExitStack() as stack:
                    for attachment in attachments:
                        await attachment.open(services, stack)
                    # The HTTP server counts connections and closes them while draining.
                    yield {
                        "connections": services.metrics.open_connections,
                        "refusals": services.metrics.refusals,
                        "drain": drain,
                    }

    app = GatewayFastAPI(
        title="triton-gateway", version=__version__, license_info=LICENSE, lifespan=lifespan
    )
    app.requires_key = components.keys_file is not None
    routers = [
        infer.router,
        models.create_router(describers),
        *(module.router for module in ROUTE_MODULES),
    ]
    error_serializers: dict[str, ErrorSerializer] = {}
    paths = CORE_PATHS
    deferral: Deferral | None = None
    for attachment in attachments:
        routers += attachment.routers
        app.error_schemas |= attachment.error_schemas
        app.sign_in = app.sign_in or attachment.sign_in
        error_serializers |= attachment.error_serializers
        deferral = attachment.deferral or deferral
        if attachment.paths is not None:
            paths |= attachment.paths
    app.paths = paths
    app.deferral = deferral
    add_routes(app, (*routers, assets.router), deferral)  # a page may have the path of an asset
    # Its router is called without FastAPI's own middleware, which costs a quarter of a request to `/v2`.
    boundary = ErrorBoundary(app.router, paths.output_prefixes, error_serializers)
    middleware = GatewayMiddleware(app, boundary, paths)
    return add_cors(middleware, settings)


def add_routes(app: FastAPI, routers: Iterable[APIRouter], deferral: Deferral | None) -> None:
    """Add the routes to those of the application; the first that matches a request serves it."""
    deferrals = [] if deferral is None else [DeferralRoute(deferral)]
    app.router.routes[:0] = [PassThroughRoute(), *deferrals]
    # `include_router` builds each route again, at the first request, which then waits for 60 ms.
    routes = [route for router in routers for route in router.routes]
    # `/v1/models/{model}` matches `/v1/models/digits:predict`, too.
    routes.sort(key=lambda route: not isinstance(route, InferenceRoute))
    app.router.routes.extend(map(provide_exit_stack, routes))


def provide_exit_stack(route: BaseRoute) -> BaseRoute:
    """Give FastAPI the stack that it needs for the files of forms, on its own routes only."""
    if not isinstance(route, APIRoute) or isinstance(route, InferenceRoute):
        return route
    if not isinstance(route.app, AsyncExitStackMiddleware):
        route.app = AsyncExitStackMiddleware(route.app)
    return route


def add_cors(application: ASGIApp, settings: Settings) -> ASGIApp:
    if not settings.cors_origins:
        return application
    return CORSMiddleware(
        application,
        allow_origins=settings.cors_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),  # safe, because a key is sent in a header and never in a cookie
        expose_headers=EXPOSED_HEADERS,
        max_age=PREFLIGHT_MAX_AGE_S,
    )
