"""Usage that is not written yet, sums by groups, and the settings of the usage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.capabilities.identity.capability import attach_identity
from gateway.capabilities.identity.usage import MAX_ANSWER_ROWS, UsageLedger, UsageTable, find_today
from gateway.capabilities.identity.usage_routes import UsageQuery, render_csv
from gateway.config.settings import Settings
from gateway.errors import MalformedRequest, StateUnavailable
from gateway.messages import CommandError
from gateway.routes.passthrough.body import find_batch_size
from gateway.telemetry.metrics import CallerUsage
from tests.support.state_contract import opened

USAGE = CallerUsage(requests=2, rows=3, inference_s=0.25, bytes_in=5, bytes_out=7)
COUNTS = {"requests": 2, "rows": 3, "inference_us": 250_000, "bytes_in": 5, "bytes_out": 7}
DAY = find_today().isoformat()


async def test_what_is_not_written_is_read_and_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    async with opened(f"file://{folder}/state.json") as (store,):
        pending = [("a", "core", USAGE)]

        def flush() -> None:
            while pending:
                ledger.add(*pending.pop())

        ledger = UsageLedger(store, flush)
        twice = {name: 2 * value for name, value in COUNTS.items()}
        async with ledger.run():
            day = find_today().isoformat()
            assert await ledger.read(day) == ({}, {"a": {"core": COUNTS}})
            assert await store.read_counts(day) == {}
            folder.rename(tmp_path / "away")
            with pytest.raises(StateUnavailable):
                await ledger._write()
            pending.append(("a", "core", USAGE))
            (tmp_path / "away").rename(folder)
            assert await ledger.read(day) == ({}, {"a": {"core": twice}})
        assert await store.read_counts(day) == {"a": {"core": twice}}
        # They are summed by `UsageTable`, in a thread: those of all callers can be many.
        pending.append(("a", "core", USAGE))
        assert await ledger.read(day) == ({"a": {"core": twice}}, {"a": {"core": COUNTS}})


def test_usage_is_summed_by_day_and_groups() -> None:
    def row(count: int, **names: str) -> dict[str, Any]:
        sums = {"requests": count, "rows": 0, "inference_seconds": 0.0, "bytes_in": 0}
        return {**names, **sums, "bytes_out": 0}

    first = {"a": {"x": {"requests": 1}, "y": {"requests": 2}}, "b": {"x": {"requests": 4}}}
    second = {"b": {"x": {"requests": 8}}}
    by_caller = UsageTable(("caller",))
    by_model = UsageTable(("model",), only_caller="a")
    for table in (by_caller, by_model):
        table.add("2026-01-01", first)
        table.add("2026-01-02", second, {})
    assert by_caller.list_days() == [
        row(3, day="2026-01-01", caller="a"),
        row(4, day="2026-01-01", caller="b"),
        row(8, day="2026-01-02", caller="b"),
    ]
    assert by_caller.list_totals() == [row(3, caller="a"), row(12, caller="b")]
    assert by_model.list_totals() == [row(1, model="x"), row(2, model="y")]


def test_rows_of_an_answer_are_bounded() -> None:
    table = UsageTable(("model",))
    table.add(DAY, {"a": {str(number): COUNTS for number in range(MAX_ANSWER_ROWS)}})
    with pytest.raises(MalformedRequest, match="more than 50000 rows"):
        table.add(DAY, {"a": {"another": COUNTS}})


def test_names_in_csv_are_no_formulas() -> None:
    table = UsageTable(("model",))
    table.add(DAY, {"a": {"=1+1": COUNTS, "m=1": COUNTS}})
    _, *lines = render_csv(UsageQuery(by="model"), table).splitlines()
    assert [line.split(",")[1] for line in lines] == ["'=1+1", "m=1"]


# The JSON of an inference, and the first dimension of its inputs.
SHAPES = {
    b'{"shape": [1], "inputs": [{"parameters": {"shape": 1}, "name": "shape", "shape": [4, 3]}]}': 4,
    b'{"inputs": [{"shape": [8, 3]}, {"shape": [2]}]}': 8,
    b'{"inputs":[{"shape" :\n[ 16 ]}]}': 16,
    b'{"inputs":[{"shape":[]}]}': 1,
    b'{"inputs":[{"shape":[-1]}]}': 1,
    b'{"inputs":[{"shape":[': 1,
    b'{"text_input":"shape"}': 1,
    b"": 1,
}


@pytest.mark.parametrize(("body", "size"), SHAPES.items())
def test_first_dimension_is_found_in_the_json(body: bytes, size: int) -> None:
    assert find_batch_size(body, None) == size
    assert find_batch_size(body + b'"shape":[99]', len(body)) == size


def test_usage_needs_keys_and_the_counts_of_callers(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="GATEWAY_USAGE requires GATEWAY_KEYS_FILE"):
        attach_identity(Settings(usage=True))
    settings = Settings(usage=True, keys_file=tmp_path / "keys.yaml", metrics_callers=False)
    with pytest.raises(CommandError, match="requires GATEWAY_METRICS_CALLERS, which is false"):
        attach_identity(settings)
