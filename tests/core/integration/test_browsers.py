"""Pages of other origins, and the pages that the gateway shows itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.config.settings import Settings
from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.keys import entry, written
from tests.support.servers import gateway_before

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
def test_preflight_of_an_allowed_origin_is_accepted(shared: httpx.Client, path: str) -> None:
    answer = preflight(shared, PAGE, path)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "x-request-timeout" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    assert preflight(shared, "http://[::1]:3000", path).status_code == 200


def test_preflight_of_another_origin_is_refused(shared: httpx.Client) -> None:
    for origin in (
        "https://evil.example",
        "http://app.example.com",
        f"{PAGE}.evil.example",
        "null",
    ):
        preflighted = preflight(shared, origin)
        assert preflighted.status_code == 400
        # What the browser sends without a preflight is answered, and no page may read it.
        answer = shared.post(INFER, content="a text", headers={"Origin": origin, **TEXT})
        assert answer.status_code == 200
        for response in (preflighted, answer):
            assert "access-control-allow-origin" not in response.headers


def test_page_of_an_allowed_origin_may_read_responses_and_not_administer(
    shared: httpx.Client,
) -> None:
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
    unload = "/v2/repository/models/text_ensemble/unload"
    assert shared.post(unload, headers={"Origin": PAGE}).status_code == 403


@pytest.mark.parametrize(
    "path",
    [
        INFER,
        "/v1/models/none/infer",
        "/v2/models/text_ensemble/infer",
        "/v2/nothing",
        "/livez",
    ],
)
def test_page_may_call_every_path_without_credentials(shared: httpx.Client, path: str) -> None:
    for answer in (preflight(shared, PAGE, path), shared.post(path, headers=FROM_PAGE)):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "access-control-allow-credentials" not in answer.headers


def test_preflight_is_refused_without_the_setting(demo: httpx.Client) -> None:
    answer = preflight(demo, PAGE)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers
    answer = demo.post(INFER, content="a text", headers=FROM_PAGE)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "origin", ["app.example.com", f"{PAGE}/", f"{PAGE}/page", "ftp://a", "HTTPS://A"]
)
def test_setting_with_an_invalid_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="is not a valid origin; use https://HOST"):
        Settings(cors_origins=(origin,))


def test_page_has_a_content_security_policy_and_is_shown_in_no_frame(demo: httpx.Client) -> None:
    for path in ("/docs", "/docs?model=ensemble"):
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
        for tag, attribute in (("script", "src"), ("link", "href"), ("img", "src")):
            for piece in answer.text.split(f"<{tag} ")[1:]:
                target = piece.partition(f'{attribute}="')[2].partition('"')[0]
                if target.startswith("http"):
                    assert "/".join(target.split("/")[:3]) in " ".join(policy.values())


def test_output_of_a_model_is_never_taken_for_a_page(demo: httpx.Client) -> None:
    answer = demo.post(INFER, content="<script>alert(1)</script>", headers=TEXT)
    assert answer.status_code == 200
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"


def test_openapi_document_describes_the_keys(
    demo: httpx.Client, demo_triton: EmbeddedTriton, tmp_path: Path
) -> None:
    without_keys = demo.get("/openapi.json").json()
    schemes = without_keys["components"]["securitySchemes"]
    assert {(scheme["type"], scheme.get("scheme"), scheme.get("name")) for scheme in schemes.values()} == {
        ("http", "bearer", None), ("apiKey", None, "X-API-Key"),
    }  # fmt: skip
    assert without_keys["security"] == [{}, *({name: []} for name in schemes)]
    path = written(tmp_path / "keys.yaml", [entry("tgw_a-secret", "infer")])
    with gateway_before(demo_triton.options.url, keys_file=str(path)) as client:
        with_keys = client.get("/openapi.json").json()
    assert with_keys["security"] == [{name: []} for name in schemes]
    assert with_keys["paths"]["/livez"]["get"]["security"] == []
    assert "security" not in with_keys["paths"]["/v1/models"]["get"]
