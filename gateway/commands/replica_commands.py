"""The commands `replicas`: the list of the replicas, and their maintenance."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from gateway.commands.errors import UsageError
from gateway.commands.flags import JsonOption, TimeoutOption, add_target
from gateway.commands.target import Target
from gateway.messages import escape_unprintable

DRAIN_TIMEOUT_S: Final = 300.0
# The client waits longer than the gateway, whose own message then arrives.
TIMEOUT_MARGIN_S: Final = 10.0

replica_commands = typer.Typer(invoke_without_command=True)

AddressArgument = Annotated[
    str, typer.Argument(metavar="ADDRESS", help="Address of the replica, as HOST:PORT.")
]


@replica_commands.callback()
@add_target
def replicas(
    target: Target,
    context: typer.Context,
    json: JsonOption = False,
) -> None:
    """List the Triton replicas and their state; cordon, drain or uncordon one."""
    from gateway.commands.tables import print_resource_list

    if context.invoked_subcommand is None:
        print_resource_list("replicas", target, json=json)
        return
    for name in context.params:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UsageError(f"write --{name} after {context.invoked_subcommand}")


@replica_commands.command()
@add_target
def cordon(target: Target, address: AddressArgument) -> None:
    """Send no new requests to a replica."""
    typer.echo(call_replica(target, address, "cordon", 60.0))


@replica_commands.command()
@add_target
def uncordon(target: Target, address: AddressArgument) -> None:
    """Send requests to a replica again."""
    typer.echo(call_replica(target, address, "uncordon", 60.0))


@replica_commands.command()
@add_target
def drain(
    target: Target, address: AddressArgument, timeout: TimeoutOption = DRAIN_TIMEOUT_S
) -> None:
    """Cordon a replica, and wait until its requests and sequences have finished."""
    typer.echo(call_replica(target, address, "drain", timeout))


def call_replica(target: Target, address: str, action: str, timeout_s: float) -> str:
    from urllib.parse import quote

    with target.connect(timeout_s + TIMEOUT_MARGIN_S) as client:
        path = f"/v1/replicas/{quote(address, safe='')}/{action}"
        result = client.request("POST", path, headers={"x-request-timeout": f"{timeout_s:g}"})
    state = "cordoned" if result["cordoned"] else "in service"
    return escape_unprintable(
        f"{result['address']} is {state}: {result['outstanding']} requests and "
        f"{result['sequences']} sequences in progress"
    )
