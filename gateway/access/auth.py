"""Authentication and authorization. Without a keys file, anyone may call; only local programs administer.

A request is authenticated once, before anything else, and authorized where it is handled.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Final

from gateway.access.keys import KeysFile
from gateway.access.peers import can_identify_peers, client_network, find_peer_uid, parse_ip_address
from gateway.callers import RIGHT_TO_MANAGE, Caller, CallerKind, Priority, Right, Role
from gateway.errors import Forbidden, MalformedRequest, Unauthenticated, Unavailable
from gateway.messages import format_utc_time, quote_text
from gateway.tasks import repeat
from gateway.telemetry.request_info import ManagementCall, RequestScope, read_head

KEYS_FILE_POLL_S: Final = 0.5
AUTHORIZATION: Final = b"authorization"
# Headers with keys, which are not forwarded to Triton.
KEY_HEADERS: Final = frozenset((AUTHORIZATION, b"x-api-key"))
KEY_REQUIRED: Final = "a key is required: send Authorization: Bearer KEY or X-API-Key: KEY"
PRIORITY_HEADER: Final = b"x-priority"
BEARER: Final = b"bearer"
BASIC: Final = b"basic"
ANONYMOUS_RIGHTS: Final = frozenset((Right.infer, Right.metrics, Right.fleet))
UNAUTHENTICATED: Final = Caller("", models=(), kind=CallerKind.unauthenticated)
ROOT_UID: Final = 0
READ_METHODS: Final = ("GET", "HEAD")
# Headers with which proxies and content delivery networks describe their client.
PROXY_HEADER: Final = re.compile(
    rb"forwarded|via|cdn-loop|x-(?:forwarded|original|envoy|appengine|azure)-.*|x-amzn-trace-id|"
    rb"x-(?:real|remote|originating)-ip|x-remote-addr|.*client-?ip|.*-connecting-ip"
)
# Sec-Fetch-Site for the gateway's own page, and for an address that a user typed.
SAME_SITE_VALUES: Final = frozenset((b"same-origin", b"none"))
BROWSER_HEADERS: Final = frozenset((b"origin", b"sec-fetch-site"))
CROSS_ORIGIN_REASON: Final = "a web page of another origin sent it"
REQUIRED_ROLES: Final = {Right.infer: Role.infer.value, Right.metrics: Role.metrics.value}


@dataclass(frozen=True)
class PathRules:
    """The paths on which requests are treated differently. Capabilities add theirs to `CORE_PATHS`."""

    public: frozenset[str] = frozenset()  # probes and browsers that load pages have no key
    public_prefixes: tuple[str, ...] = ()
    probes: frozenset[str] = frozenset()  # they come every few seconds, and are not traced
    polled: frozenset[str] = frozenset()  # the page reads them every few seconds
    output_prefixes: tuple[str, ...] = ()  # responses that can be a model's output

    def __or__(self, other: PathRules) -> PathRules:
        return PathRules(
            self.public | other.public,
            self.public_prefixes + other.public_prefixes,
            self.probes | other.probes,
            self.polled | other.polled,
            output_prefixes=self.output_prefixes + other.output_prefixes,
        )

    @cached_property
    def unlimited(self) -> frozenset[str]:
        """The paths whose requests do not count at the rate of their key."""
        return self.public | self.probes

    def is_routine(self, path: str) -> bool:
        """Return whether reads of the path say nothing about the gateway's use."""
        return (
            path in self.unlimited or path in self.polled or path.startswith(self.public_prefixes)
        )


CORE_PATHS: Final = PathRules(
    public=frozenset(("/", "/livez", "/readyz", "/docs", "/redoc", "/openapi.json")),
    public_prefixes=("/docs/",),
    probes=frozenset(("/livez", "/readyz", "/metrics", "/v2/health/live", "/v2/health/ready")),
    polled=frozenset(("/v1/models", "/v1/replicas", "/v1/events")),
    output_prefixes=("/v1/",),
)


# The errors of callers that cannot be identified, or have no rights.
REFUSALS: Final = (Unauthenticated, Forbidden, Unavailable)


# Returned for credentials that take time to verify.
UNVERIFIED: Final = Caller("", models=(), kind=CallerKind.unauthenticated)


class Verifier(ABC):
    """Identifies callers by one kind of credentials."""

    @abstractmethod
    def find_caller(self, scope: RequestScope, digest: bytes) -> Caller | None:
        """Return the caller, or `UNVERIFIED`; None if the credentials are of another kind.

        The digest is that of `hash_key`. Raises `Unauthenticated` or `Forbidden`.
        """

    async def verify(self, scope: RequestScope, *, may_wait: bool) -> Caller:
        """Verify credentials that are `UNVERIFIED`; without `may_wait`, only with what is known.

        Raises one of `REFUSALS`.
        """
        raise Unauthenticated(KEY_REQUIRED)


class KeyVerifier(Verifier):
    """Identifies callers by the keys of the keys file."""

    def __init__(self, file: KeysFile) -> None:
        self._file = file

    def find_caller(self, scope: RequestScope, digest: bytes) -> Caller | None:
        caller = self._file.find_caller(digest)
        if caller is not None and (caller.expires is not None or caller.not_before is not None):
            check_key_period(caller, datetime.now(timezone.utc))
        return caller


