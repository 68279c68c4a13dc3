"""Why a command ends: a sentence for standard error, and an exit status for scripts (docs/cli.md)."""

from __future__ import annotations

from gateway.messages import CommandError


class ClientError(CommandError):
    """The gateway refused, or something failed."""


class UsageError(ClientError):
    """The command line asks for what cannot be."""

    status = 2


class GatewayUnreachable(ClientError):
    """Nobody answers there, or what answers is no gateway."""

    status = 3


class AccessDenied(ClientError):
    """No key, a wrong one, or one that may not do this."""

    status = 4


def make_client_error(http_status: int, message: str) -> ClientError:
    return (AccessDenied if http_status in (401, 403) else ClientError)(message)
