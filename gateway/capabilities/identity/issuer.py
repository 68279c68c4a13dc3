"""The issuer's public keys: fetched over HTTP or read from a file, and refreshed in the background."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import httpx
import orjson
from anyio import to_thread
from joserfc.jwk import KeySet
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.capabilities.identity.errors import InvalidToken, IssuerUnavailable
from gateway.capabilities.identity.settings import IdentitySettings, is_safe_address
from gateway.capabilities.identity.tokens import (
    Key,
    Token,
    TokenParser,
    find_key,
    is_signed_by,
    parse_issuer_keys,
)
from gateway.config.files import read_config_file
from gateway.messages import CommandError, quote_text
from gateway.tasks import follow, repeat

log = logging.getLogger(__name__)

# The OpenID configuration and the keys together must arrive within this time.
FETCH_TIMEOUT_S: Final = 5.0
MAX_DOCUMENT_BYTES: Final = 64 << 10
# The keys are used for ten minutes, and fetched again a little earlier.
REFRESH_S: Final = 9 * 60.0
# While the issuer cannot be reached, its keys stay in use for a day.
MAX_AGE_S: Final = 86400.0
# Between two fetches, however many tokens name an unknown key or fetches fail.
MIN_INTERVAL_S: Final = 10.0
FILE_POLL_S: Final = 1.0
CONFIGURATION_PATH: Final = "/.well-known/openid-configuration"
HEADERS: Final = {"Accept": "application/json", "Accept-Encoding": "identity"}


class FetchError(Exception):
    """The keys cannot be fetched or read; the message says why."""


class KeySource(Collector):
    """The keys of an issuer, which `fetch` returns, and their age as a metric.

    One fetch runs at a time, and one begins in `min_interval_s`.
    """

    def __init__(
        self,
        issuer: str,
        fetch: Callable[[], Awaitable[KeySet]],
        *,
        max_age_s: float = MAX_AGE_S,
        refresh_s: float = REFRESH_S,
        min_interval_s: float = MIN_INTERVAL_S,
    ) -> None:
        self.is_current = False  # whether the last fetch succeeded
        self.on_change: Callable[[], object] = lambda: None  # called when there are other keys
        self._keys: KeySet | None = None
        self._issuer = issuer
        self._fetch = fetch
        self._max_age_s = max_age_s
        self._refresh_s = refresh_s
        self._min_interval_s = min_interval_s
        # The age of the keys is counted from the start until there is a fetch.
        self._fetched_at = time.monotonic()
        self._started_at = -math.inf  # when the last fetch began
        self._fetching: asyncio.Task[None] | None = None
        self._last_problem = ""

    @property
    def keys(self) -> KeySet | None:
        """The keys, or None while they are not known."""
        return self._keys if self.find_age_s() < self._max_age_s else None

    def find_age_s(self) -> float:
        return time.monotonic() - self._fetched_at

    def find_expiry(self) -> float:
        """Return when the keys expire, by `time.time`."""
        return time.time() + self._max_age_s - self.find_age_s()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(
            "gateway_oidc_keys_age_seconds",
            "Time since the issuer's keys were fetched, or since the start if they never were.",
            value=self.find_age_s(),
        )

    async def refresh_for_unknown_key(self) -> None:
        """Look for new keys, because a token names one that is not known."""
        if self._fetching is not None or self._find_wait_s(self._min_interval_s) <= 0:
            await self._refresh()

    async def run(self) -> None:
        """Refresh the keys until cancelled."""

        async def step() -> None:
            wait_s = self._find_wait_s(self._refresh_s if self.is_current else self._min_interval_s)
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            else:
                await self._refresh()

        await repeat("oidc_keys", step)

    def replace_keys(self, keys: KeySet) -> None:
        self._fetched_at = time.monotonic()
        self.is_current = True
        if self._keys is None or keys.as_dict() != self._keys.as_dict():
            self._keys = keys
            self.on_change()

    def _find_wait_s(self, interval_s: float) -> float:
        return self._started_at + interval_s - time.monotonic()

    async def _refresh(self) -> None:
        """Fetch the keys, or wait for the fetch that runs. It goes on if the caller is cancelled."""
        if self._fetching is None:
            self._started_at = time.monotonic()
            self._fetching = asyncio.create_task(self._fetch_keys())
        await follow(self._fetching)

    async def _fetch_keys(self) -> None:
        problem = ""
        try:
            self.replace_keys(await self._fetch())
        except FetchError as exc:
            self.is_current = False
            problem = str(exc)
        finally:
            self._fetching = None
        if problem != self._last_problem:
            self._last_problem = problem
            if problem:
                log.warning(
                    "the keys of the issuer %s cannot be fetched: %s", self._issuer, problem
                )
            else:
                log.info("the keys of the issuer %s can be fetched again", self._issuer)


class TokenChecker:
    """Checks tokens with the issuer's keys."""

    def __init__(self, parser: TokenParser, source: KeySource) -> None:
        self._parser = parser
        self.source = source

    async def check(self, text: bytes, *, may_fetch: bool = True) -> Token:
        """Return a valid token. Raises `InvalidToken` or `IssuerUnavailable`."""
        token = self._parser.parse(text)
        key = self._find_key(token)
        # Without an ID, a token of a new key is known only by its signature.
        is_other_key = key is None or not (token.key_id or is_signed_by(token, key))
        if is_other_key and may_fetch:
            await self.source.refresh_for_unknown_key()
            key = self._find_key(token)
        if key is None:
            if self.source.keys is None or not self.source.is_current:
                raise IssuerUnavailable
            raise InvalidToken(
                "names a key (kid) that was not among its issuer's usable keys when they were last read"
            )
        if not is_signed_by(token, key):
            raise InvalidToken("has an invalid signature")
        return token

    def _find_key(self, token: Token) -> Key | None:
        keys = self.source.keys
        return None if keys is None else find_key(keys, token)


