"""The files of the page at / and of the API description, as the gateway serves them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from urllib.parse import urljoin

import httpx
import pytest

from deploy.site.diagrams import PICTURES, describe_source, list_diagrams
from tests.support.nginx import serve_below_prefix
from tests.support.servers import ROOT, gateway_before

STATIC = ROOT / "gateway/capabilities/page/static"
DOCS = ROOT / "gateway/routes/static/docs"
AXE = ROOT / "tests" / "data" / "axe-core" / "axe.min.js"
VENDORED = (
    STATIC / "vendor" / "Inter.latin.woff2",
    *(DOCS / name for name in ("swagger-ui-bundle.js", "swagger-ui.css")),
    AXE,
)
PAGE_LINK = r'(?:href|src)="([^":]+)"'
CSS_LINK = r'url\("([^":]+)"\)'
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A gateway whose Triton is not there."""
    with gateway_before("http://127.0.0.1:1") as client:
        yield client


def test_page_and_all_files_that_it_names_are_served_and_are_no_part_of_the_api(
    client: httpx.Client,
) -> None:
    page = client.get("/", headers=BROWSER)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert '<a class="to-guide" href="guide/">Guide</a>' in page.text
    assert (
        '<html lang="en" data-features="files labels" data-issuer="" data-client-id="">'
        in page.text
    )
    names = re.findall(r'(?:src|href)="(static/[^"]+)"', page.text)
    assert len(names) >= 4
    for name in names:
        assert client.get(f"/{name}").status_code == 200, name
    for path in STATIC.rglob("*.js"):
        script = client.get(f"/static/{path.relative_to(STATIC)}")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        assert script.content == path.read_bytes()
    assert client.get("/docs/docs.js").headers["content-type"].startswith("text/javascript")
    paths = client.get("/openapi.json").json()["paths"]
    assert not [path for path in paths if path == "/" or path.startswith("/static")]


def test_guide_has_the_documents_whose_links_lead_to_each_other(client: httpx.Client) -> None:
    redirect = client.get("/guide")
    assert (redirect.status_code, redirect.headers["location"]) == (307, "guide/")
    policy = client.get("/", headers=BROWSER).headers["content-security-policy"]
    pages: dict[str, str] = {}
    links = {"/guide/"}
    while waiting := {link.partition("#")[0] for link in links} - pages.keys():
        for path in waiting:
            answer = client.get(path)
            assert answer.status_code == 200, path
            if path.startswith("/guide/"):
                assert answer.headers["content-security-policy"] == policy
            is_page = answer.headers["content-type"] == "text/html; charset=utf-8"
            pages[path] = answer.text if is_page else ""
            names = re.findall(r'(?:href|src)="([^":]+)"', pages[path])
            links |= {urljoin(path, name) for name in names if path != "/docs"}
    names = [path.relative_to(ROOT / "docs") for path in ROOT.glob("docs/*/*.md")]
    assert {f"/guide/{name}" for name in names} <= pages.keys()
    assert '<h1 id="deploying">' in pages["/guide/operate/deploy.md"]
    for link in links:
        path, _, anchor = link.partition("#")
        assert path in ("/", "/docs") or not anchor or f'id="{anchor}"' in pages[path], link
    assert not [path for path in pages if re.search(r"<script>| style=", pages[path])]
    # The search has all documents in the order of the index; what it does not name comes last.
    found = [*client.get("/guide/search.json").json()]
    assert sorted(found) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")
    )
    index = (ROOT / "docs/index.md").read_text()
    places = [index.find(f"]({name}") for name in found]
    named = [place for place in places if place >= 0]
    assert places == sorted(named) + [-1] * (len(places) - len(named))
    for name in re.findall(r'"((?:use|serve|operate)/[^"]+\.md)"', read_scripts()):
        assert f"/guide/{name}" in pages


def test_each_diagram_of_the_guide_has_its_picture() -> None:
    """`make diagrams` draws them again."""
    diagrams = dict(list_diagrams())
    assert set(PICTURES.iterdir()) == diagrams.keys()
    for path, source in diagrams.items():
        assert path.read_text().startswith(describe_source(source)), path


def read_scripts() -> str:
    return "".join(path.read_text() for path in STATIC.glob("*.js"))


