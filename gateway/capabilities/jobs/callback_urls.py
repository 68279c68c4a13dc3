"""The URLs to which callbacks may be sent: those below the prefixes of the operator's list."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import httpx

from gateway.errors import Forbidden, MalformedRequest
from gateway.messages import quote_text

MAX_URL_CHARS: Final = 2048
MAX_PORT: Final = 1 << 16
SCHEMES: Final = ("https", "http")
# A server may read such a path as another one: dot segments, also with parameters (`..;`), and separators,
# dots or percent signs that are encoded.
AMBIGUOUS_PATH: Final = re.compile(r"/\.{1,2}(?:[/;]|$)|%(?:25|2e|2f|5c)|\\", re.IGNORECASE)


class CallbackNotAllowed(Forbidden):
    code = "CALLBACK_NOT_ALLOWED"


class CallbackUrls:
    """The entries of `GATEWAY_CALLBACK_URLS`. Raises `ValueError` for an entry that is invalid."""

    def __init__(self, entries: Iterable[str]) -> None:
        self._prefixes = tuple(map(parse_prefix, entries))

    def list_authorities(self) -> Sequence[str]:
        return sorted({prefix.netloc.decode() for prefix in self._prefixes})

    def check_url(self, text: str) -> httpx.URL:
        """Return a URL that may be called. Raises `CallbackNotAllowed` or `MalformedRequest`."""
        if is_ambiguous(text):
            raise CallbackNotAllowed(
                "a callback URL with a backslash, a dot segment, or an encoded dot, slash, backslash or "
                "percent sign in its path is not allowed"
            )
        url = parse_url(text)
        if url is None:
            raise MalformedRequest("the callback URL is not valid; use https://HOST/PATH")
        if not any(is_below(url, prefix) for prefix in self._prefixes):
            place = quote_text(
                f"{url.scheme}://{url.netloc.decode()}"
            )  # a path can contain a secret
            raise CallbackNotAllowed(
                f"callbacks to this URL of {place} are not allowed: GATEWAY_CALLBACK_URLS lists the prefixes "
                "of those that are"
            )
        return url


def is_ambiguous(text: str) -> bool:
    return AMBIGUOUS_PATH.search(text.partition("?")[0]) is not None


def is_below(url: httpx.URL, prefix: httpx.URL) -> bool:
    """Return whether the URL has the origin of the prefix, and begins with its whole path segments."""
    has_origin = (url.scheme, url.netloc) == (prefix.scheme, prefix.netloc)
    expected = list_segments(prefix)
    if not expected[-1]:
        expected.pop()
    return has_origin and list_segments(url)[: len(expected)] == expected


def list_segments(url: httpx.URL) -> list[bytes]:
    return url.raw_path.partition(b"?")[0].split(b"/")


def parse_url(text: str) -> httpx.URL | None:
    """Return a URL of http or https without a fragment; None if it is invalid.

    Raises `CallbackNotAllowed` if it contains a user name or a password.
    """
    if len(text) > MAX_URL_CHARS or not (text.isascii() and text.isprintable()):
        return None
    try:
        # Of a scheme in capitals, the default port is left out the second time.
        url = httpx.URL(str(httpx.URL(text)))
        host = url.host  # decoded: of IDNA, not every name can be
    except (httpx.InvalidURL, UnicodeError):
        return None
    is_port = url.port is None or 0 < url.port < MAX_PORT
    if url.scheme not in SCHEMES or not host or not is_port or set(" #") & set(text):
        return None
    if "@" in re.split("[/?]", text)[2]:
        raise CallbackNotAllowed("a callback URL with a user name or a password is not allowed")
    return url


def parse_prefix(entry: str) -> httpx.URL:
    """Return an entry. Raises `ValueError`."""
    try:
        url = parse_url(entry)
    except CallbackNotAllowed:
        url = None
    if url is None or "?" in entry or "*" in url.host or is_ambiguous(entry):
        raise ValueError(
            f"{entry!r} is not a URL prefix such as https://HOST/PATH or http://HOST:PORT"
        )
    return url
