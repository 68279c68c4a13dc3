"""The replicas that are ejected, and for how long, by their shares of failures."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gateway.fleet.health import TRANSPORT, FailureShares


@dataclass(frozen=True)
class Named:
    name: str


@dataclass
class Fleet:
    """Replicas of which some fail. Requests are sent in turns to those that are not ejected."""

    names: str = "abc"
    failing: str = ""
    model: str = "m"
    now: float = 1000.0
    failed_at: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shares = FailureShares(lambda: self.now)
        self.replicas = [Named(name) for name in self.names]

    def fail(self, name: str) -> None:
        self.shares.record_failure(self.model, name, self.names, "it failed")

    def send(self, count: int, interval_s: float = 0.01) -> int:
        """Return how many of the requests failed."""
        before = len(self.failed_at)
        for number in range(count):
            self.now += interval_s
            allowed = self.shares.select(self.model, self.replicas)
            name = allowed[number % len(allowed)].name
            if name in self.failing:
                self.fail(name)
                self.failed_at.append(self.now)
            else:
                self.shares.record_success(self.model, name)
        return len(self.failed_at) - before

    @property
    def ejected(self) -> str:
        shares = self.shares.by_model.get(self.model, {})
        return "".join(sorted(name for name, share in shares.items() if share.is_ejected))


@pytest.mark.parametrize(
    ("names", "failing", "model", "failures", "ejected"),
    [
        ("abc", "b", "m", 5, "b"),
        ("abc", "b", TRANSPORT, 5, "b"),
        ("abc", "ab", "m", 10, "ab"),
        ("abc", "ab", TRANSPORT, 150, "a"),  # half of the fleet at most
        ("abc", "abc", "m", 300, ""),  # a model that fails everywhere is no fault of a replica
        ("abc", "abc", TRANSPORT, 300, ""),
        ("a", "a", "m", 300, ""),
        ("abc", "", "m", 0, ""),
    ],
)
def test_replica_that_fails_while_others_serve_is_ejected(
    names: str, failing: str, model: str, failures: int, ejected: str
) -> None:
    fleet = Fleet(names, failing, model)
    assert abs(fleet.send(300) - failures) <= 0.1 * failures
    assert fleet.ejected == ejected


@pytest.mark.parametrize(
    ("failures", "rounds"),
    [
        (5, 0),
        (14, 60),  # it has served, and a request failed now and then
    ],
)
def test_failures_in_a_row_eject_whatever_was_before(failures: int, rounds: int) -> None:
    fleet = Fleet()
    for _ in range(rounds):
        fleet.fail("b")
        fleet.send(60)
    count = 0
    while not fleet.ejected:
        fleet.fail("b")
        count += 1
    assert count <= failures
    fleet.shares.forget_replica("b")  # its process has ended
    assert not fleet.ejected


def test_rare_failures_eject_nothing_and_are_forgotten() -> None:
    fleet = Fleet()
    for _ in range(20):
        fleet.send(5)
        fleet.fail("a")
    assert not fleet.ejected
    fleet.send(4000, interval_s=0.1)
    assert not fleet.shares.by_model


def test_ejections_last_longer_each_time_up_to_25_s() -> None:
    fleet = Fleet(failing="b")
    fleet.send(60_000)
    first, *trials = fleet.failed_at[4:]
    pauses_s = [after - before for before, after in zip([first, *trials], trials, strict=False)]
    assert [round(pause_s) for pause_s in pauses_s[:6]] == [5, 10, 15, 20, 25, 25]
    assert set(map(round, pauses_s[5:])) == {25}
    # A reader sees it as ejected until the next trial, and what was sent before prolongs nothing.
    fleet.now = fleet.failed_at[-1] + 1
    for _ in range(50):
        fleet.fail("b")
    share = fleet.shares.find_ejection("b", "m")
    assert share is not None
    assert share.trial_at == pytest.approx(fleet.failed_at[-1] + 25)
    assert fleet.shares.list_models("b") == ["m"]
    fleet.now += 24
    assert fleet.shares.find_ejection("b", "m") is None


def test_three_trials_within_30_s_end_an_ejection_and_the_next_one_is_longer() -> None:
    fleet = Fleet(failing="b")
    fleet.send(20_000)
    fleet.failing = ""
    ended_at = fleet.now
    fleet.send(3000)
    assert not fleet.ejected
    assert fleet.now - ended_at <= 30
    fleet.failing = "b"
    fleet.send(100)
    assert fleet.shares.by_model["m"]["b"].pause_s == 25
    # After five minutes without an ejection they start short again.
    fleet.failing = ""
    fleet.send(4000, interval_s=0.1)
    fleet.failing = "b"
    fleet.send(100)
    assert fleet.shares.by_model["m"]["b"].pause_s == 5


def test_failed_trial_starts_over() -> None:
    fleet = Fleet(failing="b")
    fleet.send(300)
    fleet.failing = ""
    fleet.send(250)  # the first trial
    fleet.failing = "b"
    assert fleet.send(200) == 1
    assert fleet.ejected == "b"


def test_ejected_replicas_return_when_the_others_fail_as_well() -> None:
    fleet = Fleet(failing="b")
    fleet.send(300)
    fleet.failing = "abc"
    fleet.send(100)
    assert not fleet.ejected
