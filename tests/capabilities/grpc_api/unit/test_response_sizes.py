"""How large a response is expected to be."""

from __future__ import annotations

import pytest

from gateway.capabilities.grpc_api.receive import MAX_MODELS_WITH_SIZES, ResponseSizes

MIB = 1 << 20


@pytest.fixture
def sizes() -> ResponseSizes:
    sizes = ResponseSizes()
    sizes.add("echo", MIB, 4 * MIB)
    return sizes


def test_expected_size_follows_the_request_up_to_the_largest_response(sizes: ResponseSizes) -> None:
    assert sizes.expect("echo", MIB // 2) == 2 * MIB
    assert sizes.expect("echo", 2 * MIB) == 4 * MIB
    assert sizes.expect("other", MIB) == 0


def test_large_response_is_forgotten_after_many_small_ones(sizes: ResponseSizes) -> None:
    for _ in range(100):
        sizes.add("echo", MIB, 1)
    assert sizes.expect("echo", MIB) < MIB // 100


def test_number_of_models_is_limited(sizes: ResponseSizes) -> None:
    for number in range(MAX_MODELS_WITH_SIZES):
        sizes.add(f"model-{number}", MIB, MIB)
    assert sizes.expect("echo", MIB) == 0
    assert sizes.expect("model-0", MIB) == MIB