def test_pages_below_the_prefix_of_a_proxy_name_nothing_outside_it(client: httpx.Client) -> None:
    with serve_below_prefix(str(client.base_url).rstrip("/")) as url:
        seen: dict[str, int] = {}
        links = {f"{url}/", f"{url}/docs", f"{url}/guide", f"{url}/redoc"}
        while waiting := {link.partition("#")[0] for link in links} - seen.keys():
            for link in waiting:
                answer = httpx.get(link, headers=BROWSER, follow_redirects=True)
                seen[link] = answer.status_code
                content_type = answer.headers["content-type"]
                pattern = {"text/html": PAGE_LINK, "text/css": CSS_LINK}.get(
                    content_type.split(";")[0]
                )
                names = re.findall(pattern, answer.text) if pattern else ()
                found = (urljoin(str(answer.url), name) for name in names)
                links |= {name for name in found if not name.startswith("https://")}
        assert {link for link in seen if not link.startswith(f"{url}/")} == set()
        assert {link: status for link, status in seen.items() if status != 200} == {}
        for name in ("static/main.js", "static/vendor/Inter.latin.woff2", "docs/swagger-ui.css"):
            assert f"{url}/{name}" in seen
        assert f"{url}/guide/use/page.md" in seen


@pytest.mark.parametrize("path", ["/", "/static/page.css", "/guide/"])
def test_file_that_the_browser_has_is_not_sent_again(client: httpx.Client, path: str) -> None:
    first = client.get(path, headers=BROWSER)
    assert first.headers["cache-control"] == "no-cache"
    again = client.get(
        path, headers={**BROWSER, "If-None-Match": f'"other", W/{first.headers["etag"]}'}
    )
    assert again.status_code == 304
    assert not again.content
    assert again.headers["etag"] == first.headers["etag"]
    other = client.get(path, headers={**BROWSER, "If-None-Match": '"other"'})
    assert other.status_code == 200
    head = client.head(path, headers=BROWSER)
    assert head.status_code == 200
    assert head.headers["content-length"] == first.headers["content-length"]


def test_headers_forbid_inline_scripts_and_other_origins(client: httpx.Client) -> None:
    headers = client.get("/", headers=BROWSER).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert "http" not in headers["content-security-policy"]
    assert len(headers.get_list("content-security-policy")) == 1
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["none.js", "../main.js", "%2e%2e/errors.py", "vendor"])
@pytest.mark.parametrize("folder", ["/static", "/docs", "/guide"])
def test_other_path_below_the_folders_of_the_page_is_not_found(
    client: httpx.Client, folder: str, name: str
) -> None:
    answer = client.get(f"{folder}/{name}")
    assert answer.status_code == 404
    assert answer.json()["code"] == "NOT_FOUND"


@pytest.mark.parametrize("accept", ["*/*", "application/json", "", "text/html;q=0, */*", "text/*"])
def test_client_that_is_no_browser_gets_the_liveness_document(
    client: httpx.Client, accept: str
) -> None:
    answer = client.get("/", headers={"Accept": accept})
    assert (answer.status_code, answer.json()) == (200, {"status": "alive"})
    assert answer.headers["content-type"] == "application/json"
    page = client.get("/", headers=BROWSER)
    assert answer.headers["vary"] == page.headers["vary"] == "Accept"
    not_modified = client.get(
        "/", headers={"Accept": accept, "If-None-Match": page.headers["etag"]}
    )
    assert not_modified.json() == {"status": "alive"}


def test_page_can_be_switched_off() -> None:
    with gateway_before("http://127.0.0.1:1", page="false") as client:
        for headers in ({}, BROWSER):
            answer = client.get("/", headers=headers)
            assert (answer.status_code, answer.json()) == (200, {"status": "alive"})
        assert client.get("/static/main.js").status_code == 404
        assert client.get("/guide/").status_code == 404
        assert client.get("/livez").status_code == 200


def test_vendored_files_are_as_published() -> None:
    documented = (ROOT / "requirements/README.md").read_text()
    assert len(VENDORED) == 4
    for path in VENDORED:
        assert hashlib.sha256(path.read_bytes()).hexdigest() in documented, path
    assert VENDORED[0].stat().st_size < 60 << 10
    assert "SIL Open Font License" in (STATIC / "vendor" / "Inter.LICENSE.txt").read_text()
    assert "Apache License" in (DOCS / "swagger-ui.LICENSE.txt").read_text()
    assert "Mozilla Public License" in (AXE.parent / "LICENSE").read_text()


def test_scripts_of_the_page_never_make_markup_of_text() -> None:
    """Chromium would refuse these (`require-trusted-types-for`); other browsers may not."""
    ways = re.compile(
        r"\b(innerHTML|outerHTML|insertAdjacentHTML|srcdoc|eval|Function)\b|document\.write"
    )
    for path in STATIC.glob("*.js"):
        assert not ways.search(path.read_text()), path.name
