"""Which URLs and addresses may be called."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest

from gateway.capabilities.jobs.callback_hosts import CallbackHosts, CallbackNotAllowed, is_public
from gateway.capabilities.jobs.settings import JobSettings, split_secrets
from gateway.config.settings import read_settings
from gateway.errors import MalformedRequest
from gateway.messages import CommandError
from gateway.webhooks import generate_secret

HOSTS = CallbackHosts(
    ("shop.example", "shop.example:8443", "http://plain.example:8000", "127.0.0.1:9000")
)
ALLOWED = {
    "https://shop.example": "/",
    "https://SHOP.example:443//a/b?c=%20&d": "//a/b?c=%20&d",
    "https://shop.example:8443/?q": "/?q",
    "http://plain.example:8000/x": "/x",
    "http://127.0.0.1:9000/x": "/x",
    "https://127.0.0.1:9000/x": "/x",
}
NOT_ALLOWED = (
    "http://shop.example/",
    "https://shop.example:444/",
    "https://shop.example./",
    "https://shop.example.evil.example/",
    "https://evil.example/?https://shop.example/",
    "https://plain.example:8000/",
    "http://127.0.0.1:9001/",
    "http://127.1:9000/",
    "http://2130706433:9000/",
    "http://0x7f000001:9000/",
    "http://localhost:9000/",
    "http://[::ffff:127.0.0.1]:9000/",
    "http://169.254.169.254/latest/meta-data/",
    "http://metadata.google.internal/",
    "https://user:password@shop.example/",
    "https://user@shop.example/",
    "https://shop.example@evil.example/",
    "https://evil.example\\@shop.example/",
    "https://shop.example\\.evil.example/",
    "https://shop.example%2eevil.example/",
)
INVALID = (
    "",
    "shop.example/x",
    "//shop.example/x",
    "ftp://shop.example/",
    "file:///etc/passwd",
    "unix:///run/docker.sock",
    "https:///x",
    "https://shop.example/#x",
    "https://shop.example:0/",
    "https://shop.example:65536/",
    "https://shop.example:x/",
    "https://shop.example/a b",
    "https://shop.example/\r\nHost: evil.example",
    "https://[::1/",
    "https://shöp.example/",
    "https://shop.example/" + "x" * 2048,
)
PUBLIC = (
    "1.1.1.1", "8.8.8.8", "99.255.255.255", "100.128.0.0", "172.32.0.0", "192.0.1.1", "223.255.255.255",
    "2001:200::1", "2606:4700::1111", "2a00:1450::1",
)  # fmt: skip
NOT_PUBLIC = (
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.1.2.3",
    "168.63.129.16", "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255", "192.0.0.8",
    "192.0.0.170", "192.0.0.192", "192.0.2.1", "192.31.196.1", "192.52.193.1", "192.88.99.1", "192.168.1.1",
    "192.175.48.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1", "224.0.0.1",
    "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b::808:808", "64:ff9b:1::7f00:1", "100::1", "2001::7f00:1", "2001:0:4136:e378:8000:63bf:80ff:fffe",
    "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "2002:7f00:1::1", "2002:808:808::1",
    "2620:4f:8000::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fd20:ce::254", "fe80::1",
    "fe80::1%1", "fec0::1", "ff02::1",
)  # fmt: skip


@pytest.mark.parametrize("url", ALLOWED)
def test_url_of_a_listed_host_is_allowed(url: str) -> None:
    assert HOSTS.check_url(url).target == ALLOWED[url]


@pytest.mark.parametrize("url", NOT_ALLOWED)
def test_any_other_url_is_forbidden(url: str) -> None:
    with pytest.raises(CallbackNotAllowed) as caught:
        HOSTS.check_url(url)
    assert caught.value.status == 403
    assert "password" not in caught.value.detail or "user name" in caught.value.detail


@pytest.mark.parametrize("url", INVALID)
def test_what_is_no_url_is_malformed(url: str) -> None:
    with pytest.raises(MalformedRequest):
        HOSTS.check_url(url)


def test_without_a_list_no_url_is_allowed() -> None:
    with pytest.raises(CallbackNotAllowed, match=r"to 'https://shop.example' are not allowed"):
        CallbackHosts(()).check_url("https://shop.example/x")


@pytest.mark.parametrize(
    "entry", ["https://a/b", "ftp://a", "a b", "u@a", "10.0.0.1/8", "a/b", "*", ":1"]
)
def test_invalid_entry_of_the_list_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match="is not"):
        CallbackHosts((entry,))


@pytest.mark.parametrize("address", PUBLIC)
def test_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(ip_address(address))


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_special_address_is_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


def test_two_secrets_are_used_at_a_time() -> None:
    secrets = [generate_secret(), generate_secret()]
    settings = read_settings(JobSettings, callback_secret=", ".join(secrets))
    assert split_secrets(settings.read(JobSettings).callback_secret) == tuple(secrets)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"callback_hosts": "a,http://b/c"},
            r"^GATEWAY_CALLBACK_HOSTS cannot be .*'http://b/c' is not",
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
