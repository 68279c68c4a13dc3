"""The dependencies that check the caller's rights and provide the services."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, cast

from fastapi import Depends, Request

from gateway.access.auth import authorize_all_models
from gateway.callers import Caller, Right
from gateway.errors import MalformedRequest, UnknownModel, UnknownModelToLoad
from gateway.messages import quote_text, suggest_name
from gateway.services import INTERNAL_REQUEST, Services
from gateway.telemetry.request_info import RequestScope

V1_PREFIX: Final = "/v1/"


async def get_services(request: Request) -> Services:  # async: FastAPI runs others in a thread
    internal = request.scope.get(INTERNAL_REQUEST)
    return cast(Services, request.app.state.services if internal is None else internal.services)


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
