"""Triton's gRPC API, on a port of its own."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from gateway.capabilities.capability import Attachment, Capability, LaunchPlan
from gateway.capabilities.grpc_api.settings import GrpcSettings
from gateway.config.settings import Settings
from gateway.memory import default_budget_bytes
from gateway.messages import CommandError

if TYPE_CHECKING:
    from gateway.services import Services

# Triton's own port, where its clients expect gRPC.
USUAL_PORT: Final = 8001
PORT_SETTING: Final = "GATEWAY_GRPC_PORT"
# `up` has a flag for the setting.
PORT_FLAG: Final = "--grpc-port"
# The requests in progress of a stream, at most 64, take about this besides their messages.
MIN_STREAM_BYTES: Final = 1 << 20


class BudgetTooSmall(CommandError):
    """The memory budget has no room for a message."""


def attach_grpc_server(settings: Settings) -> Attachment | None:
    grpc_settings = settings.read(GrpcSettings)
    if not grpc_settings.grpc_port:
        return None
    places = count_message_places(settings)

    async def open_server(services: Services, stack: AsyncExitStack) -> None:
        from gateway.capabilities.grpc_api.server import run_grpc_server
        from gateway.process_exit import Drain

        server = run_grpc_server(services, services.get(Drain), grpc_settings, places)
        await stack.enter_async_context(server)

    return Attachment(open=open_server)


def count_message_places(settings: Settings) -> int:
    """Return how many messages of maximum size the memory budget has room for. Raises `BudgetTooSmall`."""
    budget_bytes = settings.max_bytes_in_flight or default_budget_bytes()
    message_bytes = max(settings.max_body_bytes, MIN_STREAM_BYTES)
    if budget_bytes < message_bytes:
        raise BudgetTooSmall(
            f"gRPC needs {message_bytes} bytes for a message of GATEWAY_MAX_BODY_BYTES, and "
            f"GATEWAY_MAX_BYTES_IN_FLIGHT is {budget_bytes}; raise the latter, or lower the former"
        )
    return budget_bytes // message_bytes


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
