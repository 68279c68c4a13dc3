"""Calls of the gateway from a command: the Python client, with the errors and exit statuses of commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gateway.client import Client, GatewayError
from gateway.client.errors import INVALID_RESPONSE, UNREACHABLE
from gateway.commands.errors import AccessDenied, ClientError, GatewayUnreachable, translate_hints
from gateway.commands.target import Target

COMMAND_TIMEOUT_S = 60.0
ACCESS_STATUSES = (401, 403)


@contextmanager
def connect(target: Target, timeout_s: float = COMMAND_TIMEOUT_S) -> Iterator[Client]:
    """Yield a client that repeats no requests. A `GatewayError` leaves the context as a `ClientError`."""
    with target.create_client(timeout_s) as client, report_gateway_errors():
        yield client


@contextmanager
def report_gateway_errors() -> Iterator[None]:
    try:
        yield
    except GatewayError as exc:
        raise make_command_error(exc) from None


def make_command_error(error: GatewayError) -> ClientError:
    message = translate_hints(str(error))
    if error.code in (UNREACHABLE, INVALID_RESPONSE):
        return GatewayUnreachable(message)
    return AccessDenied(message) if error.status in ACCESS_STATUSES else ClientError(message)
