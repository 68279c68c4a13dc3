"""Version labels: their documents, and the arithmetic of their splits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.capabilities.versions.labels import (
    InvalidLabel,
    Shadow,
    VersionLabel,
    check_label_name,
    is_label_name,
    parse_label,
    parse_stored_label,
)
from gateway.capabilities.versions.splits import (
    WeightedRotation,
    choose_version_by_key,
    find_largest_share,
)
from gateway.repository.state.content import TableEntry
from gateway.repository.state.documents import UnreadableState

VERSIONS = st.integers(0, 10**18).map(str)
SMALL_SHARES = st.dictionaries(VERSIONS, st.integers(1, 50), min_size=1, max_size=6)
SHARES = st.dictionaries(VERSIONS, st.integers(1, 1_000_000), min_size=1, max_size=16)


@given(SMALL_SHARES, st.integers(0, 500))
def test_any_run_as_long_as_the_sum_of_the_shares_is_exact(
    shares: dict[str, int], skipped: int
) -> None:
    rotation = WeightedRotation(shares)
    for _ in range(skipped):
        rotation.choose()
    chosen = Counter(rotation.choose() for _ in range(sum(shares.values())))
    assert chosen == shares


@given(st.integers(1, 1_000_000), st.integers(1, 1_000_000), st.integers(1, 2000))
def test_split_of_two_versions_is_never_a_whole_request_off(
    first: int, second: int, count: int
) -> None:
    rotation = WeightedRotation({"1": first, "2": second})
    chosen = Counter(rotation.choose() for _ in range(count))
    assert abs(chosen["1"] - count * first / (first + second)) <= 1


@pytest.mark.parametrize("shares", [{"1": 90, "2": 10}, {"1": 1, "2": 1, "3": 2}])
def test_keys_are_split_like_requests(shares: dict[str, int]) -> None:
    chosen = Counter(choose_version_by_key(shares, f"user {number}") for number in range(40_000))
    for version, share in shares.items():
        assert chosen[version] / 40_000 == pytest.approx(share / sum(shares.values()), abs=0.01)


@given(SHARES, st.text())
def test_key_keeps_its_version(shares: dict[str, int], key: str) -> None:
    chosen = choose_version_by_key(shares, key)
    assert chosen in shares
    assert choose_version_by_key(dict(reversed(shares.items())), key) == chosen


@given(SHARES, st.integers(1, 1_000_000), st.text(), st.data())
def test_key_changes_its_version_only_for_one_that_grows(
    shares: dict[str, int], more: int, key: str, data: st.DataObject
) -> None:
    growing = data.draw(st.sampled_from(sorted(shares)))
    before = choose_version_by_key(shares, key)
    after = choose_version_by_key({**shares, growing: shares[growing] + more}, key)
    assert after in (before, growing)


@given(SHARES.filter(lambda shares: len(shares) > 1), st.text(), st.data())
def test_only_keys_of_a_missing_version_get_another(
    shares: dict[str, int], key: str, data: st.DataObject
) -> None:
    missing = data.draw(st.sampled_from(sorted(shares)))
    before = choose_version_by_key(shares, key)
    rest = {version: share for version, share in shares.items() if version != missing}
    after = choose_version_by_key(rest, key)
    assert after == before if before != missing else after in rest


def test_largest_share_decides_for_reads() -> None:
    assert find_largest_share({"1": 10, "2": 80, "3": 10}) == "2"
    assert find_largest_share({"1": 50, "2": 50}) == "1"


LABELS = st.builds(
    VersionLabel,
    SHARES.map(lambda shares: {each: shares[each] for each in sorted(shares, key=int)}),
    st.booleans(),
    st.none() | st.builds(Shadow, VERSIONS, st.floats(0.1, 100)),
).filter(lambda label: label.shadow is None or label.shadow.version not in label.shares)


@given(LABELS)
def test_label_is_read_as_it_was_written(label: VersionLabel) -> None:
    read = parse_label(label.to_dict())
    assert read == (
        label
        if label.is_split
        else VersionLabel({**read.shares}, label.is_sticky_by_key, label.shadow)
    )
    assert list(read.shares) == list(label.shares)


@pytest.mark.parametrize(
    ("document", "label"),
    [
        ({"version": "2"}, VersionLabel({"2": 1})),
        ({"version": 2}, VersionLabel({"2": 1})),
        ({"version": "002"}, VersionLabel({"2": 1})),
        ({"versions": {"10": 10, "9": 90}}, VersionLabel({"9": 90, "10": 10})),
        ({"version": "1", "sticky": "key"}, VersionLabel({"1": 1}, is_sticky_by_key=True)),
        (
            {"version": "1", "shadow": {"version": "3", "percent": 10}},
            VersionLabel({"1": 1}, shadow=Shadow("3", 10.0)),
        ),
    ],
)
def test_label_is_a_version_or_shares_of_versions(document: Any, label: VersionLabel) -> None:
    assert parse_label(document) == label
    assert list(parse_label(document).shares) == list(label.shares)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (None, 'an object with "version"'),
        ({}, 'an object with "version"'),
        ({"version": "1", "versions": {"1": 1}}, 'an object with "version"'),
        ({"version": "stable"}, "'stable' is not a valid version"),
        ({"version": True}, "'True' is not a valid version"),
        ({"version": 1.5}, "'1.5' is not a valid version"),
        ({"version": "-1"}, "'-1' is not a valid version"),
        ({"versions": {}}, "1 to 16 versions"),
        ({"versions": {str(number): 1 for number in range(17)}}, "1 to 16 versions"),
        ({"versions": {"1": 1, "01": 1}}, "a version twice"),
        ({"versions": {"1": 0}}, "whole number from 1"),
        ({"versions": {"1": 0.5}}, "whole number from 1"),
        ({"versions": {"1": True}}, "whole number from 1"),
        ({"version": "1", "weight": 3}, "no key 'weight'"),
        ({"version": "1", "sticky": "user"}, '"sticky" must be "key"'),
        ({"version": "1", "shadow": "2"}, '"shadow" must be an object'),
        ({"version": "1", "shadow": {"version": "1"}}, "cannot be the label's shadow"),
        ({"version": "1", "shadow": {"version": "2", "percent": 0}}, '"percent" must be'),
        ({"version": "1", "shadow": {"version": "2", "percent": 101}}, '"percent" must be'),
        ({"version": "1", "shadow": {"version": "2", "rate": 1}}, "no key 'rate'"),
    ],
)
def test_invalid_label_is_refused_with_what_is_valid(document: Any, message: str) -> None:
    with pytest.raises(InvalidLabel, match=message):
        parse_label(document)


def test_label_name_begins_with_a_lower_case_letter() -> None:
    for valid in ("stable", "canary-2", "a", "v_2", "a" * 63):
        check_label_name(valid)
        assert is_label_name(valid)
    for invalid in ("", "2", "2nd", "Stable", "sta ble", "a" * 64, "é", "-a", "a\n"):
        with pytest.raises(InvalidLabel, match="begins with a letter"):
            check_label_name(invalid)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("../stable", {"version": "1"}),
        ("stable", {"version": {"1": 1}}),
        ("stable", {"version": "1", "unit": 1}),
        ("stable", 5),
    ],
)
def test_invalid_stored_label_is_an_error(name: str, label: object) -> None:
    with pytest.raises(UnreadableState, match="invalid label"):
        parse_stored_label(TableEntry(("m", name), label))
