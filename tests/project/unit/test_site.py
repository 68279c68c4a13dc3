"""The documentation site has every page, and its links lead somewhere outside of the repository as well."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from deploy.site.prepare import REPOSITORY, prepare
from tests.support.servers import ROOT

CONFIG = (ROOT / "mkdocs.yml").read_text()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site") / "docs"
    prepare(target)
    return target


def test_site_has_every_document_and_notebook_as_a_page(pages: Path) -> None:
    listed = re.findall(r"^ +- ([\w/-]+\.md)$", CONFIG.partition("\nnav:\n")[2], re.MULTILINE)
    written = {path.relative_to(pages).as_posix() for path in pages.glob("**/*.md")}
    assert set(listed) == written, "nav in mkdocs.yml lists every page"
    assert len(listed) == len(written)
    for notebook in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        text = (pages / "notebooks" / notebook.with_suffix(".md").name).read_text()
        assert text.endswith(f"]({notebook.name})\n")
    assert "](notebooks/streaming.md)" in (pages / "index.md").read_text()


def test_page_with_a_program_in_three_languages_has_tabs(pages: Path) -> None:
    text = (pages / "start/quick-start.md").read_text()
    tabs = re.findall(r'^=== "(\w+)"\n\n    ```(\w+)\n', text, re.MULTILINE)
    assert tabs == [("curl", "console"), ("Python", "python"), ("JavaScript", "js")]
    for page in pages.glob("**/*.md"):
        assert "tabs -->" not in page.read_text()


# Words of Mermaid's grammar, which no node can have as its name.
RESERVED = {"call", "class", "click", "default", "end", "graph", "href", "style", "subgraph"}
ARROW = re.compile(r"[-.]-[>x]")
# What each diagram must name.
DRAWN = {
    "serve/fleet": {"clients", "gateway", "Triton", "GATEWAY_STATE"},
    "serve/on-demand": {"request", "GATEWAY_HOLD_S", "KEDA", "budget", "unloaded"},
    "operate/security": {"callers", "keys", "Triton", "Redis", "nothing is trusted"},
}


def read_diagrams(page: Path) -> list[str]:
    return re.findall(r"^```mermaid\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def test_diagram_names_its_subject_and_each_node_has_a_text_and_an_edge(pages: Path) -> None:
    for page, words in DRAWN.items():
        (diagram,) = read_diagrams(pages / f"{page}.md")
        assert [word for word in words if word not in diagram] == [], page
    found = [diagram for page in pages.glob("**/*.md") for diagram in read_diagrams(page)]
    assert len(found) >= 6
    for diagram in found:
        assert diagram.startswith("flowchart "), diagram
        bare = re.sub(r"\"[^\"]*\"", "", diagram.partition("\n")[2])
        named = set(re.findall(r"\b([a-z]\w*)(?=[\[{(])", bare))
        groups = set(re.findall(r"subgraph (\w+)", bare))
        connected = {
            node
            for line in bare.splitlines()
            if ARROW.search(line)
            for node in re.findall(r"\b[a-z]\w*\b", ARROW.sub(" ", line))
        }
        assert not named & RESERVED, diagram
        assert named - groups <= connected, diagram
        assert connected <= named | groups, diagram


def test_link_out_of_the_documents_leads_to_a_file_of_the_repository(pages: Path) -> None:
    found = set()
    for page in pages.glob("**/*.md"):
        text = page.read_text()
        for target in re.findall(r"\]\((\.\./[^)#]*)", text):
            assert (page.parent / target).resolve().is_relative_to(pages), page.name
        found |= set(re.findall(rf"\]\({REPOSITORY}/(?:blob|tree)/main/([^)#]+)", text))
    assert len(found) >= 5
    assert [path for path in found if not (ROOT / path).exists()] == []


def test_page_of_the_api_has_every_operation_and_status(pages: Path) -> None:
    text = (pages / "reference/api.md").read_text()
    document = json.loads((ROOT / "docs" / "openapi.json").read_text())
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            _, found, section = text.partition(f"### `{method.upper()} {path}`\n")
            assert found
            section = section.partition("\n### ")[0]
            assert operation["summary"] in section
            for status in operation["responses"]:
                assert f"\n| {status} | " in section
