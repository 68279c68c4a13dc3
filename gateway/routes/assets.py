"""Files for browsers, which are public: they get their data from the API with the user's key."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import Request, Response

from gateway import __version__

ASSET_CONTENT_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".jpg": "image/jpeg",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
# The files have no version in their names, so that browsers revalidate each of them.
CACHE_CONTROL: Final = "no-cache"


@dataclass(frozen=True)
class Asset:
    body: bytes
    content_type: str
    etag: str


def load_assets(folder: Path, **placeholders: str) -> dict[str, Asset]:
    """Return the assets by their path in the folder. HTML may contain {{version}} and {{a placeholder}}."""
    assets: dict[str, Asset] = {}
    for path in folder.rglob("*"):
        if content_type := ASSET_CONTENT_TYPES.get(path.suffix):
            asset = create_asset(path.read_bytes(), content_type)
            if path.suffix == ".html":
                asset = fill_placeholders(asset, version=__version__, **placeholders)
            assets[path.relative_to(folder).as_posix()] = asset
    return assets


def create_asset(body: bytes, content_type: str) -> Asset:
    return Asset(body, content_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def fill_placeholders(asset: Asset, **texts: str) -> Asset:
    body = asset.body
    for name, text in texts.items():
        body = body.replace(f"{{{{{name}}}}}".encode(), text.encode())
    return create_asset(body, asset.content_type)


def build_asset_response(request: Request, asset: Asset, security_policy: str) -> Response:
    headers = {
        "ETag": asset.etag,
        "Cache-Control": CACHE_CONTROL,
        "Content-Security-Policy": security_policy,
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
    }
    # RFC 9110, section 13.1.2.
    known_etags = request.headers.get("if-none-match", "").split(",")
    if any(tag.strip().removeprefix("W/") in (asset.etag, "*") for tag in known_etags):
        return Response(status_code=304, headers=headers)
    return Response(asset.body, 200, headers, asset.content_type)
