"""The page and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response

from gateway.errors import NotFound
from gateway.messages import quote_text
from gateway.routes.assets import build_asset_response, load_assets
from gateway.routes.root import get_root
from gateway.tensors.outputs import list_accepted_types

router = APIRouter(include_in_schema=False)

# Model names and responses are untrusted input: inline scripts and strings as markup are forbidden.
UI_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
ASSETS: Final = load_assets(Path(__file__).parent / "static")
HTML_TYPE: Final = "text/html"


@router.api_route("/", methods=["GET", "HEAD"])
async def get_page(request: Request) -> Response:
    """Return the page if `Accept` contains `text/html`, else what a program gets."""
    if HTML_TYPE in list_accepted_types(request.headers.get("accept", "")):
        response = build_asset_response(request, ASSETS["index.html"], UI_SECURITY_POLICY)
    else:
        response = await get_root()
    response.headers["Vary"] = "Accept"
    return response


@router.api_route("/static/{name:path}", methods=["GET", "HEAD"])
async def get_static_file(request: Request, name: str) -> Response:
    if name not in ASSETS:
        raise NotFound(f"the page has no file {quote_text(name)}")
    return build_asset_response(request, ASSETS[name], UI_SECURITY_POLICY)
