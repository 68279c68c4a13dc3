"""The budget of pixels: in turn, bounded, and given back whatever happens."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.limits import Budget, Decoders
from gateway.metrics import Metrics


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_who_comes_first_goes_first_and_nobody_goes_beyond_the_total() -> None:
    async def scenario() -> None:
        budget, order = Budget(10), list[str]()

        async def taking(name: str, weight: int) -> int:
            taken = await budget.take(weight)
            order.append(name)
            return taken

        assert await taking("a", 6) == 6
        large = asyncio.create_task(taking("b", 1000))
        small = asyncio.create_task(taking("c", 1))
        await settled()
        assert order == ["a"]  # c would fit, but b came before
        budget.give(6)
        assert await large == 10
        assert not small.done()
        budget.give(10)
        assert await small == 1
        assert order == ["a", "b", "c"]

    asyncio.run(scenario())


def test_who_leaves_the_queue_lets_the_next_one_go() -> None:
    async def scenario() -> None:
        budget = Budget(10)
        await budget.take(6)
        large, small = asyncio.create_task(budget.take(8)), asyncio.create_task(budget.take(4))
        await settled()
        large.cancel()
        assert await asyncio.wait_for(small, 1) == 4
        with pytest.raises(asyncio.CancelledError):
            await large
        budget.give(6)
        budget.give(4)
        assert await asyncio.wait_for(budget.take(10), 1) == 10

    asyncio.run(scenario())


def test_pixels_count_until_the_thread_has_ended_even_if_nobody_waits() -> None:
    async def scenario() -> None:
        decoders = Decoders(threads=1, max_pixels_in_flight=10, metrics=Metrics())
        go, began = threading.Event(), threading.Event()

        def work() -> str:
            began.set()
            go.wait(5)
            return "done"

        first = asyncio.create_task(decoders.run(10, work))
        await asyncio.to_thread(began.wait, 5)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(decoders.run(10, lambda: "second"))
        await settled()
        assert not second.done()
        go.set()
        assert await asyncio.wait_for(second, 5) == "second"
        decoders.close()

    asyncio.run(scenario())


def test_an_error_in_a_thread_reaches_who_waits() -> None:
    async def scenario() -> None:
        decoders = Decoders(threads=1, max_pixels_in_flight=10, metrics=Metrics())
        with pytest.raises(ZeroDivisionError):
            await decoders.run(10, lambda: 1 // 0)
        assert await decoders.run(10, lambda: 5) == 5
        decoders.close()

    asyncio.run(scenario())
