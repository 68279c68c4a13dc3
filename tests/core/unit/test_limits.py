"""The budgets of memory and pixels: bounded, in turn, and given back whatever happens."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.capacity.admission import WeightedSemaphore
from gateway.capacity.decoding import DecodeExecutor
from gateway.telemetry.metrics import Metrics
from tests.support.wait import TIMEOUT_S


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_semaphore_is_fifo_and_limits_the_total() -> None:
    budget, order = WeightedSemaphore(10), list[str]()

    async def taking(name: str, weight: int) -> int:
        taken = await budget.acquire(weight)
        order.append(name)
        return taken

    assert await taking("a", 6) == 6
    large = asyncio.create_task(taking("b", 1000))
    small = asyncio.create_task(taking("c", 1))
    await settled()
    assert order == ["a"]  # c would fit, but b came before
    budget.release(6)
    assert await large == 10
    assert not small.done()
    budget.release(10)
    assert await small == 1
    assert order == ["a", "b", "c"]


async def test_cancelled_acquire_lets_the_next_one_continue() -> None:
    budget = WeightedSemaphore(10)
    await budget.acquire(6)
    large, small = (
        asyncio.create_task(budget.acquire(8)),
        asyncio.create_task(budget.acquire(4)),
    )
    await settled()
    large.cancel()
    assert await asyncio.wait_for(small, TIMEOUT_S) == 4
    with pytest.raises(asyncio.CancelledError):
        await large
    budget.release(6)
    budget.release(4)
    assert await asyncio.wait_for(budget.acquire(10), TIMEOUT_S) == 10


async def test_pixels_of_a_cancelled_decoding_count_until_its_thread_ends() -> None:
    decoders = DecodeExecutor(workers=1, max_pixels_in_flight=10, metrics=Metrics())
    go, began = threading.Event(), threading.Event()

    def work() -> str:
        began.set()
        go.wait(TIMEOUT_S)
        return "done"

    first = asyncio.create_task(decoders.run_in_thread(10, work))
    await asyncio.to_thread(began.wait, TIMEOUT_S)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(decoders.run_in_thread(10, lambda: "second"))
    await settled()
    assert not second.done()
    go.set()
    assert await asyncio.wait_for(second, TIMEOUT_S) == "second"
    await decoders.close()


async def test_error_in_a_decoding_thread_is_raised() -> None:
    decoders = DecodeExecutor(workers=1, max_pixels_in_flight=10, metrics=Metrics())
    with pytest.raises(ZeroDivisionError):
        await decoders.run_in_thread(10, lambda: 1 // 0)
    assert await decoders.run_in_thread(10, lambda: 5) == 5
    await decoders.close()
