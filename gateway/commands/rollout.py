"""`triton-gateway rollout`: moves a label to another version step by step, and back if that fails."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final

import typer
from rich.console import Console

from gateway.client import Client, GatewayError
from gateway.client.calls import build_label_path
from gateway.commands.errors import ACCESS_STATUSES, ClientError, UsageError
from gateway.commands.top import ModelTraffic, list_duration_samples, read_families
from gateway.messages import escape_unprintable
from gateway.telemetry.exposition import Families

POLL_S: Final = 1.0
MAX_FAILED_POLLS: Final = 10
INTERRUPTIONS: Final = (KeyboardInterrupt, SystemExit)  # SIGINT, and SIGTERM
INFERENCE_ROUTE: Final = re.compile(r"/v[12]/models/.*(/infer|/generate|/generate_stream|:predict)")
FAILURE_STATUS: Final = "5xx"
QUANTILE: Final = 0.99
PERCENT: Final = re.compile(r"(\d+(?:\.\d+)?)%")
LATENCY_LIMIT: Final = re.compile(r"(\d+(?:\.\d+)?)(x|ms|s)")


@dataclass(frozen=True)
class RolloutLimits:
    """Limits of the new version. Its p99 is limited in seconds, or relative to the p99 of the old version."""

    max_failed_share: float = 0.01
    max_p99_s: float = inf
    max_p99_ratio: float = inf
    min_requests: int = 20  # fewer do not judge a step


@dataclass(frozen=True)
class RolloutPlan:
    """The label, its versions, and the steps of the new version's share in percent."""

    model: str
    label: str
    old: str
    new: str
    steps: Sequence[int]
    step_s: float
    limits: RolloutLimits


class RolledBack(ClientError):
    """The new version exceeded a limit, or the rollout was interrupted."""


@dataclass
class VersionTraffic:
    """The inferences of both versions since the beginning of a step, and the old version's last known p99."""

    old: ModelTraffic = field(default_factory=ModelTraffic)
    new: ModelTraffic = field(default_factory=ModelTraffic)
    old_p99_s: float = inf

    def is_reset_after(self, earlier: VersionTraffic) -> bool:
        """Return whether the gateway restarted since, and counts from 0 again."""
        return self.old.count < earlier.old.count or self.new.count < earlier.new.count


def parse_steps(text: str) -> list[int]:
    words = text.split(",")
    steps = [int(word) for word in words if word.isdecimal()]
    is_valid = len(steps) == len(words) and steps == sorted(set(steps)) and steps[0] > 0
    if not is_valid or steps[-1] > 100:
        raise UsageError(f"--steps must be rising percentages such as 5,25,50,100, not {text!r}")
    return steps


def parse_limits(max_errors: str, max_p99: str, min_requests: int) -> RolloutLimits:
    percent = PERCENT.fullmatch(max_errors)
    if percent is None:
        raise UsageError(f"--max-errors must be a percentage such as 1%, not {max_errors!r}")
    limits = RolloutLimits(float(percent[1]) / 100, min_requests=min_requests)
    limit = LATENCY_LIMIT.fullmatch(max_p99)
    if limit is None:
        raise UsageError(f"--max-p99 must be such as 2x, 250ms or 1.5s, not {max_p99!r}")
    value = float(limit[1])
    unit = limit[2]
    if unit == "x":
        return replace(limits, max_p99_ratio=value)
    return replace(limits, max_p99_s=value / 1000 if unit == "ms" else value)


def compute_p99_s(traffic: ModelTraffic) -> float:
    """Return the p99 of the durations, interpolated within its bucket as in PromQL; inf if unknown."""
    bounds = sorted(traffic.buckets)
    if not bounds or not traffic.count:
        return inf
    rank = QUANTILE * traffic.buckets[bounds[-1]]
    lower = 0.0
    below = 0.0
    for bound in bounds:
        count = traffic.buckets[bound]
        if count >= rank:
            if bound == inf:
                return lower
            return lower + (bound - lower) * (rank - below) / max(count - below, 1e-9)
        lower = bound
        below = count
    return inf


def find_violation(traffic: VersionTraffic, limits: RolloutLimits) -> str:
    """Return the limit that the new version exceeds; empty if it exceeds none, or had too few requests."""
    new = traffic.new
    if new.count < limits.min_requests:
        return ""
    share = new.failed / new.count
    if share > limits.max_failed_share:
        return (
            f"{new.failed:.0f} of {new.count:.0f} requests failed ({share:.1%}, "
            f"the limit is {limits.max_failed_share:.1%})"
        )
    p99_s = compute_p99_s(new)
    if p99_s > limits.max_p99_s:
        return f"its p99 is {p99_s * 1000:.0f} ms, the limit is {limits.max_p99_s * 1000:.0f} ms"
    if traffic.old_p99_s < inf and p99_s > limits.max_p99_ratio * traffic.old_p99_s:
        return (
            f"its p99 is {p99_s * 1000:.0f} ms, the limit is {limits.max_p99_ratio:g} times the "
            f"{traffic.old_p99_s * 1000:.0f} ms of the old version"
        )
    return ""


def count_traffic(families: Families, model: str, version: str) -> ModelTraffic:
    """Return the inferences of a version; only those with status 5xx count as failed."""
    traffic = ModelTraffic()
    for name, labels, value in list_duration_samples(families):
        is_inference = INFERENCE_ROUTE.fullmatch(labels.get("route", "")) is not None
        if is_inference and (labels.get("model"), labels.get("version")) == (model, version):
            traffic.add_sample(name, labels, value, ok=labels.get("status") != FAILURE_STATUS)
    return traffic


