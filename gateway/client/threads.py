"""The inferences of many values for the synchronous client: in an event loop in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import aclosing
from queue import SimpleQueue
from typing import Any, Final

from gateway.client.async_client import AsyncClient
from gateway.client.connection import ClientOptions
from gateway.client.many import InferMany, InferOutcome

END: Final = None
# Outcomes that wait for a slow reader, which holds the source of the values back.
MAX_WAITING: Final = 256


def infer_many(options: ClientOptions, many: InferMany) -> Generator[InferOutcome, None, None]:
    """Yield the outcomes. Ending the iteration cancels what runs, and ends the thread."""
    from anyio.from_thread import start_blocking_portal

    call = many.call
    outcomes: SimpleQueue[InferOutcome | None] = SimpleQueue()
    slots = asyncio.Semaphore(MAX_WAITING)

    async def run() -> None:
        async with AsyncClient(**vars(options)) as client:
            source = client.infer_many(
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
            async with aclosing(source):
                async for outcome in source:
                    await slots.acquire()
                    outcomes.put(outcome)

    async def find_loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    with start_blocking_portal() as portal:
        loop = portal.call(find_loop)
        running: Any = portal.start_task_soon(run)
        running.add_done_callback(lambda _: outcomes.put(END))
        try:
            while (outcome := outcomes.get()) is not END:
                loop.call_soon_threadsafe(slots.release)
                yield outcome
            running.result()
        finally:
            running.cancel()
