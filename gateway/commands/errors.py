"""Errors of the client commands: a message for standard error and an exit status (docs/use/cli.md)."""

from __future__ import annotations

from typing import Final

from gateway.messages import CommandError

ACCESS_STATUSES: Final = (401, 403)


class ClientError(CommandError):
    """A rejected or failed request."""


class UsageError(ClientError):
    """An invalid command line."""

    status = 2


class GatewayUnreachable(ClientError):
    """No response, or a response of something that is not a gateway."""

    status = 3


class AccessDenied(ClientError):
    """A missing, wrong or unauthorised key."""

    status = 4


# The advice to users of the Python client, and the same for users of the commands.
COMMAND_HINTS: Final = {
    "models() lists the models": "triton-gateway models lists the models",
    "load it with load()": "load it with triton-gateway load",
    "request('GET', '/v1/replicas') lists the replicas": "triton-gateway replicas lists the replicas",
    "request('GET', '/readyz') shows the reason": "triton-gateway replicas shows the reason",
    "request('GET', '/v1/jobs') lists yours": "triton-gateway jobs list lists yours",
    "pass dependents=True": "use --dependents",
    "pass key=… or set TRITON_GATEWAY_KEY": "use --key KEY or TRITON_GATEWAY_KEY",
    "pass a longer timeout_s": "use a longer --timeout",
}


def translate_hints(message: str) -> str:
    for hint, command_hint in COMMAND_HINTS.items():
        message = message.replace(hint, command_hint)
    return message
