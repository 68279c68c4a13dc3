"""The gateway's URL, the credentials and certificates to use with it, and the names of its models."""

from __future__ import annotations

import shlex
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from gateway.commands.errors import (
    ACCESS_STATUSES,
    AccessDenied,
    ClientError,
    GatewayUnreachable,
    UsageError,
    translate_hints,
)
from gateway.messages import CommandError

if TYPE_CHECKING:
    from gateway.client import Client, GatewayError
    from gateway.client.connection import ClientOptions

COMMAND_TIMEOUT_S: Final = 60.0
COMPLETION_TIMEOUT_S: Final = 1.0
# What the fields of a document raise that has another shape.
SHAPE_ERRORS: Final = (
    LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """The flags of the gateway that a command uses. Properties raise `UsageError` for invalid values."""

    url: Annotated[
        str,
        typer.Option(
            envvar=["TRITON_GATEWAY_URL", "GATEWAY_URL"],
            help="URL of the gateway.",
            show_envvar=True,
        ),
    ] = "http://localhost:8080"
    key: Annotated[
        str,
        typer.Option(
            envvar=["TRITON_GATEWAY_KEY", "GATEWAY_KEY"],
            help="API key, if the gateway requires one.",
            show_default=False,
        ),
    ] = ""
    ca: Annotated[
        Path | None,
        typer.Option(
            envvar=["TRITON_GATEWAY_CA", "GATEWAY_CA"],
            help="PEM file of the trusted CA certificates.",
        ),
    ] = None

    @cached_property
    def access(self) -> ClientOptions:
        """The access of these flags. Raises `UsageError`."""
        from gateway.client.connection import find_options

        with report_invalid_flags():
            return find_options(self.url, self.key, self.ca or "")

    @cached_property
    def ssl_context(self) -> ssl.SSLContext | None:
        with report_invalid_flags():
            return self.access.create_ssl_context()

    def connect(self, timeout_s: float = COMMAND_TIMEOUT_S, retries: int = 0) -> Client:
        """Return a client whose results are Python's values. Raises `UsageError`."""
        from gateway.client import Client

        options: dict[str, Any] = {"timeout_s": timeout_s, "retries": retries, "arrays": False}
        with report_invalid_flags():
            return Client(self.url, key=self.key, ca=self.ca or "", **options)


@dataclass(frozen=True)
class OptionalTarget(Target):
    """The same flags of a command that needs no gateway, and asks one only if it is told to."""

    url: Annotated[str, typer.Option(help="URL of a running gateway to ask.")] = ""


@contextmanager
def report_invalid_flags() -> Iterator[None]:
    try:
        yield
    except ValueError as exc:
        raise UsageError(str(exc)) from None


@contextmanager
def report_gateway_errors(url: str) -> Iterator[None]:
    """Turn what a client raises into a `ClientError`, also for a response of another shape."""
    from gateway.client import GatewayError
    from gateway.client.errors import InvalidRequest

    try:
        yield
    except GatewayError as exc:
        raise make_command_error(exc) from None
    except InvalidRequest as exc:
        raise UsageError(str(exc)) from None
    except SHAPE_ERRORS as exc:
        raise GatewayUnreachable(
            f"a response of {url} has another shape than a gateway's ({exc!r}); check that the URL is the "
            "gateway's"
        ) from None


def make_command_error(error: GatewayError) -> ClientError:
    from gateway.client.errors import INVALID_RESPONSE, UNREACHABLE

    message = translate_hints(str(error))
    if error.code in (UNREACHABLE, INVALID_RESPONSE):
        return GatewayUnreachable(message)
    return AccessDenied(message) if error.status in ACCESS_STATUSES else ClientError(message)


def complete_model_name(context: typer.Context, incomplete: str) -> list[str]:
    """Ask the gateway for the names of models; never wait long, and never fail.

    Names that the shell would expand or split are left out: it inserts them as they are.
    """
    from gateway.client import GatewayError

    flags = context.params
    try:
        target = Target(**{name: flags[name] for name in ("url", "key", "ca") if flags.get(name)})
        with target.connect(COMPLETION_TIMEOUT_S) as client:
            names = [
                model.name for model in client.models() if shlex.quote(model.name) == model.name
            ]
    except (CommandError, GatewayError, *SHAPE_ERRORS):  # another server answered, or none
        return []
    given = flags.get("models") or flags.get("names") or ()
    return [name for name in names if name.startswith(incomplete) and name not in given]
