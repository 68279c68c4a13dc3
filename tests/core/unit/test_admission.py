"""Places for inferences: bounded, in turn, and given back whatever happens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.callers import Caller, Priority
from gateway.capacity.admission import (
    AdmissionQueue,
    AdmissionQueueFull,
    DeadlineTooNear,
    DisplacedFromQueue,
    Slot,
)
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
    admission = build_queue(places=1, per_model=1, queue=8)
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
    for _ in range(2):
        assert admission.try_acquire("a")
    stuck = await waiting(admission, "a")
    assert not stuck.done()
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


# Rows, and times of answers.


async def test_rows_of_a_request_are_counted_if_the_gateway_chose_the_limit() -> None:
    admission = build_queue(places=8, per_model=8, queue=8)
    fixed = await acquire(admission, "fixed")
    fixed.weigh(8)
    assert admission.try_acquire("fixed")
    admission.set_limit("a", 4)
    large = await acquire(admission, "a")
    large.weigh(100)
    waiters = [await waiting(admission, "a") for _ in range(4)]
    assert admission.waiting == 4
    assert admission.running == 3
    large.release()
    await settled()
    assert admission.waiting == 0
    for task in waiters:
        (await task).release()
    assert admission.count_requests("a") == 0
    assert not admission.is_crowded("a")


async def admit_beside(
    times: list[float], timeout_s: float, caller: str = ""
) -> asyncio.Task[Slot]:
    """Return a request that waited with this timeout for a model that answered a caller in these times."""
    admission = build_queue(places=1, per_model=1, queue=8)
    for seconds in times:
        admission.learn_answer_time("a", caller, seconds)
    assert admission.try_acquire("a")
    task = asyncio.create_task(acquire(admission, "a", timeout_s=timeout_s))
    await settled()
    later = await waiting(admission, "a")
    admission.release("a")
    await settled()
    assert later.done() is isinstance(task.exception(), DeadlineTooNear)
    later.cancel()
    await asyncio.gather(later, return_exceptions=True)
    return task


async def test_request_that_cannot_be_answered_in_time_gives_its_turn_to_the_next() -> None:
    refused = await admit_beside([TIMEOUT_S] * 20, TIMEOUT_S / 2)
    with pytest.raises(DeadlineTooNear, match="which takes 59 s or longer at present") as error:
        await refused
    assert (error.value.status, error.value.code) == (504, "DEADLINE_PASSED")


@pytest.mark.parametrize(
    "times", [[], [TIMEOUT_S], [TIMEOUT_S, 0.1] * 10], ids=["unknown", "one", "different"]
)
async def test_request_is_not_refused_for_times_that_are_not_certain(times: list[float]) -> None:
    (await (await admit_beside(times, TIMEOUT_S / 2))).release()


async def test_request_is_not_refused_for_the_times_of_other_callers() -> None:
    (await (await admit_beside([TIMEOUT_S] * 20, TIMEOUT_S / 2, caller="slow"))).release()


async def test_only_requests_above_the_background_are_foreground_uses() -> None:
    admission = build_queue()
    assert not admission.is_in_foreground_use("m")
    for model, priority in (("m", Priority.background), ("other", None)):
        (await acquire(admission, model, priority=priority)).release()
        assert not admission.is_in_foreground_use("m")
    (await acquire(admission, "m")).release()
    assert admission.is_in_foreground_use("m")
    assert admission.foreground_uses.keys() == {"m"}


async def test_slot_is_kept_until_triton_has_ended_a_request_that_timed_out() -> None:
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


# Priorities, and turns by seconds of inference.


def has_room(model: str) -> bool:
    return True


def end(queue: FairQueue, has_room: Callable[[str], bool], held_s: float = 1.0) -> Waiter:
    """Admit the next waiter whose model has room, whose request takes so long."""
    waiter = queue.take_next(has_room)
    assert waiter is not None
    queue.end(waiter, held_s)
    return waiter


def take(queue: FairQueue) -> Waiter:
    return end(queue, has_room)


async def test_each_priority_that_waits_gets_its_share() -> None:
    queue = FairQueue()
    for priority in Priority:
        for _ in range(130):
            queue.add("a", "caller", priority)
    order = [take(queue).priority for _ in range(130)]
    shares = Counter(order)
    assert order[0] is Priority.interactive
    assert [shares[priority] for priority in sorted(Priority)] == [
        pytest.approx(share, abs=2) for share in (10, 40, 80)
    ]


async def test_request_of_a_high_priority_comes_before_all_that_wait_with_a_lower_one() -> None:
    queue = FairQueue()
    for _ in range(20):
        queue.add("a", "batch", Priority.background)
        queue.add("a", "team", Priority.normal)
    for _ in range(5):
        take(queue)
        queue.add("a", "user", Priority.interactive)
        assert take(queue).priority is Priority.interactive


async def test_caller_with_long_requests_gets_fewer_turns() -> None:
    queue = FairQueue()
    for _ in range(200):
        queue.add("a", "long", Priority.normal)
        queue.add("a", "short", Priority.normal)
    seconds = Counter[str]()
    for _ in range(110):
        waiter = queue.take_next(has_room)
        assert waiter is not None
        held_s = 1.0 if waiter.line.caller == "long" else 0.1
        queue.end(waiter, held_s)
        seconds[waiter.line.caller] += round(10 * held_s)
    assert seconds["long"] == pytest.approx(seconds["short"], abs=20)


async def test_few_requests_do_not_wait_for_the_many_of_another_caller() -> None:
    queue = FairQueue()
    for _ in range(40):
        queue.add("a", "many", Priority.normal)
    for _ in range(3):
        queue.add("a", "few", Priority.normal)
    ended = [index for index in range(1, 44) if take(queue).line.caller == "few"]
    assert sum(ended) / 3 <= 40 / 10
    assert max(ended) <= 40 / 5


def only_free(model: str) -> bool:
    return model == "free"


async def test_waiting_for_a_full_model_saves_up_no_turns() -> None:
    """One waits for a full model while others are served, and then asks for the other model as well."""
    queue = FairQueue()
    queue.add("full", "batch", Priority.background)
    queue.add("full", "patient", Priority.interactive)
    for _ in range(500):
        queue.add("free", "user", Priority.interactive)
    for _ in range(200):
        end(queue, only_free)
    for _ in range(50):
        queue.add("free", "batch", Priority.background)
        queue.add("free", "patient", Priority.interactive)
    waiters = [end(queue, only_free) for _ in range(45)]
    turns = Counter(each.line.caller for each in waiters)
    assert turns["batch"] == 5
    assert turns["user"] == pytest.approx(turns["patient"], abs=2)


async def test_clock_does_not_run_backwards() -> None:
    queue = FairQueue()
    queue.add("full", "batch", Priority.background)
    for _ in range(500):
        queue.add("free", "user", Priority.interactive)
    for _ in range(200):
        end(queue, only_free)
    assert end(queue, lambda model: model == "full").line.caller == "batch"
    for _ in range(50):
        queue.add("free", "team", Priority.normal)
    order = [end(queue, only_free).line.caller for _ in range(12)]
    assert Counter(order) == {"user": 8, "team": 4}


async def test_refund_of_short_requests_saves_up_no_turns() -> None:
    """Requests that take far less than estimated end after others have been served."""
    queue = FairQueue()
    for _ in range(200):
        queue.add("a", "steady", Priority.normal)
    for _ in range(10):
        queue.add("a", "short", Priority.normal)
    running: list[Waiter] = []
    while len(running) < 10:
        waiter = queue.take_next(has_room)
        assert waiter is not None
        if waiter.line.caller == "short":
            running.append(waiter)
        else:
            queue.end(waiter, 0.05)
    for _ in range(50):
        end(queue, has_room, 0.05)
    for _ in range(20):
        queue.add("a", "short", Priority.normal)
    for waiter in running:
        queue.end(waiter, 0.0)
    order = [end(queue, has_room, 0.05).line.caller for _ in range(10)]
    assert order.count("short") <= 6


async def test_full_model_delays_no_other_model_of_the_priority() -> None:
    queue = FairQueue()
    queue.add("full", "caller", Priority.interactive)
    queue.add("free", "caller", Priority.interactive)
    waiter = queue.take_next(lambda model: model == "free")
    assert waiter is not None
    assert waiter.model == "free"
    assert queue.take_next(lambda model: model == "free") is None
    assert dict(queue.models) == {"full": 1}


async def test_caller_with_many_names_of_models_leaves_room_for_others() -> None:
    admission = build_queue(places=1, per_model=1, queue=12)
    assert admission.try_acquire("a")
    crowd = [await waiting(admission, f"invented-{number}", "noisy") for number in range(20)]
    assert sum(not task.done() for task in crowd) == 8
    other = await waiting(admission, "a", "other")
    assert not other.done()
    for task in [*crowd, other]:
        task.cancel()
    await asyncio.gather(*crowd, other, return_exceptions=True)


async def test_full_queue_makes_room_for_a_higher_priority() -> None:
    admission = build_queue(places=1, per_model=1, queue=4)
    assert admission.try_acquire("a")
    batch = [
        await waiting(admission, "a", f"batch-{number}", Priority.background) for number in range(4)
    ]
    urgent = await waiting(admission, "a", "user", Priority.interactive)
    assert [task.done() for task in batch] == [False, False, False, True]
    with pytest.raises(DisplacedFromQueue, match="background"):
        await batch[3]
    admission.release("a")
    (await urgent).release()
    for task in batch[:3]:
        (await task).release()
    assert (admission.running, admission.waiting) == (0, 0)


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
