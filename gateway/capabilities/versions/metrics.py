"""The metrics of version labels."""

from __future__ import annotations

from gateway.telemetry.metrics import MetricFactory


class LabelMetrics:
    def __init__(self, create: MetricFactory) -> None:
        self.redirects = create.counter(
            "gateway_label_redirects_total",
            "Requests of a split that another version served, because this version was not ready.",
            ("model", "label", "version"),
        )
        self.shadow_requests = create.counter(
            "gateway_shadow_requests_total",
            "Copies of requests to a shadow version, by result: "
            "succeeded, failed, busy, too_many, too_large, unsupported.",
            ("model", "label", "version", "result"),
        )
