"""An event loop in a thread, for the concurrent requests of the synchronous client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from anyio.from_thread import start_blocking_portal

from gateway.client.async_client import AsyncClient
from gateway.client.batches import InferOutcome


def run_infer_many(
    client_options: Mapping[str, Any], arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> Iterator[InferOutcome]:
    """Yield the outcomes of `AsyncClient.infer_many`. Ending the iteration cancels it and ends the thread."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(AsyncClient(**client_options)) as client,
    ):

        async def start() -> Any:
            return client.infer_many(*arguments, **options)

        outcomes = portal.call(start)
        try:
            while True:
                try:
                    outcome = portal.call(outcomes.__anext__)
                except StopAsyncIteration:
                    return
                yield outcome
        finally:
            portal.call(outcomes.aclose)
