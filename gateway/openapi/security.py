"""The security schemes: the two headers in which clients send their key."""

from __future__ import annotations

from typing import Final

SECURITY_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
SECURITY: Final[list[dict[str, list[str]]]] = [{name: []} for name in SECURITY_SCHEMES]