def open_key_source(settings: IdentitySettings) -> KeySource:
    """Return the source that the settings name. Raises `CommandError` for files that cannot be read."""
    path = settings.jwks_file
    try:
        if path is None:
            read_access(settings)
            return KeySource(settings.oidc_issuer, partial(fetch_keys, settings))
        source = KeySource(
            settings.oidc_issuer,
            partial(to_thread.run_sync, read_keys, path),
            max_age_s=math.inf,
            refresh_s=FILE_POLL_S,
            min_interval_s=FILE_POLL_S,
        )
        source.replace_keys(read_keys(path))
    except FetchError as exc:
        raise CommandError(str(exc)) from None
    return source


async def fetch_keys(settings: IdentitySettings, timeout_s: float = FETCH_TIMEOUT_S) -> KeySet:
    """Fetch the keys from the issuer. Raises `FetchError`."""
    try:
        with anyio.fail_after(timeout_s):
            context, token = await to_thread.run_sync(read_access, settings)
            # A proxy of the environment is used, but not for an issuer on this machine.
            uses_proxy = (settings.oidc_jwks_url or settings.oidc_issuer).startswith("https:")
            timeout = httpx.Timeout(timeout_s)
            async with httpx.AsyncClient(
                verify=context, timeout=timeout, trust_env=uses_proxy, headers=HEADERS
            ) as client:
                fetch = partial(fetch_document, client, settings.oidc_issuer, token)
                address = settings.oidc_jwks_url or find_keys_address(
                    settings.oidc_issuer,
                    await fetch(settings.oidc_issuer.rstrip("/") + CONFIGURATION_PATH),
                )
                text = await fetch(address)
            return await to_thread.run_sync(parse_issuer_keys, text)
    except TimeoutError:
        raise FetchError(f"there was no complete response within {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL, OSError) as exc:
        raise FetchError(str(exc) or type(exc).__name__) from None
    except ValueError as exc:
        raise FetchError(f"the response is invalid: {exc}") from None


def read_access(settings: IdentitySettings) -> tuple[ssl.SSLContext, str]:
    """Return the trusted certificates and the token, which may change at any time. Raises `FetchError`."""
    ca_file = settings.oidc_ca_file
    token_file = settings.oidc_token_file
    certificates = None if ca_file is None else f"{read_text(ca_file)}\n"  # an empty text is no CA
    try:
        context = ssl.create_default_context(cadata=certificates)
    except (ssl.SSLError, ValueError):
        raise FetchError(f"{ca_file} is not a valid CA certificate") from None
    token = "" if token_file is None else read_text(token_file).strip()
    if not (token.isascii() and token.isprintable()):
        raise FetchError(f"{token_file} does not contain a token")
    return context, token


def read_keys(path: Path) -> KeySet:
    """Return the keys in a file. Raises `FetchError`."""
    try:
        return parse_issuer_keys(read_text(path).encode())
    except ValueError as exc:
        raise FetchError(f"{path}: {exc}") from None


def read_text(path: Path) -> str:
    try:
        return read_config_file(path)
    except OSError as exc:
        raise FetchError(f"{path}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise FetchError(f"{path} is not a text in UTF-8") from None


async def fetch_document(client: httpx.AsyncClient, issuer: str, token: str, address: str) -> bytes:
    """Return a document; the token is sent to the issuer's host only, and no redirect is followed."""
    is_own = find_origin(address) == find_origin(issuer)
    headers = {"Authorization": f"Bearer {token}"} if token and is_own else {}
    async with client.stream("GET", address, headers=headers) as response:
        if response.status_code != httpx.codes.OK:
            raise FetchError(f"{address} answers with status {response.status_code}")
        body = b""
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_DOCUMENT_BYTES:
                raise FetchError(f"{address} answers with more than 64 KiB")
        return body


def find_keys_address(issuer: str, configuration: bytes) -> str:
    """Return where the keys are by an OpenID configuration. Raises `FetchError` or `ValueError`."""
    document: Any = orjson.loads(configuration)
    if not isinstance(document, dict) or document.get("issuer") != issuer:
        raise FetchError("its OpenID configuration is that of another issuer")
    address = document.get("jwks_uri")
    if not isinstance(address, str) or not is_safe_address(address):
        raise FetchError("its OpenID configuration has no jwks_uri with https://")
    if issuer.startswith("https:") and not address.startswith("https:"):
        raise FetchError(f"its keys are at {quote_text(address)}, which is not encrypted")
    return address


def find_origin(address: str) -> tuple[str, str, int | None]:
    url = httpx.URL(address)
    return url.scheme, url.host, url.port
