"""The state stores of `GATEWAY_STATE`: memory, a file for one machine, Redis for several machines."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import quote, urlsplit

import orjson

from gateway.errors import Conflict
from gateway.messages import quote_text
from gateway.repository.state.desired import (
    OPERATION_TTL_S,
    BadState,
    DesiredModel,
    DesiredState,
    StateStore,
    with_cordon,
)
from gateway.repository.state.file import open_file_store
from gateway.repository.state.loads import (
    Loads,
    find_confirmed_load,
    new_load_token,
    with_finished_load,
    with_load,
    without_replica,
)
from gateway.repository.state.redis import open_redis_store
from gateway.settings import Settings
from gateway.version_labels import LabelTable, VersionLabel

log = logging.getLogger(__name__)

STATE_URL_HELP: Final = (
    "GATEWAY_STATE must be memory:, none:, file:///FOLDER/state.json or "
    "redis://USER:PASSWORD@HOST:6379/0?prefix=NAME: (rediss:// for TLS, with ssl_ca_certs=FILE "
    "for a private CA); special characters must be percent-encoded"
)


def open_state_store(url: str) -> StateStore:
    """Open the store of a `GATEWAY_STATE` URL. Raises `BadState`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadState(STATE_URL_HELP) from None
    store: StateStore | None = None
    if parts.scheme == "file":
        store = open_file_store(parts)
    elif parts.scheme in ("redis", "rediss"):
        store = open_redis_store(parts, port or 6379)
    elif not parts.netloc + parts.path + parts.query + parts.fragment:
        kind = {"memory": MemoryStateStore, "none": ReadOnlyStateStore}.get(parts.scheme)
        store = None if kind is None else kind()
    if store is None:
        # No message contains the URL, because it can contain a password.
        raise BadState(STATE_URL_HELP)
    return store


def open_configured_store(settings: Settings) -> StateStore:
    """Open the store of the desired state. Raises `BadState`."""
    if settings.state:
        return open_state_store(settings.state)
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    # Each fleet has its own file: models that were loaded on another one do not concern it.
    fleet = hashlib.sha256(",".join(sorted(settings.triton_urls)).encode()).hexdigest()[:12]
    try:
        return open_state_store(f"file://{quote(str(folder / 'triton-gateway' / f'{fleet}.json'))}")
    except BadState as exc:
        log.warning("models loaded through the API will be forgotten at the next start: %s", exc)
        return open_state_store("memory:")


class StateNotShared(Conflict):
    code = "STATE_NOT_SHARED"

    def __init__(self, subject: str) -> None:
        super().__init__(
            f"{subject} cannot be changed through the API, because GATEWAY_STATE is none:; "
            "change the models file, or share the state of the gateways in Redis"
        )


class MemoryStateStore:
    """State of one process, which is lost when it exits."""

    is_shared: ClassVar[bool] = False
    loss_count: ClassVar[int] = 0

    def __init__(self) -> None:
        self._state = DesiredState()
        self._operations: dict[str, tuple[float, bytes]] = {}
        self._loads: Loads = {}
        self._cordons: frozenset[str] = frozenset()

    async def read_desired_models(self) -> Mapping[str, DesiredModel]:
        return self._state.models

    async def set_desired_model(
        self, model: str, desired: DesiredModel | None, expected_revision: int | None = None
    ) -> int:
        if not self._state.has_revision(model, expected_revision):
            return 0
        self._state = self._state.with_model(model, desired)
        return self._state.revision

    async def read_labels(self) -> LabelTable:
        return self._state.labels

    async def set_label(self, model: str, name: str, label: VersionLabel | None) -> None:
        self._state = self._state.with_label(model, name, label)

    async def read_loads(self) -> Loads:
        return self._loads

    async def begin_load(self, replica: str, model: str) -> tuple[str, str]:
        token = new_load_token("")
        before = find_confirmed_load(self._loads, replica, model)
        self._loads = with_load(self._loads, replica, model, token)
        return token, before

    async def end_load(self, replica: str, model: str, token: str, resulting_load: str) -> None:
        self._loads = with_finished_load(self._loads, replica, model, token, resulting_load)

    async def forget_loads(self, replica: str) -> None:
        self._loads = without_replica(self._loads, replica)

    async def read_cordons(self) -> frozenset[str]:
        return self._cordons

    async def set_cordon(self, replica: str, *, is_cordoned: bool) -> None:
        self._cordons = with_cordon(self._cordons, replica, is_cordoned=is_cordoned)

    async def record_operation(self, operation_id: str, document: Mapping[str, Any]) -> None:
        now = time.monotonic()
        operations = self._operations  # in the order of their times
        operations.pop(operation_id, None)
        operations[operation_id] = (now, orjson.dumps(document))
        while now - operations[oldest := next(iter(operations))][0] > OPERATION_TTL_S:
            del operations[oldest]

    async def read_operation(self, operation_id: str) -> Mapping[str, Any] | None:
        _, raw = self._operations.get(operation_id, (0, b"null"))
        document: Mapping[str, Any] | None = orjson.loads(raw)
        return document

    async def acquire_lease(self, name: str) -> bool:
        return True

    async def release_lease(self, name: str) -> None:
        pass

    async def exchange_reports(self, report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return []

    def rate_windows(self) -> None:
        return None

    @property
    def is_available(self) -> bool:
        return True

    async def close(self) -> None:
        pass


class ReadOnlyStateStore(MemoryStateStore):
    """State for gateways that do not share any: only the models file decides what is loaded."""

    async def set_desired_model(
        self, model: str, desired: DesiredModel | None, expected_revision: int | None = None
    ) -> int:
        raise StateNotShared(f"model {quote_text(model)}")

    async def set_cordon(self, replica: str, *, is_cordoned: bool) -> None:
        raise StateNotShared(f"the cordon of replica {quote_text(replica)}")

    async def set_label(self, model: str, name: str, label: VersionLabel | None) -> None:
        raise StateNotShared(f"model {quote_text(model)}")
