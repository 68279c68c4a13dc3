"""Which URLs may be called."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.capabilities.jobs.callback_urls import CallbackNotAllowed, CallbackUrls
from gateway.capabilities.jobs.settings import JobSettings, split_secrets
from gateway.config.settings import check_removed_settings, read_settings
from gateway.errors import MalformedRequest
from gateway.messages import CommandError
from gateway.webhooks import generate_secret

URLS = CallbackUrls(
    (
        "https://shop.example/done",
        "https://shop.example:8443",
        "http://plain.example:8000/a/b/",
        "http://[::1]:9000",
    )
)
# What is sent: the authority and the target; or the status of the refusal.
OUTCOMES: dict[str, tuple[str, str] | int] = {
    "https://shop.example/done": ("shop.example", "/done"),
    "HTTPS://SHOP.example:443/done/7?c=%20&d": ("shop.example", "/done/7?c=%20&d"),
    "https://shop.example/done//7/?../..": ("shop.example", "/done//7/?../.."),
    "https://shop.example/done?x=https://evil.example/%2e%2e": (
        "shop.example",
        "/done?x=https://evil.example/%2e%2e",
    ),
    "https://shop.example:8443?q": ("shop.example:8443", "/?q"),
    "http://plain.example:8000/a/b": ("plain.example:8000", "/a/b"),
    "http://plain.example:8000/a/b/..c/.d": ("plain.example:8000", "/a/b/..c/.d"),
    "http://[::1]:9000/x": ("[::1]:9000", "/x"),
    # Another path.
    "https://shop.example": 403,
    "https://shop.example/": 403,
    "https://shop.example/done2": 403,
    "https://shop.example/Done": 403,
    "https://shop.example//done": 403,
    "https://shop.example/x/done": 403,
    "https://shop.example/?/done": 403,
    "https://shop.example/done;x": 403,
    "https://shop.example/d%6fne": 403,
    "http://plain.example:8000/a": 403,
    # A path that a server may read as another one.
    "https://shop.example/done/../admin": 403,
    "https://shop.example/done/..": 403,
    "https://shop.example/done/./x": 403,
    "https://shop.example/done/..;/admin": 403,
    "https://shop.example/done/%2e%2E/admin": 403,
    "https://shop.example/done/.%2e/admin": 403,
    "https://shop.example/done/%252e%252e/admin": 403,
    "https://shop.example/done%2f..%2fadmin": 403,
    "https://shop.example/done/..%5cadmin": 403,
    "https://shop.example/done\\..\\admin": 403,
    # Another origin.
    "http://shop.example/done": 403,
    "https://shop.example:444/done": 403,
    "https://shop.example./done": 403,
    "https://shop.example.evil.example/done": 403,
    "https://evil.example/done?https://shop.example/done": 403,
    "https://plain.example:8000/a/b": 403,
    "http://[::ffff:7f00:1]:9000/x": 403,
    "http://127.0.0.1:9000/x": 403,
    "http://169.254.169.254/latest/meta-data/": 403,
    "https://user:password@shop.example/done": 403,
    "https://@shop.example/done": 403,
    "https://shop.example@evil.example/done": 403,
    "https://evil.example\\@shop.example/done": 403,
    "https://shop.example\\.evil.example/done": 403,
    "https://shop.example%2f.evil.example/done": 403,
    # No URL.
    "": 400,
    "shop.example/done": 400,
    "//shop.example/done": 400,
    "ftp://shop.example/done": 400,
    "file:///etc/passwd": 400,
    "unix:///run/docker.sock": 400,
    "https:///done": 400,
    "https:shop.example/done": 400,
    "https://shop.example/done#x": 400,
    "https://shop.example:0/done": 400,
    "https://shop.example:65536/done": 400,
    "https://shop.example:x/done": 400,
    "https://shop.example/done/a b": 400,
    "https://shop.example/done\r\nHost: evil.example": 400,
    "https://shop.example/done\t": 400,
    "https://[::1/done": 400,
    "https://xn--0/done": 400,
    "https://shöp.example/done": 400,
    "https://shop.example/done/" + "x" * 2048: 400,
}


@pytest.mark.parametrize("url", OUTCOMES)
def test_url_below_a_prefix_is_allowed_and_any_other_is_refused(url: str) -> None:
    outcome: tuple[str, str] | int
    try:
        checked = URLS.check_url(url)
        outcome = (checked.netloc.decode(), checked.raw_path.decode())
    except (CallbackNotAllowed, MalformedRequest) as exc:
        outcome = exc.status
    assert outcome == OUTCOMES[url]


def test_message_has_the_origin_alone() -> None:
    with pytest.raises(CallbackNotAllowed) as caught:
        URLS.check_url("https://shop.example/secret?token=secret")
    assert caught.value.detail == (
        "callbacks to this URL of 'https://shop.example' are not allowed: GATEWAY_CALLBACK_URLS lists the "
        "prefixes of those that are"
    )


def test_without_a_list_no_url_is_allowed() -> None:
    with pytest.raises(CallbackNotAllowed, match=r"of 'https://shop.example' are not allowed"):
        CallbackUrls(()).check_url("https://shop.example/x")


@pytest.mark.parametrize(
    "entry",
    [
        "shop.example", "10.0.0.0/8", "ftp://a", "https://a b", "https://u@a", "https://*.a", "https://a?b",
        "https://a/b/../c", "https://a/%2e", "https://:1", "/a", "*",
    ],
)  # fmt: skip
def test_invalid_entry_of_the_list_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match="is not a URL prefix such as"):
        CallbackUrls((entry,))


def test_two_secrets_are_used_at_a_time() -> None:
    secrets = [generate_secret(), generate_secret()]
    settings = read_settings(JobSettings, callback_secret=", ".join(secrets))
    assert split_secrets(settings.read(JobSettings).callback_secret) == tuple(secrets)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"callback_urls": "https://a,b/c"},
            r"^GATEWAY_CALLBACK_URLS cannot be .*'b/c' is not a URL prefix",
        ),
        (
            {"callback_secret": "whsec_dG9vIHNob3J0"},
            r"^GATEWAY_CALLBACK_SECRET is invalid: use whsec_",
        ),
    ],
)
def test_invalid_setting_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CommandError, match=message) as caught:
        read_settings(JobSettings, **values)
    assert "dG9v" not in str(caught.value)


def test_former_list_of_hosts_is_refused_with_its_replacement() -> None:
    message = (
        r"^GATEWAY_CALLBACK_HOSTS is no longer a setting; unset it: GATEWAY_CALLBACK_URLS lists prefixes "
        r"such as https://shop\.example/done$"
    )
    with pytest.raises(CommandError, match=message):
        check_removed_settings(("gateway_callback_hosts",))
