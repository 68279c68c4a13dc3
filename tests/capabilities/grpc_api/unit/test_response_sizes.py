"""How large a response is expected to be."""

from __future__ import annotations

import pytest

from gateway.capabilities.grpc_api.receive import MAX_RESPONSE_SIZES, ResponseSizes

MIB = 1 << 20
CALLER = "a"


@pytest.fixture
def sizes() -> ResponseSizes:
    sizes = ResponseSizes()
    sizes.add("echo", CALLER, MIB, 4 * MIB)
    return sizes


def test_expected_size_follows_the_request_up_to_the_largest_response(sizes: ResponseSizes) -> None:
    assert sizes.expect("echo", CALLER, MIB // 2) == 2 * MIB
    assert sizes.expect("echo", CALLER, 2 * MIB) == 4 * MIB
    assert sizes.expect("other", CALLER, MIB) == 0


def test_large_response_to_one_caller_is_not_expected_by_others(sizes: ResponseSizes) -> None:
    sizes.add("echo", "b", 1, MIB)
    assert sizes.expect("echo", "b", MIB) == MIB
    assert sizes.expect("echo", "c", MIB) == 0
    assert sizes.expect("echo", CALLER, 1) == 4


def test_large_response_is_forgotten_after_many_small_ones(sizes: ResponseSizes) -> None:
    for _ in range(100):
        sizes.add("echo", CALLER, MIB, 1)
    assert sizes.expect("echo", CALLER, MIB) < MIB // 100


def test_number_of_sizes_is_limited(sizes: ResponseSizes) -> None:
    for number in range(MAX_RESPONSE_SIZES):
        sizes.add(f"model-{number}", CALLER, MIB, MIB)
    assert sizes.expect("echo", CALLER, MIB) == 0
    assert sizes.expect("model-0", CALLER, MIB) == MIB
