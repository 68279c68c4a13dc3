"""A client connection with one exchange at a time: its transport, deadline and back-pressure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Final, cast

from gateway.errors import BadUpstream, DeadlinePassed, Unavailable
from gateway.http_client.response import BODY, DONE, HEAD, IDLE, ResponseParser

Buffer = bytes | memoryview

RESPONSE_HIGH_WATER_BYTES: Final = 256 * 1024
COALESCE_REQUEST_UNDER_BYTES: Final = 64 * 1024


class RequestNotSent(Unavailable):
    """The request did not reach the server, so it cannot have run and may be sent to another.

    `is_refused` means that nothing listens there; otherwise the connection timed out.
    """

    def __init__(self, message: str, *, is_refused: bool = True) -> None:
        super().__init__(message)
        self.is_refused = is_refused


class UpstreamConnection(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport
        self.response = ResponseParser()
        self.idle_since = 0.0
        self._is_request_sent = True
        self._error: BaseException | None = None  # the exchange has failed
        self._read_waiter: asyncio.Future[None] | None = None
        self._write_waiter: asyncio.Future[None] | None = None
        self._is_reading_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._deadline = 0.0
        self._timeout_s = 0.0
        self._on_closed: Callable[[], None] | None = None

    # Called by the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response.state is IDLE:
            self.abort()  # unsolicited or late data must not become the response to a later request
            return
        try:
            response.feed(data)
        except BadUpstream as error:
            self.fail(error)
            return
        if response.buffered_bytes > RESPONSE_HIGH_WATER_BYTES and not self._is_reading_paused:
            self._is_reading_paused = True
            self._transport.pause_reading()
        self._wake_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        try:
            self.response.feed_end(exc)
        except BadUpstream as error:
            self.fail(error)
        self._wake_reader()
        self.resume_writing()
        if self._on_closed is not None:
            self._cancel_timer()
            self._on_closed()
        self.response.release()

    def pause_writing(self) -> None:
        if self._write_waiter is None:
            self._write_waiter = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._write_waiter is not None and not self._write_waiter.done():
            self._write_waiter.set_result(None)
        self._write_waiter = None

    # An exchange.

    @property
    def is_usable(self) -> bool:
        return self.response.can_keep_alive and not self._transport.is_closing()

    def begin_request(self, timeout_s: float) -> None:
        self.response.begin()
        self._is_request_sent = False
        self._error = None
        self.set_timeout(timeout_s)

    def send(self, head: bytes, body: bytes | list[Buffer]) -> None:
        """Send a request; a small one in one write, and so in one packet."""
        self._is_request_sent = True
        if self._transport.is_closing():
            return
        if isinstance(body, list):
            self._transport.writelines([head, *body])
        elif len(body) < COALESCE_REQUEST_UNDER_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    async def send_chunks(
        self, head: bytes, body: AsyncIterator[bytes], *, is_chunked: bool
    ) -> None:
        """Send a request whose body arrives bit by bit. An error of the body ends the exchange."""
        self._write(head)
        try:
            async for data in body:
                if data:
                    self._write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)
                    if self._write_waiter is not None:
                        await self._write_waiter
                    self.raise_if_failed()
            if is_chunked:
                self._write(b"0\r\n\r\n")
            self._is_request_sent = True
        except Exception as exc:  # noqa: BLE001 - whoever waits for the response raises it
            self.fail(exc)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    async def wait_for_head(self) -> None:
        """Wait until the head of the response has arrived. Raises `BadUpstream` or `DeadlinePassed`."""
        while self.response.state is HEAD and self._error is None:
            await self._wait_for_data()
        self.raise_if_failed()

    async def next_chunk(self) -> bytes:
        """Return the body received since the last call; empty at its end."""
        response = self.response
        while not response.chunks and response.state is BODY and self._error is None:
            await self._wait_for_data()
        if not response.chunks:
            self.raise_if_failed()
        return self.take_buffered()

    def take_buffered(self) -> bytes:
        data = self.response.take()
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._transport.resume_reading()
        return data

    def raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    def end_request(self) -> bool:
        """End the exchange; return whether the connection may be used again, and close it otherwise."""
        is_reusable = (
            self.response.state is DONE
            and self._is_request_sent
            and self.is_usable
            # Unsent or unread data of this exchange would corrupt the next one.
            and not self._is_reading_paused
            and self._transport.get_write_buffer_size() == 0
        )
        self.response.end()
        if not is_reusable:
            self.abort()
        return is_reusable

    def abort(self) -> None:
        self.response.can_keep_alive = False
        self._cancel_timer()
        self._transport.abort()

    def close(self) -> None:
        self._cancel_timer()
        self._transport.close()

    def fail(self, error: BaseException) -> None:
        """End the exchange with an error, which pending reads and writes raise."""
        if self.response.is_receiving and self._error is None:
            self._error = error
        self.abort()
        self._wake_reader()
        self.resume_writing()

    def _wait_for_data(self) -> asyncio.Future[None]:
        self._read_waiter = self._loop.create_future()
        return self._read_waiter

    def _wake_reader(self) -> None:
        if self._read_waiter is not None and not self._read_waiter.done():
            self._read_waiter.set_result(None)

    # Deadlines.

    def set_timeout(self, timeout_s: float) -> None:
        """Limit the wait for the next data to this time from now."""
        self._timeout_s = timeout_s
        self._deadline = self._loop.time() + timeout_s
        if self._timer is None or self._timer_due > self._deadline:
            self._start_timer()

    def _start_timer(self) -> None:
        self._cancel_timer()
        self._timer_due = self._deadline
        self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_deadline(self) -> None:
        self._timer = None
        if not self.response.is_receiving or self._error is not None:
            return
        if self._loop.time() < self._deadline:
            self._start_timer()
            return
        error = DeadlinePassed(round(self._timeout_s, 3))
        if self.response.state is HEAD and self._is_request_sent:
            self._error = error  # the connection stays open: the server works on the request
            self._wake_reader()
        else:
            self.fail(error)

    @property
    def is_work_pending(self) -> bool:
        """Whether the deadline has passed, and the server works on the request as before."""
        return isinstance(self._error, DeadlinePassed) and self.is_usable

    def wait_for_end(self, timeout_s: float, on_closed: Callable[[], None]) -> None:
        """Close the connection when the server answers a request whose deadline has passed, or then."""
        self.response.end()
        self._on_closed = on_closed
        self._timer = self._loop.call_later(timeout_s, self.abort)
