"""NumPy's archives: what NumPy and zipfile write is read, and inflates to no more than it may."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import MalformedRequest, TooLarge
from gateway.tensors.npy import read_npz
from tests.support.hostile_files import MIB, archive, claiming_size, npy, overlapping

LIMIT = 64 * MIB
RANDOM = np.random.default_rng(1)
ARRAYS: dict[str, np.ndarray] = {
    "a": RANDOM.normal(size=(100, 100)),
    "zeros": np.zeros((1000, 1000)),
    "é ☕": np.arange(300_000).reshape(300, 1000),
    "empty": np.zeros(0),
    "../b/c": np.array([1], np.float32),
}
SMALL = npy(np.zeros(3))


def read(data: bytes, limit: int = LIMIT) -> dict[str, np.ndarray]:
    return read_npz(data, limit, 128)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("is_file", [True, False])
def test_archive_of_numpy_is_read(save: object, is_file: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.npz" if is_file else io.BytesIO()
    save(file, **ARRAYS)  # type: ignore[operator]
    arrays = read(file.read_bytes() if isinstance(file, Path) else file.getvalue())
    assert arrays.keys() == ARRAYS.keys()
    for name, array in arrays.items():
        assert np.array_equal(array, ARRAYS[name])


def test_archives_without_sizes_or_entries_are_read() -> None:
    """The local headers of what is written to a pipe have no sizes: these stand behind the data."""

    class Pipe(io.BytesIO):
        def seekable(self) -> bool:
            return False

        def tell(self) -> int:
            raise OSError

    file = Pipe()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as written:
        for name in ("x", "y"):
            with written.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.arange(50))
    assert {name: array.sum() for name, array in read(file.getvalue()).items()} == {
        "x": 1225,
        "y": 1225,
    }
    assert read(archive([])) == {}


ENCRYPTED = bytearray(archive([("x.npy", SMALL)]))
ENCRYPTED[6] = ENCRYPTED[ENCRYPTED.rindex(b"PK\1\2") + 8] = 1
MALFORMED = {
    "bzip2": (
        archive([("x.npy", SMALL)], zipfile.ZIP_BZIP2),
        "compression method is not supported",
    ),
    "LZMA": (archive([("x.npy", SMALL)], zipfile.ZIP_LZMA), "compression method is not supported"),
    "encrypted": (bytes(ENCRYPTED), "encrypted"),
    "overlapping entries": (overlapping(archive([("x.npy", SMALL)]), 9), "damaged"),
    "the same entry twice": (
        overlapping(archive([("x.npy", SMALL)]), 2).replace(b"1.npy", b"x.npy"),
        "damaged|two arrays",
    ),
    "two of a name": (archive([("x.npy", SMALL), ("x", SMALL)]), "two arrays named 'x'"),
    "a long name": (archive([("x" * 300, SMALL)]), "longer than 255 bytes"),
    "no array": (archive([("x.txt", b"hello")]), "not a .npy file"),
    "a smaller size than it has": (
        claiming_size(archive([("x.npy", npy(np.zeros(MIB)))]), 100),
        "Bad CRC",
    ),
    "a larger size than it has": (
        claiming_size(archive([("x.npy", SMALL)]), 60 * MIB),
        "shorter than its size",
    ),
    "cut": (archive([("x.npy", SMALL)])[:-10], "damaged"),
    "nothing": (b"", "not a zip file"),
    "a signature": (b"PK\5\6", "damaged"),
}


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
@pytest.mark.parametrize("name", MALFORMED)
def test_invalid_archive_is_malformed(name: str) -> None:
    data, words = MALFORMED[name]
    with pytest.raises(MalformedRequest, match=words):
        read(data)


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
def test_inflated_bytes_and_arrays_of_an_archive_are_limited() -> None:
    data = archive((f"{number}.npy", npy(np.zeros(MIB, np.uint8))) for number in range(10))
    assert len(read(data)) == 10
    assert len(data) < 20_000
    with pytest.raises(TooLarge, match=f"inflates to more than {5 * MIB} bytes"):
        read(data, 5 * MIB)
    with pytest.raises(TooLarge, match="more than 128 arrays"):
        read(archive((f"{number}.npy", SMALL) for number in range(129)))


@pytest.mark.parametrize("size", [100, 2**32 - 1])
def test_memory_for_a_zip_bomb_is_limited(size: int) -> None:
    bomb = claiming_size(archive([("x.npy", npy(np.zeros(30 * MIB, np.uint8)))]), size)
    tracemalloc.start()
    with pytest.raises((TooLarge, MalformedRequest)):
        read(bomb, 8 * MIB)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 12 * MIB


SOUND = [
    archive([("a.npy", SMALL), ("b.npy", npy(np.arange(50)))]),
    archive([("a.npy", SMALL)], zipfile.ZIP_STORED),
]


@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
@given(st.data())
def test_mutated_archive_is_read_or_refused(data: st.DataObject) -> None:
    mutated = bytearray(data.draw(st.sampled_from(SOUND)))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        mutated[at] = data.draw(st.sampled_from([0, 1, 0xFF]) | st.integers(0, 255))
    if data.draw(st.booleans()):
        del mutated[data.draw(st.integers(0, len(mutated))) :]
    with suppress(MalformedRequest, TooLarge):
        read(bytes(mutated), MIB)
