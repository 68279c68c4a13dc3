"""The documentation site has every page, and its links lead somewhere outside of the repository as well."""

from __future__ import annotations

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


def test_link_out_of_the_documents_leads_to_a_file(pages: Path) -> None:
    found = set()
    for page in pages.glob("**/*.md"):
        text = page.read_text()
        for target in re.findall(r"\]\((\.\./[^)#]*)", text):
            assert (page.parent / target).resolve().is_relative_to(pages), page.name
        found |= set(re.findall(rf"\]\({REPOSITORY}/(?:blob|tree)/main/([^)#]+)", text))
    assert len(found) >= 5
    assert [path for path in found if not (ROOT / path).exists()] == []
