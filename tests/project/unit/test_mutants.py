"""The table of seeded faults fits the code."""

from __future__ import annotations

from collections import Counter

from tests.mutants.__main__ import LANES, SURVIVED, read_faults, read_results, read_sources


def test_each_fault_changes_one_place() -> None:
    text = "\0".join(text for _, text in read_sources())
    faults = read_faults()
    assert {each.name: text.count(each.old) for each in faults if text.count(each.old) != 1} == {}
    assert [each.name for each in faults if each.old == each.new] == []


def test_there_are_sixty_faults_of_different_names() -> None:
    names = Counter(each.name for each in read_faults())
    assert len(names) >= 60
    assert names.most_common(1)[0][1] == 1


def test_each_result_is_of_a_fault_and_a_lane() -> None:
    results = read_results()
    assert set(results) <= {each.name for each in read_faults()}
    assert {each["lane"] for each in results.values()} <= {"", "unit", *LANES, SURVIVED}
