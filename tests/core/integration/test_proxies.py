"""Behind a proxy that ends TLS and strips a path prefix: no response leads its client elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.support.nginx import serve_below_prefix
from tests.support.servers import gateway_before

PNG = {"Content-Type": "image/png"}
NOT_FOUND = (404, "NOT_FOUND", "paths do not end with a slash")
PASSED_THROUGH = (404, "NOT_FOUND", "path not found in Triton's API")
# A request whose path has a slash too many, the status, the code and words of the message.
ROWS = (
    ("POST", "/v1/models/ensemble/infer/", *NOT_FOUND),
    ("POST", "/v1/models/ensemble/infer/?dry_run=true", *NOT_FOUND),
    ("POST", "/v1/models/ensemble/versions/1/infer/", *NOT_FOUND),
    ("GET", "/v1/models/", *NOT_FOUND),
    ("GET", "/v1/models/ensemble/", *NOT_FOUND),
    ("HEAD", "/v1/models/ensemble/", 404, "", ""),
    ("GET", "/v1/models/ensemble/openapi.json/", *NOT_FOUND),
    ("GET", "/v1/replicas/", *NOT_FOUND),
    ("GET", "/metrics/", *NOT_FOUND),
    ("GET", "/livez/", *NOT_FOUND),
    ("GET", "/readyz/", *NOT_FOUND),
    ("GET", "/openapi.json/", *NOT_FOUND),
    ("POST", "/v2/repository/index/", *NOT_FOUND),
    ("POST", "/v2/repository/models/ensemble/load/", *NOT_FOUND),
    ("GET", "/v2/models/", *PASSED_THROUGH),
    ("POST", "/v2/models/ensemble/infer/", *PASSED_THROUGH),
    ("GET", "/v2/health/ready/", *PASSED_THROUGH),
    ("GET", "/nowhere/", *NOT_FOUND),
    ("GET", "/nowhere", 404, "NOT_FOUND", "path not found; GET /docs shows the API"),
)


@dataclass(frozen=True)
class Places:
    """The addresses of a gateway, and of the prefix of an nginx before it."""

    gateway: str
    prefix: str


@pytest.fixture(scope="module")
def places(demo_triton: EmbeddedTriton) -> Iterator[Places]:
    with gateway_before(demo_triton.options.url) as client:
        gateway = str(client.base_url).rstrip("/")
        with serve_below_prefix(gateway) as prefix:
            yield Places(gateway, prefix)


@pytest.mark.parametrize("place", ["gateway", "prefix"])
@pytest.mark.parametrize(("method", "path", "status", "code", "words"), ROWS)
def test_path_with_a_slash_at_its_end_is_no_redirect(
    places: Places, place: str, method: str, path: str, status: int, code: str, words: str
) -> None:
    headers = {**PNG, "X-Forwarded-Proto": "https"}
    url = f"{getattr(places, place)}{path}"
    response = httpx.request(
        method, url, headers=headers, content=b"x" if method == "POST" else None
    )
    assert response.status_code == status
    assert "location" not in response.headers
    if method != "HEAD":
        assert response.json()["code"] == code
        assert words in response.json()["error"]


def test_description_of_the_api_is_found_below_the_prefix(places: Places) -> None:
    redirect = httpx.get(f"{places.prefix}/redoc")
    assert (redirect.status_code, redirect.headers["location"]) == (307, "docs")
    followed = httpx.get(f"{places.prefix}/redoc", follow_redirects=True)
    assert str(followed.url) == f"{places.prefix}/docs"
    assert followed.status_code == 200


@pytest.mark.parametrize(
    ("forwarded", "scheme"), [("https", "https"), ("http", "http"), ("", "http"), ("evil", "http")]
)
def test_examples_have_the_scheme_of_the_client(
    places: Places, forwarded: str, scheme: str
) -> None:
    """An example of another scheme would send the body and the key in clear text."""
    headers = {"X-Forwarded-Proto": forwarded, "Host": "gateway.example"}
    with httpx.Client(base_url=places.gateway, headers=headers) as client:
        description = client.get("/v1/models/text_ensemble").json()
    address = f"{scheme}://gateway.example/v1/models/text_ensemble/infer"
    assert address in description["curl"]
    assert address in description["python"]
