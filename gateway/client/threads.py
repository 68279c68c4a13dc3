"""The inferences of many values for the synchronous client: in an event loop in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from gateway.client.async_client import AsyncClient
from gateway.client.connection import ClientOptions
from gateway.client.many import InferMany, InferOutcome


def infer_many(options: ClientOptions, many: InferMany) -> Generator[InferOutcome, None, None]:
    """Yield the outcomes. Ending the iteration cancels what runs, and ends the thread."""
    from anyio.from_thread import start_blocking_portal

    call = many.call
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(AsyncClient(**vars(options))) as client,
    ):
        outcomes = client.infer_many(
            call.model,
            many.values,
            batch=many.batch,
            concurrency=many.concurrency,
            version=call.version,
            parameters=call.parameters,
            classification=call.classification,
            headers=call.headers,
            timeout_s=call.timeout_s,
            stream=many.stream,
        )
        lock = asyncio.Lock()
        takers: list[asyncio.Task[Any] | None] = []

        async def take() -> InferOutcome | None:
            takers[:] = [asyncio.current_task()]
            async with lock:
                return await anext(outcomes, None)

        async def close() -> None:
            # A signal may have interrupted the thread that waits for it.
            for taker in filter(None, takers):
                taker.cancel()
            async with lock:
                await outcomes.aclose()

        try:
            while (outcome := portal.call(take)) is not None:
                yield outcome
        finally:
            portal.call(close)
