"""HTTPS: what is spoken, what is refused, and certificates that change."""

from __future__ import annotations

import os
import socket
import ssl
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from starlette.types import Receive, Scope, Send

from tests.support.certificates import trusting, write_pair
from tests.support.http_server import (
    FAST,
    MIB,
    PATIENCE_S,
    SHORT_S,
    START,
    TOO_SLOW,
    Client,
    Stage,
    echo,
    refused,
)
from tests.support.wait import Pace, retry_when_late, wait_until


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def shown(authority: trustme.CA, port: int) -> set[str]:
    """The names in the certificate that the server shows."""
    with (
        socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
        trusting(authority).wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        certificate = connection.getpeercert()
        assert certificate
        return {str(each[1]) for each in certificate["subjectAltName"]}


@pytest.fixture
def tls(tmp_path: Path, authority: trustme.CA) -> dict[str, Any]:
    """The settings of a certificate and its key."""
    write_pair(authority, tmp_path, "one.test")
    return {"tls_cert_file": tmp_path / "cert.pem", "tls_key_file": tmp_path / "key.pem"}


@pytest.fixture
def https(tls: dict[str, Any]) -> Iterator[Stage]:
    with Stage(**tls) as stage:
        yield stage


def test_https_is_served_and_http_is_not(https: Stage, authority: trustme.CA) -> None:
    schemes: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        schemes.append(scope["scheme"])
        await echo(scope, receive, send)

    https.app = app
    body = bytes(3 * MIB)
    with httpx.Client(verify=trusting(authority), timeout=PATIENCE_S) as client:
        for _ in range(3):
            answer = client.post(f"https://127.0.0.1:{https.port}/in", content=body)
            assert answer.content == body
    assert schemes == ["https"] * 3
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{https.port}/")


def test_old_versions_of_tls_are_refused(https: Stage, authority: trustme.CA) -> None:
    context = trusting(authority)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with (
        socket.create_connection(("127.0.0.1", https.port), PATIENCE_S) as plain,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_request_has_the_names_and_the_end_of_the_clients_certificate(
    tls: dict[str, Any], authority: trustme.CA, tmp_path: Path
) -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await echo(scope, receive, send)

    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    end = datetime(2040, 5, 6, 7, 8, 9, tzinfo=timezone.utc)
    pair = authority.issue_cert("client.example", not_after=end)
    context = trusting(authority)
    tls.update(tls_client_ca_file=tmp_path / "ca.pem", tls_client_auth="optional")
    with Stage(**tls) as stage:
        stage.app = app
        url = f"https://127.0.0.1:{stage.port}/"
        httpx.get(url, verify=context, timeout=PATIENCE_S)
        pair.configure_cert(context)
        httpx.get(url, verify=context, timeout=PATIENCE_S)
    without, known = scopes
    assert (without["certificate_names"], without["certificate_expires_at"]) == ((), None)
    assert known["certificate_names"] == (("DNS", "client.example"),)
    assert known["certificate_expires_at"] == end.timestamp()


@contextmanager
def tls_client(stage: Stage, authority: trustme.CA) -> Iterator[Client]:
    context = trusting(authority)
    with (
        stage.client() as plain,
        context.wrap_socket(plain.socket, server_hostname="127.0.0.1") as connection,
    ):
        yield Client(stage, connection)


def test_rejections_are_sent_over_tls(tls: dict[str, Any], authority: trustme.CA) -> None:
    with Stage(**tls, **FAST) as hasty:

        def stop_in_the_header(pace: Pace) -> None:
            with tls_client(hasty, authority) as client:
                client.say(START)
                pace.mark()
                assert refused(client) == TOO_SLOW

        retry_when_late(stop_in_the_header, SHORT_S / 2)
    with Stage(**tls) as stage, tls_client(stage, authority) as client:
        client.say(START + b"X: y\r\n" * 100 + b"\r\n")
        assert refused(client) == (431, "HEADER_TOO_LARGE")


def warnings_of(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("the last valid version stays in use")


def test_new_certificate_is_used_and_a_broken_one_is_not(
    https: Stage, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shows(name: str) -> Callable[[], bool]:
        return lambda: name in shown(authority, https.port)

    assert shows("one.test")()
    with httpx.Client(verify=trusting(authority), timeout=PATIENCE_S) as client:
        url = f"https://127.0.0.1:{https.port}/"
        assert client.get(url).status_code == 200
        write_pair(authority, tmp_path, "two.test")
        wait_until(shows("two.test"))
        (tmp_path / "nonsense").write_text("nonsense")
        (tmp_path / "nonsense").replace(tmp_path / "cert.pem")
        wait_until(lambda: warnings_of(caplog) == 1)
        assert shows("two.test")()
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "pipe").replace(tmp_path / "cert.pem")
        wait_until(lambda: "it is not a regular file" in caplog.text)
        (tmp_path / "key.pem").unlink()
        wait_until(lambda: warnings_of(caplog) == 3)
        assert shows("two.test")()
        write_pair(authority, tmp_path, "three.test")
        wait_until(shows("three.test"))
        assert client.get(url).status_code == 200
