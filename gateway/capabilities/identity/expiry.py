"""When keys expire: a metric, and a warning each day before."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from typing import Final

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.access.keys import NEVER, KeysFile, find_end
from gateway.messages import format_utc_time
from gateway.repository.shared_state import SharedState
from gateway.tasks import repeat

log = logging.getLogger(__name__)

WARNING_PERIOD: Final = timedelta(days=30)
WARNING_INTERVAL_S: Final = 24 * 3600.0
CHECK_INTERVAL_S: Final = 2.0
LEASE_NAME: Final = "key expiry"


class KeyExpiry(Collector):
    """The ends of keys that expire. A name that has another key, as after a rotation, ends with its last."""

    def __init__(self, keys_file: KeysFile, state: SharedState) -> None:
        self._keys_file = keys_file
        self._state = state
        self._warned_at: dict[str, float] = {}

    def find_ends(self) -> Mapping[str, datetime]:
        ends: dict[str, datetime] = {}
        for caller in self._keys_file.value.callers.values():
            ends[caller.name] = max(ends.get(caller.name, find_end(caller)), find_end(caller))
        return {name: end for name, end in ends.items() if end is not NEVER}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        gauge = GaugeMetricFamily(
            "gateway_key_expires_seconds",
            "Time until the key expires, negative afterwards; absent for one that does not expire.",
            labels=["caller"],
        )
        now = datetime.now(timezone.utc)
        for name, end in self.find_ends().items():
            gauge.add_metric([name], (end - now).total_seconds())
        yield gauge

    async def run(self) -> None:
        async def check() -> None:
            await asyncio.sleep(CHECK_INTERVAL_S)
            if await self._state.renew_lease(LEASE_NAME):  # one process of all that share the state
                self._warn()

        await repeat("key_expiry", check)

    def _warn(self) -> None:
        now = datetime.now(timezone.utc)
        ends = self.find_ends()
        self._warned_at = {name: at for name, at in self._warned_at.items() if name in ends}
        for name, end in ends.items():
            warned_at = self._warned_at.get(name, -math.inf)
            is_near = now < end < now + WARNING_PERIOD
            if is_near and time.monotonic() - warned_at >= WARNING_INTERVAL_S:
                self._warned_at[name] = time.monotonic()
                message = "key %s expires at %s; make another one with triton-gateway key rotate %s"
                log.warning(message, name, format_utc_time(end), name)
