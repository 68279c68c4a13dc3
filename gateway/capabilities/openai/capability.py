"""OpenAI's API: embeddings and rankings of any model of texts, and completions of OpenAI servers."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from gateway.capabilities.capability import Attachment, Capability
from gateway.config.settings import CapabilitySettings, CommaSeparated, Settings

if TYPE_CHECKING:
    from gateway.services import Services


class OpenAISettings(CapabilitySettings):
    openai_urls: CommaSeparated = ()
    """Comma-separated URLs of servers of OpenAI's API, such as vLLM or Triton's OpenAI frontend, to which
    /v1/chat/completions and /v1/completions are forwarded: http://HOST:8000. Empty: 501."""


def attach_openai(settings: Settings) -> Attachment:
    from gateway.capabilities.openai.routes import ERROR_SERIALIZERS, OpenAIDescriber, router
    from gateway.capabilities.openai.servers import OpenAIServers
    from gateway.fleet.discovery import create_tls_context
    from gateway.fleet.replica import parse_replica_url
    from gateway.routes.openapi import OPENAI_ERROR_SCHEMA

    addresses = [parse_replica_url(url) for url in settings.read(OpenAISettings).openai_urls]

    async def open_servers(services: Services, stack: AsyncExitStack) -> None:
        if addresses:
            servers = OpenAIServers(addresses, settings, create_tls_context(settings, addresses))
            stack.callback(servers.close)
            services.provide(servers)

    return Attachment(
        (router,),
        {"OpenAIError": OPENAI_ERROR_SCHEMA},
        error_serializers=ERROR_SERIALIZERS,
        open=open_servers,
        describer=OpenAIDescriber(),
    )


CAPABILITY = Capability("openai", attach_openai, settings=OpenAISettings)
