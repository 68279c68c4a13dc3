"""The budget of memory that requests hold together."""

from __future__ import annotations

import psutil
import pytest

from gateway.errors import TooLarge
from gateway.memory import (
    MAX_FREE_HEAP_BYTES,
    SMALL_REQUEST_BYTES,
    MemoryBudget,
    MemoryBudgetExceeded,
    MemoryCharge,
    memory_limit_bytes,
    return_free_memory,
)
from gateway.telemetry.metrics import Metrics

MIB = 1 << 20


def budget(mib: int = 64) -> MemoryBudget:
    return MemoryBudget(mib * MIB, Metrics().shed)


def test_released_memory_can_be_charged_again_and_a_refused_charge_takes_none() -> None:
    memory = budget()
    for _ in range(3):
        charge = MemoryCharge(memory)
        charge.add(20 * MIB)
        charge.add(20 * MIB)
        refused = MemoryCharge(memory)
        with pytest.raises(MemoryBudgetExceeded) as raised:
            refused.add(20 * MIB)
        assert (raised.value.status_code, raised.value.headers) == (429, {"Retry-After": "1"})
        assert memory.used_bytes == 40 * MIB
        refused.release()
        charge.release()
        assert memory.used_bytes == 0


def test_memory_that_nobody_is_charged_for_leaves_less_to_large_requests() -> None:
    memory = budget(256)
    memory.update_excess(100 * MIB)
    charge = MemoryCharge(memory)
    charge.add(50 * MIB)
    memory.update_excess((100 + 50 + 32 + 80) * MIB)
    assert not memory.has_room(100 * MIB)
    with pytest.raises(MemoryBudgetExceeded):
        charge.add(100 * MIB)
    MemoryCharge(memory).add(MIB)  # small requests have as much as before
    memory.update_excess((100 + 50 + 32) * MIB)
    charge.add(100 * MIB)
    memory.update_excess(10_000 * MIB)
    assert memory.excess_bytes == 96 * MIB  # half of what large requests may use is theirs


def test_resized_charge_holds_what_it_holds_now() -> None:
    memory = budget()
    charge = MemoryCharge(memory)
    for mib in (1, 40, 2):
        charge.resize(mib * MIB)
        assert memory.used_bytes == mib * MIB
    with pytest.raises(TooLarge):
        charge.resize(50 * MIB)
    assert memory.used_bytes == 2 * MIB


def test_memory_is_counted_by_the_kind_of_its_charge() -> None:
    """Two parts of a request that wait for their model at once are one."""
    memory = budget()
    body, message = MemoryCharge(memory), MemoryCharge(memory, "message")
    body.add(2 * MIB)
    message.add(3 * MIB)
    counts = [memory.bytes_by_kind.copy()]
    first, second = message.hold(), message.hold()
    with first:
        second.__enter__()
        counts.append(memory.bytes_by_kind.copy())
    second.__exit__(None, None, None)
    body.change_kind("response")
    body.resize(MIB)
    counts.append(memory.bytes_by_kind.copy())
    assert [{kind: size // MIB for kind, size in each.items() if size} for each in counts] == [
        {"body": 2, "message": 3},
        {"body": 2, "held": 3},
        {"response": 1, "message": 3},
    ]
    body.release()
    message.release()
    assert set(memory.bytes_by_kind.values()) == {memory.used_bytes} == {0}


def test_budget_has_shrunk_once_after_each_peak() -> None:
    memory = budget()
    for _ in range(2):
        charge = MemoryCharge(memory)
        charge.add(20 * MIB)
        assert not memory.has_shrunk(MAX_FREE_HEAP_BYTES)
        charge.release()
        assert memory.has_shrunk(MAX_FREE_HEAP_BYTES)
        assert not memory.has_shrunk(MAX_FREE_HEAP_BYTES)


def test_free_memory_between_buffers_in_use_returns_to_the_system() -> None:
    buffers = [bytes(100_000) for _ in range(1000)]
    used = [buffers[number] for number in range(0, 1000, 50)]
    process = psutil.Process()
    full = process.memory_info().rss
    buffers.clear()
    return_free_memory()
    assert process.memory_info().rss < full - 50 * MIB
    assert len(used) == 20


def test_large_requests_leave_room_for_small_ones() -> None:
    memory = budget()
    large, late, small = MemoryCharge(memory), MemoryCharge(memory), MemoryCharge(memory)
    large.add(48 * MIB)
    with pytest.raises(MemoryBudgetExceeded):
        late.add(2 * MIB)
    small.add(SMALL_REQUEST_BYTES)
    with pytest.raises(MemoryBudgetExceeded):
        small.add(1)  # it is a large one now


def test_request_above_the_budget_is_too_large() -> None:
    with pytest.raises(TooLarge, match="GATEWAY_MAX_BYTES_IN_FLIGHT"):
        MemoryCharge(budget()).add(49 * MIB)


def test_refusals_for_memory_are_counted() -> None:
    metrics = Metrics()
    charge = MemoryCharge(MemoryBudget(4 * MIB, metrics.shed))
    charge.add(2 * MIB)
    with pytest.raises(MemoryBudgetExceeded):
        MemoryCharge(charge._budget).add(2 * MIB)
    samples = {
        sample.labels["reason"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "gateway_requests_shed_total"
    }
    assert samples["memory"] == 1


def test_memory_limit_is_at_most_that_of_the_machine() -> None:
    assert 64 * MIB < memory_limit_bytes() < 1 << 50
