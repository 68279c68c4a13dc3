"""The queue of lines: in order, bounded, and never waiting for who reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from gateway.telemetry.logs import MAX_QUEUED_CHARS, LineWriter, write_fully

LINE = "x" * 1000


class Pipe:
    """A writer of lines into a pipe."""

    def __init__(self, max_chars: int, *, blocking: bool) -> None:
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, blocking)
        write = partial(write_fully, self.writing)
        self.writer = LineWriter(write, "{} dropped".format, max_chars)

    def put(self, *lines: str) -> None:
        for line in lines:
            self.writer.put(f"{line}\n")

    def read(self, last: str) -> list[str]:
        """Return all lines up to the first that ends so, and read not a byte of the next."""
        data = b""
        while not data.endswith(f"{last}\n".encode()):
            data += os.read(self.reading, 1)
        return data.decode().splitlines()


@contextmanager
def pipe(max_chars: int = MAX_QUEUED_CHARS, *, blocking: bool = True) -> Iterator[Pipe]:
    opened = Pipe(max_chars, blocking=blocking)
    try:
        yield opened
    finally:
        for descriptor in (opened.reading, opened.writing):
            with suppress(OSError):
                os.close(descriptor)


def test_lines_of_several_threads_are_complete_and_in_order() -> None:
    names = "abcd"
    with pipe() as lines:
        texts = {name: [f"{name} {number}" for number in range(500)] for name in names}
        threads = [threading.Thread(target=lines.put, args=texts[name]) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert lines.writer.flush(10)
        lines.put("a\udc80b", "end")
        *found, odd, _ = lines.read("end")
    assert odd == r"a\udc80b"
    for name in names:
        assert [line for line in found if line.startswith(name)] == texts[name]
    assert lines.writer.dropped_count == 0


@pytest.mark.parametrize("blocking", [True, False])
def test_lines_for_a_slow_reader_are_dropped_counted_and_reported(blocking: bool) -> None:
    count = 500  # 500 KB; the pipe takes 64
    with pipe(20_000, blocking=blocking) as lines:
        for number in range(count):
            lines.put(f"{number:04} {LINE}")
            if number % 50 == 0:
                lines.writer.flush(0.05)
        dropped = lines.writer.dropped_count
        assert dropped > 300
        assert not lines.writer.flush(0.01)
        found = lines.read("dropped")  # without another line
        assert lines.writer.flush(10)
        lines.put("after")
        found += lines.read("after")
    numbers = [int(line[:4]) for line in found if line.endswith(LINE)]
    assert len(numbers) + dropped == count
    assert numbers == sorted(numbers)
    assert sum(int(line.split()[0]) for line in found if "dropped" in line) == dropped


def test_line_larger_than_the_queue_is_written() -> None:
    with pipe(10) as lines:
        lines.put(LINE)
        assert lines.read("x" * 1000) == [LINE]


def test_lines_that_cannot_be_written_are_counted_and_the_next_are_written() -> None:
    with pipe() as lines:
        os.close(lines.reading)
        for _ in range(10):
            lines.put("nobody")
            assert lines.writer.flush(10)
        assert lines.writer.dropped_count == 10
    failures = [MemoryError()]
    written: list[str] = []

    def write(text: str) -> None:
        if failures:
            raise failures.pop()
        written.append(text)

    writer = LineWriter(write, str)
    for text in ("lost\n", "kept\n"):
        writer.put(text)
        assert writer.flush(10)
    assert (written, writer.dropped_count) == (["kept\n"], 1)
