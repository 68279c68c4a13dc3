"""Servers of OpenAI's API (vLLM, Triton's OpenAI frontend), to which completions are forwarded."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from gateway.config.settings import Settings
from gateway.errors import DeadlinePassed
from gateway.fleet.replica import ReplicaAddress, create_http_client
from gateway.http_client.client import UpstreamResponse
from gateway.http_client.connection import Headers, RequestNotSent

log = logging.getLogger(__name__)

MAX_LABELLED_MODELS: Final = 64
OTHER_MODELS: Final = "other"


class OpenAIServers:
    """Sends each request to the server with the fewest outstanding ones."""

    def __init__(
        self, addresses: Sequence[ReplicaAddress], settings: Settings, tls: ssl.SSLContext | None
    ) -> None:
        self._clients = [create_http_client(address, settings, tls) for address in addresses]
        self._labelled_models: set[str] = set()

    def get_model_label(self, model: str) -> str:
        """Return the name for metrics, or `OTHER_MODELS`: some servers accept every name."""
        if len(self._labelled_models) < MAX_LABELLED_MODELS:
            self._labelled_models.add(model)
        return model if model in self._labelled_models else OTHER_MODELS

    def close(self) -> None:
        for client in self._clients:
            client.close()

    async def send(
        self, path: bytes, headers: Headers, body: bytes, timeout_s: float
    ) -> UpstreamResponse:
        """Return the response of the first server that accepts a connection.

        Raises `RequestNotSent` if none does, `BadUpstream` or `DeadlinePassed`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s  # all attempts share it
        for client in sorted(self._clients, key=attrgetter("outstanding")):
            remaining_s = deadline - loop.time()
            try:
                return await client.send(
                    b"POST",
                    path,
                    headers=headers,
                    body=body,
                    timeout_s=remaining_s,
                    outlives_client=False,
                )
            except RequestNotSent:
                log.warning("OpenAI server %s cannot be reached", client.authority)
            except DeadlinePassed:
                raise DeadlinePassed(round(timeout_s, 3)) from None
        raise RequestNotSent("no OpenAI server can be reached")
