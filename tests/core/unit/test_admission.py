"""Places for inferences: bounded, in turn, and given back whatever happens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.callers import Caller, Priority
from gateway.capacity.admission import AdmissionQueue, AdmissionQueueFull, Slot
from gateway.capacity.fair_queue import FairQueue, Waiter
from gateway.errors import DeadlinePassed
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_info import RequestInfo
from tests.support.wait import TIMEOUT_S


def build_queue(places: int = 4, per_model: int = 3, queue: int = 4) -> AdmissionQueue:
    return AdmissionQueue(places, per_model, queue, Metrics())


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def info_of(caller: str = "", priority: Priority | None = None) -> RequestInfo:
    info = RequestInfo("0" * 32)
    info.caller = Caller(caller, priority=priority)
    info.caller_name = caller
    return info


async def acquire(
    admission: AdmissionQueue,
    model: str,
    caller: str = "",
    priority: Priority | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Slot:
    slot = Slot(admission, model, info_of(caller, priority))
    await slot.acquire(timeout_s)
    return slot


async def waiting(
    admission: AdmissionQueue, model: str, caller: str = "", priority: Priority | None = None
) -> asyncio.Task[Slot]:
    task = asyncio.create_task(acquire(admission, model, caller, priority))
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
    admission = build_queue(places=1, per_model=1, queue=10)
    assert admission.try_acquire("a")
    admitted: list[str] = []

    async def served(request: str) -> None:
        model, _, caller = request.partition(":")
        with await acquire(admission, model, caller):
            admitted.append(request)
            await settled()

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
        await acquire(admission, "a")
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (admission.running, admission.waiting) == (1, 0)


async def test_queue_keeps_room_for_other_callers() -> None:
    admission = build_queue(places=1, per_model=1, queue=8)
    assert admission.try_acquire("a")
    crowd = [await waiting(admission, f"a{number}", "noisy") for number in range(20)]
    late = [await waiting(admission, "a", "another") for _ in range(20)]
    assert sum(not task.done() for task in crowd) == 4
    assert sum(not task.done() for task in late) == 2
    for task in crowd + late:
        if task.done():
            assert isinstance(task.exception(), AdmissionQueueFull)
        task.cancel()
    await asyncio.gather(*crowd, *late, return_exceptions=True)


@pytest.mark.parametrize("queue", [1, 4], ids=["full queue", "queue with room"])
async def test_requests_that_wait_for_one_model_delay_no_other(queue: int) -> None:
    admission = build_queue(places=4, per_model=2, queue=queue)
    for _ in range(2):
        assert admission.try_acquire("a")
    stuck = await waiting(admission, "a")
    assert not stuck.done()
    await assert_admitted_at_once(admission, "b")
    admission.release("a")
    await asyncio.wait_for(stuck, TIMEOUT_S)
    assert (admission.running, admission.waiting) == (3, 0)
    assert admission.try_acquire("b")
    late = await waiting(admission, "c")  # no place is left for its first request
    late.cancel()


async def test_deadline_in_the_queue_raises_and_leaves_nothing() -> None:
    admission = build_queue(places=1, per_model=1)
    assert admission.try_acquire("a")
    with pytest.raises(DeadlinePassed):
        await acquire(admission, "a", timeout_s=0.05)
    assert (admission.running, admission.waiting) == (1, 0)
    admission.release("a")
    assert admission.try_acquire("a")


CALLS = st.tuples(
    st.sampled_from("abc"), st.sampled_from("xy"), st.sampled_from(["enter", "leave", "cancel"])
)


@given(st.lists(CALLS))
async def test_places_are_never_lost_or_given_twice(steps: list[tuple[str, str, str]]) -> None:
    admission = build_queue(places=3, per_model=2, queue=6)
    held: list[tuple[str, Slot]] = []
    tasks: list[tuple[str, asyncio.Task[Slot]]] = []
    for model, caller, step in steps:
        if step == "enter":
            tasks.append((model, asyncio.create_task(acquire(admission, model, caller))))
        elif step == "leave" and held:
            held.pop()[1].release()
        elif step == "cancel" and tasks:
            tasks.pop()[1].cancel()
        await settled()
        for name, task in [pair for pair in tasks if pair[1].done()]:
            tasks.remove((name, task))
            if task.exception() is None:
                held.append((name, task.result()))
        running = [name for name, _ in held]
        assert admission.running == len(held) <= 3
        assert admission.waiting == len(tasks) <= 6
        assert all(running.count(name) <= 2 for name in "abc")
        # Whoever waits could not be let in: there is no place, or none of that model.
        assert len(held) == 3 or all(running.count(name) == 2 for name, _ in tasks)
    for _, task in tasks:
        task.cancel()
    await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
    for _, slot in held:
        slot.release()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_only_requests_above_the_background_are_foreground_uses() -> None:
    admission = build_queue()
    assert not admission.is_in_foreground_use("m")
    for model, priority in (("m", Priority.background), ("other", None)):
        (await acquire(admission, model, priority=priority)).release()
        assert not admission.is_in_foreground_use("m")
    (await acquire(admission, "m")).release()
    assert admission.is_in_foreground_use("m")
    assert admission.foreground_uses.keys() == {"m"}


async def test_slot_is_kept_until_triton_has_ended_the_request() -> None:
    admission = build_queue(places=1, per_model=1)
    error = DeadlinePassed(1)
    error.work_ended = asyncio.get_running_loop().create_future()
    with pytest.raises(DeadlinePassed), await acquire(admission, "a"):
        raise error
    later = await waiting(admission, "a")
    assert not later.done()
    error.work_ended.set_result(None)
    (await later).release()
    assert admission.running == 0


# Priorities and turns.


def enqueue(
    queue: FairQueue,
    model: str,
    caller: str,
    priority: Priority = Priority.normal,
    *,
    count: int = 1,
) -> None:
    for _ in range(count):
        queue.add(Waiter(model, caller, priority))


def has_room(model: str) -> bool:
    return True


def only_free(model: str) -> bool:
    return model == "free"


def take(queue: FairQueue, has_room: Callable[[str], bool] = has_room) -> Waiter:
    waiter = queue.take_next(has_room)
    assert waiter is not None
    return waiter


async def test_each_priority_that_waits_gets_its_share() -> None:
    queue = FairQueue()
    for priority in Priority:
        enqueue(queue, "a", "caller", priority, count=130)
    order = [take(queue).priority for _ in range(130)]
    assert order[0] is Priority.interactive
    shares = Counter(order)
    assert [shares[priority] for priority in sorted(Priority)] == [10, 40, 80]


async def test_higher_priority_comes_before_all_that_wait() -> None:
    queue = FairQueue()
    enqueue(queue, "a", "batch", Priority.background, count=20)
    enqueue(queue, "a", "team", count=20)
    for _ in range(5):
        take(queue)
        enqueue(queue, "a", "user", Priority.interactive)
        assert take(queue).priority is Priority.interactive


async def test_few_requests_do_not_wait_for_the_many_of_another_caller() -> None:
    queue = FairQueue()
    enqueue(queue, "a", "many", count=40)
    enqueue(queue, "a", "few", count=3)
    assert [take(queue).caller for _ in range(7)] == ["many", "few"] * 3 + ["many"]


async def test_waiting_for_a_full_model_saves_up_no_turns() -> None:
    """One waits for a full model while others are served, and then asks for the other model as well."""
    queue = FairQueue()
    enqueue(queue, "full", "batch", Priority.background)
    enqueue(queue, "full", "patient", Priority.interactive)
    enqueue(queue, "free", "user", Priority.interactive, count=500)
    for _ in range(200):
        take(queue, only_free)
    enqueue(queue, "free", "batch", Priority.background, count=50)
    enqueue(queue, "free", "patient", Priority.interactive, count=50)
    turns = Counter(take(queue, only_free).caller for _ in range(45))
    assert turns == {"batch": 5, "user": 20, "patient": 20}


async def test_clock_does_not_run_backwards() -> None:
    queue = FairQueue()
    enqueue(queue, "full", "batch", Priority.background)
    enqueue(queue, "free", "user", Priority.interactive, count=500)
    for _ in range(200):
        take(queue, only_free)
    assert take(queue, lambda model: model == "full").caller == "batch"
    enqueue(queue, "free", "team", count=50)
    turns = Counter(take(queue, only_free).caller for _ in range(12))
    assert turns == {"user": 8, "team": 4}


async def test_full_model_delays_no_other_model_of_the_priority() -> None:
    queue = FairQueue()
    enqueue(queue, "full", "caller")
    enqueue(queue, "free", "caller")
    assert take(queue, only_free).model == "free"
    assert queue.take_next(only_free) is None
    assert dict(queue.models) == {"full": 1}


async def test_background_requests_take_no_places_of_a_higher_priority() -> None:
    admission = build_queue(places=1, per_model=1, queue=4)
    assert admission.try_acquire("a")
    batch = [
        await waiting(admission, "a", f"batch-{number}", Priority.background) for number in range(5)
    ]
    urgent = await waiting(admission, "a", "user", Priority.interactive)
    assert [task.done() for task in batch] == [False] * 4 + [True]
    with pytest.raises(AdmissionQueueFull, match="4 are waiting"):
        await batch[4]
    admission.release("a")
    (await urgent).release()
    for task in batch[:4]:
        (await task).release()
    assert (admission.running, admission.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("waiters", "per_model", "retry_after"), [(2, 3, "1"), (90, 2, "5"), (700, 1, "60")]
)
async def test_clients_return_later_the_more_requests_wait(
    waiters: int, per_model: int, retry_after: str
) -> None:
    admission = build_queue(places=8, per_model=per_model, queue=2 * waiters)
    for _ in range(per_model):
        assert admission.try_acquire("a")
    tasks = [await waiting(admission, "a") for _ in range(waiters)]
    with pytest.raises(AdmissionQueueFull) as refused:
        await acquire(admission, "a")
    assert refused.value.headers == {"Retry-After": retry_after}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(
    ("of_caller", "of_model", "wanted", "expected"),
    [
        (None, None, None, "normal"),
        (None, "background", None, "background"),
        ("interactive", "background", None, "interactive"),
        ("interactive", None, "background", "background"),
        ("normal", None, "interactive", "normal"),
    ],
)
async def test_priority_of_a_request(
    of_caller: str | None, of_model: str | None, wanted: str | None, expected: str
) -> None:
    def parse(name: str | None) -> Priority | None:
        return None if name is None else Priority[name]

    admission = AdmissionQueue(1, 1, 1, Metrics(), lambda model: parse(of_model))
    info = info_of("caller", parse(of_caller))
    info.wanted_priority = parse(wanted)
    assert admission.find_priority("a", info) is Priority[expected]
