"""The worker process of `gateway.capacity.decoding.pool`, which decodes large or expensive bodies.

It reads calls from a socket and sends a result or an exception for each. Its memory is limited, and its
priority is lower than that of the gateway and Triton. A timer ends it if a call exceeds its deadline,
even if the gateway has crashed.
"""

from __future__ import annotations

import gc
import io
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gateway.capacity.decoding.messages import (
    FRAME_COUNT,
    FRAME_SIZE,
    pack_message,
    unpack_frame_sizes,
    unpack_message,
)
from gateway.errors import GatewayError
from gateway.memory import limit_heap_growth, return_free_memory

NICENESS: Final = 5
DEADLINE_GRACE_S: Final = 1.0  # the gateway itself kills the process at the deadline
MAX_READ_BYTES: Final = 256 << 10


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
