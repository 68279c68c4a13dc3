"""The choice of the requests that are sampled, and of the bodies that must not be seen."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.capabilities.samples.delivery import EventSender
from gateway.capabilities.samples.events import build_events
from gateway.http_client.response import Headers
from gateway.media_types import EVENT_STREAM, NDJSON
from gateway.services import Services
from gateway.telemetry.recording import Recording
from gateway.telemetry.request_info import RequestScope

OPT_OUT_HEADER: Final = b"x-no-sample"
# Statuses without an inference: a job was accepted, or the caller may not use the model.
UNSAMPLED_STATUSES: Final = (202, 401, 403)
ERROR_STATUS: Final = 400


@dataclass(frozen=True)
class SampleRule:
    """The share of a model's requests that is sampled, and what must not be seen."""

    rate: float = 0.0
    hides_inputs: bool = False
    hides_outputs: bool = False


class SampleRecorder:
    """Decides which requests are sampled, and passes on their events."""

    def __init__(
        self, services: Services, sender: EventSender, rate: float, redacted: frozenset[str]
    ) -> None:
        self._services = services
        self._sender = sender
        self._memory = sender.memory
        self._rate = rate
        # The highest rate of a model so far: a request is recorded before its model is known.
        self._highest_rate = rate
        self._redacted = redacted  # names of models and tensors

    def start(self, scope: RequestScope) -> Recording | None:
        draw = random.random()  # noqa: S311 - no secret
        if draw >= self._highest_rate or scope["method"] != "POST":
            return None
        if any(name == OPT_OUT_HEADER for name, _ in scope["headers"]):
            return None
        return Recording(self._memory, scope, draw)

    def end(self, scope: RequestScope, recording: Recording | None, status: int) -> None:
        """Queue the events of a request, if it is sampled by the rate of its model."""
        info = scope["request_info"]
        is_inference = info.model and info.management_call is None and scope["method"] == "POST"
        rule = self._find_rule(info.model) if is_inference else SampleRule()
        self._highest_rate = max(self._highest_rate, rule.rate)
        if recording is None:
            return
        if recording.draw >= rule.rate or status in UNSAMPLED_STATUSES:
            recording.release()
        elif recording.is_dropped:
            recording.release()
            self._sender.drop(2)
        else:
            # An error can quote a value, and a body that does not fit the model can have it anywhere.
            is_uncertain = status >= ERROR_STATUS and (rule.hides_inputs or rule.hides_outputs)
            hides_stream = rule.hides_inputs and is_stream(recording.response.headers)
            events = build_events(
                scope,
                recording,
                status,
                hides_request=rule.hides_inputs or is_uncertain,
                hides_response=rule.hides_outputs or is_uncertain or hides_stream,
            )
            self._sender.put(events)

    def _find_rule(self, model: str) -> SampleRule:
        """Return the rule of a model; no samples until its config was read, which may say so."""
        services = self._services
        redacted = self._redacted
        if not services.pool.is_listed(model):  # a model of another server can have any tensors
            return SampleRule(self._rate, bool(redacted), bool(redacted))
        signature = services.signatures.find_or_start_reading(model)
        if signature is None:
            return SampleRule()
        is_redacted = model in redacted
        return SampleRule(
            parse_rate(signature.parameters, self._rate),
            is_redacted or not redacted.isdisjoint(signature.inputs),
            is_redacted or not redacted.isdisjoint(signature.outputs),
        )


def parse_rate(parameters: Mapping[str, str], default: float) -> float:
    try:
        return float(parameters.get("gateway.sample_rate", default))
    except ValueError:
        return 0.0


def is_stream(headers: Headers) -> bool:
    """Return whether a response is a stream, whose errors have no status."""
    types = (value.decode("latin-1") for name, value in headers if name == b"content-type")
    return next(types, "").startswith((EVENT_STREAM, NDJSON))
