"""NumPy's files and archives: read as NumPy reads them, and refused if they contradict themselves."""

from __future__ import annotations

import io
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest

from gateway.errors import MalformedRequest, TooLarge
from gateway.tensors.npy import read_npy, read_npz
from tests.support.hostile_files import (
    MIB,
    NPY_HEADERS,
    archive,
    claiming_size,
    npy,
    npy_of,
    npy_with,
    overlapping,
)

ARRAYS: dict[str, np.ndarray] = {
    "floats": np.arange(6, dtype=np.float32).reshape(2, 3),
    "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "a number": np.array(5, np.int64),
    "empty": np.zeros((0, 3)),
    "32 dimensions": np.zeros((1,) * 32, np.int8),
    "booleans": np.array([True, False]),
    "big-endian": np.arange(4, dtype=">i2"),
    "é ☕": np.array(["é ☕", "\U0001f600"]),
    "characters": np.array(["é", "b"], ">U3"),
    "../b/c": np.array([b"a", b"bc"]),
    "complex": np.array([1j]),
    "BF16": np.ones(3, ml_dtypes.bfloat16).view("V2"),
    "not finite": np.array([1, np.nan, np.inf], np.float16),
}
SMALL = npy(np.zeros(3))


def test_arrays_are_read_as_views_of_their_file() -> None:
    for array in ARRAYS.values():
        for version in ((1, 0), (2, 0), (3, 0)):
            read = read_npy(npy(array, version))
            assert (read.dtype, read.shape) == (array.dtype, array.shape)
            assert read.tobytes() == array.tobytes()
    header = b"{'shape': (2L,), 'fortran_order': False, 'descr': '<f4'}"  # of Python 2
    data = npy_with(header, np.array([1, 2], np.float32).tobytes())
    assert read_npy(data).tolist() == [1, 2]
    assert np.shares_memory(read_npy(data), np.frombuffer(data, np.uint8))
    # No elements, however wide.
    assert read_npy(npy_of("(0,)", "'|S999999999'")).nbytes == 0


INVALID = (
    *NPY_HEADERS.values(),
    npy_with(b"{}", bytes(8)),
    npy_with(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} + {}", bytes(8)),
    npy_of("'2'", data=bytes(8)),
    npy_of("(-2,)", data=bytes(8)),
    npy_of("(2,)", "'<f16'", bytes(32)),
    npy_of("(1,)", "'<M8[s]'", bytes(8)),
    npy_of("(0,)", "'|S9999999999'"),
    b"",
    SMALL[:9],
    SMALL[:-1],
    SMALL + b"x",
)


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_invalid_file_is_malformed(subtests: pytest.Subtests) -> None:
    for file in INVALID:
        with subtests.test(str(file[:100])), pytest.raises(MalformedRequest, match=r"\.npy "):
            read_npy(file)
    with pytest.raises(
        MalformedRequest, match="declares 10000000000 × 4 bytes of data; the file has 0"
    ):
        read_npy(npy_of("(100000, 100000)"))


# Archives.


def read(data: bytes, limit: int = 64 * MIB) -> dict[str, np.ndarray]:
    return read_npz(data, limit, 128)


class Pipe(io.BytesIO):
    """What is written to it has its sizes behind the data, because they are not known before."""

    def seekable(self) -> bool:
        return False

    def tell(self) -> int:
        raise OSError


def test_archive_of_numpy_is_read() -> None:
    saved, compressed, piped = io.BytesIO(), io.BytesIO(), Pipe()
    np.savez(saved, **ARRAYS)  # type: ignore[arg-type]
    np.savez_compressed(compressed, **ARRAYS)  # type: ignore[arg-type]
    with zipfile.ZipFile(piped, "w", zipfile.ZIP_DEFLATED) as written:
        for name, array in ARRAYS.items():
            with written.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, array)
    for file in (saved, compressed, piped):
        arrays = read(file.getvalue())
        assert arrays.keys() == ARRAYS.keys()
        assert all(array.tobytes() == ARRAYS[name].tobytes() for name, array in arrays.items())
    assert read(archive([])) == {}


ENCRYPTED = bytearray(archive([("x.npy", SMALL)]))
ENCRYPTED[6] = ENCRYPTED[ENCRYPTED.rindex(b"PK\1\2") + 8] = 1
ZEROS = npy(np.zeros(MIB))
MALFORMED = (
    (archive([("x.npy", SMALL)], zipfile.ZIP_BZIP2), "compression method is not supported"),
    (archive([("x.npy", SMALL)], zipfile.ZIP_LZMA), "compression method is not supported"),
    (bytes(ENCRYPTED), "encrypted"),
    (overlapping(archive([("x.npy", SMALL)]), 9), "damaged"),
    (overlapping(archive([("x.npy", SMALL)]), 2).replace(b"1.npy", b"x.npy"), "damaged|two arrays"),
    (archive([("x.npy", SMALL), ("x", SMALL)]), "two arrays named 'x'"),
    (archive([("x" * 300, SMALL)]), "longer than 255 bytes"),
    (archive([("x.txt", b"hello")]), "not a .npy file"),
    (claiming_size(archive([("x.npy", ZEROS)]), 100), "Bad CRC"),
    (claiming_size(archive([("x.npy", SMALL)]), 60 * MIB), "shorter than its size"),
    (archive([("x.npy", SMALL)])[:-10], "damaged"),
    (b"", "not a zip file"),
    (b"PK\5\6", "damaged"),
)


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_invalid_archive_is_malformed(subtests: pytest.Subtests) -> None:
    for data, words in MALFORMED:
        with subtests.test(words), pytest.raises(MalformedRequest, match=words):
            read(data)


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_inflated_bytes_and_arrays_of_an_archive_are_limited() -> None:
    data = archive((f"{number}.npy", npy(np.zeros(MIB, np.uint8))) for number in range(10))
    assert len(read(data)) == 10
    with pytest.raises(TooLarge, match=f"inflates to more than {5 * MIB} bytes"):
        read(data, 5 * MIB)
    with pytest.raises(TooLarge, match="more than 128 arrays"):
        read(archive((f"{number}.npy", SMALL) for number in range(129)))
    zeros = archive([("x.npy", npy(np.zeros(30 * MIB, np.uint8)))])
    for claimed in (100, 2**32 - 1):
        bomb = claiming_size(zeros, claimed)
        tracemalloc.start()
        with pytest.raises((TooLarge, MalformedRequest)):
            read(bomb, 8 * MIB)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 12 * MIB
