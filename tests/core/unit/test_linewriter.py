"""The queue of lines: in order, bounded, and never waiting for who reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from gateway.telemetry.logs import LineWriter, format_dropped_notice
from tests.support.wait import wait_until

PIPE_BYTES = 64 << 10  # as Linux makes them
LINE = "x" * 1000


@contextmanager
def pipe(*, blocking: bool = True) -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    os.set_blocking(writing, blocking)
    try:
        yield reading, writing
    finally:
        for descriptor in (reading, writing):
            with suppress(OSError):
                os.close(descriptor)


def read_lines(descriptor: int, until: str) -> list[str]:
    """All lines up to the first with these words, and not a byte of the next."""
    lines = [b""]
    while until.encode() not in lines[-1] or not lines[-1].endswith(b"\n"):
        if lines[-1].endswith(b"\n"):
            lines.append(b"")
        lines[-1] += os.read(descriptor, 1)
    return [line.decode().rstrip("\n") for line in lines]


def test_lines_are_complete_and_in_order() -> None:
    with pipe() as (reading, writing):
        writer = LineWriter(writing)
        for number in range(2000):
            writer.enqueue(f"{number}\n")
        assert writer.flush(10)
        writer.enqueue("the end\n")
        found = read_lines(reading, "end")
    assert found == [*map(str, range(2000)), "the end"]
    assert writer.dropped_count == 0


@pytest.mark.parametrize("blocking", [True, False])
def test_lines_for_a_slow_reader_are_dropped_counted_and_reported(
    blocking: bool,
) -> None:
    with pipe(blocking=blocking) as (reading, writing):
        writer = LineWriter(writing, max_bytes=20_000)
        count = 500
        for number in range(count):  # 500 KB; the pipe and the batch that waits for it take 130
            writer.enqueue(f"{number:04} {LINE}\n")
            if number % 50 == 0:
                writer.flush(0.05)
        assert writer.dropped_count > 0
        assert writer._queued_size <= 20_000
        assert not writer.flush(0.01)
        dropped = writer.dropped_count
        found = read_lines(reading, "were dropped here")
        writer.enqueue("after\n")
        found += read_lines(reading, "after")
        assert writer.flush(10)
    notices = [line for line in found if "were dropped here" in line]
    numbers = [int(line[:4]) for line in found if line.endswith(LINE)]
    assert len(numbers) + dropped == count
    assert numbers == sorted(numbers)
    assert found[-1] == "after"
    assert sum(int(line.split()[0]) for line in notices) == dropped
    assert set(notices) <= {format_dropped_notice(number) for number in range(count)}


def test_notice_is_written_without_another_line() -> None:
    with pipe() as (reading, writing):
        writer = LineWriter(writing, max_bytes=1000)
        while not writer.dropped_count:
            writer.enqueue(f"{LINE}\n")
        assert read_lines(reading, "were dropped here")[-1] == format_dropped_notice(
            writer.dropped_count
        )


def test_line_larger_than_the_queue_and_half_a_character_are_written() -> None:
    with pipe() as (reading, writing):
        writer = LineWriter(writing, max_bytes=10)
        writer.enqueue(f"{LINE}\n")
        assert read_lines(reading, "x") == [LINE]
        writer.enqueue("a\udc80b\n")
        assert read_lines(reading, "a") == [r"a\udc80b"]


def test_closed_reader_blocks_nothing() -> None:
    with pipe() as (reading, writing):
        writer = LineWriter(writing)
        os.close(reading)
        for _ in range(10):
            writer.enqueue("nobody\n")
            assert writer.flush(10)
        assert writer.dropped_count == 10


def test_lines_of_several_threads_are_complete() -> None:
    with pipe() as (reading, writing):
        writer = LineWriter(writing)

        def speak(name: str) -> None:
            for number in range(300):
                writer.enqueue(f"{name} {number}\n")

        threads = [threading.Thread(target=speak, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        wait_until(lambda: writer.flush(0))
        writer.enqueue("the end\n")
        found = read_lines(reading, "the end")[:-1]
    for name in "abcd":
        own = [line for line in found if line.startswith(name)]
        assert own == [f"{name} {number}" for number in range(300)]


def test_failure_of_the_writing_thread_is_counted_and_it_goes_on() -> None:
    failures: list[int] = []

    def fail_once(count: int) -> str:
        if not failures:
            failures.append(count)
            raise MemoryError
        return "notice"

    with pipe() as (reading, writing):
        writer = LineWriter(writing, max_bytes=1000, format_notice=fail_once)
        while not writer.dropped_count:
            writer.enqueue(f"{LINE}\n")
        dropped = writer.dropped_count
        read_lines(reading, "notice")
        assert failures
        assert writer.dropped_count > dropped
