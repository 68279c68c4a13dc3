"""The table of seeded faults fits the code."""

from __future__ import annotations

from collections import Counter

from tests.mutants.__main__ import ROOT, read_faults


def test_each_fault_changes_one_place() -> None:
    text = "\0".join(
        path.read_text()
        for path in (ROOT / "gateway").rglob("*")
        if path.suffix in {".py", ".js", ".html", ".css"}
    )
    faults = read_faults()
    assert {each.name: text.count(each.old) for each in faults if text.count(each.old) != 1} == {}
    assert [each.name for each in faults if each.old == each.new] == []


def test_there_are_sixty_faults_of_different_names() -> None:
    names = Counter(each.name for each in read_faults())
    assert len(names) >= 60
    assert names.most_common(1)[0][1] == 1
