"""What is kept, and what keeps it: the wishes, how they are written, and how trouble is told."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

import orjson
from limits import RateLimitItem

from gateway.errors import StateUnavailable
from gateway.messages import CommandError
from gateway.state.loads import Loads

log = logging.getLogger(__name__)

STATE_FORMAT: Final = 1  # of the file
OPERATION_TTL_S: Final = 3600  # how long an operation can be asked about
OPERATION_ID: Final = re.compile(
    "[0-9a-f]{32}"
)  # becomes a file's name or a key, and comes from a URL
READ_ACTION: Final = "read"  # what is done with the state, or cannot be
WRITE_ACTION: Final = "kept"


class BadState(CommandError):
    """A `GATEWAY_STATE` that cannot be one, or cannot be used, in a sentence."""


class UnreadableState(ValueError):
    """What is kept there is not what a gateway keeps, in half a sentence."""


@dataclass(frozen=True)
class DesiredModel:
    """What the API asked of a model: to be loaded with these parameters, or to be unloaded."""

    is_loaded: bool
    parameters: Mapping[str, Any] = field(default_factory=dict)
    revision: int = 0  # given by the store; a wish that was repeated has another than before
    config_digest: str = ""  # of parameters that come from the models file

    @property
    def load_id(self) -> str:
        """What tells this load of the model from every other; empty where any load will do."""
        revision = str(self.revision) if self.revision else ""
        return f"{revision}/{self.config_digest}" if self.config_digest else revision


class StateStore(Protocol):
    """Where wishes are kept. What fails raises `StateUnavailable`, and is then not half done."""

    async def read_desired_models(self) -> Mapping[str, DesiredModel]:
        """The current wish of every model that has one."""

    async def set_desired_model(self, model: str, desired: DesiredModel | None) -> int:
        """Keep a wish, or with None forget it. Its revision, higher than every earlier one; a wish that
        has one keeps it."""

    async def renew_leadership(self) -> bool:
        """Whether this process is the one that reconciles. Ask every second: leading lapses."""

    async def read_loads(self) -> Loads:
        """What each replica confirmed last, without loads of processes that are gone."""

    async def begin_load(self, replica: str, model: str) -> tuple[str, str]:
        """Note that this process loads a model. A token for `end_load`, and what was confirmed before."""

    async def end_load(self, replica: str, model: str, token: str, resulting_load: str) -> None:
        """Note what a load left on the replica; empty if that is unknown. It is unknown as well when
        another load began meanwhile."""

    async def forget_loads(self, replica: str) -> None:
        """The replica has restarted, or is gone: what it confirmed says nothing any more."""

    async def record_operation(self, operation_id: str, document: Mapping[str, Any]) -> None:
        """Note how far an operation is, to be read everywhere for an hour.

        The operation's id is `secrets.token_hex(16)`; another is a `ValueError`.
        """

    async def read_operation(self, operation_id: str) -> Mapping[str, Any] | None:
        """What was last recorded of an operation; None if nothing, or if this is no id."""

    def rate_windows(self) -> RateWindows | None:
        """Where the requests to every process that shares this state are counted, if it can be there."""

    @property
    def is_available(self) -> bool:
        """Whether the state could be read and kept when that was last tried."""

    async def close(self) -> None: ...


class RateWindows(Protocol):
    """Counts requests in windows of time, of several processes together."""

    async def wait_s(self, window: RateLimitItem, name: str) -> float:
        """Count one more request; 0, or in how many seconds there is room for it.

        Raises `StateUnavailable`, soon.
        """


@dataclass(frozen=True)
class DesiredState:
    """Every wish, and the revision of the last change; a value that changes make anew."""

    models: Mapping[str, DesiredModel] = field(default_factory=dict)
    revision: int = 0

    def with_model(self, model: str, desired: DesiredModel | None) -> DesiredState:
        revision = self.revision + 1
        models = {name: kept for name, kept in self.models.items() if name != model}
        if desired is not None:
            models[model] = replace(desired, revision=desired.revision or revision)
        return DesiredState(models, revision)

    def to_json(self) -> bytes:
        models = {
            name: {**desired_model_to_dict(wish), "revision": wish.revision}
            for name, wish in self.models.items()
        }
        document = {"format": STATE_FORMAT, "revision": self.revision, "models": models}
        return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def desired_model_to_dict(desired: DesiredModel) -> dict[str, Any]:
    return {"loaded": desired.is_loaded, "parameters": dict(desired.parameters)}


def decode_state(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise UnreadableState("it is not JSON") from None


def parse_desired_model(document: Any) -> DesiredModel:
    """Raises `Unreadable`."""
    match document:
        case {"loaded": bool(loaded), "parameters": dict(parameters), "revision": int(revision)}:
            return DesiredModel(loaded, parameters, revision)
    raise UnreadableState("it holds something else than wishes")


def parse_desired_state(document: Any) -> DesiredState:
    """Raises `Unreadable`."""
    match document:
        case {"format": int(other)} if other != STATE_FORMAT:
            raise UnreadableState(
                f"it has format {other}, and this gateway knows format {STATE_FORMAT}"
            )
        case {"format": int(), "revision": int(revision), "models": dict(models)}:
            return DesiredState(
                {name: parse_desired_model(wish) for name, wish in models.items()}, revision
            )
    raise UnreadableState("it holds something else than wishes")


def is_operation_id(operation_id: str) -> bool:
    return OPERATION_ID.fullmatch(operation_id) is not None


def require_operation_id(operation_id: str) -> None:
    if not is_operation_id(operation_id):
        raise ValueError("the id of an operation is 32 hexadecimal digits")


class OutageLog:
    """Tells the log when something begins to fail and when it works again, not each time between."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._reasons: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def __contains__(self, action: str) -> bool:
        return action in self._reasons

    def record_failure(self, action: str, reason: str) -> StateUnavailable:
        if self._reasons.get(action) != reason:
            log.warning("the state at %s cannot be %s: %s", self._place, action, reason)
        self._reasons[action] = reason
        return StateUnavailable(action, reason)

    def record_success(self, action: str) -> None:
        if self._reasons.pop(action, None) is not None:
            log.info("the state at %s can be %s again", self._place, action)
