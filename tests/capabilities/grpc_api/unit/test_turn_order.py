"""The order of the requests of a stream."""

from __future__ import annotations

import asyncio

from gateway.capabilities.grpc_api.streams import TurnOrder


def test_turn_waits_until_the_last_one_with_its_key_has_ended() -> None:
    async def run() -> None:
        order = TurnOrder()
        first = order.take("a")
        second = order.take("a")
        third = order.take("a")
        assert not order.take("b").is_waiting
        waiting = asyncio.ensure_future(second.wait())
        await asyncio.sleep(0)
        assert (waiting.done(), second.is_waiting) == (False, True)
        first.end()
        await waiting
        assert (second.is_waiting, third.is_waiting) == (False, True)
        second.end()
        third.end()
        assert not third.is_waiting
        assert not order.take("a").is_waiting

    asyncio.run(run())
