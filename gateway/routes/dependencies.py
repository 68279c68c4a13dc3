"""The dependencies that check the caller's rights and provide the services."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, cast

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError, create_model
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from gateway.access.auth import authorize_all_models
from gateway.callers import Caller, Right
from gateway.errors import MalformedRequest, UnknownModel, UnknownModelToLoad
from gateway.messages import quote_text, suggest_name
from gateway.services import INTERNAL_REQUEST, Deferral, Services
from gateway.telemetry.request_info import RequestScope, read_head

V1_PREFIX: Final = "/v1/"


async def get_services(request: Request) -> Services:  # async: FastAPI runs others in a thread
    return cast(Services, request.scope["services"])


def require_right(
    right: Right,
    *,
    for_all_models: bool = False,
    not_found_error: type[UnknownModel] = UnknownModel,
) -> Any:
    """Return a dependency that checks the caller's right to the path's model and provides the services.

    Handlers get the services only this way, so that none can skip the check.
    """

    async def check_right(request: Request) -> Services:
        services = await get_services(request)
        if for_all_models:
            authorize_all_models(cast(RequestScope, request.scope), right)
        else:
            model = request.path_params.get("model", "")
            version = request.path_params.get("version", "")
            # Only the handler resolves a version that can be a label: each call counts as a request.
            resolver = services.resolver
            check: Callable[..., object] = (
                resolver.check_access if right is Right.infer else resolver.resolve
            )
            check(request.scope, right, model, version, not_found_error)
        # Triton ignores a query on its own paths, and so must the gateway.
        if request.scope["path"].startswith(V1_PREFIX):
            check_query(request)
        return services

    return Depends(check_right)


def check_query(request: Request) -> None:
    """Accept only query parameters that the route has. Raises `MalformedRequest`."""
    known = [parameter.alias for parameter in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            raise MalformedRequest(
                f"unknown query parameter {quote_text(name)}{suggest_name(name, known)}"
            )


class InferenceRoute(APIRoute):
    """A route whose handler gets the request, the parameters of its path, and its query if it has one.

    FastAPI describes it, but its dependencies cost more than an inference: `pipeline.open_request` checks the
    caller's rights.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        query: dict[str, Any] = {
            each.alias: (each.field_info.annotation, each.field_info)
            for each in self.dependant.query_params
        }
        self._query: type[BaseModel] = create_model("InferenceQuery", **query)
        self.app = self.serve

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        parameters = scope["path_params"]
        if scope["query_string"]:
            parameters |= self._read_query(request)
        response = await self.endpoint(request, **parameters)
        await response(scope, receive, send)

    def _read_query(self, request: Request) -> dict[str, Any]:
        """Return arguments of the handler. Raises `MalformedRequest` or `RequestValidationError`."""
        check_query(request)
        try:
            query = self._query.model_validate(dict(request.query_params))
        except ValidationError as exc:
            errors = [{**error, "loc": ("query", *error["loc"])} for error in exc.errors()]
            raise RequestValidationError(errors) from exc
        return query.model_dump(exclude_unset=True)


class DeferralRoute(BaseRoute):
    """The requests that are answered before their inference has run, whatever their path is."""

    def __init__(self, deferral: Deferral) -> None:
        self._deferral = deferral

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        is_deferred = (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and INTERNAL_REQUEST not in scope
            and read_head(scope, self._deferral.matches)
        )
        return Match.FULL if is_deferred else Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._deferral.handle(Request(scope, receive), scope["services"])
        await response(scope, receive, send)


ServicesForAnyCaller = Annotated[Services, Depends(get_services)]
ServicesForInference = Annotated[Services, require_right(Right.infer)]
ServicesForMetrics = Annotated[Services, require_right(Right.metrics, for_all_models=True)]
ServicesForFleet = Annotated[Services, require_right(Right.fleet)]
ServicesForManagement = Annotated[Services, require_right(Right.manage)]
# Changes that affect every model, such as a cordon or the log level.
ServicesForAdministration = Annotated[Services, require_right(Right.manage, for_all_models=True)]
ServicesForLoad = Annotated[
    Services, require_right(Right.manage, not_found_error=UnknownModelToLoad)
]


def get_caller(request: Request) -> Caller:
    return cast(Caller, request.scope["request_info"].caller)


def record_label(request: Request, services: Services, model: str, label: str) -> None:
    info = request.scope["request_info"]
    services.record_model(info, model)
    if info.management_call is not None:
        info.management_call.label = label
