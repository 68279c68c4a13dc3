"""The services that handlers use, and the dependencies that check the caller's rights."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, cast

from fastapi import Depends, Request

from gateway.admission import AdmissionQueue
from gateway.auth import Authenticator, authorize, authorize_all_models
from gateway.decoding.executor import DecodeExecutor
from gateway.errors import MalformedRequest, UnknownModel, UnknownModelToLoad
from gateway.fleet.pool import ReplicaPool
from gateway.fleet.repository import Repository
from gateway.fleet.signatures import ModelService
from gateway.http_client.connection import Headers
from gateway.keys import Caller, Right
from gateway.memory import MemoryBudget, MemoryCharge
from gateway.metrics import Metrics
from gateway.rate_limit import RateLimiter
from gateway.request_info import RequestInfo
from gateway.settings import Settings
from gateway.tracing import Tracer


@dataclass(frozen=True)
class Services:
    """The application's components, created once by its lifespan."""

    settings: Settings
    pool: ReplicaPool
    models: ModelService
    repository: Repository
    decode_executor: DecodeExecutor
    admission: AdmissionQueue
    memory: MemoryBudget
    metrics: Metrics
    access: Authenticator
    rate_limiter: RateLimiter
    tracer: Tracer | None = None
    management_headers: Headers = field(default_factory=list)  # open Triton's own management API

    def get_charge(self, info: RequestInfo) -> MemoryCharge:
        charge = info.charge  # `GatewayMiddleware` releases it at the end of the request
        if charge is None:
            charge = info.charge = MemoryCharge(self.memory)
        return charge

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


async def get_services(request: Request) -> Services:  # async: FastAPI runs others in a thread
    return cast(Services, request.app.state.services)


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
        if for_all_models:
            authorize_all_models(request.scope, right)
        else:
            path_params = request.path_params
            authorize(
                request.scope,
                right,
                path_params.get("model", ""),
                path_params.get("version", ""),
                not_found_error,
            )
        return cast(Services, request.app.state.services)

    return Depends(check_right)


ServicesForAnyCaller = Annotated[Services, Depends(get_services)]
ServicesForInference = Annotated[Services, require_right(Right.infer)]
ServicesForMetrics = Annotated[Services, require_right(Right.metrics, for_all_models=True)]
ServicesForFleet = Annotated[Services, require_right(Right.fleet)]
ServicesForManagement = Annotated[Services, require_right(Right.manage)]
ServicesForLoad = Annotated[
    Services, require_right(Right.manage, not_found_error=UnknownModelToLoad)
]


def get_caller(request: Request) -> Caller:
    return cast(Caller, request.scope["request_info"].caller)
