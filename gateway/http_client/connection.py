"""An HTTP/1.1 client connection on httptools, with one exchange at a time.

It is reused only after a complete and valid response (RFC 9112, section 9.3). Every network failure
becomes a gateway error, body iteration included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, cast

import httptools

from gateway.errors import BadUpstream, DeadlinePassed, Unavailable

Headers = list[tuple[bytes, bytes]]
Buffer = bytes | memoryview

RESPONSE_HIGH_WATER_BYTES: Final = 256 * 1024
MAX_RESPONSE_HEADERS: Final = 200
MAX_RESPONSE_HEAD_BYTES: Final = 128 * 1024
# A longer header is not kept by its connection, to be recognized when it is repeated.
MAX_KNOWN_HEADER_BYTES: Final = 2048
RESPONSE_HEADER_END: Final = b"\r\n\r\n"
STATUSES: Final = range(100, 600)  # RFC 9110, section 15
RESPONSE_FRAMING_HEADERS: Final = (b"content-length", b"transfer-encoding")


class RequestNotSent(Unavailable):
    """The request did not reach the server, so it cannot have run and may be sent to another.

    `is_refused` means that nothing listens there; otherwise the connection timed out.
    """

    def __init__(self, message: str, *, is_refused: bool = True) -> None:
        super().__init__(message)
        self.is_refused = is_refused


class ExchangeState(Enum):
    IDLE = auto()  # no request
    HEAD = auto()  # waiting for the header of the response
    BODY = auto()
    DONE = auto()  # the response is complete
    FAILED = auto()  # the response will never be complete


# A request compares a dozen members, and each costs 0.4 µs more if it is read from its class.
IDLE, HEAD, BODY, DONE, FAILED = ExchangeState


@dataclass(frozen=True, slots=True)
class KnownResponse:
    """A response that arrived in one read, and after which the connection persists."""

    header: bytes
    response_bytes: int  # the header and the body
    headers: Headers


class UpstreamConnection(asyncio.Protocol):
    """A connection to a server and its current exchange.

    A response with the header of the last one, byte for byte, is not parsed again.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._state = IDLE
        self._can_keep_alive = True
        self.is_request_sent = True
        self._error: BaseException | None = None
        self._read_waiter: asyncio.Future[None] | None = None
        self._write_waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._deadline = 0.0
        self._timeout_s = 0.0
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        self._is_reading_paused = False
        self._is_close_delimited = False
        self._on_closed: Callable[[], None] | None = None
        self._head_bytes = 0
        self._body_bytes = 0
        # The response in the last read, if the read contained exactly one.
        self._known_response: KnownResponse | None = None
        self.status = 0
        self.headers: Headers = []
        self.idle_since = 0.0

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._state is IDLE:
            self.abort()  # unsolicited or late data must not become the response to a later request
            return
        size = len(data)
        known = self._known_response
        body_bytes = self._body_bytes
        is_first = self._state is HEAD and not self._head_bytes
        if (
            is_first
            and known is not None
            and size == known.response_bytes
            and data.startswith(known.header)
        ):
            self._repeat_response(known, data)
            return
        self._known_response = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self.fail(create_failure("the replica's response is not HTTP/1.1", exc))
        # An endless header or trailer never reaches a callback, so its size is counted here.
        if self._is_receiving and self._body_bytes == body_bytes:
            self._head_bytes += size
            if self._head_bytes > MAX_RESPONSE_HEAD_BYTES:
                self.fail(BadUpstream("the replica's response header is too large"))
        elif is_first and self._state is DONE and self._can_keep_alive:
            self._learn_response(data)

    def _learn_response(self, data: bytes) -> None:
        """Keep the header if the data is one response without chunks, and nothing else."""
        header_bytes = data.find(RESPONSE_HEADER_END) + len(RESPONSE_HEADER_END)
        size = len(data)
        if header_bytes + self._body_bytes == size and header_bytes <= MAX_KNOWN_HEADER_BYTES:
            header = data[:header_bytes]
            self._known_response = KnownResponse(header, size, self.headers)

    def _repeat_response(self, known: KnownResponse, data: bytes) -> None:
        self.headers = known.headers
        # The status line is a part of the header, so that `self.status` is right already.
        self._chunks.append(data[len(known.header) :])
        self._state = DONE
        self._wake_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        self._can_keep_alive = False
        if self._state is BODY and self._is_close_delimited and exc is None:
            self.on_message_complete()  # RFC 9112, section 6.3: the close ends a body without a length
        elif self._is_receiving:
            reason = "the replica closed the connection before its response was complete"
            self.fail(create_failure(reason, exc))
        self._wake_writer()
        if self._on_closed is not None:
            self._cancel_timer()
            self._on_closed()
        # The parser refers to this connection. Collecting that cycle would cost more than the parser's work.
        del self._parser

    def pause_writing(self) -> None:
        if self._write_waiter is None:
            self._write_waiter = self._loop.create_future()

    def resume_writing(self) -> None:
        self._wake_writer()

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if self._state is DONE:
            raise httptools.HttpParserError("an unsolicited second response")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._state is HEAD:  # trailers are ignored
            self.headers.append((name.lower(), value))
            if len(self.headers) > MAX_RESPONSE_HEADERS:
                raise httptools.HttpParserError("too many headers")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status not in STATUSES:
            raise httptools.HttpParserError("an invalid status")
        if self.status < 200:
            return
        if not self._parser.should_keep_alive():
            self._can_keep_alive = False
            self._is_close_delimited = not any(
                name in RESPONSE_FRAMING_HEADERS for name, _ in self.headers
            )
        self._state = BODY
        self._wake_reader()

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered_bytes += len(body)
        self._body_bytes += len(body)
        self._head_bytes = 0
        if (
            self._buffered_bytes > RESPONSE_HIGH_WATER_BYTES
            and not self._is_reading_paused
            and self._transport is not None
        ):
            self._is_reading_paused = True
            self._transport.pause_reading()
        self._wake_reader()

    def on_message_complete(self) -> None:
        if self._state is HEAD:  # an interim response, such as 100 Continue
            self.headers = []
        elif self._state is BODY:
            # A trailer may request a close.
            self._can_keep_alive = self._can_keep_alive and self._parser.should_keep_alive()
            self._state = DONE
            self._wake_reader()

    # The interface for an exchange.

    @property
    def is_usable(self) -> bool:
        return (
            self._can_keep_alive
            and self._transport is not None
            and not self._transport.is_closing()
        )

    @property
    def _is_receiving(self) -> bool:
        return self._state is HEAD or self._state is BODY

    @property
    def is_awaiting_head(self) -> bool:
        return self._state is HEAD

    def begin_request(self, timeout_s: float) -> None:
        self._state = HEAD
        self.is_request_sent = False
        self._error = None
        self._is_close_delimited = False
        self._head_bytes = 0
        self._body_bytes = 0
        self.headers = []
        self.set_timeout(timeout_s)

    def set_timeout(self, timeout_s: float) -> None:
        """Limit the wait for the next data to this time from now.

        A timer per exchange would cost more than reading its response: a running timer is kept, and
        checks the deadline when it fires.
        """
        self._timeout_s = timeout_s
        self._deadline = self._loop.time() + timeout_s
        if self._timer is None or self._timer_due > self._deadline:
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = self._deadline
        self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._is_receiving:
            return
        if self._loop.time() < self._deadline:
            self._start_timer()
            return
        error = DeadlinePassed(round(self._timeout_s, 3))
        if self._state is HEAD and self.is_request_sent:
            self._state = FAILED
            self._error = error
            self._wake_reader()
        else:
            self.fail(error)

    @property
    def is_work_pending(self) -> bool:
        """Return whether the deadline has passed, and the server works on the request as before."""
        return self._state is FAILED and self.is_usable

    def wait_for_end(self, timeout_s: float, on_closed: Callable[[], None]) -> None:
        """Close the connection when the server answers a request whose deadline has passed, or then."""
        self._state = IDLE
        self._on_closed = on_closed
        self._timer = self._loop.call_later(timeout_s, self.abort)

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def write_buffers(self, buffers: Sequence[Buffer]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(buffers)

    async def drain(self) -> None:
        """Wait until the server accepts more data. Raises the error of a failed exchange."""
        if self._write_waiter is not None:
            await self._write_waiter
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        if self._state is FAILED and self._error is not None:
            raise self._error

    async def next_chunk(self) -> bytes:
        """Return the body received since the last call; empty at its end."""
        while not self._chunks and self._state is BODY:
            await self.wait_for_data()
        if not self._chunks:
            self.raise_if_failed()
        return self.take_buffered()

    def take_buffered(self) -> bytes:
        if not self._chunks:
            return b""
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered_bytes = 0
        if self._is_reading_paused and self._transport is not None:
            self._is_reading_paused = False
            self._transport.resume_reading()
        return data

    def unread(self, data: bytes) -> None:
        """Put received data back in front of the rest of the body."""
        self._chunks.insert(0, data)
        self._buffered_bytes += len(data)

    @property
    def is_complete(self) -> bool:
        return self._state is DONE

    def end_request(self) -> bool:
        transport = self._transport
        reusable = (
            self._state is DONE
            and self.is_request_sent
            and self._can_keep_alive
            and transport is not None
            and not transport.is_closing()
            # Unsent or unread data of this exchange would corrupt the next one.
            and not self._is_reading_paused
            and transport.get_write_buffer_size() == 0
        )
        self._state = IDLE
        self._chunks.clear()
        self._buffered_bytes = 0
        if not reusable:
            self.abort()
        return reusable

    def abort(self) -> None:
        self._can_keep_alive = False
        self._cancel_timer()
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        self._cancel_timer()
        if self._transport is not None:
            self._transport.close()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def fail(self, error: BaseException) -> None:
        """End the exchange with an error, which pending reads and writes raise."""
        if self._is_receiving:
            self._state = FAILED
            self._error = error
        self.abort()
        self._wake_reader()
        self._wake_writer()

    def wait_for_data(self) -> asyncio.Future[None]:
        self._read_waiter = self._loop.create_future()
        return self._read_waiter

    def _wake_reader(self) -> None:
        if self._read_waiter is not None and not self._read_waiter.done():
            self._read_waiter.set_result(None)

    def _wake_writer(self) -> None:
        if self._write_waiter is not None and not self._write_waiter.done():
            self._write_waiter.set_result(None)
        self._write_waiter = None


def create_failure(reason: str, cause: BaseException | None) -> BadUpstream:
    error = BadUpstream(reason)
    error.__cause__ = cause
    return error
