"""Outlier detection: a replica that fails a model which the others serve gets only trials of its requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.fleet.health import OutlierDetector


@dataclass
class Replica:
    name: str
    up_since: float = 0.0


@dataclass
class Fleet:
    """Three replicas of which some fail; requests are sent as the detector allows, in turns."""

    failing: set[str]
    now: float = 0.0
    replicas: list[Replica] = field(
        default_factory=lambda: [Replica("a"), Replica("b"), Replica("c")]
    )

    def __post_init__(self) -> None:
        self.detector = OutlierDetector(lambda: self.now)

    def send(self, count: int, interval_s: float = 0.01) -> int:
        """Send this many requests and return how many failed."""
        failures = 0
        for number in range(count):
            self.now += interval_s
            allowed = self.detector.limit_candidates("m", self.replicas)
            replica = allowed[number % len(allowed)]
            is_failure = replica.name in self.failing
            self.detector.record("m", replica.name, self.replicas, is_failure=is_failure)
            failures += is_failure
        return failures

    @property
    def outliers(self) -> set[str]:
        return {each.name for each in self.replicas if self.detector.list_models(each.name)}


def test_replicas_that_fail_while_others_serve_are_outliers() -> None:
    fleet = Fleet({"b"})
    assert fleet.send(300) == 5
    assert fleet.outliers == {"b"}
    assert fleet.send(5000) == 5  # in fifty seconds: one trial in ten
    fleet = Fleet({"a", "b"})
    assert fleet.send(300) <= 20
    assert fleet.outliers == {"a", "b"}
    fleet = Fleet({"a", "b", "c"})
    fleet.send(300)
    assert not fleet.outliers


def test_outlier_that_succeeds_three_times_gets_its_share_again() -> None:
    fleet = Fleet({"b"})
    fleet.send(300)
    fleet.failing.clear()
    fleet.send(1500)
    assert not fleet.outliers
    fleet.send(30_000, interval_s=0.1)
    assert not fleet.detector.is_tracked("m")


def test_restarted_replica_is_no_outlier() -> None:
    fleet = Fleet({"b"})
    fleet.send(300)
    fleet.replicas[1].up_since = fleet.now + 1
    fleet.failing.clear()
    fleet.send(1)
    assert not fleet.outliers


def test_rare_failures_and_a_single_replica_make_no_outlier() -> None:
    fleet = Fleet(set())
    for _ in range(20):
        fleet.send(5)
        fleet.detector.record("m", "a", fleet.replicas, is_failure=True)
    assert not fleet.outliers
    alone = Fleet({"a"}, replicas=[Replica("a")])
    alone.send(100)
    assert not alone.outliers
