"""Prepare the documentation for a site generator: python -m deploy.site.prepare TARGET.

The pages in docs/ are written for readers of the repository. In the copy, links out of docs/ lead to the
repository's address, notebooks are pages, blocks between <!-- tabs --> and <!-- /tabs --> are tabs, and
reference/api.md is generated from openapi.json. No generator needs a plugin for that.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from deploy.site.notebooks import format_notebook

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/triton-gateway/triton-gateway"
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- /tabs -->\n", re.DOTALL | re.MULTILINE)
TAB = re.compile(r"^\*\*(\w+)\*\*\n\n(```.*?^```\n)", re.DOTALL | re.MULTILINE)
API_HEAD = """\
# HTTP API

Every path of the gateway itself, generated from [openapi.json](../openapi.json), which a running gateway \
serves as `/openapi.json` and shows at `/docs`. Each model has an OpenAPI document of its own: \
`/v1/models/{model}/openapi.json`. What Triton answers below `/v2` is described under \
[pass-through](../use/clients.md#pass-through-v2), and all errors under [errors](errors.md).
"""


def prepare(target: Path) -> None:
    """Write the site's pages and files into the folder, which is replaced."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT / "docs", target)
    for notebook in target.glob("notebooks/*.ipynb"):
        notebook.with_suffix(".md").write_text(format_notebook(notebook))
    for page in target.glob("**/*.md"):
        folder = page.parent.relative_to(target).as_posix()
        page.write_text(format_tabs(rewrite_links(page.read_text(), folder)))
    document = json.loads((ROOT / "docs" / "openapi.json").read_text())
    (target / "reference/api.md").write_text(format_api(document))


def rewrite_links(markdown: str, folder: str) -> str:
    def replace(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match[1]))
        if path.startswith("docs/"):
            # From another page, a notebook is the page that is made of it.
            return match[0] if folder == "notebooks" else match[0].replace(".ipynb", ".md")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{REPOSITORY}/{kind}/main/{path}{match[2] or ''}"

    return LINK.sub(replace, markdown)


def read_tabs(markdown: str) -> list[dict[str, str]]:
    """Return the code block of each tab by its title, for each group of tabs."""
    return [dict(TAB.findall(group)) for group in TABS.findall(markdown)]


def format_tabs(markdown: str) -> str:
    """Write groups of tabs as pymdownx.tabbed expects them."""

    def format_tab(match: re.Match[str]) -> str:
        return f'=== "{match[1]}"\n\n{textwrap.indent(match[2], "    ")}'

    return TABS.sub(lambda match: TAB.sub(format_tab, match[1]).lstrip(), markdown)


def format_api(document: dict[str, Any]) -> str:
    operations: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            tag = (operation.get("tags") or ["other"])[0]
            operations.setdefault(tag, []).append(format_operation(method, path, operation))
    parts = [API_HEAD]
    for tag in sorted(operations):
        parts += [f"## {tag.capitalize()}\n", *operations[tag]]
    return "\n".join(parts)


def format_operation(method: str, path: str, operation: dict[str, Any]) -> str:
    description = join_lines(operation.get("description", ""))
    lines = [f"### `{method.upper()} {path}`", "", f"**{operation['summary']}.** {description}"]
    rows = [
        (f"`{each['name']}`", each["in"], join_lines(each.get("description", "")))
        for each in operation.get("parameters", [])
    ]
    if body := operation.get("requestBody", {}).get("content"):
        rows.append(("body", "", ", ".join(f"`{name}`" for name in body)))
    if rows:
        lines += ["", "| parameter | in | description |", "|---|---|---|"]
        lines += [f"| {name} | {place} | {text} |" for name, place, text in rows]
    lines += ["", "| status | response |", "|---|---|"]
    for status, response in sorted(operation["responses"].items()):
        types = ", ".join(f"`{name}`" for name in response.get("content", {}))
        text = join_lines(response["description"])
        lines.append(f"| {status} | {text} {types if status.startswith('2') else ''} |")
    return "\n".join([*lines, ""])


def join_lines(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
