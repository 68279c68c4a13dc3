"""How `make test-cluster` judges an event: what may fail, and when everything is well."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.cluster.__main__ import parse_images
from tests.cluster.desired import (
    Answer,
    GatewayView,
    find_fleet_differences,
    find_pod_differences,
    find_spread_differences,
)
from tests.cluster.kubectl import ClusterError
from tests.cluster.run import Choice
from tests.cluster.verdict import (
    SETTLE_S,
    Failure,
    Losses,
    Outcome,
    Record,
    find_log_faults,
    find_violations,
    format_table,
    parse_record,
)

FAULT_ENDED = 100.0
BEFORE, AFTER = FAULT_ENDED - 5, FAULT_ENDED + 5


def build_failure(connected: float, began: float) -> Failure:
    return Failure("unary", connected, began, began + 1, "502")


def build_outcome(losses: Losses, *failures: Failure, **fields: Any) -> Outcome:
    record = Record(Counter(unary=1000), failures)
    return Outcome("an event", losses, record, fault_ended=FAULT_ENDED, **fields)


@pytest.mark.parametrize(
    ("losses", "connected", "began", "is_allowed"),
    [
        (Losses.none, BEFORE, BEFORE, False),
        (Losses.requests_inside, BEFORE, BEFORE, True),
        (Losses.requests_inside, BEFORE, AFTER, False),
        (Losses.connections_inside, BEFORE, AFTER, True),
        (Losses.connections_inside, AFTER, AFTER, False),
    ],
)
def test_request_may_fail_only_inside_what_died(
    losses: Losses, connected: float, began: float, is_allowed: bool
) -> None:
    outcome = build_outcome(losses, build_failure(connected, began))
    assert bool(find_violations(outcome)) != is_allowed


def test_request_to_what_is_stopped_may_fail_until_a_probe_has_noticed() -> None:
    failure = build_failure(AFTER, AFTER)
    noticed_later = build_outcome(Losses.connections_inside, failure, unnoticed_s=10.0)
    assert not find_violations(noticed_later)
    noticed_earlier = build_outcome(Losses.connections_inside, failure, unnoticed_s=1.0)
    assert find_violations(noticed_earlier) == ["1 requests failed that must not: 1 × unary: 502"]


def test_connection_may_be_refused_only_by_a_gateway_that_died() -> None:
    refused = (build_failure(AFTER, AFTER),)
    for losses in Losses:
        outcome = Outcome("an event", losses, Record(Counter(unary=1), (), refused))
        assert bool(find_violations(outcome)) != (losses is Losses.connections_inside)


def test_load_must_be_answered() -> None:
    assert find_violations(Outcome("an event", Losses.requests_inside, Record(Counter()))) == [
        "no request was answered"
    ]
    assert not find_violations(Outcome("install", Losses.none))


def test_fleet_has_a_time_to_settle_and_logs_have_no_faults() -> None:
    assert not find_violations(build_outcome(Losses.none, settled_s=SETTLE_S))
    late = build_outcome(Losses.none, settled_s=SETTLE_S + 1)
    (violation,) = find_violations(late)
    assert f"{SETTLE_S + 1:.0f} s after the pods were ready" in violation
    slow_dns = build_outcome(Losses.none, settled_s=SETTLE_S + 1, settle_limit_s=40.0)
    assert not find_violations(slow_dns)
    log = "a line\nTraceback (most recent call last):\n  File …\n"
    (fault,) = find_log_faults("gateway-0", log)
    faulty = build_outcome(Losses.none, log_faults=(fault,))
    assert find_violations(faulty) == [
        "the log of gateway-0 has: Traceback (most recent call last):"
    ]


def test_record_counts_what_ended_in_the_period() -> None:
    lines = [
        json.dumps(
            {"at": at, "answered": {"unary": 10, "stream": 1}, "oldest": at, "longest_s": at / 10}
        )
        for at in (1.0, 2.0, 3.0, 4.0)
    ]
    times = {"connected": 0.5, "began": 1.5, "ended": 2.5}
    lines.append(json.dumps({"failed": "stream", **times, "reason": "502"}))
    lines.append(json.dumps({"refused": "unary", **times, "reason": "refused"}))
    lines.append(json.dumps({"slow": "image", **times, "reason": "5.1 s"}))
    lines.append(json.dumps({"failed": "unary", **times, "ended": 3.5, "reason": "503"}))
    record = parse_record(lines, after=1.0, until=3.0)
    assert record.answered == {"unary": 20, "stream": 2}
    assert record.requests == 23
    assert record.failures == (Failure("stream", reason="502", **times),)
    assert [each.kind for each in record.refused] == ["unary"]
    assert [(each.kind, each.reason) for each in record.slow] == [("image", "5.1 s")]
    assert record.longest_s == 0.3


def test_request_may_be_slow_only_inside_what_died() -> None:
    for losses, began, is_allowed in (
        (Losses.none, BEFORE, False),
        (Losses.requests_inside, BEFORE, True),
        (Losses.requests_inside, AFTER, False),
    ):
        record = Record(Counter(unary=1), slow=(build_failure(began, began),))
        outcome = Outcome("an event", losses, record, fault_ended=FAULT_ENDED)
        assert bool(find_violations(outcome)) != is_allowed


def test_table_has_a_row_for_each_event() -> None:
    outcomes = [
        build_outcome(Losses.none, well_s=12.4, settled_s=3.4),
        build_outcome(Losses.requests_inside, build_failure(BEFORE, BEFORE)),
        build_outcome(Losses.none, build_failure(BEFORE, BEFORE)),
        build_outcome(Losses.none, skipped="the cluster has one node"),
    ]
    heading, _, *rows = format_table(outcomes).splitlines()
    assert len({len(row) for row in [heading, *rows]}) == 1
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0] == ["an event", "1,000", "0", "0", "0.0", "12", "3", "ok"]
    assert cells[1][2:] == ["1 (1 inside)", "0", "0.0", "0", "0", "ok"]
    assert cells[2][2:] == ["1", "0", "0.0", "0", "0", "VIOLATED"]
    assert cells[3][-1] == "skipped: the cluster has one node"


def build_deployment(generation: int = 2, **status: int) -> dict[str, Any]:
    counts = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 2, "observedGeneration": 2}
    return {
        "metadata": {"name": "triton", "generation": generation},
        "spec": {"replicas": 2},
        "status": {**counts, **status},
    }


def build_pods(*phases: str) -> list[dict[str, Any]]:
    return [
        {"metadata": {"name": f"triton-{number}"}, "status": {"phase": phase}}
        for number, phase in enumerate(phases)
    ]


def test_pods_are_ready_when_no_old_one_is_left() -> None:
    """An evicted pod stays as a record of its eviction."""
    running = build_pods("Running", "Running", "Failed")
    assert not [*find_pod_differences([build_deployment()], running)]
    left = build_pods("Running", "Running", "Running")
    assert [*find_pod_differences([build_deployment()], left)] == [
        "3 pods instead of 2 exist: triton-0, triton-1, triton-2"
    ]
    assert [*find_pod_differences([build_deployment(readyReplicas=1)], running)]
    assert [*find_pod_differences([build_deployment(generation=3)], running)]


def test_pods_are_spread_when_each_has_a_node_of_its_own() -> None:
    first, second = ({"spec": {"nodeName": node}} for node in ("n1", "n2"))
    assert not [*find_spread_differences("triton", [first, second])]
    (difference,) = find_spread_differences("triton", [first, first])
    assert difference == "the pods of triton are not spread: n1, n1"


def view_fleet(readiness: int, *replicas: dict[str, Any]) -> list[GatewayView]:
    listed = Answer(200, json.dumps({"replicas": replicas}))
    return [GatewayView("gateway-0", Answer(readiness, "{}"), listed)]


def test_fleet_is_well_when_each_gateway_sees_the_tritons_and_their_models() -> None:
    up = {"address": "10.0.0.1:8000", "state": "UP", "models": {"a": "READY"}}
    wishes = {"a": True, "b": False}
    tritons = ["10.0.0.1"]
    views = view_fleet(200, up)
    assert not [*find_fleet_differences(views, tritons, wishes)]
    assert len([*find_fleet_differences(views, ["10.0.0.1", "10.0.0.2"], wishes)]) == 1
    assert len([*find_fleet_differences(views, tritons, {"a": True, "c": True})]) == 1
    assert len([*find_fleet_differences(views, tritons, {"a": False})]) == 1
    down = view_fleet(503, {**up, "state": "DOWN"})
    assert len([*find_fleet_differences(down, tritons, wishes)]) == 2
    (sentence,) = find_fleet_differences(
        [GatewayView("gateway-0", Answer(200, "{}"), Answer(0, "ConnectError"))], tritons, wishes
    )
    assert sentence == "gateway-0 does not list replicas: 0 ConnectError"


def test_images_and_events_are_chosen_by_words() -> None:
    assert parse_images("redis=mirror/redis:8 gateway=g:1")["redis"] == "mirror/redis:8"
    with pytest.raises(ClusterError, match=r"IMAGES has 'nginx=x'; write gateway=…, embedded=…"):
        parse_images("nginx=x")
    choice = Choice(without=["CoreDNS", "chart"], only=["rollout", "CoreDNS"])
    assert choice.includes("prod")
    assert not choice.includes("chart")
    assert choice.includes_event("rollout of both")
    assert not choice.includes_event("CoreDNS is away")
    assert not choice.includes_event("a node dies")
