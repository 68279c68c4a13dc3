"""Which fleets are possible after the answers to some changes: the model that `make chaos` compares with."""

from __future__ import annotations

from tests.chaos import world
from tests.chaos.world import (
    Answer,
    Details,
    Effect,
    Model,
    Outcome,
    World,
    WorldEffect,
    list_possible_worlds,
)

LOADED = World({"a": Model(world.LOADED, {1: 7})})
UNLOADED = World({"a": Model(world.UNLOADED, {1: 7})})
GONE = World({"a": Model()})
DETAILS = Details("a", version=1, label="stable", number=8)


def apply(effect: Effect) -> WorldEffect:
    return lambda before: effect(before, DETAILS)


LOAD = apply(world.load)
UNLOAD = apply(world.unload)
DELETE = apply(world.delete)
BROKEN_UPLOAD = apply(world.upload_broken)


def test_acknowledged_change_leaves_one_world() -> None:
    assert list_possible_worlds(LOADED, [Answer(UNLOAD, Outcome.done)]) == [UNLOADED]


def test_change_without_a_response_leaves_both_worlds() -> None:
    unknown = Answer(UNLOAD, Outcome.unknown)
    assert list_possible_worlds(LOADED, [unknown]) == [UNLOADED, LOADED]


def test_overlapping_changes_may_come_in_any_order() -> None:
    both = [Answer(LOAD, Outcome.done), Answer(UNLOAD, Outcome.done)]
    assert list_possible_worlds(LOADED, both) == [UNLOADED, LOADED]


def test_refusal_must_follow_from_the_world_or_be_excused() -> None:
    refused = Answer(LOAD, Outcome.refused, "MODEL_NOT_FOUND")
    assert list_possible_worlds(LOADED, [refused]) == []
    assert list_possible_worlds(GONE, [refused]) == [GONE]
    excused = Answer(LOAD, Outcome.refused, "STATE_UNAVAILABLE", is_excused=True)
    assert list_possible_worlds(UNLOADED, [excused]) == [UNLOADED]


def test_refusal_shows_the_order_of_overlapping_changes() -> None:
    """The load that did not find the model came after its deletion."""
    answers = [Answer(DELETE, Outcome.done), Answer(LOAD, Outcome.refused, "MODEL_NOT_FOUND")]
    assert list_possible_worlds(LOADED, answers) == [GONE]


def test_broken_upload_must_not_be_acknowledged() -> None:
    assert list_possible_worlds(LOADED, [Answer(BROKEN_UPLOAD, Outcome.partly_done)]) == []
    refused = Answer(BROKEN_UPLOAD, Outcome.refused, "LOAD_FAILED")
    assert list_possible_worlds(LOADED, [refused]) == [LOADED]
