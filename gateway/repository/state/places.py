"""The places of the state by the URL of `GATEWAY_STATE`: in memory, in a file for one machine, in Redis."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

from gateway.config.settings import Settings
from gateway.repository.state.interface import BadState, KeyValues
from gateway.repository.state.redis import open_redis_store
from gateway.repository.state.sqlite import SqliteKeyValues, open_file_store
from gateway.repository.state.store import ReadOnlyStateStore, StateStore

STATE_URL_HELP: Final = (
    "GATEWAY_STATE must be memory:, none:, file:///FOLDER/state.db or "
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
    place: KeyValues | None = None
    if parts.scheme == "file":
        place = open_file_store(parts)
    elif parts.scheme in ("redis", "rediss"):
        place = open_redis_store(parts, port or 6379, password)
    elif not parts.netloc + parts.path + parts.query + parts.fragment:
        place = SqliteKeyValues(None) if parts.scheme in ("memory", "none") else None
    if place is None:
        # No message contains the URL, because it can contain a password.
        raise BadState(STATE_URL_HELP)
    return ReadOnlyStateStore(place) if parts.scheme == "none" else StateStore(place)


def open_configured_store(settings: Settings) -> StateStore:
    """Open the store of the settings. Raises `BadState`."""
    if settings.state:
        return open_state_store(settings.state, read_state_password(settings))
    # Each fleet has its own file: models that were loaded on another one do not concern it.
    fleet = hashlib.sha256(",".join(sorted(settings.triton_urls)).encode()).hexdigest()[:12]
    folder = find_state_folder()
    try:
        return open_state_store(f"file://{quote(str(folder / f'{fleet}.db'))}")
    except BadState as exc:
        raise BadState(
            f"{exc}; mount a volume at {folder}, set GATEWAY_STATE to a place of your choice, or to memory: "
            "to forget at the end which models the API has loaded"
        ) from None


def find_state_folder() -> Path:
    """Return the folder in which the gateways of this user keep their state."""
    folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder) / "triton-gateway"


def read_state_password(settings: Settings) -> str:
    return settings.state_password.get_secret_value() if settings.state_password else ""
