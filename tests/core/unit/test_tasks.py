"""Background loops: whatever a step raises, the loop goes on, and the failure is logged and counted."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from gateway import tasks
from gateway.tasks import TaskTimeout, cancel_tasks, repeat
from gateway.telemetry.metrics import Metrics


async def test_background_loop_continues_after_an_unexpected_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps: list[int] = []
    is_done = asyncio.Event()

    async def step() -> None:
        steps.append(len(steps))
        if len(steps) == 1:
            raise ZeroDivisionError("the first step")
        is_done.set()
        await asyncio.sleep(10)

    loop = asyncio.create_task(repeat("probe", step))
    with anyio.fail_after(10):
        await is_done.wait()
    await cancel_tasks([loop])
    assert "the background loop probe failed and goes on" in caplog.text
    assert "ZeroDivisionError: the first step" in caplog.text
    metrics = Metrics()
    metrics.flush()
    value = metrics.registry.get_sample_value(
        "gateway_background_failures_total", {"loop": "probe"}
    )
    assert value == 1
    assert not tasks.background_failures


async def test_work_that_takes_too_long_is_cancelled() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError), TaskTimeout(loop, 0.01):
        await asyncio.sleep(10)
    with TaskTimeout(loop, 10):
        await asyncio.sleep(0)
    with pytest.raises(ZeroDivisionError), TaskTimeout(loop, 10):
        raise ZeroDivisionError
    # The task is not cancelled any more.
    await asyncio.sleep(0.02)


async def test_cancellation_from_outside_is_not_a_timeout() -> None:
    async def work() -> None:
        with TaskTimeout(asyncio.get_running_loop(), 10):
            await asyncio.sleep(10)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with anyio.move_on_after(0.01) as scope:
        await work()
    assert scope.cancelled_caught
