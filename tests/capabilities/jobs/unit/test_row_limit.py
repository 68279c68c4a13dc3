"""How many rows of a batch run at the same time."""

from __future__ import annotations

import pytest

from gateway.capabilities.jobs.batches import choose_row_limit
from gateway.tensors.signature import Signature

SINGLE = Signature("single", "1", {}, {})
TWO = Signature("two", "1", {}, {}, instances=2)
BATCHING = Signature("batching", "1", {}, {}, 8, instances=2, has_dynamic_batching=True)


@pytest.mark.parametrize(
    ("stages", "replicas", "alone", "beside_users"),
    [
        ([SINGLE], 1, 2, 2),
        ([SINGLE], 3, 6, 2),
        ([TWO], 1, 4, 1),
        ([BATCHING], 1, 32, 8),
        ([SINGLE, TWO, BATCHING], 1, 32, 1),
    ],
)
def test_rows_keep_a_model_busy_and_leave_an_instance_to_others(
    stages: list[Signature], replicas: int, alone: int, beside_users: int
) -> None:
    assert choose_row_limit(stages, replicas, has_users=False) == alone
    assert choose_row_limit(stages, replicas, has_users=True) == beside_users
