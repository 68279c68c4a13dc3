"""The documents at `/guide/`: the Markdown of the wheel or the checkout as pages, which need no network."""

from __future__ import annotations

import posixpath
import re
from functools import cached_property
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from gateway.errors import NotFound
from gateway.messages import quote_text
from gateway.routes.assets import (
    ASSET_CONTENT_TYPES,
    Asset,
    build_asset_response,
    create_asset,
    fill_placeholders,
)

if TYPE_CHECKING:
    from markdown_it.token import Token

PACKAGED: Final = Path(__file__).parent / "guide"
CHECKOUT: Final = Path(__file__).parents[3] / "docs"
INDEX: Final = "index.md"
SECTIONS: Final = ("start", "use", "serve", "operate", "reference", "contribute")
PAGE_SUFFIX: Final = ".md"
REPOSITORY: Final = "https://github.com/triton-gateway/triton-gateway/blob/main"
METHODS: Final = ["GET", "HEAD"]


class GuideRoutes:
    """The documents, in a template with {{root}}, {{title}}, {{navigation}} and {{content}}."""

    def __init__(self, template: Asset, security_policy: str) -> None:
        self._template = template
        self._security_policy = security_policy
        self._documents = Documents(PACKAGED if PACKAGED.is_dir() else CHECKOUT)
        self._assets: dict[str, Asset] = {}
        self.router = APIRouter(include_in_schema=False)
        self.router.add_api_route("/guide", self.redirect_to_index, methods=METHODS)
        self.router.add_api_route("/guide/{name:path}", self.get_file, methods=METHODS)

    async def redirect_to_index(self) -> Response:
        return RedirectResponse("guide/")

    async def get_file(self, request: Request, name: str) -> Response:
        name = name or INDEX
        if name not in self._documents.files:
            where = f"all documents are at {REPOSITORY}/docs"
            raise NotFound(f"the guide has no file {quote_text(name)}; {where}")
        if name not in self._assets:
            # It takes longer than the event loop may be blocked.
            self._assets[name] = await to_thread.run_sync(self._load, name)
        return build_asset_response(request, self._assets[name], self._security_policy)

    def _load(self, name: str) -> Asset:
        path = self._documents.files[name]
        if path.suffix != PAGE_SUFFIX:
            return create_asset(path.read_bytes(), ASSET_CONTENT_TYPES[path.suffix])
        return fill_placeholders(
            self._template,
            root=find_root(name),
            title=escape(self._documents.titles[name]),
            navigation=self._documents.render_navigation(name),
            content=self._documents.render(name),
        )


class Documents:
    """The Markdown files and images of a folder."""

    def __init__(self, folder: Path) -> None:
        self.files = {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if path.suffix == PAGE_SUFFIX or path.suffix in ASSET_CONTENT_TYPES
        }

    @cached_property
    def titles(self) -> dict[str, str]:
        return {
            name: path.read_text("utf-8").partition("\n")[0].removeprefix("# ").replace("`", "")
            for name, path in self.files.items()
            if path.suffix == PAGE_SUFFIX
        }

    def render_navigation(self, current: str) -> str:
        parts = []
        guide = f"{find_root(current)}guide"
        for section in SECTIONS:
            names = [name for name in self.titles if name.startswith(f"{section}/")]
            links = [
                f'<li><a href="{guide}/{name}"{" aria-current=page" if name == current else ""}>'
                f"{escape(self.titles[name])}</a></li>"
                for name in sorted(names, key=self.titles.__getitem__)
            ]
            parts.append(f"<h2>{section.capitalize()}</h2><ul>{''.join(links)}</ul>")
        return "".join(parts)

    def render(self, name: str) -> str:
        """Return a document as HTML, whose headings have the anchors that GitHub gives them."""
        from markdown_it import MarkdownIt

        markdown = MarkdownIt("commonmark").enable("table")
        tokens = markdown.parse(self.files[name].read_text("utf-8"))
        for token, following in pairwise(tokens):
            if token.type == "heading_open":
                token.attrSet("id", find_anchor(following.content))
            for child in token.children or ():
                self._rewrite_link(child, name)
        rendered: str = markdown.renderer.render(tokens, markdown.options, {})
        return rendered

    def _rewrite_link(self, token: Token, name: str) -> None:
        """Let a link to what is no document lead to the repository."""
        href = str(token.attrGet("href") or "#")
        if re.match("[a-z]+:|#", href):
            return
        path = posixpath.normpath(
            posixpath.join("docs", posixpath.dirname(name), href.partition("#")[0])
        )
        if path == "docs/openapi.json":
            token.attrSet("href", f"{find_root(name)}docs")
        elif path.removeprefix("docs/") not in self.files:
            token.attrSet("href", f"{REPOSITORY}/{path}")


def find_root(name: str) -> str:
    """Return the relative path from a document to `/`, which can be below the prefix of a proxy."""
    return "../" * (name.count("/") + 1)


def find_anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
