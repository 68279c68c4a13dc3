"""The worker process of `gateway.capacity.decoding`, which decodes large or expensive bodies.

It reads calls from a socket and sends a result or an exception for each. Its memory is limited, and its
priority is lower than that of the gateway and Triton. A timer ends it if a call exceeds its deadline,
even if the gateway has crashed.

A message is a pickle, and a frame for each of its large contents. These are not copied into the pickle
or out of it (PEP 574), because copying them at once would hold the event loop.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from gateway.errors import GatewayError
from gateway.memory import limit_heap_growth, return_free_memory
from gateway.tensors.dtypes import build_bytes_array

FRAME_COUNT: Final = struct.Struct("<I")
FRAME_SIZE: Final = struct.Struct("<Q")
MIN_FRAME_BYTES: Final = 64 << 10
NICENESS: Final = 5
DEADLINE_GRACE_S: Final = 1.0  # the gateway itself kills the process at the deadline
MAX_READ_BYTES: Final = 256 << 10


# The messages.


class MessagePickler(pickle.Pickler):
    """A pickler that calls `buffer_callback` with large bytes, and with the data of arrays."""

    def persistent_id(self, obj: Any) -> pickle.PickleBuffer | None:
        if isinstance(obj, (bytes, bytearray)) and len(obj) >= MIN_FRAME_BYTES:
            return pickle.PickleBuffer(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Return how to restore an array of BYTES, whose elements the pickler would store one by one."""
        if not isinstance(obj, np.ndarray) or obj.dtype.kind != "O":
            return NotImplemented
        values = obj.ravel().tolist()
        if not all(isinstance(value, bytes) for value in values):
            return NotImplemented
        sizes = np.array(list(map(len, values)), np.uint64)
        return restore_bytes_array, (obj.shape, sizes, b"".join(values))


class MessageUnpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return pid  # the frame


def restore_bytes_array(shape: tuple[int, ...], sizes: np.ndarray, data: bytes) -> np.ndarray:
    values: list[bytes] = []
    start = 0
    for size in sizes.tolist():
        values.append(data[start : start + size])
        start += size
    return build_bytes_array(values).reshape(shape)


def pack_message(message: Any) -> list[bytes | memoryview]:
    """Return the frames of a message: a header with the size of each frame, the pickle, and its contents."""
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    MessagePickler(file, protocol=5, buffer_callback=buffers.append).dump(message)
    frames: list[bytes | memoryview] = [file.getvalue(), *(buffer.raw() for buffer in buffers)]
    sizes = b"".join(FRAME_SIZE.pack(len(frame)) for frame in frames)
    return [FRAME_COUNT.pack(len(frames)) + sizes, *frames]


def unpack_message(frames: Sequence[bytes]) -> Any:
    """Return the message, whose large contents are the frames themselves.

    It runs Python code for each element of an array of BYTES, so that it does not hold the GIL.
    """
    return MessageUnpickler(io.BytesIO(frames[0]), buffers=frames[1:]).load()


def unpack_frame_sizes(data: bytes) -> list[int]:
    return [size for (size,) in FRAME_SIZE.iter_unpack(data)]


# The process.


def receive_message(connection: socket.socket) -> Any:
    """Return the next message. Raises `EOFError` if the gateway closed the socket."""
    (count,) = FRAME_COUNT.unpack(read_exactly(connection, FRAME_COUNT.size))
    sizes = unpack_frame_sizes(read_exactly(connection, count * FRAME_SIZE.size))
    return unpack_message([read_exactly(connection, size) for size in sizes])


def read_exactly(connection: socket.socket, size: int) -> bytes:
    file = io.BytesIO()
    while (missing := size - file.tell()) > 0:
        data = connection.recv(min(missing, MAX_READ_BYTES))
        if not data:
            raise EOFError
        file.write(data)
    return file.getvalue()


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
        return_free_memory()


def data_segment_bytes() -> int:
    # RLIMIT_DATA limits this number (proc(5), statm).
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def main() -> None:
    """Serve calls. The arguments are the socket's file descriptor and the memory limit in bytes."""
    descriptor, max_memory_bytes = map(int, sys.argv[1:])
    os.nice(NICENESS)
    limit_heap_growth()
    # Parsed documents have no reference cycles, and the garbage collector makes parsing five times slower.
    gc.disable()
    gc.freeze()
    # RLIMIT_AS is unsuitable: NumPy's libraries reserve much more address space than they use.
    resource.setrlimit(resource.RLIMIT_DATA, (data_segment_bytes() + max_memory_bytes,) * 2)
    with socket.socket(fileno=descriptor) as connection:
        serve_calls(connection)
