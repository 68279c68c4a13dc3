"""Background loops: whatever a step raises, the loop goes on, and the failure is logged and counted."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from gateway import tasks
from gateway.tasks import ChangeSignal, TaskTimeout, cancel_tasks, repeat
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


async def test_change_reaches_every_task_that_waits_and_one_that_comes_later() -> None:
    changes = ChangeSignal()
    waiting = [asyncio.create_task(changes.wait(0)) for _ in range(3)]
    await asyncio.sleep(0)
    changes.notify()
    with anyio.fail_after(10):
        assert await asyncio.gather(*waiting) == [1, 1, 1]
        assert await changes.wait(0) == 1
    assert await changes.wait(1, timeout_s=0.01) == 1
