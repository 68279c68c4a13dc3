"""What the handlers work with; made once by the application's lifespan."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, cast

from fastapi import Depends, Request

from gateway.auth import Access, admit, admit_to_all
from gateway.context import Notes
from gateway.decoding.decoders import Decoders
from gateway.errors import Malformed, UnknownModel, UnknownModelToLoad
from gateway.fleet.models import Models
from gateway.fleet.pool import Pool
from gateway.fleet.repository import Repository
from gateway.keys import Caller, Right
from gateway.limits import Gate
from gateway.memory import Charge, MemoryBudget
from gateway.metrics import Metrics
from gateway.rates import Rates
from gateway.settings import Settings
from gateway.tracing import Tracer
from gateway.triton.wire import Headers


@dataclass(frozen=True)
class Services:
    settings: Settings
    pool: Pool
    models: Models
    repository: Repository
    decoders: Decoders
    gate: Gate
    memory: MemoryBudget
    metrics: Metrics
    access: Access
    rates: Rates
    tracer: Tracer | None = None
    management_headers: Headers = field(default_factory=list)  # for Triton's own

    def charge_for(self, notes: Notes) -> Charge:
        """Return what the request holds of the memory budget; the edge releases it at the request's end."""
        charge = notes.charge
        if charge is None:
            charge = notes.charge = Charge(self.memory)
        return charge

    @cached_property
    def usual_timeout_s(self) -> float:
        return self.settings.request_timeout_s

    def timeout_s(self, asked: str | None) -> float:
        """The seconds a request may take; `asked` is its X-Request-Timeout. Raises `Malformed`."""
        if asked is None:
            return self.settings.request_timeout_s
        try:
            seconds = float(asked)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < float("inf"):
            raise Malformed("X-Request-Timeout takes a number of seconds above 0")
        return min(seconds, self.settings.max_request_timeout_s)


async def services(request: Request) -> Services:
    """A coroutine, because FastAPI runs any other dependency in a thread."""
    return cast(Services, request.app.state.services)


def services_for(
    right: Right, *, of_all: bool = False, unknown: type[UnknownModel] = UnknownModel
) -> Any:
    """A handler gets its services by saying what for: none forgets to ask whether the caller may, and
    sees the model that the path names."""

    async def granted(request: Request) -> Services:
        if of_all:
            admit_to_all(request.scope, right)
        else:
            named = request.path_params
            admit(request.scope, right, named.get("model", ""), named.get("version", ""), unknown)
        return cast(Services, request.app.state.services)

    return Depends(granted)


ServicesForAll = Annotated[Services, Depends(services)]
ServicesForInference = Annotated[Services, services_for(Right.infer)]
ServicesForMetrics = Annotated[Services, services_for(Right.metrics, of_all=True)]
ServicesForFleet = Annotated[Services, services_for(Right.fleet)]
ServicesForManagement = Annotated[Services, services_for(Right.manage)]
ServicesForLoad = Annotated[Services, services_for(Right.manage, unknown=UnknownModelToLoad)]


def caller_of(request: Request) -> Caller:
    return cast(Caller, request.scope["notes"].caller)
