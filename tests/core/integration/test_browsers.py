"""Pages of other origins, and the pages that the gateway shows itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.keys import entry, written
from tests.support.servers import gateway, gateway_before

PAGE = "https://app.example.com"
INFER = "/v1/models/text_ensemble/infer"
TEXT = {"Content-Type": "text/plain"}
FROM_PAGE = {"Origin": PAGE, **TEXT}


@pytest.fixture(scope="module")
def shared(demo_triton: EmbeddedTriton) -> Iterator[httpx.Client]:
    """Open to the pages of one origin."""
    with gateway_before(
        demo_triton.options.url, cors_origins=f"{PAGE}, http://[::1]:3000"
    ) as client:
        yield client


def preflight(client: httpx.Client, origin: str, path: str = INFER) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-request-timeout",
    }
    return client.options(path, headers=headers)


@pytest.mark.long
@pytest.mark.parametrize("path", [INFER, "/v2/models/text_ensemble/infer"])
def test_a_browser_is_told_that_a_page_of_that_origin_may_call(
    shared: httpx.Client, path: str
) -> None:
    answer = preflight(shared, PAGE, path)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-request-timeout" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    assert preflight(shared, "http://[::1]:3000", path).status_code == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://app.example.com", f"{PAGE}.evil.example", "null"]
)
def test_no_other_page_may(shared: httpx.Client, origin: str) -> None:
    answer = preflight(shared, origin)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers
    answer = shared.post(INFER, content="a text", headers={"Origin": origin, **TEXT})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers  # so no page sees it


def test_the_page_may_read_the_answer_and_its_errors(shared: httpx.Client) -> None:
    for path, status in (
        (INFER, 200), ("/v1/models/none/infer", 404), ("/v2/models/text_ensemble", 200),
        ("/v2/models/none", 404),
    ):  # fmt: skip
        method = "GET" if path.startswith("/v2") else "POST"
        answer = shared.request(method, path, content="a text", headers=FROM_PAGE)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "X-Request-ID" in answer.headers["access-control-expose-headers"]
        assert answer.headers["vary"] == "Origin"


def test_a_page_is_nobody_who_administers(shared: httpx.Client) -> None:
    path = "/v2/repository/models/text_ensemble/unload"
    assert shared.post(path, headers={"Origin": PAGE}).status_code == 403


def test_unless_configured_no_page_may(demo: httpx.Client) -> None:
    answer = preflight(demo, PAGE)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers
    answer = demo.post(INFER, content="a text", headers=FROM_PAGE)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["app.example.com", f"{PAGE}/", f"{PAGE}/page", "ftp://a", "HTTPS://A"]
)
def test_what_is_no_origin_keeps_the_gateway_from_starting(origin: str) -> None:
    with (
        pytest.raises(AssertionError, match="is not a valid origin; use https://HOST"),
        gateway("http://127.0.0.1:1", cors_origins=origin),
    ):
        pass


@pytest.mark.parametrize("path", ["/docs", "/docs?model=ensemble"])
def test_a_page_says_what_it_may_load_and_is_shown_in_no_other(
    demo: httpx.Client, path: str
) -> None:
    answer = demo.get(path)
    assert answer.headers["content-type"].startswith("text/html")
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["x-content-type-options"] == "nosniff"
    for source in ("script src", "link href", "img src"):
        tag, attribute = source.split()
        for piece in answer.text.split(f"<{tag} ")[1:]:
            target = piece.partition(f'{attribute}="')[2].partition('"')[0]
            if target.startswith("http"):
                assert "/".join(target.split("/")[:3]) in " ".join(policy.values())


def test_what_a_model_answers_is_never_taken_for_a_page(demo: httpx.Client) -> None:
    answer = demo.post(INFER, content="<script>alert(1)</script>", headers=TEXT)
    assert answer.status_code == 200
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"


def test_the_openapi_document_says_how_a_key_is_sent(demo: httpx.Client) -> None:
    document = demo.get("/openapi.json").json()
    schemes = document["components"]["securitySchemes"]
    assert {(scheme["type"], scheme.get("scheme"), scheme.get("name")) for scheme in schemes.values()} == {
        ("http", "bearer", None), ("apiKey", None, "X-API-Key"),
    }  # fmt: skip
    assert "security" not in document  # there are no keys here


def test_with_keys_it_says_for_what(demo_triton: EmbeddedTriton, tmp_path: Path) -> None:
    path = written(tmp_path / "keys.yaml", [entry("tgw_a-secret", "infer")])
    with gateway_before(demo_triton.options.url, keys_file=str(path)) as client:
        document = client.get("/openapi.json").json()
    assert document["security"] == [
        {name: []} for name in document["components"]["securitySchemes"]
    ]
    assert document["paths"]["/livez"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/models"]["get"]
