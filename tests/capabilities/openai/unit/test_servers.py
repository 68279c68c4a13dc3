"""Servers of completions: their addresses, TLS and deadlines."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import trustme

from gateway.app import create_app
from gateway.capabilities.openai.servers import OpenAIServers
from gateway.config.settings import Settings
from gateway.errors import DeadlinePassed
from gateway.fleet.discovery import create_tls_context
from gateway.fleet.replica import BadAddress, parse_replica_url
from tests.support.certificates import server_context, serving
from tests.support.servers import blackhole
from tests.support.wait import TIMEOUT_S, no_task_left, takes_at_least


async def test_unreachable_openai_servers_share_one_deadline() -> None:
    options = Settings(connect_timeout_s=0.2)
    with blackhole() as first, blackhole() as second, blackhole() as third:
        addresses = [
            parse_replica_url(f"http://127.0.0.1:{port}") for port in (first, second, third)
        ]
        # With a deadline for each, no server would be reached within 0.6 s, which is another error.
        async with no_task_left():
            with (
                closing(OpenAIServers(addresses, options, None)) as servers,
                takes_at_least(0.3),
                pytest.raises(DeadlinePassed, match=r"within 0\.3 s"),
            ):
                await servers.send(b"/v1/completions", [], b"", 0.3)


async def test_server_with_fewer_outstanding_requests_is_chosen(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = server_context(authority, name="127.0.0.1", wants_client=False)
    async with serving(context, b"first") as first, serving(context, b"later") as second:
        settings = Settings(triton_ca_file=tmp_path / "ca.pem", state="memory:")
        addresses = [parse_replica_url(url) for url in (first, second)]
        servers = OpenAIServers(addresses, settings, create_tls_context(settings, addresses))
        with closing(servers), ExitStack() as stack:
            for body in (b"first", b"later"):
                response = await servers.send(b"/v1/completions", [], b"", TIMEOUT_S)
                stack.enter_context(closing(response))
                assert await response.next_chunk() == body


async def test_openai_server_may_have_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    async with serving(server_context(authority, name="127.0.0.1", wants_client=False)) as url:
        settings = Settings(openai_urls=(url,), triton_ca_file=tmp_path / "ca.pem", state="memory:")
        addresses = [parse_replica_url(url)]
        servers = OpenAIServers(addresses, settings, create_tls_context(settings, addresses))
        with closing(servers):
            response = await servers.send(b"/v1/completions", [], b"", TIMEOUT_S)
            with closing(response):
                assert (response.status, await response.next_chunk()) == (200, b"hello")


def test_invalid_address_of_openai_server_is_reported_before_the_start() -> None:
    with pytest.raises(BadAddress, match="ftp"):
        create_app(Settings(openai_urls=("ftp://127.0.0.1",), state="memory:"))
