"""The requests of clients whose last one was refused."""

from __future__ import annotations

import asyncio

from gateway.server.protocol.clients import ClientRegistry

STEPS = 12
CLIENTS = 20


async def test_refused_requests_start_one_by_one_while_others_continue() -> None:
    events: list[str] = []

    async def run(name: str, turn: asyncio.Future[None] | None) -> None:
        if turn is not None:
            await turn
        events.append(name)
        for _ in range(STEPS):
            await asyncio.sleep(0)
        events.append(f"{name} ended")

    clients = ClientRegistry()
    loop = asyncio.get_running_loop()
    refused = [run(f"refused {at}", clients.enqueue_refused(loop)) for at in range(CLIENTS)]
    await asyncio.gather(*refused, run("good", None))
    started = [event for event in events if event.startswith("refused") and "ended" not in event]
    assert started == [f"refused {at}" for at in range(CLIENTS)]
    assert events.index("good ended") < events.index(f"refused {STEPS // 2 + 1}")
    assert len(events) == 2 * (CLIENTS + 1)


async def test_cancelled_request_does_not_delay_the_next() -> None:
    clients = ClientRegistry()
    loop = asyncio.get_running_loop()
    turns = [clients.enqueue_refused(loop) for _ in range(6)]
    for turn in turns[:5]:
        turn.cancel()
    await asyncio.wait_for(turns[5], 60)
    await asyncio.wait_for(clients.enqueue_refused(loop), 60)
    assert [turn.cancelled() for turn in turns] == [True] * 5 + [False]
