"""The names of models that the patterns of a key match."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.callers import Caller

# However slow the machine is.
PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


GLOBS = st.lists(st.text("ab*?[]!-^\\", min_size=1, max_size=9), min_size=1)


@PROPERTY
@given(GLOBS, st.text("ab-^!]") | st.text(min_size=1, max_size=30))
def test_no_pattern_matches_a_name_that_a_path_must_quote(globs: list[str], name: str) -> None:
    for models in (tuple(globs), ("a*", "[!b]*")):
        if Caller("x", models=models).can_see(name):
            assert name.isascii()
            assert name.isprintable()
            assert not set(name) & set('%/\\?#"<>[]{}|^` ')
            assert name not in (".", "..")


# A pattern, a name, and whether a key with the pattern sees it.
SEPARATORS = [
    ("res,text", "res", False),
    ("res,text", "text", False),
    ("res", "res,text", False),
    ("res", "res\n", False),
    ("res", "res\ntext", False),
    ("res", "res\0text", False),
    ("res*", "res\n", False),
    ("*text", "res\0text", False),
    ("*text", "res text", False),
    ("res", "Res", False),
    ("res*", "res", True),
    ("res*", "res-2", True),
]


@pytest.mark.parametrize(("pattern", "name", "is_seen"), SEPARATORS)
def test_pattern_of_a_key_matches_whole_names(pattern: str, name: str, is_seen: bool) -> None:
    assert Caller("x", models=(pattern,)).can_see(name) is is_seen


def test_visibility_cache_is_bounded() -> None:
    caller = Caller("x", models=("a*",))
    for number in range(5000):
        assert caller.can_see(f"a{number}")
        assert not caller.can_see(f"b{number}")
    assert caller.can_see("a" * 10_000)
    assert len(caller._visibility_cache) <= 1024
    assert max(map(len, caller._visibility_cache)) < 300
