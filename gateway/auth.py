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

from gateway.errors import Forbidden, Unauthenticated, UnknownModel
from gateway.keys import Caller, KeysFile, Right, Role
from gateway.messages import quote_text
from gateway.names import is_model_name, normalize_version
from gateway.peers import can_identify_peers, find_peer_uid, parse_ip_address
from gateway.request_info import ManagementCall

KEYS_FILE_POLL_S: Final = 0.5
BEARER: Final = b"bearer"
BASIC: Final = b"basic"
# Asked by what watches and what draws pages, neither of which has a key.
PUBLIC_PATHS: Final = frozenset(
    ("/", "/livez", "/readyz", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
)
PUBLIC_PATH_PREFIX: Final = "/static/"
ANONYMOUS_RIGHTS: Final = frozenset((Right.infer, Right.metrics, Right.fleet))
ANONYMOUS: Final = Caller("", rights=ANONYMOUS_RIGHTS)
# The same, where nobody administers without a key.
ANONYMOUS_NON_ADMIN: Final = Caller("", rights=ANONYMOUS_RIGHTS)
UNAUTHENTICATED: Final = Caller("", models=())
ROOT_UID: Final = 0
READ_METHODS: Final = ("GET", "HEAD")
# What proxies and content networks say of the client they ask for.
PROXY_HEADER: Final = re.compile(
    rb"forwarded|via|cdn-loop|x-(?:forwarded|original|envoy|appengine|azure)-.*|x-amzn-trace-id|"
    rb"x-(?:real|remote|originating)-ip|x-remote-addr|.*client-?ip|.*-connecting-ip"
)
# What a browser says of the gateway's own page, and of an address that a person typed.
SAME_SITE_VALUES: Final = frozenset((b"same-origin", b"none"))
BROWSER_HEADERS: Final = frozenset((b"origin", b"sec-fetch-site"))
CROSS_ORIGIN_REASON: Final = "a web page of another origin sent it"
REQUIRED_ROLES: Final = {Right.infer: Role.infer.value, Right.metrics: Role.metrics.value}


class Authenticator:
    """Tells who calls, by the keys file there is, or is not."""

    def __init__(
        self,
        keys_file: KeysFile | None,
        allowed_hosts: Sequence[str] = (),
        *,
        local_admin: bool = True,
    ) -> None:
        self._keys_file = keys_file
        self._allowed_hosts = tuple(allowed_hosts)
        self._anonymous = ANONYMOUS if local_admin else ANONYMOUS_NON_ADMIN

    @property
    def requires_key(self) -> bool:
        """Whether keys are asked for at all."""
        return self._keys_file is not None

    def authenticate(self, scope: Scope) -> Caller:
        """Raises `Unauthenticated`, or `Forbidden` for a host that is not the gateway's."""
        if self._allowed_hosts:
            self._check_host(scope["headers"])
        file = self._keys_file
        if file is None:
            return self._anonymous
        try:
            key = extract_key(scope["headers"])
            if (found := file.find_caller(key)) is None:
                raise Unauthenticated("the key is not known")
        except Unauthenticated:
            if is_public_path(scope["path"]):
                return UNAUTHENTICATED
            raise
        return found

    def _check_host(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """A page whose name was made to stand for this machine (DNS rebinding) sends its own name."""
        for name, value in headers:
            if name == b"host" and not is_allowed_host(value, self._allowed_hosts):
                host = quote_text(parse_host(value.decode("latin-1")))
                raise Forbidden(
                    f"the gateway does not serve the host {host}; add it to GATEWAY_ALLOWED_HOSTS if it is "
                    "one of the gateway's own names"
                )

    async def watch_keys_file(self) -> None:
        """Look for another keys file, for ever."""
        while self._keys_file is not None:
            await asyncio.sleep(KEYS_FILE_POLL_S)
            self._keys_file.reload_if_changed()


def is_public_path(path: str) -> bool:
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_PATH_PREFIX)


def extract_key(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
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
    return any(name in BROWSER_HEADERS for name, _ in headers)


def authorize(
    scope: Scope,
    right: Right,
    model: str = "",
    version: str = "",
    unknown_model_error: type[UnknownModel] = UnknownModel,
) -> None:
    """Raises `Forbidden` for what the caller may not do, `unknown` for what it does not see, and for
    what is no name of a model or no version: another server on the way could take it for another path."""
    notes = scope["request_info"]
    caller: Caller = notes.caller
    if right is Right.manage and scope["method"] not in READ_METHODS:
        notes.management_call = ManagementCall(model)
    if right not in caller.rights:
        why = explain_remote_origin(scope) if caller is ANONYMOUS else ""
        if why or caller is not ANONYMOUS:
            raise create_forbidden_error(caller, right, why)
    if model and not (is_model_name(model) and caller.can_see(model)):
        raise unknown_model_error(model, version)
    if version and normalize_version(version) is None:
        raise unknown_model_error(model, version)


def authorize_all_models(scope: Scope, right: Right) -> None:
    """For what speaks of every model, or acts on it. Raises `Forbidden`."""
    authorize(scope, right)
    caller: Caller = scope["request_info"].caller
    if not caller.can_see_all:
        raise Forbidden(
            f"this concerns every model, and the key {quote_text(caller.name)} is for some"
        )


def create_forbidden_error(caller: Caller, right: Right, reason: str = "") -> Forbidden:
    """What a caller without the right is told; `why` its request is not a local one."""
    if caller is ANONYMOUS:
        return Forbidden(
            "without a key, administration is allowed only to the gateway's own user on the same machine; "
            f"this request is refused because {reason}; use an admin key (GATEWAY_KEYS_FILE)"
        )
    if caller is ANONYMOUS_NON_ADMIN:
        return Forbidden(
            "administration is switched off: GATEWAY_LOCAL_ADMIN is false, and there is no keys file"
        )
    role = REQUIRED_ROLES.get(right, Role.admin.value)
    return Forbidden(
        f"the key {quote_text(caller.name)} does not have the role {role}, which this needs"
    )


# Without keys.


def explain_remote_origin(scope: Scope) -> str:
    """Why a request is not that of a program of this user on this machine; empty if it is.

    Administration is code that runs: a request that a proxy sends for somebody else, a web page, or
    another user of the machine must not pass for one of the gateway's own.
    """
    client, server = scope.get("client"), scope.get("server")
    if client is None or server is None or not is_loopback(client[0]):
        return "it comes from another address"
    if scope["http_version"] == "1.0":  # as nginx asks, if it is not told otherwise
        return "it uses HTTP/1.0, as a proxy does"
    if why := explain_foreign_headers(scope["headers"]):
        return why
    if can_identify_peers() and find_peer_uid(client, server) not in (os.geteuid(), ROOT_UID):
        return "a program of another user sent it"
    return ""


def explain_foreign_headers(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Why a request's headers are those of a proxy or of a web page; empty if they are not."""
    origin = host = ""
    for name, value in headers:
        if name == b"host":
            host = value.decode("latin-1").lower()
        elif name == b"origin":
            origin = value.decode("latin-1").lower()
        elif name == b"sec-fetch-site" and value not in SAME_SITE_VALUES:
            return CROSS_ORIGIN_REASON
        elif PROXY_HEADER.fullmatch(name):
            return f"a proxy passed it on (its header {name.decode('latin-1')})"
    if not is_loopback(parse_host(host)):
        return f"it is for the host {quote_text(host)} and not for localhost"
    return (
        CROSS_ORIGIN_REASON
        if origin and origin not in (f"http://{host}", f"https://{host}")
        else ""
    )


def parse_host(authority: str) -> str:
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
        return parse_ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(256)
def is_allowed_host(authority: bytes, patterns: tuple[str, ...]) -> bool:
    """Whether a `Host` header names one of the hosts `allowed`, or this machine."""
    host = parse_host(authority.decode("latin-1"))
    return is_loopback(host) or any(fnmatchcase(host, pattern) for pattern in patterns)
