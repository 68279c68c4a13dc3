"""Parsing of the `Host` header, and the hosts that the gateway serves."""

from __future__ import annotations

import pytest

from gateway.access.auth import is_allowed_host, is_loopback, parse_host
from gateway.config.settings import read_settings
from gateway.messages import CommandError

LOCAL = [
    "localhost", "LOCALHOST", "localhost:8080", "localhost.:80", "app.localhost", "127.0.0.1",
    "127.0.0.1:8080", "127.255.255.254", "[::1]", "[::1]:8080", "[::ffff:127.0.0.1]:80",
]  # fmt: skip
FOREIGN = [
    "", "evil.example", "localhost.evil.example", "notlocalhost", "127.0.0.1.evil.example",
    "127.0.0.1.nip.io:8080", "10.0.0.7", "0.0.0.0", "[::]", "[::1", "2130706433", "127.1", "0x7f.1",
    "[fe80::1]", "localhost@evil.example",
]  # fmt: skip


def test_loopback_and_configured_hosts_are_allowed() -> None:
    for authority in LOCAL:
        assert is_loopback(parse_host(authority)), authority
        assert is_allowed_host(authority.encode(), ("models.test",)), authority
    for authority in FOREIGN:
        assert not is_loopback(parse_host(authority)), authority
        assert not is_allowed_host(authority.encode(), ("models.test",)), authority
    for authority in ("models.test", "MODELS.test:80", "a.b.example", "[2001:db8::7]"):
        allowed = ("models.test", "*.example", "2001:db8::7")
        assert is_allowed_host(authority.encode(), allowed), authority
        assert is_allowed_host(authority.encode(), ("*",)), authority


def test_allowed_hosts_are_names_without_scheme_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_ALLOWED_HOSTS", "Models.Example.com, *.test,[2001:db8::7]")
    assert read_settings().allowed_hosts == ("models.example.com", "*.test", "2001:db8::7")
    for wrong in ("http://a.test", "a.test:8080", "a.test/x", "a b"):
        monkeypatch.setenv("GATEWAY_ALLOWED_HOSTS", wrong)
        with pytest.raises(
            CommandError, match="is not a valid host; use names without http:// and without a port"
        ):
            read_settings()
