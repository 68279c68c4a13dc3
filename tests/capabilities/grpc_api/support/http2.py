"""A client that writes HTTP/2 frames as it likes (RFC 9113), to be a bad gRPC client."""

from __future__ import annotations

import re
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from tests.support.wait import TIMEOUT_S

if TYPE_CHECKING:
    from typing_extensions import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA = 0
HEADERS = 1
RST_STREAM = 3
SETTINGS = 4
PING = 6
GOAWAY = 7
WINDOW_UPDATE = 8
END_STREAM = 0x1
END_HEADERS = 0x4
ACK = 0x1
CANCEL = 8
# The server then writes every field of a header as it is (RFC 9113, section 6.5.2).
NO_HEADER_TABLE = struct.pack("!HI", 1, 0)
MAX_FRAME_BYTES = 16_384
UNFINISHED_MESSAGES = 100
UNFINISHED_MIB = 700  # of all of them
WINDOW_BYTES = 65_535  # of a connection and of a stream, until the server opens them
INITIAL_WINDOW = 4  # the setting of new streams


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


class Http2Connection:
    """A connection to a gRPC server."""

    def __init__(self, address: str, source: str = "") -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S, (source, 0))
        self._buffer = b""
        self._next_stream = 1
        self._socket.sendall(PREFACE + encode_frame(SETTINGS, 0, 0, NO_HEADER_TABLE))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a read in another thread
        self._socket.close()

    def send(self, *frames: bytes) -> None:
        self._socket.sendall(b"".join(frames))

    def start_call(self, method: str, **metadata: str) -> int:
        """Send the header of a call; return its stream."""
        stream = self._next_stream
        self.send(self.header(method, **metadata))
        return stream

    def header(self, method: str, **metadata: str) -> bytes:
        """A HEADERS frame on a new stream."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "localhost",
            "te": "trailers",
            "content-type": "application/grpc",
            **{name.replace("_", "-"): value for name, value in metadata.items()},
        }
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        block = b"".join(encode_header(name, value) for name, value in fields.items())
        return encode_frame(HEADERS, END_HEADERS, stream, block)

    def call(self, method: str, message: bytes = b"") -> bytes:
        """The frames of a complete call on a new stream."""
        stream = self._next_stream
        data = encode_frame(DATA, END_STREAM, stream, encode_message(message))
        return self.header(method) + data

    def send_data(self, stream: int, data: bytes, *, is_last: bool = False) -> None:
        """Send data without waiting for the server's flow control."""
        pieces = [
            data[start : start + MAX_FRAME_BYTES] for start in range(0, len(data), MAX_FRAME_BYTES)
        ]
        for number, piece in enumerate(pieces):
            flags = END_STREAM if is_last and number == len(pieces) - 1 else 0
            self.send(encode_frame(DATA, flags, stream, piece))

    def send_as_allowed(self, stream: int, data: bytes) -> int:
        """Send data on the only stream of the connection as the server reads it; return its status."""
        whole = WINDOW_BYTES
        one = WINDOW_BYTES
        initial = WINDOW_BYTES
        sent = 0
        while True:
            size = min(whole, one, MAX_FRAME_BYTES, len(data) - sent)
            if size > 0:
                self.send(encode_frame(DATA, 0, stream, data[sent : sent + size]))
                sent += size
                whole, one = whole - size, one - size
                continue
            frame = self.read_frame()
            if frame is None:
                raise ConnectionError("the server closed the connection")
            if frame.kind == HEADERS and (status := find_status(frame)) is not None:
                return status
            if frame.kind == WINDOW_UPDATE:
                more = int.from_bytes(frame.payload, "big")
                whole, one = (whole, one + more) if frame.stream else (whole + more, one)
            elif frame.kind == SETTINGS and not frame.flags & ACK:
                changed = dict(struct.iter_unpack("!HI", frame.payload)).get(
                    INITIAL_WINDOW, initial
                )
                one, initial = one + changed - initial, changed
                self.send(encode_frame(SETTINGS, ACK, 0, b""))
            elif frame.kind == PING and not frame.flags & ACK:
                self.send(encode_frame(PING, ACK, 0, frame.payload))

    def read_frame(self, timeout_s: float = TIMEOUT_S) -> Frame | None:
        """The next frame; None when the server has closed the connection. Raises `TimeoutError`."""
        self._socket.settimeout(timeout_s)
        with suppress(ConnectionError):
            header = self._read(9)
            if len(header) == 9:
                length = int.from_bytes(header[:3], "big")
                kind, flags, stream = struct.unpack("!BBI", header[3:])
                return Frame(kind, flags, stream, self._read(length))
        return None

    def wait_for(self, kind: int, timeout_s: float = TIMEOUT_S) -> Frame:
        """Read until a frame of this kind; settings are confirmed on the way."""
        deadline = time.monotonic() + timeout_s
        while (frame := self.read_frame(max(deadline - time.monotonic(), 0.01))) is not None:
            if frame.kind == SETTINGS and not frame.flags & ACK:
                with suppress(ConnectionError):  # it may have sent all, and gone
                    self.send(encode_frame(SETTINGS, ACK, 0, b""))
            if frame.kind == kind:
                return frame
        raise ConnectionError("the server closed the connection")

    def wait_for_status(self, timeout_s: float = TIMEOUT_S) -> int:
        """Read until a call ends; return its status."""
        while True:
            status = find_status(self.wait_for(HEADERS, timeout_s))
            if status is not None:
                return status

    def _read(self, length: int) -> bytes:
        while len(self._buffer) < length:
            chunk = self._socket.recv(65_536)
            if not chunk:
                return b""
            self._buffer += chunk
        data, self._buffer = self._buffer[:length], self._buffer[length:]
        return data


def find_status(frame: Frame) -> int | None:
    found = re.search(rb"grpc-status[\1\2](\d+)", frame.payload)
    return None if found is None else int(found[1])


@contextmanager
def unfinished_messages(address: str, method: str, **metadata: str) -> Iterator[list[int]]:
    """Calls that send all of a message but its last byte; the statuses of those that end before."""
    statuses: list[int] = []
    message = encode_message(bytes(UNFINISHED_MIB * 1024**2 // UNFINISHED_MESSAGES))[:-1]

    def send(client: Http2Connection) -> None:
        with suppress(OSError):  # closed at the end
            stream = client.start_call(method, **metadata)
            statuses.append(client.send_as_allowed(stream, message))

    with ThreadPoolExecutor(UNFINISHED_MESSAGES) as executor, ExitStack() as stack:
        for _ in range(UNFINISHED_MESSAGES):
            client = stack.enter_context(Http2Connection(address))
            executor.submit(send, client)
        yield statuses


def encode_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack("!BBI", kind, flags, stream) + payload


def encode_header(name: str, value: str) -> bytes:
    """A literal field without indexing (RFC 7541, section 6.2.2), below 127 characters each."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


def encode_message(
    message: bytes, length: int | None = None, *, is_compressed: bool = False
) -> bytes:
    """A gRPC message with its prefix, which may claim another length."""
    return struct.pack("!BI", is_compressed, len(message) if length is None else length) + message
