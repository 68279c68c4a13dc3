"""The web page at `/`, the API description at `/docs`, and the liveness response for programs at `/`.

The files of `gateway/static/` are public. The page gets its data from the API with the user's key.
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
from gateway.routes.dependencies import ServicesForAnyCaller
from gateway.tensors.outputs import list_accepted_types

router = APIRouter(include_in_schema=False)  # for the page's files
root_router = APIRouter(include_in_schema=False)

ASSET_CONTENT_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Model names and responses are untrusted input: inline scripts and strings as markup are forbidden.
UI_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# Swagger UI sets styles and builds markup itself, from a description that contains names of models only.
DOCS_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
VERSION_PLACEHOLDER: Final = b"{{version}}"
# The files have no version in their names, so that browsers revalidate each of them.
CACHE_CONTROL: Final = "no-cache"


@dataclass(frozen=True)
class Asset:
    body: bytes
    content_type: str
    etag: str


def load_assets(folder: Path) -> dict[str, Asset]:
    """Read the files; HTML may contain the version of the gateway as VERSION_PLACEHOLDER."""
    assets: dict[str, Asset] = {}  # by path, relative to the folder
    for path in folder.rglob("*"):
        if content_type := ASSET_CONTENT_TYPES.get(path.suffix):
            body = path.read_bytes()
            if path.suffix == ".html":
                body = body.replace(VERSION_PLACEHOLDER, __version__.encode())
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            assets[path.relative_to(folder).as_posix()] = Asset(body, content_type, etag)
    return assets


ASSETS: Final = load_assets(Path(__file__).parents[1] / "static")
HTML_TYPE: Final = "text/html"
ALIVE_BODY: Final = b'{"status":"alive"}'


@root_router.api_route("/", methods=["GET", "HEAD"])
async def get_root(request: Request, services: ServicesForAnyCaller) -> Response:
    """Return the page if it is enabled and `Accept` contains `text/html`, else the same JSON as KServe."""
    accept = request.headers.get("accept", "")
    if services.settings.page and HTML_TYPE in list_accepted_types(accept):
        response = build_asset_response(request, ASSETS["index.html"])
    else:
        response = Response(ALIVE_BODY, headers={"Cache-Control": CACHE_CONTROL}, media_type=JSON)
    response.headers["Vary"] = "Accept"
    return response


@router.api_route("/static/{name:path}", methods=["GET", "HEAD"])
async def get_static_file(request: Request, name: str) -> Response:
    if name not in ASSETS:
        raise NotFound(f"the page has no file {quote_text(name)}")
    return build_asset_response(request, ASSETS[name])


@root_router.api_route("/docs", methods=["GET", "HEAD"])
async def get_docs(request: Request) -> Response:
    """Return the description of the API as a page, which needs no other server."""
    return build_asset_response(request, ASSETS["docs/index.html"], DOCS_SECURITY_POLICY)


@root_router.api_route("/docs/{name:path}", methods=["GET", "HEAD"])
async def get_docs_file(request: Request, name: str) -> Response:
    asset = ASSETS.get(f"docs/{name}")
    if asset is None:
        raise NotFound(f"the API description has no file {quote_text(name)}")
    return build_asset_response(request, asset, DOCS_SECURITY_POLICY)


@root_router.api_route("/redoc", methods=["GET", "HEAD"])
async def redirect_to_docs() -> Response:
    return RedirectResponse("/docs")


def build_asset_response(
    request: Request, asset: Asset, security_policy: str = UI_SECURITY_POLICY
) -> Response:
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
