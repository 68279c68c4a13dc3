"""The queue of events, which is bounded, and the tasks that send them to the sink."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import anyio

from gateway.capabilities.samples.events import REQUEST_TYPE, SampleEvent, can_have_error, redact
from gateway.capabilities.samples.grpc_messages import convert_message, is_message
from gateway.capabilities.samples.sinks import EventsNotSent, FolderSink, HttpSink
from gateway.errors import GatewayError
from gateway.services import Services
from gateway.tasks import cancel_tasks, repeat
from gateway.telemetry.metrics import MetricFactory
from gateway.tensors.signature import Signature

log = logging.getLogger(__name__)

MAX_QUEUE_BYTES: Final = 16 << 20
# More data is changed in a thread: in a gRPC message, it can be so many numbers, of eight bytes each.
MAX_INLINE_CHANGE_BYTES: Final = 4 << 10
MAX_ATTEMPTS: Final = 5
PAUSE_S: Final = 2.0  # between two attempts
# Events that wait when the gateway ends are sent within this time.
CLOSE_TIMEOUT_S: Final = 2.0
REPORT_INTERVAL_S: Final = 60.0  # between two lines in the log
DROP_REASONS: Final = ("queue_full", "refused", "unavailable", "folder_full", "shutdown")


class EventQueue:
    """The events that wait for the sink.

    They and the bodies that are being recorded hold at most `MAX_QUEUE_BYTES`.
    """

    def __init__(self, create: MetricFactory, max_bytes: int = MAX_QUEUE_BYTES) -> None:
        self.sent = create.counter(
            "gateway_sample_events_sent_total", "Events of samples that the sink accepted."
        )
        self.failed = create.counter(
            "gateway_sample_failures_total", "Attempts to send events of samples that failed."
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
        self._memory = create.level(
            "gateway_sample_queue_bytes", "Memory of the samples of a process, 16 MiB at most."
        )
        self._events: asyncio.Queue[SampleEvent] = asyncio.Queue()
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self.unsent = 0

    def reserve(self, size_bytes: int) -> bool:
        """Reserve memory, which is to be released; return False if there is no room."""
        if self._held_bytes + size_bytes > self._max_bytes:
            return False
        self._held_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        self._held_bytes -= size_bytes

    def put(self, events: Sequence[SampleEvent]) -> None:
        """Add events, for which their sizes are reserved."""
        self._count_unsent(len(events))
        for event in events:
            self._events.put_nowait(event)

    def drop(self, count: int, reason: str = "queue_full") -> None:
        self._dropped[reason].inc(count)

    @asynccontextmanager
    async def take(self, enough_bytes: int) -> AsyncIterator[Sequence[SampleEvent]]:
        """Wait for events and yield some, which hold their memory until the end of the block.

        With the last one, they have at least so many bytes of data, unless there are no more.
        """
        taken = [await self._events.get()]
        data_bytes = len(taken[0].data)
        while data_bytes < enough_bytes and not self._events.empty():
            taken.append(self._events.get_nowait())
            data_bytes += len(taken[-1].data)
        try:
            yield taken
        finally:
            self.release(sum(event.size_bytes for event in taken))
            self._count_unsent(-len(taken))
            for _ in taken:
                self._events.task_done()

    async def wait_until_empty(self) -> None:
        await self._events.join()

    def _count_unsent(self, count: int) -> None:
        self.unsent += count
        self._depth.set(self.unsent)
        self._memory.set(self._held_bytes)


class EventSender:
    """Takes events from the queue, removes what must not be seen, and sends them."""

    def __init__(
        self,
        queue: EventQueue,
        sink: HttpSink | FolderSink,
        services: Services,
        redacted: frozenset[str],
    ) -> None:
        self._queue = queue
        self._sink = sink
        self._services = services
        self._redacted = redacted
        self._next_report_at = 0.0

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        loops = (repeat("samples", self._send_next) for _ in range(self._sink.parallel_sends))
        tasks = list(map(asyncio.create_task, loops))
        try:
            yield
            with anyio.move_on_after(CLOSE_TIMEOUT_S):
                await self._queue.wait_until_empty()
        finally:
            self._queue.drop(self._queue.unsent, "shutdown")
            await cancel_tasks(tasks)

    async def _send_next(self) -> None:
        async with self._queue.take(self._sink.bytes_per_send) as events:
            await self._send([await self._prepare(event) for event in events])
        await asyncio.sleep(self._sink.interval_s)

    async def _prepare(self, event: SampleEvent) -> SampleEvent:
        """Return an event without what must not be seen, and with a document in place of a gRPC message."""
        # Without a signature, the model can have all of these tensors.
        hidden = own = self._redacted
        if hidden and (signature := await self._read_signature(str(event.attributes["model"]))):
            is_request = event.attributes["type"] == REQUEST_TYPE
            own = self._redacted.intersection(signature.inputs if is_request else signature.outputs)
            hidden = self._redacted.intersection((*signature.inputs, *signature.outputs))
        if hidden and can_have_error(event):
            # An error can quote a value, and a body that does not fit the model can have it anywhere.
            return event.without_data()
        if is_message(event):
            change = convert_message
        elif own:
            change = redact
        else:
            return event
        if len(event.data) <= MAX_INLINE_CHANGE_BYTES:
            await asyncio.sleep(0)  # thousands of events can follow each other
            return change(event, own)
        return await asyncio.to_thread(change, event, own)

    async def _read_signature(self, model: str) -> Signature | None:
        """Return the signature of a model that is loaded: to read it would load another one."""
        with suppress(GatewayError):
            if self._services.pool.is_loaded(model):
                return await self._services.signatures.get_signature(model)
        return None

    async def _send(self, events: Sequence[SampleEvent]) -> None:
        for _ in range(MAX_ATTEMPTS):
            try:
                await self._sink.send(events)
            except EventsNotSent as exc:
                reason = exc.reason
                self._report(str(exc))
                self._queue.failed.inc()
                if exc.is_final:
                    break
                await asyncio.sleep(PAUSE_S)
            else:
                self._queue.sent.inc(len(events))
                return
        self._queue.drop(len(events), reason)

    def _report(self, problem: str) -> None:
        now = time.monotonic()
        if now >= self._next_report_at:
            self._next_report_at = now + REPORT_INTERVAL_S
            log.warning("samples are not delivered: %s", problem)
