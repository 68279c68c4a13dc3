"""Triton's gRPC API, on a port of its own."""

from __future__ import annotations

from contextlib import AsyncExitStack

from gateway.capability import Attachment, Capability
from gateway.draining import Drain
from gateway.services import Services
from gateway.settings import Settings


def attach_grpc_server(settings: Settings) -> Attachment | None:
    return Attachment(open=open_server) if settings.grpc_port else None


async def open_server(services: Services, stack: AsyncExitStack) -> None:
    from gateway.capabilities.grpc_api.server import run_grpc_server

    await stack.enter_async_context(run_grpc_server(services, services.get(Drain)))


CAPABILITY = Capability("grpc_api", attach_grpc_server)
