"""Sign-in of the page at a real issuer, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.capabilities.identity.support.issuer import AUDIENCE, CONFIGURATION, serving_issuer
from tests.capabilities.page.support import browser
from tests.support.fake_triton import fake_triton
from tests.support.keys import bearer
from tests.support.servers import gateway


@pytest.fixture
def page(tmp_path: Path) -> Iterator[browser.Page]:
    with browser.chromium(tmp_path / "profile") as driver:
        yield browser.Page(driver)


@browser.is_required
def test_user_of_the_page_signs_in_and_the_token_stays_in_memory(
    page: browser.Page, tmp_path: Path
) -> None:
    keys_file = tmp_path / "keys.yaml"
    keys_file.write_text("oidc: [{claim: sub, value: alice, roles: [infer]}]")
    with serving_issuer() as issuer, fake_triton() as triton:
        settings = {
            "keys_file": str(keys_file),
            "oidc_issuer": issuer.url,
            "oidc_audience": AUDIENCE,
            "oidc_client_id": "the page",
        }
        with gateway(f"http://127.0.0.1:{triton.port}", **settings) as (client, _):
            page.refusals = {401, 403}
            page.open(str(client.base_url), "#live")
            page.click("#key-sign-in")
            page.see("#key-button", "Key: set")
            page.until(lambda: page.run("return location.hash") == "#live", "the view of before")
            assert page.run("return location.search") == ""
            assert page.run("return {...sessionStorage, ...localStorage}") == {
                "triton-gateway-visited": "1"
            }
            assert page.origins() == {page.origin, issuer.url}
            assert not page.console()
            assert issuer.challenges == {}
            # A page without a sign-in of its own reads no code.
            page.open(str(client.base_url), "?code=code-1&state=other#live")
            # A provider that is away is said in the dialog.
            issuer.answer = lambda path: (503, {}) if path == CONFIGURATION else None
            page.refusals.add(503)
            page.click("#key-sign-in")
            page.see("#key-error", "The sign-in service cannot be reached from this page.")
            page.close()


def test_page_asks_the_issuer_only_with_the_setting(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.yaml"
    keys_file.write_text("oidc: [{claim: sub, value: alice, roles: [infer]}]")
    with serving_issuer() as issuer:
        settings = {
            "keys_file": str(keys_file),
            "oidc_issuer": issuer.url,
            "oidc_audience": AUDIENCE,
        }
        with gateway("127.0.0.1:9", **settings) as (client, _):
            response = client.get("/", headers={"Accept": "text/html", **bearer("")})
            assert "connect-src 'self';" in response.headers["content-security-policy"]
            assert issuer.url not in response.text
