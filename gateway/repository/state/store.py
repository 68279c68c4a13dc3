"""The state stores of `GATEWAY_STATE`: memory, a file for one machine, Redis for several machines."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

from gateway.config.settings import Settings
from gateway.repository.state.documents import MemoryStateStore, ReadOnlyStateStore
from gateway.repository.state.file import open_file_store
from gateway.repository.state.interface import BadState, StateStore
from gateway.repository.state.redis import open_redis_store

log = logging.getLogger(__name__)

STATE_URL_HELP: Final = (
    "GATEWAY_STATE must be memory:, none:, file:///FOLDER/state.json or "
    "redis://USER:PASSWORD@HOST:6379/0?prefix=NAME: (rediss:// for TLS, with ssl_ca_certs=FILE "
    "for a private CA); special characters must be percent-encoded"
)


def open_state_store(url: str, password: str = "") -> StateStore:
    """Open the store of a `GATEWAY_STATE` URL; the password is for one without. Raises `BadState`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise BadState(STATE_URL_HELP) from None
    store: StateStore | None = None
    if parts.scheme == "file":
        store = open_file_store(parts)
    elif parts.scheme in ("redis", "rediss"):
        store = open_redis_store(parts, port or 6379, password)
    elif not parts.netloc + parts.path + parts.query + parts.fragment:
        kind = {"memory": MemoryStateStore, "none": ReadOnlyStateStore}.get(parts.scheme)
        store = None if kind is None else kind()
    if store is None:
        # No message contains the URL, because it can contain a password.
        raise BadState(STATE_URL_HELP)
    return store


def open_configured_store(settings: Settings) -> StateStore:
    if settings.state:
        return open_state_store(settings.state, read_state_password(settings))
    # Each fleet has its own file: models that were loaded on another one do not concern it.
    fleet = hashlib.sha256(",".join(sorted(settings.triton_urls)).encode()).hexdigest()[:12]
    try:
        return open_state_store(f"file://{quote(str(find_state_folder() / f'{fleet}.json'))}")
    except BadState as exc:
        log.warning("models loaded through the API will be forgotten at the next start: %s", exc)
        return open_state_store("memory:")


def find_state_folder() -> Path:
    """Return the folder in which the gateways of this user keep their state."""
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder) / "triton-gateway"


def read_state_password(settings: Settings) -> str:
    return settings.state_password.get_secret_value() if settings.state_password else ""