class Rollout:
    def __init__(self, client: Client, plan: RolloutPlan) -> None:
        self._client = client
        self._plan = plan
        self._path = build_label_path(plan.model, plan.label)
        self._kept: dict[str, Any] = {}  # fields of the label that the rollout does not change
        self._old_p99_s = inf
        self._has_moved = False
        self._start = self._last = VersionTraffic()  # when the step began, and at the last poll

    def run(self) -> None:
        """Move the label through all steps. Raises `RolledBack` after it was moved back."""
        plan = self._plan
        self._check_label()
        for percent in plan.steps:
            try:
                self._set_share(percent)
                traffic = self._watch_step(percent)
            except BaseException as exc:
                if not self._has_moved:
                    raise
                self._move_back()
                if not isinstance(exc, (ClientError, GatewayError, *INTERRUPTIONS)):
                    raise
                reason = "interrupted" if isinstance(exc, INTERRUPTIONS) else str(exc)
                raise RolledBack(
                    f"label {plan.label} of model {plan.model} is back on version {plan.old}: {reason}"
                ) from None
            typer.echo(escape_unprintable(describe_step(plan, percent, traffic)))

    def _move_back(self) -> None:
        """Move all requests back to the old version. Raises `ClientError` if that fails for a while."""
        plan = self._plan
        failures = 0
        while True:
            try:
                self._set_share(0)
                break
            except GatewayError as exc:
                failures += 1
                if failures > MAX_FAILED_POLLS:
                    raise ClientError(
                        f"label {plan.label} of model {plan.model} could not be moved back to version "
                        f"{plan.old}: {exc}"
                    ) from None
            time.sleep(POLL_S)

    def _check_label(self) -> None:
        """Check that the label means the old version. Raises `ClientError`."""
        try:
            label = self._client.request("GET", self._path)
        except GatewayError as exc:
            if exc.code == "LABEL_NOT_FOUND":
                return
            raise
        shares = label.get("versions") or {label["version"]: 1}
        if not shares.keys() <= {self._plan.old, self._plan.new}:
            raise ClientError(
                f"label {self._plan.label} means version {' and '.join(shares)}; set it to version "
                f"{self._plan.old} first"
            )
        self._kept = {key: label[key] for key in ("sticky", "shadow") if key in label}
        if self._kept.get("shadow", {}).get("version") in (self._plan.old, self._plan.new):
            del self._kept["shadow"]

    def _set_share(self, percent: int) -> None:
        plan = self._plan
        versions: dict[str, Any] = {"versions": {plan.old: 100 - percent, plan.new: percent}}
        if percent in (0, 100):
            versions = {"version": plan.new if percent else plan.old}
        had_moved = self._has_moved
        self._has_moved = True  # the change may arrive even if its response does not
        try:
            self._client.request("PUT", self._path, {**self._kept, **versions})
        except GatewayError as exc:
            if exc.status:  # the gateway refused the change
                self._has_moved = had_moved
            raise

    def _watch_step(self, percent: int) -> VersionTraffic:
        """Wait until the step is over and judged. Raises `RolledBack`, with the reason only."""
        plan = self._plan
        self._start = self._last = self._read_counters()
        end = time.monotonic() + plan.step_s
        failed_polls = 0
        with Console(stderr=True, quiet=not sys.stderr.isatty()).status("") as status:
            while True:
                time.sleep(min(POLL_S, plan.step_s))
                try:
                    traffic = self._read_traffic()
                    self._check_ready()
                except GatewayError as exc:
                    failed_polls += 1
                    if failed_polls > MAX_FAILED_POLLS or exc.status in ACCESS_STATUSES:
                        raise
                    continue
                failed_polls = 0
                if violation := find_violation(traffic, plan.limits):
                    raise RolledBack(f"at {percent} % for version {plan.new}, {violation}")
                left_s = max(end - time.monotonic(), 0)
                text = f"{describe_step(plan, percent, traffic)}; {left_s:.0f} s left"
                status.update(escape_unprintable(text))
                if time.monotonic() >= end and traffic.new.count >= plan.limits.min_requests:
                    return traffic

    def _check_ready(self) -> None:
        label = self._client.request("GET", self._path)
        if not label["ready"].get(self._plan.new, True):
            raise RolledBack(f"version {self._plan.new} is not ready on any replica")

    def _read_counters(self) -> VersionTraffic:
        plan = self._plan
        families = read_families(self._client)
        old, new = (count_traffic(families, plan.model, each) for each in (plan.old, plan.new))
        return VersionTraffic(old, new)

    def _read_traffic(self) -> VersionTraffic:
        counters = self._read_counters()
        if counters.is_reset_after(self._last):
            self._start = VersionTraffic()
        self._last = counters
        old = counters.old.subtract(self._start.old)
        new = counters.new.subtract(self._start.new)
        if old.count >= self._plan.limits.min_requests:
            self._old_p99_s = compute_p99_s(old)
        return VersionTraffic(old, new, self._old_p99_s)


def describe_step(plan: RolloutPlan, percent: int, traffic: VersionTraffic) -> str:
    def describe(version: str, counts: ModelTraffic) -> str:
        if not counts.count:
            return f"version {version}: no requests"
        p99_ms = compute_p99_s(counts) * 1000
        failed = counts.failed / counts.count
        return f"version {version}: {counts.count:.0f} requests, {failed:.1%} failed, p99 {p99_ms:.0f} ms"

    versions = describe(plan.new, traffic.new), describe(plan.old, traffic.old)
    return f"{percent} %: {'; '.join(versions)}"
