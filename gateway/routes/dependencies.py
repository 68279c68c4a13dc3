"""What the handlers work with; made once by the application's lifespan."""

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
from gateway.keys import Caller, Right
from gateway.memory import MemoryBudget, MemoryCharge
from gateway.metrics import Metrics
from gateway.rate_limit import RateLimiter
from gateway.request_info import RequestInfo
from gateway.settings import Settings
from gateway.tracing import Tracer
from gateway.triton.http.connection import Headers


@dataclass(frozen=True)
class Services:
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
    management_headers: Headers = field(default_factory=list)  # for Triton's own

    def get_charge(self, info: RequestInfo) -> MemoryCharge:
        """Return what the request holds of the memory budget; the edge releases it at the request's end."""
        charge = info.charge
        if charge is None:
            charge = info.charge = MemoryCharge(self.memory)
        return charge

    @cached_property
    def default_timeout_s(self) -> float:
        return self.settings.request_timeout_s

    def resolve_timeout_s(self, requested: str | None) -> float:
        """The seconds a request may take; `asked` is its X-Request-Timeout. Raises `Malformed`."""
        if requested is None:
            return self.settings.request_timeout_s
        try:
            seconds = float(requested)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise MalformedRequest("X-Request-Timeout takes a number of seconds above 0")
        return min(seconds, self.settings.max_request_timeout_s)


async def get_services(request: Request) -> Services:
    """A coroutine, because FastAPI runs any other dependency in a thread."""
    return cast(Services, request.app.state.services)


def require_right(
    right: Right,
    *,
    for_all_models: bool = False,
    not_found_error: type[UnknownModel] = UnknownModel,
) -> Any:
    """A handler gets its services by saying what for: none forgets to ask whether the caller may, and
    sees the model that the path names."""

    async def check_right(request: Request) -> Services:
        if for_all_models:
            authorize_all_models(request.scope, right)
        else:
            named = request.path_params
            authorize(
                request.scope,
                right,
                named.get("model", ""),
                named.get("version", ""),
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
