"""The liveness response for programs at `/`, and the API description at `/docs`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from gateway.errors import NotFound
from gateway.media_types import JSON
from gateway.messages import quote_text
from gateway.routes.assets import CACHE_CONTROL, build_asset_response, load_assets

router = APIRouter(include_in_schema=False)

# Swagger UI sets styles and builds markup itself, from a description that contains names of models only.
DOCS_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
ASSETS: Final = load_assets(Path(__file__).parents[1] / "static/docs")
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
    return RedirectResponse("/docs")
