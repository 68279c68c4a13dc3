"""Archives from untrusted sources: their files, and what is refused."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.capacity.archives import ArchiveLimits, InvalidArchive, read_archive
from gateway.errors import TooLarge
from tests.support.archives import tarred, zipped

MIB = 1 << 20


def stored(
    folder: Path, data: bytes, suffix: str, max_bytes: int = MIB, max_entries: int = 10_000
) -> dict[str, bytes]:
    path = folder / f"archive{suffix}"
    path.write_bytes(data)
    bounds = ArchiveLimits(max_bytes, max_entries)
    with path.open("rb") as file:
        return {
            name: b"".join(map(bytes, pieces))
            for name, pieces in read_archive(file, suffix, bounds)
        }


FOLDER = {
    "a/1/model.onnx": bytes(range(256)) * 4,
    "a/config.pbtxt": b"",
    "a/" + "long" * 30 + "/é.txt": b"x" * 3000,
}
ARCHIVES: dict[str, tuple[Callable[[dict[str, bytes]], bytes], str]] = {
    "zip": (zipped, ".zip"),
    "zip, stored": (lambda files: zipped(files, zipfile.ZIP_STORED), ".zip"),
    "tar.gz": (tarred, ".tar.gz"),
    "tar": (lambda files: tarred(files, "w"), ".tar"),
    "tar, GNU": (lambda files: tarred(files, "w:gz", tarfile.GNU_FORMAT), ".tar.gz"),
    "tar, ustar": (lambda files: tarred(files, "w:gz", tarfile.USTAR_FORMAT), ".tar.gz"),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_archive_is_read_as_it_was_written(tmp_path: Path, kind: str) -> None:
    write, suffix = ARCHIVES[kind]
    ignored = {"__MACOSX/._a": b"junk", "a/.DS_Store": b"junk"}
    assert stored(tmp_path, write({**FOLDER, **ignored}), suffix) == FOLDER


OUTSIDE = (
    "../evil", "/etc/evil", "a/../../evil", "a//b", "a\\..\\b", "a/./b", "a\x1bb", "b/" * 20 + "c",
    "x" * 250, ".triton-gateway-0-1",
)  # fmt: skip


def tar_entry(kind: bytes) -> bytes:
    entry = tarfile.TarInfo("a/link")
    entry.type, entry.linkname = kind, "/etc/passwd"
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(entry)
    return file.getvalue()


def zip_entry(mode: int) -> bytes:
    entry = zipfile.ZipInfo("a/link")
    entry.external_attr = mode << 16
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(entry, "/etc/passwd")
    return file.getvalue()


def pax(content: bytes) -> bytes:
    header = tarfile.TarInfo("x")
    header.type, header.size = b"x", len(content)
    padding = b"\0" * (-len(content) % 512)
    return header.tobuf(tarfile.USTAR_FORMAT) + content + padding


INVALID_PAX_RECORDS = (
    (b"1200000 path=" + b"x" * 1_199_986 + b"\n", "headers are too long"),
    (b"60 size=" + b"9" * 51 + b"\n", "damaged"),
    (b"8 path=a\n", "damaged"),
    (b"0 path=a\n", "damaged"),
    (b"path=a\n", "damaged"),
)


def tar_of_size(size: int) -> bytes:
    """A header whose size is a binary number, as GNU tar writes large ones."""
    entry = tarfile.TarInfo("a")
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


def list_invalid_archives() -> Iterator[tuple[bytes, str, str]]:
    """Return archives, their suffixes, and words of the refusal."""
    for write, suffix in (ARCHIVES[kind] for kind in ("zip", "tar.gz", "tar")):
        for path in OUTSIDE:
            yield write({path: b"x"}), suffix, "path"
    for kind in (b"1", b"2", b"3", b"4", b"6", b"S"):
        yield tar_entry(kind), ".tar", "neither a file nor a folder"
    for mode in (0o120777, 0o020666, 0o010666):
        yield zip_entry(mode), ".zip", "neither a file nor a folder"
    for record, words in INVALID_PAX_RECORDS:
        yield pax(record), ".tar", words
    yield pax(b"6 a=b\n" * 10_000) * 80, ".tar", "headers are too long"
    yield pax(b"6 a=b\n") * 1000, ".tar", "damaged|too long"
    yield tar_of_size(-1024) + bytes(1024), ".tar", "damaged|negative"
    yield tar_of_size(1 << 40), ".tar", "damaged"
    yield tarred({"a": b"x"}, "w")[:1024], ".tar", "damaged"
    yield gzip.compress(b"") * 1002, ".tar.gz", "damaged"
    labels = zipped({"1/labels.txt": b"cat\ndog"}, zipfile.ZIP_STORED)
    changed = labels.replace(b"dog", b"dig")
    yield changed, ".zip", "Bad CRC"


def test_invalid_archive_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for data, suffix, words in list_invalid_archives():
        with subtests.test(words, data=data[:40]), pytest.raises(InvalidArchive, match=words):
            stored(tmp_path, data, suffix)


def test_archive_beyond_a_limit_alone_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for write, suffix in (ARCHIVES[kind] for kind in ("zip", "tar.gz", "tar")):
        cases = [
            (write({"a": b"\0" * (2 * MIB)}), 10_000, "inflates to more than"),
            (write({f"{n}": b"" for n in range(51)}), 50, "more than 50 entries"),
        ]
        for data, max_entries, words in cases:
            with subtests.test(words, suffix=suffix), pytest.raises(TooLarge, match=words):
                stored(tmp_path, data, suffix, max_entries=max_entries)
    headers = gzip.compress(tarfile.TarInfo("a").tobuf(tarfile.USTAR_FORMAT) * 1_001)
    with pytest.raises(TooLarge, match="entries"):
        stored(tmp_path, headers, ".tar.gz", max_entries=1_000)
    # As many gzip members as an archive of this size may have.
    files = {"1/model.onnx": bytes(20 * MIB)}
    plain = tarred(files, "w")
    pieces = [plain[start : start + (16 << 10)] for start in range(0, len(plain), 16 << 10)]
    data = b"".join(gzip.compress(piece, 1) for piece in pieces)
    assert stored(tmp_path, data, ".tar.gz", max_bytes=len(plain)) == files


def test_damaged_archive_is_refused_or_its_files_are_as_written(tmp_path: Path) -> None:
    """Each hundredth byte, changed."""
    for kind in ("zip", "zip, stored", "tar.gz"):  # tar has no checksums of contents
        write, suffix = ARCHIVES[kind]
        data = write(FOLDER)
        for place in range(0, len(data), 101):
            damaged = data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]
            with suppress(InvalidArchive):
                assert stored(tmp_path, damaged, suffix).items() <= FOLDER.items()
