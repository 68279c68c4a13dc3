"""The worker process of `gateway.decoding.pool`, which decodes large or expensive bodies.

It reads calls from a socket and sends a result or an exception for each. Its memory is limited, and its
priority is lower than that of the gateway and Triton. A timer ends it if a call exceeds its deadline,
even if the gateway has crashed.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gateway.errors import GatewayError

NICENESS: Final = 5
DEADLINE_GRACE_S: Final = 1.0  # the gateway itself kills the process at the deadline
FRAME_COUNT: Final = struct.Struct("<I")
FRAME_SIZE: Final = struct.Struct("<Q")


def pack_message(message: Any) -> list[bytes | memoryview]:
    """Return the frames of a message: a header with the size of each frame, the pickle, and its buffers.

    Arrays are not copied into the pickle (PEP 574).
    """
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    frames: list[bytes | memoryview] = [body, *(buffer.raw() for buffer in buffers)]
    sizes = b"".join(FRAME_SIZE.pack(len(frame)) for frame in frames)
    return [FRAME_COUNT.pack(len(frames)) + sizes, *frames]


def unpack_message(frames: list[bytearray]) -> Any:
    # The message's arrays share the frames' memory.
    return pickle.loads(frames[0], buffers=frames[1:])  # noqa: S301 - the peer is our own process


def unpack_frame_sizes(data: bytes | bytearray) -> list[int]:
    return [size for (size,) in FRAME_SIZE.iter_unpack(data)]


def receive_message(connection: socket.socket) -> Any:
    """Return the next message. Raises `EOFError` if the gateway closed the socket."""
    (count,) = FRAME_COUNT.unpack(read_exactly(connection, FRAME_COUNT.size))
    sizes = unpack_frame_sizes(read_exactly(connection, count * FRAME_SIZE.size))
    return unpack_message([read_exactly(connection, size) for size in sizes])


def read_exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data


class WorkerOutOfMemory(Exception):
    """The call exceeds the worker's memory limit."""


class WorkerCallError(Exception):
    """The call raised an unexpected exception, which is a bug of the gateway."""


def run_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(*arguments)
    except GatewayError as exc:
        return False, exc
    except (MemoryError, SystemError):  # some libraries raise SystemError when out of memory
        return False, WorkerOutOfMemory()
    except Exception as exc:  # noqa: BLE001 - the border of the process: the gateway logs it
        return False, WorkerCallError(f"{type(exc).__name__}: {exc}")


def serve_calls(connection: socket.socket) -> None:
    while True:
        try:
            function, arguments, timeout_s = receive_message(connection)
        except EOFError:
            return
        # SIGALRM ends the process.
        signal.setitimer(signal.ITIMER_REAL, timeout_s + DEADLINE_GRACE_S)
        frames = pack_message(run_call(function, arguments))
        signal.setitimer(signal.ITIMER_REAL, 0)
        for frame in frames:
            connection.sendall(frame)
        del arguments, frames
        gc.collect()


def data_segment_bytes() -> int:
    # RLIMIT_DATA limits this number (proc(5), statm).
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def main() -> None:
    """Serve calls. The arguments are the socket's file descriptor and the memory limit in bytes."""
    descriptor, max_memory_bytes = map(int, sys.argv[1:])
    os.nice(NICENESS)
    # Parsed documents have no reference cycles, and the garbage collector makes parsing five times slower.
    gc.disable()
    gc.freeze()
    # RLIMIT_AS is unsuitable: NumPy's libraries reserve much more address space than they use.
    resource.setrlimit(resource.RLIMIT_DATA, (data_segment_bytes() + max_memory_bytes,) * 2)
    with socket.socket(fileno=descriptor) as connection:
        serve_calls(connection)
