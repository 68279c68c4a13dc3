"""The URLs to which callbacks may be sent: those below the prefixes of the operator's list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from gateway.errors import Forbidden, MalformedRequest
from gateway.messages import quote_text

MAX_URL_CHARS: Final = 2048
DEFAULT_PORTS: Final = {"https": 443, "http": 80}
# A server may read such a path as another one: dot segments, also with parameters (`..;`), and separators,
# dots or percent signs that are encoded.
AMBIGUOUS_PATH: Final = re.compile(r"/\.{1,2}(?:[/;]|$)|%(?:25|2e|2f|5c)|\\", re.IGNORECASE)


class CallbackNotAllowed(Forbidden):
    code = "CALLBACK_NOT_ALLOWED"


@dataclass(frozen=True)
class CallbackUrl:
    scheme: str
    host: str
    port: int
    path: str
    query: str

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path

    def is_below(self, prefix: CallbackUrl) -> bool:
        """Return whether the URL has the origin of the prefix, and begins with its whole path segments."""
        expected = prefix.path.rstrip("/").split("/")
        segments = self.path.split("/")[: len(expected)]
        return self.origin == prefix.origin and segments == expected


class CallbackUrls:
    """The entries of `GATEWAY_CALLBACK_URLS`. Raises `ValueError` for an entry that is invalid."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._prefixes = tuple(map(parse_prefix, entries))

    def list_authorities(self) -> Sequence[str]:
        return sorted({prefix.authority for prefix in self._prefixes})

    def check_url(self, text: str) -> CallbackUrl:
        """Return a URL that may be called. Raises `CallbackNotAllowed` or `MalformedRequest`."""
        url = parse_url(text)
        if url is None:
            raise MalformedRequest("the callback URL is not valid; use https://HOST/PATH")
        if AMBIGUOUS_PATH.search(url.path):
            raise CallbackNotAllowed(
                "a callback URL with a backslash, a dot segment, or an encoded dot, slash, backslash or "
                "percent sign in its path is not allowed"
            )
        if not any(map(url.is_below, self._prefixes)):
            place = quote_text(f"{url.scheme}://{url.authority}")  # a path can contain a secret
            raise CallbackNotAllowed(
                f"callbacks to this URL of {place} are not allowed: GATEWAY_CALLBACK_URLS lists the prefixes "
                "of those that are"
            )
        return url


def parse_url(text: str) -> CallbackUrl | None:
    """Return the parts of a URL of http or https without a fragment; None if it is invalid.

    Raises `CallbackNotAllowed` if it contains a user name or a password.
    """
    if len(text) > MAX_URL_CHARS or not (text.isascii() and text.isprintable()) or " " in text:
        return None
    try:
        parts = urlsplit(text)
        host = parts.hostname
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in DEFAULT_PORTS or not host or port == 0 or "#" in text:
        return None
    if "@" in parts.netloc:
        raise CallbackNotAllowed("a callback URL with a user name or a password is not allowed")
    port = port or DEFAULT_PORTS[parts.scheme]
    return CallbackUrl(parts.scheme, host, port, parts.path or "/", parts.query)


def parse_prefix(entry: str) -> CallbackUrl:
    """Return the parts of an entry. Raises `ValueError`."""
    try:
        url = parse_url(entry)
    except CallbackNotAllowed:
        url = None
    if url is None or "?" in entry or "*" in url.host or AMBIGUOUS_PATH.search(url.path):
        raise ValueError(
            f"{entry!r} is not a URL prefix such as https://HOST/PATH or http://HOST:PORT"
        )
    return url
