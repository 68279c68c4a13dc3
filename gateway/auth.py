"""Who may call. Without a keys file: everybody, and administration from this very machine.

A request is looked at once, before anything else; what it may do is asked where it is about to be done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from starlette.types import Scope

from gateway.errors import Forbidden, Unauthenticated, UnknownModel
from gateway.keys import Caller, KeysFile, Right, Role
from gateway.words import quoted

LOOK_EVERY_S: Final = 0.5
BEARER: Final = b"bearer"
# Asked by what watches and what draws pages, neither of which has a key.
OPEN: Final = frozenset(
    ("/", "/livez", "/readyz", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
)
OPEN_BELOW: Final = "/static/"
ANYBODY: Final = Caller("", rights=frozenset((Right.infer, Right.metrics, Right.fleet)))
NOBODY: Final = Caller("", models=())
# Who sends these is not the one at the other end of the connection.
FORWARDED: Final = frozenset((b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via"))
NEEDED: Final = {Right.infer: Role.infer.value, Right.metrics: Role.metrics.value}


class Access:
    """Tells who calls, by the keys file there is, or is not."""

    def __init__(self, file: KeysFile | None) -> None:
        self._file = file

    @property
    def keyed(self) -> bool:
        """Whether keys are asked for at all."""
        return self._file is not None

    def caller(self, scope: Scope) -> Caller:
        """Raises `Unauthenticated`."""
        file = self._file
        if file is None:
            return ANYBODY
        try:
            key = presented(scope["headers"])
            if (found := file.owner(key)) is None:
                raise Unauthenticated("the key is not known")
        except Unauthenticated:
            if is_open(scope["path"]):
                return NOBODY
            raise
        return found

    async def watch(self) -> None:
        """Look for another keys file, for ever."""
        while self._file is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            self._file.look()


def is_open(path: str) -> bool:
    return path in OPEN or path.startswith(OPEN_BELOW)


def presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key that comes with a request. Raises `Unauthenticated` for none, and for two that differ."""
    key: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, shown = value.partition(b" ")
            if scheme.lower() != BEARER:
                continue  # somebody else's business
        elif name == b"x-api-key":
            shown = value
        else:
            continue
        shown = shown.strip()
        if key is not None and shown != key:
            raise Unauthenticated("the request has two different keys")
        key = shown
    if not key:
        raise Unauthenticated("a key is needed: Authorization: Bearer KEY, or X-API-Key: KEY")
    return key


def admit(scope: Scope, right: Right, model: str = "", version: str = "") -> None:
    """Raises `Forbidden` for what the caller may not do, `UnknownModel` for what it does not see."""
    caller: Caller = scope["notes"].caller
    if right not in caller.rights and not (caller is ANYBODY and is_local(scope)):
        raise refusal(caller, right)
    if model and not caller.sees(model):
        raise UnknownModel(model, version)


def admit_to_all(scope: Scope, right: Right) -> None:
    """For what speaks of every model, or acts on it. Raises `Forbidden`."""
    admit(scope, right)
    caller: Caller = scope["notes"].caller
    if not caller.sees_all:
        raise Forbidden(f"this concerns every model, and the key {quoted(caller.name)} is for some")


def refusal(caller: Caller, right: Right) -> Forbidden:
    if caller is ANYBODY:
        return Forbidden("administration is open to callers on the gateway's own machine only")
    role = NEEDED.get(right, Role.admin.value)
    return Forbidden(f"the key {quoted(caller.name)} has not the role {role}, which this needs")


# Without keys.


def is_local(scope: Scope) -> bool:
    """Whether somebody on this machine asks: not for another, and not a page in a browser of theirs."""
    client = scope.get("client")
    if client is None or not is_loopback(client[0]):
        return False
    for name, value in scope["headers"]:
        if name in FORWARDED:
            return False
        if name == b"origin" and not is_loopback(host_of(value.decode("latin-1"))):
            return False
    return True


def host_of(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


@lru_cache(256)
def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
