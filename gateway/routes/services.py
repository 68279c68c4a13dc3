"""What the handlers work with; made once by the application's lifespan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, cast

from fastapi import Depends, Request

from gateway.errors import Malformed
from gateway.fleet.models import Models
from gateway.fleet.pool import Pool
from gateway.fleet.repository import Repository
from gateway.limits import Decoders
from gateway.metrics import Metrics
from gateway.settings import Settings
from gateway.tracing import Tracer


@dataclass(frozen=True)
class Services:
    settings: Settings
    pool: Pool
    models: Models
    repository: Repository
    decoders: Decoders
    metrics: Metrics
    tracer: Tracer | None = None

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


ServicesDep = Annotated[Services, Depends(services)]
