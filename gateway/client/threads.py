"""An event loop in a thread, for the concurrent requests of the synchronous client."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from anyio.from_thread import start_blocking_portal

from gateway.client.async_client import AsyncClient
from gateway.client.batches import InferMany, InferOutcome


def run_infer_many(
    client_options: Mapping[str, Any], many: InferMany
) -> Generator[InferOutcome, None, None]:
    """Yield the outcomes of many inferences. Ending the iteration cancels them and ends the thread."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(AsyncClient(**client_options)) as client,
    ):
        outcomes = client.start_many(many)
        try:
            while True:
                try:
                    outcome = portal.call(outcomes.__anext__)
                except StopAsyncIteration:
                    return
                yield outcome
        finally:
            portal.call(outcomes.aclose)