class Authenticator:
    """Identifies callers by the first verifier that recognizes their credentials.

    Without a keys file every caller is anonymous.
    """

    def __init__(
        self,
        keys_file: KeysFile | None,
        allowed_hosts: Sequence[str] = (),
        paths: PathRules = CORE_PATHS,
        *,
        local_admin: bool = True,
    ) -> None:
        self.keys_file = keys_file
        self.verifiers: list[Verifier] = [] if keys_file is None else [KeyVerifier(keys_file)]
        self._paths = paths
        self._allowed_hosts = tuple(allowed_hosts)
        self._anonymous = Caller(
            "",
            rights=ANONYMOUS_RIGHTS,
            kind=CallerKind.anonymous,
            may_administer_locally=local_admin,
        )

    @property
    def requires_key(self) -> bool:
        return self.keys_file is not None

    def authenticate(self, scope: RequestScope) -> Caller | None:
        """Return the caller; None if `verify` must be awaited.

        Raises `Unauthenticated`, or `Forbidden`, also for a host that is not allowed.
        """
        if self._allowed_hosts:
            self._check_host(scope["headers"])
        if self.keys_file is None:
            return self._anonymous
        try:
            digest = read_head(scope, hash_key)
            for verifier in self.verifiers:
                caller = verifier.find_caller(scope, digest)
                if caller is not None:
                    return None if caller is UNVERIFIED else caller
            raise Unauthenticated("unknown key" if digest else KEY_REQUIRED)
        except REFUSALS:
            if self._is_public(scope["path"]):
                return UNAUTHENTICATED
            raise

    async def verify(self, scope: RequestScope, *, is_public: bool = False) -> Caller:
        """Return the caller of credentials that take time to verify. Raises one of `REFUSALS`.

        A public request does not wait for anything outside of the gateway, and is never refused.
        """
        is_public = is_public or self._is_public(scope["path"])
        try:
            digest = read_head(scope, hash_key)
            for verifier in self.verifiers:
                caller = verifier.find_caller(scope, digest)
                if caller is UNVERIFIED:
                    return await verifier.verify(scope, may_wait=not is_public)
                if caller is not None:
                    return caller
            raise Unauthenticated(KEY_REQUIRED)
        except REFUSALS:
            if is_public:
                return UNAUTHENTICATED
            raise

    def _is_public(self, path: str) -> bool:
        return path in self._paths.public or path.startswith(self._paths.public_prefixes)

    def _check_host(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        # A page that rebinds its DNS name to this machine sends that name as Host.
        for name, value in headers:
            if name == b"host" and not is_allowed_host(value, self._allowed_hosts):
                host = quote_text(parse_host(value.decode("latin-1")))
                raise Forbidden(
                    f"host {host} is not allowed; if it is a name of this gateway, add it to "
                    "GATEWAY_ALLOWED_HOSTS"
                )

    async def watch_keys_file(self) -> None:
        if (file := self.keys_file) is None:
            return

        async def check() -> None:
            await asyncio.sleep(KEYS_FILE_POLL_S)
            await file.reload_in_background()

        await repeat("keys_file", check)


def check_key_period(caller: Caller, now: datetime) -> None:
    """Check that a key is valid now. Raises `Unauthenticated`."""
    if caller.expires is not None and caller.expires <= now:
        expired = format_utc_time(caller.expires)
        raise Unauthenticated(f"{caller.label} expired at {expired}; ask for another key")
    if caller.not_before is not None and now < caller.not_before:
        raise Unauthenticated(
            f"{caller.label} is valid from {format_utc_time(caller.not_before)} on"
        )


def extract_key(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the key or token of a request, empty if there is none. Raises `Unauthenticated` for two of them.

    Basic credentials are used only without another key: they may be meant for a proxy.
    """
    key: bytes | None = None
    basic: list[bytes] = []
    for name, value in headers:
        if name not in KEY_HEADERS:
            continue
        credentials = value
        if name == AUTHORIZATION:
            scheme, _, credentials = value.partition(b" ")
            if scheme.lower() == BASIC:
                basic.append(credentials)
            if scheme.lower() != BEARER:
                continue  # credentials for a proxy or another scheme
        credentials = credentials.strip()
        if key is not None and credentials != key:
            raise Unauthenticated("the request contains two different keys or tokens; send one")
        key = credentials
    if key is None and len(basic) == 1 and not is_from_browser(headers):
        key = decode_password(basic[0])
    return key or b""


def hash_key(scope: RequestScope) -> bytes:
    """Return the SHA-256 of the key or token, empty if there is none. Raises `Unauthenticated`."""
    key = extract_key(scope["headers"])
    return hashlib.sha256(key).digest() if key else b""


def decode_password(credentials: bytes) -> bytes:
    """Return the password of Basic credentials (RFC 7617); empty if they are invalid."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def is_from_browser(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    # A browser adds stored Basic credentials to the requests of every page, like cookies.
    return any(name in BROWSER_HEADERS for name, _ in headers)


def read_priority(scope: RequestScope) -> Priority | None:
    """Return the priority that the request asks for. Raises `MalformedRequest` for an unknown one."""
    for name, value in scope["headers"]:
        if name == PRIORITY_HEADER:
            text = value.decode("latin-1").strip().lower()
            if text not in Priority.__members__:
                names = ", ".join(Priority.__members__)
                raise UnknownPriority(
                    f"X-Priority is {quote_text(text)}, which is not one of {names}"
                )
            return Priority[text]
    return None


class UnknownPriority(MalformedRequest):
    """The header X-Priority has another value than the names of the priorities."""


def name_caller(caller: Caller, client: tuple[str, int] | None) -> str:
    """Return the name by which callers take turns: of the key, or without keys the client's network."""
    return caller.name or (client_network(client[0]) if client else "")


def authorize(scope: RequestScope, right: Right, model: str = "") -> None:
    """Check the caller's right; `ModelResolver` checks its access to the model. Raises `Forbidden`."""
    info = scope["request_info"]
    if right is RIGHT_TO_MANAGE and scope["method"] not in READ_METHODS:
        client = scope["client"]
        info.management_call = ManagementCall(model, client[0] if client else "")
    if right not in info.caller.rights:
        check_local_administrator(scope, info.caller, right)


def check_local_administrator(scope: RequestScope, caller: Caller, right: Right) -> None:
    """Check whether a caller without the right is a local program, which has all. Raises `Forbidden`."""
    if caller.kind is not CallerKind.anonymous:
        raise MissingRole(caller, right)
    if not caller.may_administer_locally:
        raise AdministrationDisabled
    if reason := explain_remote_origin(scope):
        raise RemoteAdministration(reason)


def authorize_all_models(scope: RequestScope, right: Right) -> None:
    """Check that the caller has the right, and can see every model. Raises `Forbidden`."""
    authorize(scope, right)
    caller = scope["request_info"].caller
    if not caller.can_see_all:
        raise Forbidden(
            f"{caller.label} is limited to some models; this requires access to all models"
        )


class MissingRole(Forbidden):
    def __init__(self, caller: Caller, right: Right) -> None:
        role = REQUIRED_ROLES.get(right, Role.admin.value)
        super().__init__(f"{caller.label} lacks the role {quote_text(role)}, which this requires")


class AdministrationDisabled(Forbidden):
    message = (
        "administration is disabled: GATEWAY_LOCAL_ADMIN is false and GATEWAY_KEYS_FILE is not set"
    )


class RemoteAdministration(Forbidden):
    def __init__(self, reason: str) -> None:
        super().__init__(
            "without a key, only the gateway's own user on the same machine may administer; "
            f"this request was rejected because {reason}; use an admin key (GATEWAY_KEYS_FILE)"
        )


def explain_remote_origin(scope: RequestScope) -> str:
    """Return the reason why a request is not from a local program of this user; empty if it is.

    Administration can execute code: a request that a proxy forwards, or that a web page or another user of
    the machine sends, must not pass as local.
    """
    client = scope.get("client")
    server = scope.get("server")
    if client is None or server is None or not is_loopback(client[0]):
        return "it comes from another address"
    if scope["http_version"] == "1.0":  # nginx's default for upstream requests
        return "it uses HTTP/1.0, as a proxy does"
    if reason := explain_foreign_headers(scope["headers"]):
        return reason
    if can_identify_peers() and find_peer_uid(client, server) not in (os.geteuid(), ROOT_UID):
        return "a program of another user sent it"
    return ""


def explain_foreign_headers(headers: Sequence[tuple[bytes, bytes]]) -> str:
    host = ""
    for name, value in headers:
        if name == b"host":
            host = value.decode("latin-1").lower()
        elif PROXY_HEADER.fullmatch(name):
            return f"a proxy forwarded it (header {name.decode('latin-1')})"
    if is_cross_origin(headers):
        return CROSS_ORIGIN_REASON
    return "" if is_loopback(parse_host(host)) else f"its host is {quote_text(host)}, not localhost"


def is_cross_origin(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a web page sent the request whose origin is not the gateway's."""
    origin = host = ""
    is_other_site = False
    for name, value in headers:
        if name == b"host":
            host = value.decode("latin-1").lower()
        elif name == b"origin":
            origin = value.decode("latin-1").lower()
        elif name == b"sec-fetch-site" and value not in SAME_SITE_VALUES:
            is_other_site = True
    return is_other_site or origin not in ("", f"http://{host}", f"https://{host}")


def parse_host(authority: str) -> str:
    """Return the host of a `Host` header in lower case, without the port; empty if it is invalid."""
    host = authority.lower()
    if host.startswith("["):
        address, bracket, _ = host[1:].partition("]")
        return address if bracket else ""
    return host.partition(":")[0].removesuffix(".")


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Return whether a name (RFC 6761, section 6.3) or an address is a loopback one."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return parse_ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(256)
def is_allowed_host(authority: bytes, patterns: tuple[str, ...]) -> bool:
    host = parse_host(authority.decode("latin-1"))
    return is_loopback(host) or any(fnmatchcase(host, pattern) for pattern in patterns)
