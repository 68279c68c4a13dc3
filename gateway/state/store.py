"""What the API asked of each model, kept where every process that serves the fleet finds it.

In memory for one process, in a file for the processes of one machine, in Redis for several machines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from gateway.errors import Conflict
from gateway.state.file import file_at
from gateway.state.loads import Loads, begin, end, new_token
from gateway.state.redis import redis_at
from gateway.state.wishes import KEPT_S, BadState, Store, Wish, Wishes, require_operation
from gateway.words import quoted

SPELLING: Final = (
    "GATEWAY_STATE is none of memory:, none:, file:///FOLDER/state.json and "
    "redis://USER:PASSWORD@HOST:6379/0?prefix=NAME: (rediss:// for TLS, with ssl_ca_certs=FILE "
    "for an authority of your own); what is special within a part of it is percent-encoded"
)


def store(url: str) -> Store:
    """`memory:`, `none:`, `file:///PATH` or `redis://HOST:6379/0`. Raises `BadState`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadState(SPELLING) from None
    kept: Store | None = None
    if not parts.netloc + parts.path + parts.query + parts.fragment:
        kept = (
            Memory() if parts.scheme == "memory" else ReadOnly() if parts.scheme == "none" else None
        )
    if parts.scheme == "file":
        kept = file_at(parts)
    elif parts.scheme in ("redis", "rediss"):
        kept = redis_at(parts, port or 6379)
    if kept is None:
        # Without the address itself, here and everywhere: it can hold a password.
        raise BadState(SPELLING)
    return kept


class ChangesRefused(Conflict):
    code = "STATE_NOT_SHARED"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"model {quoted(model)} cannot be changed by the API here: GATEWAY_STATE is none:, so that "
            "gateways that share no state do not undo each other's changes; change the models file, or "
            "share the state in Redis"
        )


class Memory:
    """For one process; gone with it."""

    def __init__(self) -> None:
        self._wishes = Wishes()
        self._operations: dict[str, tuple[float, bytes]] = {}
        self._loads: Loads = {}

    async def wishes(self) -> Mapping[str, Wish]:
        return self._wishes.models

    async def wish(self, model: str, wish: Wish | None) -> int:
        self._wishes = self._wishes.having(model, wish)
        return self._wishes.revision

    async def leads(self) -> bool:
        return True

    async def loads(self) -> Loads:
        return self._loads

    async def begin_load(self, replica: str, model: str) -> tuple[str, str]:
        token = new_token("")
        self._loads, before = begin(self._loads, replica, model, token)
        return token, before

    async def end_load(self, replica: str, model: str, token: str, left: str) -> None:
        self._loads, _ = end(self._loads, replica, model, token, left)

    async def forget_loads(self, replica: str) -> None:
        self._loads = {name: models for name, models in self._loads.items() if name != replica}

    async def record(self, operation: str, document: Mapping[str, Any]) -> None:
        require_operation(operation)
        now = time.monotonic()
        for old in [name for name, (at, _) in self._operations.items() if now - at > KEPT_S]:
            del self._operations[old]
        self._operations[operation] = (now, orjson.dumps(document))

    async def operation(self, operation: str) -> Mapping[str, Any] | None:
        _, raw = self._operations.get(operation, (0, b"null"))
        document: Mapping[str, Any] | None = orjson.loads(raw)
        return document

    def windows(self) -> None:
        return None

    @property
    def is_available(self) -> bool:
        return True

    async def close(self) -> None:
        pass


class ReadOnly(Memory):
    """For several gateways that share no state: only the models file says what is loaded."""

    async def wish(self, model: str, wish: Wish | None) -> int:
        raise ChangesRefused(model)
