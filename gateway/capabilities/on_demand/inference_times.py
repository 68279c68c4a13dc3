"""The last inference of a model on a replica, by Triton's statistics: others than this gateway may use it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from gateway.errors import GatewayError
from gateway.fleet.replica import Replica
from gateway.fleet.transports import request_json, triton_model_path
from gateway.triton.request_target import RequestTarget

log = logging.getLogger(__name__)

STATISTICS_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True)
class LastInference:
    """The time of an inference, by the clocks of the replica and of this process."""

    timestamp_ms: int
    at: float


class InferenceTimes:
    """The last known inference of each model on each replica."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], LastInference] = {}

    async def read(self, replica: Replica, model: str) -> float:
        """Return when the model last ran there, by `time.perf_counter`; -inf if that is not known."""
        target = RequestTarget(model, timeout_s=STATISTICS_TIMEOUT_S)
        try:
            path = f"{triton_model_path(model)}/stats"
            document = await request_json(replica, target, b"GET", path)
        except GatewayError as exc:
            log.debug("the statistics of %s on %s cannot be read: %s", model, replica.name, exc)
            return -inf
        key = (replica.name, model)
        timestamp_ms = parse_last_inference(document)
        known = update_last_inference(
            self._known.get(key), timestamp_ms, now=time.perf_counter(), wall_clock_s=time.time()
        )
        self._known[key] = known
        return known.at


def parse_last_inference(document: Any) -> int:
    """Return the time of the last inference in Triton's statistics of a model, in ms; 0 for none."""
    match document:
        case {"model_stats": list(versions)}:
            times = (each.get("last_inference") for each in versions if isinstance(each, dict))
            return max((value for value in times if isinstance(value, int)), default=0)
    return 0


def update_last_inference(
    known: LastInference | None, timestamp_ms: int, *, now: float, wall_clock_s: float
) -> LastInference:
    """Return the time of an inference by this process's clock.

    Only for the first reading, the clocks of the replica and of this machine are trusted to agree: an
    inference that is new in a later reading ran since the previous one, whatever its timestamp is.
    """
    if known is not None:
        return known if known.timestamp_ms == timestamp_ms else LastInference(timestamp_ms, now)
    if not timestamp_ms:
        return LastInference(0, -inf)
    return LastInference(timestamp_ms, now - max(wall_clock_s - timestamp_ms / 1000, 0.0))
