"""The address of a gateway, and the access to it. Nothing here uses the network."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

DEFAULT_URL: Final = "http://localhost:8080"
SCHEMES: Final = ("http", "https")
VARIABLE_PREFIXES: Final = ("TRITON_GATEWAY_", "GATEWAY_")  # the second is that of the settings


@dataclass(frozen=True)
class ClientOptions:
    """The arguments of a client, with what was found in the environment."""

    url: str  # without a slash at its end
    key: str
    ca: str
    timeout_s: float = 60.0
    retries: int = 10
    arrays: bool = True
    proxy: str | None = None

    def create_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    def create_ssl_context(self) -> ssl.SSLContext | None:
        """Return the context of a `https:` URL. Raises `ValueError` if the certificates cannot be read."""
        if self.url.startswith("http:"):
            return None
        try:
            return ssl.create_default_context(cafile=self.ca or None)
        except (OSError, ssl.SSLError) as exc:
            reason = exc.strerror or exc
            raise ValueError(f"cannot read the certificates of {self.ca}: {reason}") from None


def find_options(
    url: str | None, key: str | None, ca: str | os.PathLike[str] | None
) -> ClientOptions:
    """Return the options of the arguments; what is None comes from the environment. Raises `ValueError`."""
    url = normalize_url(read_variable("URL", DEFAULT_URL) if url is None else url)
    key = read_variable("KEY") if key is None else key
    if not (key.isascii() and key.isprintable()):
        raise ValueError("the key contains invalid characters; a key is printable ASCII")
    ca = read_variable("CA") if ca is None else ca
    return ClientOptions(url, key, os.fspath(ca))


def read_variable(name: str, default: str = "") -> str:
    """Return the value of the first variable with this name that is set."""
    variables = (f"{prefix}{name}" for prefix in VARIABLE_PREFIXES)
    return next((os.environ[each] for each in variables if each in os.environ), default)


def normalize_url(url: str) -> str:
    """Return a URL, or that of `HOST:PORT`, without a slash at its end. Raises `ValueError`."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError as exc:
        raise ValueError(f"{url!r} is not a valid gateway URL: {exc}") from None
    if parts.username is not None:
        raise ValueError("the gateway URL contains a user name; the gateway expects an API key")
    if parts.scheme not in SCHEMES or not parts.hostname or port == 0:
        raise ValueError(f"{url!r} is not a valid gateway URL; example: {DEFAULT_URL}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
