"""Who may call. Without a keys file: everybody, and administration from this very machine.

A request is looked at once, before anything else; what it may do is asked where it is about to be done.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from starlette.types import Scope

from gateway.context import ManagementCall
from gateway.errors import Forbidden, Unauthenticated, UnknownModel
from gateway.keys import Caller, KeysFile, Right, Role
from gateway.names import is_model_name, normalized_version
from gateway.peers import knows_peers, plain, user_of_peer
from gateway.words import quoted

LOOK_EVERY_S: Final = 0.5
BEARER: Final = b"bearer"
BASIC: Final = b"basic"
# Asked by what watches and what draws pages, neither of which has a key.
OPEN: Final = frozenset(
    ("/", "/livez", "/readyz", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
)
OPEN_BELOW: Final = "/static/"
KEYLESS: Final = frozenset((Right.infer, Right.metrics, Right.fleet))
ANYBODY: Final = Caller("", rights=KEYLESS)
# The same, where nobody administers without a key.
NO_ADMINISTRATOR: Final = Caller("", rights=KEYLESS)
NOBODY: Final = Caller("", models=())
ROOT: Final = 0
READING: Final = ("GET", "HEAD")
# What proxies and content networks say of the client they ask for.
OF_A_PROXY: Final = re.compile(
    rb"forwarded|via|cdn-loop|x-(?:forwarded|original|envoy|appengine|azure)-.*|x-amzn-trace-id|"
    rb"x-(?:real|remote|originating)-ip|x-remote-addr|.*client-?ip|.*-connecting-ip"
)
# What a browser says of the gateway's own page, and of an address that a person typed.
OWN_PAGE: Final = frozenset((b"same-origin", b"none"))
OF_BROWSERS: Final = frozenset((b"origin", b"sec-fetch-site"))
OF_A_PAGE: Final = "a web page of another origin sent it"
NEEDED: Final = {Right.infer: Role.infer.value, Right.metrics: Role.metrics.value}


class Access:
    """Tells who calls, by the keys file there is, or is not."""

    def __init__(
        self, file: KeysFile | None, hosts: Sequence[str] = (), *, local_admin: bool = True
    ) -> None:
        self._file = file
        self._hosts = tuple(hosts)
        self._keyless = ANYBODY if local_admin else NO_ADMINISTRATOR

    @property
    def keyed(self) -> bool:
        """Whether keys are asked for at all."""
        return self._file is not None

    def caller(self, scope: Scope) -> Caller:
        """Raises `Unauthenticated`, or `Forbidden` for a host that is not the gateway's."""
        if self._hosts:
            self._check_host(scope["headers"])
        file = self._file
        if file is None:
            return self._keyless
        try:
            key = presented(scope["headers"])
            if (found := file.owner(key)) is None:
                raise Unauthenticated("the key is not known")
        except Unauthenticated:
            if is_open(scope["path"]):
                return NOBODY
            raise
        return found

    def _check_host(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """A page whose name was made to stand for this machine (DNS rebinding) sends its own name."""
        for name, value in headers:
            if name == b"host" and not is_allowed(value, self._hosts):
                host = quoted(host_of(value.decode("latin-1")))
                raise Forbidden(
                    f"the gateway does not serve the host {host}; add it to GATEWAY_ALLOWED_HOSTS if it is "
                    "one of the gateway's own names"
                )

    async def watch(self) -> None:
        """Look for another keys file, for ever."""
        while self._file is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            self._file.look()


def is_open(path: str) -> bool:
    return path in OPEN or path.startswith(OPEN_BELOW)


def presented(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The key that comes with a request. Raises `Unauthenticated` for none, and for two that differ.

    Basic credentials count where there is no other key: they may be a proxy's.
    """
    key: bytes | None = None
    basic: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, shown = value.partition(b" ")
            if scheme.lower() == BASIC:
                basic.append(shown)
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
    if key is None and len(basic) == 1 and not is_from_browser(headers):
        key = read_password(basic[0])
    if not key:
        raise Unauthenticated("a key is needed: Authorization: Bearer KEY, or X-API-Key: KEY")
    return key


def read_password(credentials: bytes) -> bytes:
    """Return the password of Basic credentials (RFC 7617); empty for what are none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def is_from_browser(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a browser sent it: Basic credentials that it knows go with the requests of every
    page, as cookies do."""
    return any(name in OF_BROWSERS for name, _ in headers)


def admit(
    scope: Scope,
    right: Right,
    model: str = "",
    version: str = "",
    unknown: type[UnknownModel] = UnknownModel,
) -> None:
    """Raises `Forbidden` for what the caller may not do, `unknown` for what it does not see, and for
    what is no name of a model or no version: another server on the way could take it for another path."""
    notes = scope["notes"]
    caller: Caller = notes.caller
    if right is Right.manage and scope["method"] not in READING:
        notes.managed = ManagementCall(model)
    if right not in caller.rights:
        why = why_not_local(scope) if caller is ANYBODY else ""
        if why or caller is not ANYBODY:
            raise refusal(caller, right, why)
    if model and not (is_model_name(model) and caller.sees(model)):
        raise unknown(model, version)
    if version and normalized_version(version) is None:
        raise unknown(model, version)


def admit_to_all(scope: Scope, right: Right) -> None:
    """For what speaks of every model, or acts on it. Raises `Forbidden`."""
    admit(scope, right)
    caller: Caller = scope["notes"].caller
    if not caller.sees_all:
        raise Forbidden(f"this concerns every model, and the key {quoted(caller.name)} is for some")


def refusal(caller: Caller, right: Right, why: str = "") -> Forbidden:
    """What a caller without the right is told; `why` its request is not a local one."""
    if caller is ANYBODY:
        return Forbidden(
            "without a key, administration is allowed only to the gateway's own user on the same machine; "
            f"this request is refused because {why}; use an admin key (GATEWAY_KEYS_FILE)"
        )
    if caller is NO_ADMINISTRATOR:
        return Forbidden(
            "administration is switched off: GATEWAY_LOCAL_ADMIN is false, and there is no keys file"
        )
    role = NEEDED.get(right, Role.admin.value)
    return Forbidden(
        f"the key {quoted(caller.name)} does not have the role {role}, which this needs"
    )


# Without keys.


def why_not_local(scope: Scope) -> str:
    """Why a request is not that of a program of this user on this machine; empty if it is.

    Administration is code that runs: a request that a proxy sends for somebody else, a web page, or
    another user of the machine must not pass for one of the gateway's own.
    """
    client, server = scope.get("client"), scope.get("server")
    if client is None or server is None or not is_loopback(client[0]):
        return "it comes from another address"
    if scope["http_version"] == "1.0":  # as nginx asks, if it is not told otherwise
        return "it uses HTTP/1.0, as a proxy does"
    if why := why_for_another(scope["headers"]):
        return why
    if knows_peers() and user_of_peer(client, server) not in (os.geteuid(), ROOT):
        return "a program of another user sent it"
    return ""


def why_for_another(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Why a request's headers are those of a proxy or of a web page; empty if they are not."""
    origin = host = ""
    for name, value in headers:
        if name == b"host":
            host = value.decode("latin-1").lower()
        elif name == b"origin":
            origin = value.decode("latin-1").lower()
        elif name == b"sec-fetch-site" and value not in OWN_PAGE:
            return OF_A_PAGE
        elif OF_A_PROXY.fullmatch(name):
            return f"a proxy passed it on (its header {name.decode('latin-1')})"
    if not is_loopback(host_of(host)):
        return f"it is for the host {quoted(host)} and not for localhost"
    return OF_A_PAGE if origin and origin not in (f"http://{host}", f"https://{host}") else ""


def host_of(authority: str) -> str:
    """The host of a `Host` header, in lower case and without its port."""
    host = authority.lower()
    if host.startswith("["):
        address, closed, _ = host[1:].partition("]")
        return address if closed else ""
    return host.partition(":")[0].removesuffix(".")


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Whether a name or an address stands for this machine alone (RFC 6761, section 6.3)."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return plain(host).is_loopback
    except ValueError:
        return False


@lru_cache(256)
def is_allowed(authority: bytes, allowed: tuple[str, ...]) -> bool:
    """Whether a `Host` header names one of the hosts `allowed`, or this machine."""
    host = host_of(authority.decode("latin-1"))
    return is_loopback(host) or any(fnmatchcase(host, pattern) for pattern in allowed)
