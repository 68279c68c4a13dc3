"""The page and its files."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request, Response

from gateway.capabilities.capability import SignIn
from gateway.capabilities.page.guide import METHODS, UI_SECURITY_POLICY, Guide
from gateway.errors import NotFound
from gateway.headers import list_accepted_types
from gateway.messages import quote_text
from gateway.routes.assets import (
    Asset,
    build_asset_response,
    fill_placeholders,
    get_root,
    load_assets,
)

# Parts of the page that use capabilities, which can be absent, and a path of each.
FEATURES: Final = {
    "jobs": "/v1/jobs",
    "files": "/v1/models/{model}/files",
    "labels": "/v1/models/{model}/labels/{label}",
}


class PageRoutes:
    """The page with its files, and the documents."""

    def __init__(self) -> None:
        self._assets = load_assets(Path(__file__).parent / "static")
        self._page: Asset | None = None
        router = APIRouter(include_in_schema=False)
        router.add_api_route("/", self.get_page, methods=METHODS)
        router.add_api_route("/static/{name:path}", self.get_static_file, methods=METHODS)
        self.routers = (router, Guide(self._assets["guide.html"]).router)

    async def get_page(self, request: Request) -> Response:
        """Return the page if `Accept` contains `text/html`, else what a program gets."""
        sign_in: SignIn = request.app.sign_in or SignIn("", "")
        if "text/html" in list_accepted_types(request.headers.get("accept", "")):
            if self._page is None:
                self._page = fill_placeholders(
                    self._assets["index.html"],
                    features=" ".join(find_features(request.app)),
                    issuer=escape(sign_in.issuer),
                    client_id=escape(sign_in.client_id),
                )
            response = build_asset_response(request, self._page, build_policy(sign_in.issuer))
        else:
            response = await get_root()
        response.headers["Vary"] = "Accept"
        return response

    async def get_static_file(self, request: Request, name: str) -> Response:
        if name not in self._assets:
            raise NotFound(f"the page has no file {quote_text(name)}")
        return build_asset_response(request, self._assets[name], UI_SECURITY_POLICY)


def build_policy(issuer: str) -> str:
    """Return the policy of the page, which asks the issuer for a token."""
    parts = urlsplit(issuer)
    origin = f" {parts.scheme}://{parts.netloc}" if issuer else ""
    return UI_SECURITY_POLICY.replace("connect-src 'self'", f"connect-src 'self'{origin}")


def find_features(app: FastAPI) -> list[str]:
    paths = {getattr(route, "path", "") for route in app.routes}
    return [feature for feature, path in FEATURES.items() if path in paths]
