"""The counts of callers and phases, which are labels that must stay few."""

from __future__ import annotations

import re
from time import perf_counter

from prometheus_client import generate_latest

from gateway.telemetry.metrics import OTHER_CALLERS, Metrics
from gateway.telemetry.refusals import MAX_CALLERS
from gateway.telemetry.request_info import RequestInfo, current_request_info, measure_upstream_time


def read_samples(metrics: Metrics, family: str) -> dict[str, float]:
    metrics.flush()
    page = generate_latest(metrics.registry).decode()
    return {
        labels: float(value)
        for labels, value in re.findall(rf"^{family}\{{(.*)\}} (\S+)$", page, re.MULTILINE)
    }


def create_info(key: str = "", model: str = "resnet", error_code: str = "") -> RequestInfo:
    return RequestInfo("id", model=model, key=key, error_code=error_code)


def test_waits_are_added_up_by_the_name_of_the_key() -> None:
    metrics = Metrics()
    for caller, seconds in (("batch", 0.5), ("batch", 1.0), ("", 9.0)):
        metrics.count_caller_wait(caller, seconds)
    assert read_samples(metrics, "gateway_caller_queue_seconds_total") == {'caller="batch"': 1.5}


def test_requests_and_refusals_are_counted_by_the_name_of_the_key() -> None:
    metrics = Metrics()
    metrics.observe(create_info("app"), 200, 0.1)
    metrics.observe(create_info("app"), 200, 0.1)
    metrics.observe(create_info("app", error_code="OVERLOADED"), 429, 0.1)
    metrics.observe(create_info("app", error_code="MODEL_NOT_FOUND"), 404, 0.1)
    metrics.observe(create_info(model="", error_code="UNAUTHENTICATED"), 401, 0.1)
    metrics.observe(create_info(), 200, 0.1)
    assert read_samples(metrics, "gateway_caller_requests_total") == {
        'caller="app",model="resnet"': 4
    }
    assert read_samples(metrics, "gateway_caller_refusals_total") == {
        'caller="app",code="OVERLOADED"': 1,
        'caller="",code="UNAUTHENTICATED"': 1,
    }


def test_callers_beyond_the_maximum_are_counted_as_others() -> None:
    metrics = Metrics()
    for number in range(MAX_CALLERS + 3):
        metrics.observe(create_info(f"key{number}"), 200, 0.1)
    found = read_samples(metrics, "gateway_caller_requests_total")
    assert len(found) == MAX_CALLERS + 1
    assert found[f'caller="{OTHER_CALLERS}",model="resnet"'] == 3


def test_duration_is_counted_in_the_buckets_from_its_time_on() -> None:
    metrics = Metrics()
    for seconds in (0.0005, 0.001, 0.2, 31.0):
        metrics.observe(create_info(), 200, seconds)
    found = read_samples(metrics, "gateway_request_duration_seconds_bucket")
    counts = {re.findall(r'le="(.*?)"', labels)[0]: count for labels, count in found.items()}
    expected = {"0.001": 2, "0.1": 2, "0.25": 3, "30.0": 3, "+Inf": 4}
    assert {bound: counts[bound] for bound in expected} == expected


def test_phases_are_counted_by_model_and_only_if_the_request_had_them() -> None:
    metrics = Metrics()
    for upstream_s in (0.02, 0.03):
        info = create_info()
        info.upstream_s = upstream_s
        metrics.observe(info, 200, 0.1)
    info = create_info()
    info.add_phase("admission", 0.25)
    info.add_phase("admission", 0.5)
    metrics.observe(info, 200, 1.0)
    unknown = create_info(model="")
    unknown.upstream_s = 0.1
    metrics.observe(unknown, 404, 0.1)
    assert read_samples(metrics, "gateway_request_phase_seconds_count") == {
        'model="resnet",phase="upstream"': 2,
        'model="resnet",phase="admission"': 1,
    }
    sums = read_samples(metrics, "gateway_request_phase_seconds_sum")
    assert sums == {
        'model="resnet",phase="upstream"': 0.05,
        'model="resnet",phase="admission"': 0.75,
    }


def test_time_of_parallel_calls_is_counted_once_and_that_of_later_ones_is_added() -> None:
    info = create_info()
    token = current_request_info.set(info)
    started_at = perf_counter()
    with measure_upstream_time(), measure_upstream_time():
        sum(range(100_000))
    first_s = info.upstream_s
    with measure_upstream_time():
        sum(range(100_000))
    current_request_info.reset(token)
    assert 0 < first_s < info.upstream_s < perf_counter() - started_at
