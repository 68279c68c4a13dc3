"""Triton's gRPC API, on a port of its own."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from gateway.capabilities.capability import Attachment, Capability, LaunchPlan
from gateway.capabilities.grpc_api.settings import GrpcSettings
from gateway.config.settings import Settings
from gateway.messages import CommandError

if TYPE_CHECKING:
    from gateway.services import Services

# Triton's own port, where its clients expect gRPC.
USUAL_PORT: Final = 8001
PORT_SETTING: Final = "GATEWAY_GRPC_PORT"
# `up` has a flag for the setting.
PORT_FLAG: Final = "--grpc-port"


def attach_grpc_server(settings: Settings) -> Attachment | None:
    grpc_settings = settings.read(GrpcSettings)
    if not grpc_settings.grpc_port:
        return None

    async def open_server(services: Services, stack: AsyncExitStack) -> None:
        from gateway.capabilities.grpc_api.server import run_grpc_server
        from gateway.process_exit import Drain

        server = run_grpc_server(services, services.get(Drain), grpc_settings)
        await stack.enter_async_context(server)

    return Attachment(open=open_server)


def prepare_grpc(plan: LaunchPlan) -> None:
    """Check the port, and serve gRPC on the same address as HTTP."""
    from gateway.embedded.options import check_distinct_ports, check_port_free

    if plan.tritons and can_use_usual_port(plan):
        plan.update_settings(grpc_port=USUAL_PORT)
    settings = plan.settings.read(GrpcSettings)
    if not settings.grpc_port:
        return
    flag = PORT_FLAG if plan.tritons else PORT_SETTING
    check_distinct_ports({**plan.ports, flag: settings.grpc_port})
    check_port_free(plan.host, settings.grpc_port, flag)
    plan.update_settings(grpc_host=plan.host)
    plan.places.append(f"gRPC port {settings.grpc_port}")


def can_use_usual_port(plan: LaunchPlan) -> bool:
    from gateway.embedded.options import check_port_free

    if PORT_SETTING in os.environ or USUAL_PORT in plan.ports.values():
        return False
    try:
        check_port_free(plan.host, USUAL_PORT, PORT_SETTING)
    except CommandError:
        return False
    return True


CAPABILITY = Capability(
    "grpc_api", attach_grpc_server, settings=GrpcSettings, prepare_launch=prepare_grpc
)
