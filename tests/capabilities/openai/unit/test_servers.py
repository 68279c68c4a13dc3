"""Servers of completions: their addresses, TLS and deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import trustme

from gateway.app import create_app
from gateway.capabilities.openai.servers import OpenAIServers
from gateway.config.settings import Settings
from gateway.errors import DeadlinePassed
from gateway.fleet.discovery import create_tls_context
from gateway.fleet.replica import BadAddress, parse_replica_url
from gateway.inference.body import Deadline
from tests.support.certificates import server_context, serving
from tests.support.servers import blackhole
from tests.support.wait import TIMEOUT_S, no_task_left, takes_at_least

SCOPE: Any = {"path": "/v1/completions", "headers": []}


def create_servers(settings: Settings, urls: Sequence[str]) -> OpenAIServers:
    addresses = [parse_replica_url(url) for url in urls]
    return OpenAIServers(addresses, settings, create_tls_context(settings, addresses))


async def test_unreachable_openai_servers_share_one_deadline() -> None:
    with blackhole() as first, blackhole() as second, blackhole() as third:
        urls = [f"http://127.0.0.1:{port}" for port in (first, second, third)]
        # With a deadline for each, no server would be reached within 0.6 s, which is another error.
        async with no_task_left():
            with (
                closing(create_servers(Settings(connect_timeout_s=0.2), urls)) as servers,
                takes_at_least(0.3),
                pytest.raises(DeadlinePassed, match=r"within 0\.3 s"),
            ):
                await servers.send(SCOPE, b"", Deadline.after(0.3))


async def test_server_with_fewer_outstanding_requests_is_chosen(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    context = server_context(authority, name="127.0.0.1", wants_client=False)
    settings = Settings(triton_ca_file=tmp_path / "ca.pem", state="memory:")
    async with serving(context, b"first") as first, serving(context, b"later") as second:
        with closing(create_servers(settings, (first, second))) as servers, ExitStack() as stack:
            for body in (b"first", b"later"):
                response = await servers.send(SCOPE, b"", Deadline.after(TIMEOUT_S))
                stack.enter_context(closing(response))
                assert (response.status, await response.next_chunk()) == (200, body)


def test_invalid_address_of_openai_server_is_reported_before_the_start() -> None:
    with pytest.raises(BadAddress, match="ftp"):
        create_app(Settings(openai_urls=("ftp://127.0.0.1",), state="memory:"))
