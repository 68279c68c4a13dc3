"""Messages between the gateway and its decoding processes.

A message is a pickle, and a frame for each of its large contents. These are not copied into the pickle
or out of it (PEP 574), because copying them at once would hold the event loop.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from gateway.tensors.dtypes import build_bytes_array

FRAME_COUNT: Final = struct.Struct("<I")
FRAME_SIZE: Final = struct.Struct("<Q")
MIN_FRAME_BYTES: Final = 64 << 10


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
