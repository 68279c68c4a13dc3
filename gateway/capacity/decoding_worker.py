"""What a decoding process does, besides anyio's worker that reads the calls and writes the results."""

from __future__ import annotations

import gc
import os
import resource
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from gateway.errors import GatewayError, TooLarge
from gateway.memory import limit_heap_growth, return_free_memory

T = TypeVar("T")
NICENESS: Final = 5
TOO_MUCH_MEMORY: Final = (
    "decoding the body requires more memory than one request may use; send smaller requests"
)


class DecodingFault(Exception):
    """The call raised an unexpected exception, which is a bug of the gateway."""


def run_call(max_memory_bytes: int, function: Callable[..., T], *arguments: object) -> T:
    """Return the function's result. Raises its `GatewayError`, `TooLarge` or `DecodingFault`.

    The limit of memory applies to the function only. If there were no memory for the call itself, anyio's
    worker would take the rest of it, bytes of a client, for the next call.
    """
    prepare_process()
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    # RLIMIT_AS is unsuitable: NumPy's libraries reserve much more address space than they use.
    limit = data_segment_bytes() + max_memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard_limit))
    try:
        return function(*arguments)
    except GatewayError:
        raise
    except (MemoryError, SystemError):  # some libraries raise SystemError when out of memory
        raise TooLarge(TOO_MUCH_MEMORY) from None
    except Exception as exc:  # noqa: BLE001 - the border of the process: the gateway logs it
        raise DecodingFault(f"{type(exc).__name__}: {exc}") from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard_limit, hard_limit))
        gc.collect()
        return_free_memory()


@cache
def prepare_process() -> None:
    os.nice(NICENESS)  # below the gateway and Triton
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C must not interrupt it while the gateway drains
    limit_heap_growth()
    # Parsed documents have no reference cycles, and the garbage collector makes parsing five times slower.
    gc.disable()
    gc.freeze()


def data_segment_bytes() -> int:
    # RLIMIT_DATA limits this number (proc(5), statm).
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    return pages * resource.getpagesize()


def import_decoders() -> None:
    """Import what the first call would wait for."""
    import gateway.tensors.inputs  # noqa: F401, PLC0415 - only in the process
