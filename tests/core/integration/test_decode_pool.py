"""Processes that decode: results, errors, limits, and what becomes of one that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable

import numpy as np
import psutil
import pytest

from gateway.decoding.pool import MAX_CALLS, DecodePool
from gateway.decoding.worker import WorkerCallError
from gateway.errors import BadImage, TooLarge
from gateway.tensors.images import inspect_image
from gateway.tensors.payload import PayloadLimits
from tests.support.wait import wait_until_async

MIB = 1 << 20
LONG_S = 300.0


def run(scenario: Callable[[DecodePool], Awaitable[None]], size: int = 2) -> None:
    async def main() -> None:
        pool = DecodePool(size, 256 * MIB)
        try:
            await scenario(pool)
        finally:
            await pool.close()
        assert not children()

    asyncio.run(main())


def children() -> list[psutil.Process]:
    found = psutil.Process().children()
    return [child for child in found if "gateway.decoding" in " ".join(command_of(child))]


def command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def test_arrays_come_back_as_they_are() -> None:
    async def scenario(pool: DecodePool) -> None:
        for array in (np.arange(6, dtype=np.int8).reshape(2, 3), np.zeros((0, 4)), np.float16(2)):
            result = await pool.run(np.negative, (array,), LONG_S)
            assert result.dtype == array.dtype
            assert (result == -array).all()
        large = np.ones(5_000_000)
        assert (await pool.run(np.negative, (large,), LONG_S)).sum() == -5_000_000

    run(scenario)


class PackingThread:
    """An argument that records the thread which pickles it."""

    name = ""

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        self.name = threading.current_thread().name
        return int, ()


def test_arguments_are_pickled_outside_the_event_loop() -> None:
    async def scenario(pool: DecodePool) -> None:
        argument = PackingThread()
        assert await pool.run(abs, (argument,), LONG_S) == 0
        assert argument.name not in ("", threading.current_thread().name)

    run(scenario)


def test_one_process_serves_many_calls() -> None:
    async def scenario(pool: DecodePool) -> None:
        assert len({await pool.run(os.getpid, (), LONG_S) for _ in range(20)}) == 1
        assert len(children()) == 1

    run(scenario)


def test_a_process_is_replaced_before_its_memory_grows() -> None:
    async def scenario(pool: DecodePool) -> None:
        numbers = [await pool.run(os.getpid, (), LONG_S) for _ in range(MAX_CALLS + 1)]
        assert len(set(numbers[:-1])) == 1
        assert numbers[-1] != numbers[0]
        await wait_until_async(lambda: len(children()) == 1)

    run(scenario)


def test_no_more_processes_run_than_allowed() -> None:
    async def scenario(pool: DecodePool) -> None:
        calls = [pool.run(os.getpid, (), LONG_S) for _ in range(20)]
        assert len(set(await asyncio.gather(*calls))) <= 2

    run(scenario)


def test_an_error_of_the_gateway_is_raised_as_it_is() -> None:
    async def scenario(pool: DecodePool) -> None:
        with pytest.raises(BadImage) as refused:
            await pool.run(inspect_image, (b"no image", PayloadLimits(), "X"), LONG_S)
        assert refused.value.status_code == 422
        assert "'X'" in refused.value.detail
        assert len(children()) == 1  # it goes on

    run(scenario)


def test_any_other_error_is_a_fault() -> None:
    async def scenario(pool: DecodePool) -> None:
        with pytest.raises(WorkerCallError, match="ZeroDivisionError"):
            await pool.run(divmod, (1, 0), LONG_S)

    run(scenario)


def test_a_call_that_is_cancelled_is_killed() -> None:
    async def scenario(pool: DecodePool) -> None:
        call = asyncio.create_task(pool.run(time.sleep, (LONG_S,), LONG_S))
        await wait_until_async(children)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await wait_until_async(lambda: not children())
        assert await pool.run(abs, (-3,), LONG_S) == 3

    run(scenario, size=1)


def test_a_call_that_outlives_its_deadline_ends_by_itself() -> None:
    """As when the gateway is gone and nobody cancels it."""

    async def scenario(pool: DecodePool) -> None:
        with pytest.raises(TooLarge):
            await pool.run(time.sleep, (LONG_S,), 0.1)
        assert await pool.run(abs, (-3,), LONG_S) == 3

    run(scenario, size=1)


def test_a_call_that_needs_too_much_memory_is_refused() -> None:
    async def scenario(pool: DecodePool) -> None:
        with pytest.raises(TooLarge, match="memory"):
            await pool.run(np.ones, (100 * MIB,), LONG_S)
        assert await pool.run(abs, (-3,), LONG_S) == 3

    run(scenario, size=1)


def test_a_process_that_dies_costs_only_its_call() -> None:
    async def scenario(pool: DecodePool) -> None:
        with pytest.raises(TooLarge):
            await pool.run(signal.raise_signal, (signal.SIGKILL,), LONG_S)
        pid = await pool.run(os.getpid, (), LONG_S)
        process = psutil.Process(pid)
        process.kill()  # while it has nothing to do
        # A zombie may have threads that still hold its socket.
        await wait_until_async(lambda: not process.is_running())
        assert await pool.run(os.getpid, (), LONG_S) != pid

    run(scenario, size=1)
