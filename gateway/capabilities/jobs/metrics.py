"""The metrics of jobs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.capabilities.jobs.job import JobState
from gateway.capabilities.jobs.runner import JobRunner


class JobCollector(Collector):
    """Counts of the jobs in the store, a few seconds old."""

    def __init__(self, runner: JobRunner) -> None:
        self._runner = runner

    def collect(self) -> Iterator[GaugeMetricFamily]:
        counts = self._runner.counts
        jobs = GaugeMetricFamily("gateway_jobs", "Jobs that are kept, by state.", labels=["state"])
        for state in JobState:
            jobs.add_metric([state.value], counts.by_state.get(state, 0))
        yield jobs
        age_s = 0.0
        if counts.oldest_queued_at is not None:
            age_s = max(time.time() - counts.oldest_queued_at, 0.0)
        yield GaugeMetricFamily(
            "gateway_job_queue_age_seconds", "Age of the oldest job that is queued.", age_s
        )
        yield GaugeMetricFamily(
            "gateway_jobs_bytes", "Size of the bodies and results of jobs.", counts.size_bytes
        )
