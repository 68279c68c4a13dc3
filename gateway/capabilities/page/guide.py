"""The documents at `/guide/`: the Markdown of the wheel or the checkout as pages, which need no network."""

from __future__ import annotations

import json
import posixpath
import re
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Final

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from gateway.errors import NotFound
from gateway.messages import quote_text
from gateway.routes.assets import (
    Asset,
    build_asset_response,
    create_asset,
    fill_placeholders,
    load_assets,
)

PACKAGED: Final = Path(__file__).parent / "guide"
CHECKOUT: Final = Path(__file__).parents[3] / "docs"
INDEX: Final = "index.md"
SECTIONS: Final = ("start", "use", "serve", "operate", "reference", "contribute")
REPOSITORY: Final = "https://github.com/triton-gateway/triton-gateway/blob/main"
METHODS: Final = ["GET", "HEAD"]
# Model names and responses are untrusted input: inline scripts and strings as markup are forbidden.
UI_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)


class Guide:
    """The documents, in a template with {{root}}, {{title}}, {{navigation}} and {{content}}."""

    def __init__(self, template: Asset) -> None:
        folder = PACKAGED if PACKAGED.is_dir() else CHECKOUT
        self._template = template
        self._documents = read_documents(folder)
        self._assets = load_assets(folder)  # and the documents that were rendered
        index = json.dumps(self._documents).encode()
        self._assets["search.json"] = create_asset(index, "application/json")
        self.router = APIRouter(include_in_schema=False)
        self.router.add_api_route("/guide", lambda: RedirectResponse("guide/"), methods=METHODS)
        self.router.add_api_route("/guide/{name:path}", self.get_file, methods=METHODS)

    async def get_file(self, request: Request, name: str) -> Response:
        name = name or INDEX
        if name in self._documents and name not in self._assets:
            # It takes longer than the event loop may be blocked.
            self._assets[name] = await to_thread.run_sync(self._render, name)
        if name not in self._assets:
            raise NotFound(f"the guide has no file {quote_text(name)}; see {REPOSITORY}/docs")
        return build_asset_response(request, self._assets[name], UI_SECURITY_POLICY)

    def _render(self, name: str) -> Asset:
        return fill_placeholders(
            self._template,
            name=name,
            root=find_root(name),
            title=escape(find_title(self._documents[name])),
            navigation=self._render_navigation(name),
            content=self._render_content(name),
        )

    def _render_navigation(self, current: str) -> str:
        parts = []
        for section in SECTIONS:
            links = [
                f'<li><a href="{find_root(current)}guide/{name}"'
                f"{' aria-current=page' if name == current else ''}>{escape(find_title(text))}</a></li>"
                for name, text in self._documents.items()
                if name.startswith(f"{section}/")
            ]
            parts.append(f"<h2>{section.capitalize()}</h2><ul>{''.join(links)}</ul>")
        return "".join(parts)

    def _render_content(self, name: str) -> str:
        """Return a document as HTML, whose headings have the anchors that GitHub gives them."""
        from markdown_it import MarkdownIt

        markdown = MarkdownIt("commonmark").enable("table")
        tokens = markdown.parse(self._documents[name])
        for token, following in pairwise(tokens):
            if token.type == "heading_open":
                anchor = re.sub(r"[^\w\- ]", "", following.content.lower()).replace(" ", "-")
                token.attrSet("id", anchor)
            for child in token.children or ():
                if href := child.attrGet("href"):
                    child.attrSet("href", self._find_target(str(href), name))
        rendered: str = markdown.renderer.render(tokens, markdown.options, {})
        return rendered

    def _find_target(self, href: str, name: str) -> str:
        """Return where a link of a document leads: what is no document is in the repository."""
        if re.match("[a-z]+:|#", href):
            return href
        path = posixpath.normpath(
            posixpath.join("docs", posixpath.dirname(name), href.partition("#")[0])
        )
        if path == "docs/openapi.json":
            return f"{find_root(name)}docs"
        is_known = path.removeprefix("docs/") in self._documents.keys() | self._assets.keys()
        return href if is_known else f"{REPOSITORY}/{path}"


def read_documents(folder: Path) -> dict[str, str]:
    """Return the documents by name in the order of the index; those that it does not name come last."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    index = (folder / INDEX).read_text("utf-8") if INDEX in names else ""
    names.sort(key=lambda name: index.find(f"]({name}") % (len(index) + 1))
    return {name: (folder / name).read_text("utf-8") for name in names}


def find_title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ").replace("`", "")


def find_root(name: str) -> str:
    """Return the relative path from a document to `/`, which can be below the prefix of a proxy."""
    return "../" * (name.count("/") + 1)
