"""The lines that `up` prints when it is ready: what to open, and one request to paste."""

from __future__ import annotations

import asyncio
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.access.auth import is_loopback
from gateway.capabilities.capability import LaunchPlan
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.listeners import WILDCARD_HOSTS, join_host_port
from gateway.routes.examples import EXAMPLE_IMAGE, format_curl_example
from gateway.services import Services
from gateway.tensors.signature import Signature

MAX_EXAMINED_MODELS: Final = 10
ENSEMBLE: Final = "ensemble"
SAMPLE_IMAGE: Final = Path("docs/images/seven.png")  # it exists in a checkout


class Welcome:
    """Prints the lines in the background, once the server listens."""

    def __init__(self, plan: LaunchPlan, port: int, print_line: Callable[[str], None]) -> None:
        self._plan = plan
        self._port = port
        self._print_line = print_line
        self._services: Services | None = None
        self._task: asyncio.Task[None] | None = None  # the event loop has weak references only

    def receive_services(self, services: Services) -> None:
        self._services = services

    def start(self) -> None:
        if self._services is not None:
            self._task = asyncio.create_task(self._print(self._services))

    async def _print(self, services: Services) -> None:
        url = format_url(services.settings, self._plan.host, self._port)
        if self._plan.has_page:
            self._print_line(f"open:   {url}/")
            self._print_line(f"guide:  {url}/guide/")
            if self._plan.opens_page:
                await asyncio.to_thread(webbrowser.open, f"{url}/")
        if example := await choose_example(services, url):
            self._print_line(f"paste:  {example}")


def format_url(settings: Settings, host: str, port: int) -> str:
    scheme = "http" if settings.tls_cert_file is None else "https"
    name = "localhost" if is_loopback(host) or host in WILDCARD_HOSTS else host
    return f"{scheme}://{join_host_port(name, port)}"


async def choose_example(services: Services, url: str) -> str:
    """Return a curl command for one of the ready models; empty if there is none.

    A request that needs no file works when it is pasted; an ensemble is what its author offers to clients.
    """
    examples: list[tuple[bool, bool, str, str]] = []
    for signature in await read_signatures(services):
        command = format_curl_example(signature, url)
        if SAMPLE_IMAGE.is_file():
            command = command.replace(f"@{EXAMPLE_IMAGE}", f"@{SAMPLE_IMAGE}")
        needs_file = f"@{EXAMPLE_IMAGE}" in command
        is_part = signature.platform != ENSEMBLE
        examples.append((needs_file, is_part, signature.model, command))
    if not examples:
        return ""
    header = ' -H "Authorization: Bearer $KEY"' if services.access.requires_key else ""
    return min(examples)[-1] + header


async def read_signatures(services: Services) -> list[Signature]:
    try:
        indexes = services.pool.list_serving_indexes().values()
        names = sorted({name for index in indexes for name in index.ready_models})
        names = names[:MAX_EXAMINED_MODELS]
        return [await services.signatures.get_signature(name) for name in names]
    except GatewayError:  # nothing can serve a request at this moment
        return []
