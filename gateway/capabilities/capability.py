"""The seam between the core and the capabilities: the values with which a capability describes itself.

The core knows no capability. `gateway/capabilities/installed.py` lists them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from gateway.config.settings import CapabilitySettings, Settings
from gateway.errors import GatewayError
from gateway.messages import CommandError

# Commands import this module before they import the application, which takes a second.
if TYPE_CHECKING:
    from fastapi import APIRouter

    from gateway.access.auth import PathRules
    from gateway.access.keys import RuleParsers
    from gateway.embedded.options import TritonOptions
    from gateway.repository.models_file import KeyParsers
    from gateway.repository.state.content import Table
    from gateway.routes.error_responses import ErrorSerializer
    from gateway.services import Deferral, ModelDescriber, Services

CheckStatus = Literal["ok", "warning", "failed"]
OK: Final = "ok"
WARNING: Final = "warning"
FAILED: Final = "failed"


@dataclass(frozen=True)
class Finding:
    """The result of one check. `advice` says what to do; it is empty if nothing has to be done."""

    check: str
    status: CheckStatus
    message: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value}


def describe_error(exc: CommandError | GatewayError) -> str:
    return exc.detail if isinstance(exc, GatewayError) else str(exc)


async def open_nothing(services: Services, stack: AsyncExitStack) -> None:
    """The capability has nothing to open."""


def check_nothing(settings: Settings) -> Iterable[Finding]:
    return ()


@dataclass
class LaunchPlan:
    """The plan of `up` or `serve`. Capabilities check it, and add the places that they serve."""

    settings: Settings
    host: str
    ports: Mapping[str, int]  # flag → port
    workers: int = 1
    tritons: Sequence[TritonOptions] = ()  # the Tritons that `up` starts
    places: list[str] = field(default_factory=list)  # where something else than HTTP is served
    has_page: bool = False  # a page for browsers is at /
    opens_page: bool = False  # `up` opens it in a browser when the gateway is ready

    def update_settings(self, **values: Any) -> None:
        self.settings = self.settings.model_copy(update=values)


def prepare_nothing(plan: LaunchPlan) -> None:
    """The capability has no port of its own."""


@dataclass(frozen=True)
class SignIn:
    """The OpenID provider at which users of the page sign in."""

    issuer: str
    client_id: str


@dataclass(frozen=True)
class Attachment:
    """The part of one application that a capability adds."""

    routers: Sequence[APIRouter] = ()
    error_schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name → schema
    # By their paths; one that ends with a slash stands for all that begin with it.
    error_serializers: Mapping[str, ErrorSerializer] = field(default_factory=dict)
    paths: PathRules | None = None
    describer: ModelDescriber | None = None
    # Opens the components of the routes, and provides them in `services`; the stack closes them.
    open: Callable[[Services, AsyncExitStack], Awaitable[None]] = open_nothing
    deferral: Deferral | None = None  # one capability has it
    sign_in: SignIn | None = None


@dataclass(frozen=True)
class Capability:
    """A part of the gateway that is deleted with its folder and its line in the list.

    `attach` imports the rest of the capability, and returns None if the settings switch it off. It raises a
    `CommandError` for invalid settings.
    """

    name: str
    attach: Callable[[Settings], Attachment | None]
    check: Callable[[Settings], Iterable[Finding]] = check_nothing  # run by `triton-gateway doctor`
    settings: type[CapabilitySettings] | None = None
    # Called by `up` and `serve` before they start anything. Raises a `CommandError`.
    prepare_launch: Callable[[LaunchPlan], None] = prepare_nothing
    table: Table[Any] | None = None  # its name is in `CAPABILITY_TABLES`
    model_keys: KeyParsers = field(default_factory=dict)  # keys that it adds to the models file
    rule_parsers: RuleParsers = field(default_factory=dict)  # lists that it adds to the keys file
