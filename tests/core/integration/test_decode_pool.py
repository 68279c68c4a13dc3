"""The pool of decoding processes: results, errors and limits."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator

import numpy as np
import psutil
import pytest

from gateway.capacity.decoding import MAX_CALLS, DecodePool
from gateway.capacity.decoding_worker import WorkerCallError
from gateway.errors import BadImage, MalformedRequest, TooLarge
from gateway.media_types import JSON
from gateway.tensors.images.decode import inspect_image
from gateway.tensors.inputs import decode_body
from gateway.tensors.payload import PayloadLimits
from tests.support.wait import wait_until_async

MIB = 1 << 20
LONG_S = 300.0


@pytest.fixture(params=[2])
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[DecodePool]:
    pool = DecodePool(request.param, 256 * MIB)
    yield pool
    await pool.close()
    assert not children()


one_process = pytest.mark.parametrize("pool", [1], indirect=True)


def children() -> list[psutil.Process]:
    found = psutil.Process().children()
    return [child for child in found if "gateway.capacity.decoding" in " ".join(command_of(child))]


def command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


async def test_arrays_are_returned_unchanged(pool: DecodePool) -> None:
    for array in (np.arange(6, dtype=np.int8).reshape(2, 3), np.zeros((0, 4)), np.float16(2)):
        result = await pool.run(np.negative, (array,), LONG_S)
        assert result.dtype == array.dtype
        assert (result == -array).all()
    large = np.ones(5_000_000)
    assert (await pool.run(np.negative, (large,), LONG_S)).sum() == -5_000_000


@one_process
async def test_process_that_parses_a_body_does_not_import_the_application(pool: DecodePool) -> None:
    """Its imports would take longer than any body."""
    with pytest.raises(MalformedRequest):
        await pool.run(decode_body, (b"{", JSON, None, PayloadLimits()), LONG_S)
    imported = await pool.run(eval, ("{*__import__('sys').modules}",), LONG_S)
    assert "gateway.tensors.inputs" in imported
    assert imported.isdisjoint({"fastapi", "gateway.services"})


class PackingThread:
    """An argument that records the thread which pickles it."""

    name = ""

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        self.name = threading.current_thread().name
        return int, ()


async def test_arguments_are_pickled_outside_the_event_loop(pool: DecodePool) -> None:
    argument = PackingThread()
    assert await pool.run(abs, (argument,), LONG_S) == 0
    assert argument.name not in ("", threading.current_thread().name)


async def test_process_is_used_again_and_replaced_before_its_memory_grows(pool: DecodePool) -> None:
    pids = [await pool.run(os.getpid, (), LONG_S) for _ in range(MAX_CALLS + 1)]
    assert len(set(pids[:-1])) == 1
    assert pids[-1] != pids[0]
    await wait_until_async(lambda: len(children()) == 1)


async def test_concurrent_calls_use_no_more_processes_than_allowed(pool: DecodePool) -> None:
    calls = [pool.run(os.getpid, (), LONG_S) for _ in range(20)]
    assert len(set(await asyncio.gather(*calls))) <= 2


async def test_error_of_the_gateway_is_raised_and_any_other_is_a_fault(pool: DecodePool) -> None:
    with pytest.raises(BadImage) as refused:
        await pool.run(inspect_image, (b"no image", PayloadLimits(), "X"), LONG_S)
    assert refused.value.status_code == 422
    assert "'X'" in refused.value.detail
    with pytest.raises(WorkerCallError, match="ZeroDivisionError"):
        await pool.run(divmod, (1, 0), LONG_S)
    assert len(children()) == 1  # the process continues


@one_process
async def test_call_that_is_cancelled_is_killed(pool: DecodePool) -> None:
    call = asyncio.create_task(pool.run(time.sleep, (LONG_S,), LONG_S))
    await wait_until_async(children)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await wait_until_async(lambda: not children())
    assert await pool.run(abs, (-3,), LONG_S) == 3


@one_process
async def test_call_after_its_deadline_or_above_the_memory_is_refused(pool: DecodePool) -> None:
    # It ends by itself, as when the gateway is gone and does not cancel it.
    with pytest.raises(TooLarge):
        await pool.run(time.sleep, (LONG_S,), 0.1)
    assert await pool.run(abs, (-3,), LONG_S) == 3
    with pytest.raises(TooLarge, match="memory"):
        await pool.run(np.ones, (100 * MIB,), LONG_S)
    assert await pool.run(abs, (-3,), LONG_S) == 3


@one_process
async def test_process_that_dies_fails_only_its_call(pool: DecodePool) -> None:
    with pytest.raises(TooLarge):
        await pool.run(signal.raise_signal, (signal.SIGKILL,), LONG_S)
    pid = await pool.run(os.getpid, (), LONG_S)
    process = psutil.Process(pid)
    process.kill()  # while it has nothing to do
    # A zombie may have threads that still hold its socket.
    await wait_until_async(lambda: not process.is_running())
    assert await pool.run(os.getpid, (), LONG_S) != pid
