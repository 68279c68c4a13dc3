"""The delivery of events: those that wait, in bounded memory, and the tasks that send them."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import SplitResult

import anyio

from gateway.capabilities.samples.events import SampleEvent, encode_event_headers
from gateway.errors import GatewayError
from gateway.http_client.client import HttpClient
from gateway.tasks import cancel_tasks, repeat
from gateway.telemetry.metrics import MetricFactory
from gateway.telemetry.recording import RecorderMemory

log = logging.getLogger(__name__)

# The attributes of an event hold about this much memory.
EVENT_BYTES: Final = 4096
PARALLEL_SENDS: Final = 8
SEND_TIMEOUT_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 64 << 10
SUCCESS_STATUSES: Final = range(200, 300)
# Events that wait when the gateway ends are sent within this time.
CLOSE_TIMEOUT_S: Final = 2.0
REPORT_INTERVAL_S: Final = 60.0  # between two lines in the log
DROP_REASONS: Final = ("queue_full", "refused", "unavailable", "shutdown")


class EventSender:
    """Sends events to an address, each in a request, in the binary mode of CloudEvents."""

    def __init__(self, address: SplitResult, token: str, create: MetricFactory) -> None:
        self.memory = RecorderMemory()  # of the events, and of bodies that are being recorded
        query = f"?{address.query}" if address.query else ""
        self._target = f"{address.path or '/'}{query}".encode()
        self._headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
        is_encrypted = address.scheme == "https"
        self._client = HttpClient(
            address.hostname or "",
            address.port or (443 if is_encrypted else 80),
            tls=ssl.create_default_context() if is_encrypted else None,
            connect_timeout_s=SEND_TIMEOUT_S,
        )
        self._events: asyncio.Queue[SampleEvent] = asyncio.Queue()
        self._unsent = 0
        self._next_report_at = 0.0
        self._sent = create.counter(
            "gateway_sample_events_sent_total", "Events of samples that the sink accepted."
        )
        dropped = create.counter(
            "gateway_sample_events_dropped_total",
            f"Events of samples that were dropped, by reason: {', '.join(DROP_REASONS)}.",
            ("reason",),
        )
        # A series that exists from the start makes its first event visible to increase().
        self._dropped = {reason: dropped.labels(reason) for reason in DROP_REASONS}
        self._depth = create.level(
            "gateway_sample_queue_events", "Events of samples that the sink has not accepted yet."
        )
        self._held = create.level(
            "gateway_sample_queue_bytes", "Memory of the samples of a process, 16 MiB at most."
        )

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        loops = (repeat("samples", self._send_next) for _ in range(PARALLEL_SENDS))
        tasks = list(map(asyncio.create_task, loops))
        try:
            yield
            with anyio.move_on_after(CLOSE_TIMEOUT_S):
                await self._events.join()
        finally:
            self._dropped["shutdown"].inc(self._unsent)
            await cancel_tasks(tasks)
            self._client.close()

    def put(self, events: Sequence[SampleEvent]) -> None:
        """Add events, or drop them if there is no room."""
        if not self.memory.reserve(len(events) * EVENT_BYTES):
            self.drop(len(events))
            for event in events:
                event.body.release()
            return
        for event in events:
            self._events.put_nowait(event)
        self._count_unsent(len(events))

    def drop(self, count: int) -> None:
        self._dropped["queue_full"].inc(count)

    async def _send_next(self) -> None:
        event = await self._events.get()
        try:
            await self._send(event)
        finally:
            event.body.release()
            self.memory.release(EVENT_BYTES)
            self._count_unsent(-1)
            self._events.task_done()

    async def _send(self, event: SampleEvent) -> None:
        """Send an event once: samples are few, and one that is lost is counted."""
        try:
            response = await self._client.request(
                b"POST",
                self._target,
                headers=[*encode_event_headers(event.attributes), *self._headers],
                body=event.body.data,
                timeout_s=SEND_TIMEOUT_S,
                max_bytes=MAX_ANSWER_BYTES,
            )
        except GatewayError as exc:
            self._report_drop("unavailable", f"{self._client.authority}: {exc.detail}")
            return
        if response.status in SUCCESS_STATUSES:
            self._sent.inc()
        else:
            self._report_drop("refused", f"the sink answered with status {response.status}")

    def _report_drop(self, reason: str, problem: str) -> None:
        self._dropped[reason].inc()
        now = time.monotonic()
        if now >= self._next_report_at:
            self._next_report_at = now + REPORT_INTERVAL_S
            log.warning("samples are not delivered: %s", problem)

    def _count_unsent(self, count: int) -> None:
        self._unsent += count
        self._depth.set(self._unsent)
        self._held.set(self.memory.held_bytes)
