"""Files for browsers, the API description at `/docs`, and the response of `/` for programs.

All of them are public: pages get their data from the API with the user's key.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from gateway import __version__
from gateway.errors import NotFound
from gateway.media_types import JSON
from gateway.messages import quote_text

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


router = APIRouter(include_in_schema=False)

# Swagger UI sets styles and builds markup itself, from a description that contains names of models only.
DOCS_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
ASSETS: Final = load_assets(Path(__file__).parent / "static/docs")
ALIVE_BODY: Final = b'{"status":"alive"}'


@router.api_route("/", methods=["GET", "HEAD"])
async def get_root() -> Response:
    """Return the same JSON as KServe."""
    return Response(ALIVE_BODY, headers={"Cache-Control": CACHE_CONTROL}, media_type=JSON)


@router.api_route("/docs", methods=["GET", "HEAD"])
async def get_docs(request: Request) -> Response:
    """Return the description of the API as a page, which needs no other server."""
    return build_asset_response(request, ASSETS["index.html"], DOCS_SECURITY_POLICY)


@router.api_route("/docs/{name:path}", methods=["GET", "HEAD"])
async def get_docs_file(request: Request, name: str) -> Response:
    asset = ASSETS.get(name)
    if asset is None:
        raise NotFound(f"the API description has no file {quote_text(name)}")
    return build_asset_response(request, asset, DOCS_SECURITY_POLICY)


@router.api_route("/redoc", methods=["GET", "HEAD"])
async def redirect_to_docs() -> Response:
    return RedirectResponse("docs")
