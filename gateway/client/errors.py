"""Errors of the client commands: a message for standard error and an exit status (docs/cli.md)."""

from __future__ import annotations

from gateway.messages import CommandError


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


def make_client_error(http_status: int, message: str) -> ClientError:
    return (AccessDenied if http_status in (401, 403) else ClientError)(message)
