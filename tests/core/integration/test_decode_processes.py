"""The threads and processes that decode bodies: results, errors, limits, and clients that leave."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import numpy as np
import psutil
import pytest

from gateway.capacity.decoding import DecodeExecutor
from gateway.capacity.decoding_worker import DecodingFault
from gateway.errors import MalformedRequest, TooLarge
from gateway.media_types import JSON
from gateway.telemetry.metrics import Metrics
from gateway.tensors.inputs import decode_body
from gateway.tensors.payload import PayloadLimits
from tests.support.servers import ROOT
from tests.support.wait import wait_until, wait_until_async

LONG_S = 300.0
LEAVING_CLIENTS = 32


@pytest.fixture
async def executor() -> AsyncIterator[DecodeExecutor]:
    executor = DecodeExecutor(Metrics(), 2)
    yield executor
    await executor.close()


async def test_results_and_errors_are_those_of_the_function(executor: DecodeExecutor) -> None:
    for array in (np.arange(6, dtype=np.int8).reshape(2, 3), np.zeros((0, 4)), np.ones(5_000_000)):
        result = await executor.run_in_process(np.negative, array)
        assert result.dtype == array.dtype
        assert (result == -array).all()
    with pytest.raises(MalformedRequest, match="not valid JSON"):
        await executor.run_in_process(decode_body, b"{", JSON, None, PayloadLimits())
    with pytest.raises(DecodingFault, match="ZeroDivisionError"):
        await executor.run_in_process(divmod, 1, 0)
    with pytest.raises(ZeroDivisionError):
        await executor.run_in_thread(lambda: 1 // 0)
    assert await executor.run_in_thread(lambda: 5) == 5


async def test_process_imports_what_it_decodes_with_and_not_the_application(
    executor: DecodeExecutor,
) -> None:
    await executor.start_process()
    imported = await executor.run_in_process(eval, "{*__import__('sys').modules}")
    assert "gateway.tensors.inputs" in imported
    assert imported.isdisjoint({"fastapi", "gevent", "gateway.services", "gateway.cli"})


async def test_concurrent_calls_use_no_more_processes_than_allowed(
    executor: DecodeExecutor,
) -> None:
    calls = [executor.run_in_process(os.getpid) for _ in range(20)]
    assert len(set(await asyncio.gather(*calls))) <= 2


async def test_call_above_the_memory_limit_is_refused_and_the_process_goes_on(
    executor: DecodeExecutor,
) -> None:
    pid = await executor.run_in_process(os.getpid)
    with pytest.raises(TooLarge, match="memory"):
        await executor.run_in_process(np.ones, executor.max_process_bytes)
    assert await executor.run_in_process(os.getpid) == pid


async def test_process_that_dies_fails_only_its_call(executor: DecodeExecutor) -> None:
    with pytest.raises(TooLarge):
        await executor.run_in_process(signal.raise_signal, signal.SIGKILL)
    assert await executor.run_in_process(abs, -3) == 3


async def test_clients_that_leave_do_not_stop_the_decoding_of_others(
    executor: DecodeExecutor,
) -> None:
    """Some leave while their process starts, others while it works for them."""
    before = set(psutil.Process().children())
    for number in range(LEAVING_CLIENTS):
        leaving = asyncio.create_task(executor.run_in_process(time.sleep, LONG_S))
        await asyncio.sleep(0.05 * (number % 3))
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    pids = await asyncio.gather(*(executor.run_in_process(os.getpid) for _ in range(4)))
    children = [child for child in psutil.Process().children() if child not in before]
    assert {child.pid for child in children} >= set(pids)
    await wait_until_async(lambda: len(running_children(before)) <= 2)


OF_ANOTHER_GATEWAY = """
import asyncio, os, time
from gateway.capacity.decoding import DecodeExecutor
from gateway.telemetry.metrics import Metrics

async def main():
    executor = DecodeExecutor(Metrics(), 1)
    print(await executor.run_in_process(os.getpid), flush=True)
    await executor.run_in_process(time.sleep, 1)

asyncio.run(main())
"""


def test_processes_of_a_gateway_that_is_killed_end_with_their_call() -> None:
    command = [sys.executable, "-c", OF_ANOTHER_GATEWAY]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as gateway:
        assert gateway.stdout is not None
        process = psutil.Process(int(gateway.stdout.readline()))
        gateway.kill()
    wait_until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def running_children(before: set[psutil.Process]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child not in before]
