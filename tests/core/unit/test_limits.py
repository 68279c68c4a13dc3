"""Places for inferences, and the budget of pixels: bounded, in turn, and given back whatever happens."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.capacity.admission import AdmissionQueue, AdmissionQueueFull, WeightedSemaphore
from gateway.capacity.decoding.executor import DecodeExecutor
from gateway.errors import DeadlinePassed
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


# The admission queue.


def build_queue(places: int = 4, per_model: int = 3, queue: int = 4) -> AdmissionQueue:
    return AdmissionQueue(places, per_model, queue, Metrics())


async def waiting(admission: AdmissionQueue, model: str, caller: str = "") -> asyncio.Task[float]:
    task = asyncio.create_task(admission.acquire(model, TIMEOUT_S, caller))
    await settled()
    return task


async def assert_admitted_at_once(admission: AdmissionQueue, model: str) -> None:
    """Assert that a request is admitted although no slot is released."""
    task = await waiting(admission, model)
    assert task.done()
    await task


async def test_one_model_cannot_take_every_place() -> None:
    admission = build_queue()
    assert [admission.try_acquire("a") for _ in range(4)] == [True, True, True, False]
    assert admission.try_acquire("b")
    assert not admission.try_acquire("c")
    admission.release("b")
    assert admission.try_acquire("c")


@pytest.mark.parametrize(
    ("coming", "order"),
    [
        (["a", "a", "a", "b", "c"], ["a", "b", "c", "a", "a"]),
        (
            ["a:noisy", "a:noisy", "a:noisy", "a:other"],
            ["a:noisy", "a:other", "a:noisy", "a:noisy"],
        ),
    ],
    ids=["models", "callers of one model"],
)
async def test_models_and_callers_are_admitted_in_turn(coming: list[str], order: list[str]) -> None:
    admission = build_queue(places=1, per_model=1, queue=8)
    assert admission.try_acquire("a")
    admitted: list[str] = []

    async def served(request: str) -> None:
        model, _, caller = request.partition(":")
        await admission.acquire(model, TIMEOUT_S, caller)
        admitted.append(request)
        await settled()
        admission.release(model)

    tasks = []
    for request in coming:
        tasks.append(asyncio.create_task(served(request)))
        await settled()
    admission.release("a")
    await asyncio.gather(*tasks)
    assert admitted == order
    assert (admission.running, admission.waiting) == (0, 0)


async def test_full_queue_is_refused_with_429() -> None:
    admission = build_queue(places=1, per_model=1, queue=4)
    assert admission.try_acquire("a")
    tasks = [await waiting(admission, "a") for _ in range(2)]
    with pytest.raises(AdmissionQueueFull, match="'a'") as refused:
        await admission.acquire("a", TIMEOUT_S)
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (admission.running, admission.waiting) == (1, 0)


@pytest.mark.parametrize("others", [("b", ""), ("a", "another")], ids=["model", "caller"])
async def test_queue_keeps_room_for_other_models_and_callers(others: tuple[str, str]) -> None:
    admission = build_queue(places=1, per_model=1, queue=8)
    assert admission.try_acquire("a")
    crowd = [await waiting(admission, "a", "noisy") for _ in range(20)]
    late = [await waiting(admission, *others) for _ in range(20)]
    assert sum(not task.done() for task in crowd) == 4
    assert sum(not task.done() for task in late) == 2
    assert all(
        isinstance(task.exception(), AdmissionQueueFull) for task in crowd + late if task.done()
    )
    for task in crowd + late:
        task.cancel()
    await asyncio.gather(*crowd, *late, return_exceptions=True)


@pytest.mark.parametrize("queue", [1, 4], ids=["full queue", "queue with room"])
async def test_requests_that_wait_for_one_model_do_not_delay_or_crowd_another(queue: int) -> None:
    admission = build_queue(places=4, per_model=2, queue=queue)
    assert not admission.is_busy
    for _ in range(2):
        assert admission.try_acquire("a")
    stuck = await waiting(admission, "a")
    assert not stuck.done()
    assert admission.is_busy
    assert admission.is_crowded("a")
    assert not admission.is_crowded("b")
    await assert_admitted_at_once(admission, "b")
    admission.release("a")
    await asyncio.wait_for(stuck, TIMEOUT_S)
    assert (admission.running, admission.waiting) == (3, 0)
    assert admission.try_acquire("b")
    assert admission.is_crowded("b")
    late = await waiting(admission, "c")  # no place is left for its first request
    assert admission.is_crowded("c")
    late.cancel()


async def test_deadline_in_the_queue_raises_and_leaves_nothing() -> None:
    admission = build_queue(places=1, per_model=1)
    assert admission.try_acquire("a")
    with pytest.raises(DeadlinePassed):
        await admission.acquire("a", 0.05)
    assert (admission.running, admission.waiting) == (1, 0)
    admission.release("a")
    assert admission.try_acquire("a")


CALLS = st.tuples(
    st.sampled_from("abc"), st.sampled_from("xy"), st.sampled_from(["enter", "leave", "cancel"])
)


@given(st.lists(CALLS))
async def test_places_are_never_lost_or_given_twice(steps: list[tuple[str, str, str]]) -> None:
    admission = build_queue(places=3, per_model=2, queue=6)
    held: list[str] = []
    tasks: list[tuple[str, asyncio.Task[float]]] = []
    for model, caller, step in steps:
        if step == "enter":
            tasks.append((model, asyncio.create_task(admission.acquire(model, TIMEOUT_S, caller))))
        elif step == "leave" and held:
            admission.release(held.pop())
        elif step == "cancel" and tasks:
            tasks.pop()[1].cancel()
        await settled()
        for name, task in [pair for pair in tasks if pair[1].done()]:
            tasks.remove((name, task))
            if task.exception() is None:
                held.append(name)
        assert admission.running == len(held) <= 3
        assert admission.waiting == len(tasks) <= 6
        assert all(held.count(name) <= 2 for name in "abc")
        # Whoever waits could not be let in: there is no place, or none of that model.
        assert len(held) == 3 or all(held.count(name) == 2 for name, _ in tasks)
    for _, task in tasks:
        task.cancel()
    await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
    for name in held:
        admission.release(name)
    assert (admission.running, admission.waiting) == (0, 0)
