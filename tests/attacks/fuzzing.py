"""Mutational fuzzing of everything that reads a client's or a replica's bytes.

A target is a function of bytes with a few valid inputs. Each run mutates one of them and calls the
function: it may refuse the bytes with the gateway's own errors, and with nothing else, and it may not
take longer than its share of CPU time for their number.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

STEP_BYTES = 64 << 10
MAX_STEP_S = 0.05  # of CPU time, for each 64 KiB
ROUNDS = 3  # of a call that seems slow: the fastest counts
MAX_INPUT_BYTES = 256 << 10
WORDS = b"""" \\ \\u0000 [ ] { } [[[[ , : ; = ' ( ) -- -1 0 1e999 NaN data: IDAT RIFF"""
TOKENS = (
    *WORDS.split(),
    *(b"\0", b"\xff", b"\xff\xd8", b"\xff\xda", b"\xc3\x28", b"9" * 40),
    *(b"\r\n", b"\r\n\r\n", b"\n\n", b"PK\x03\x04", b"PK\x01\x02"),
    *(b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\xff\xff\xff\xff"),
)


@dataclass(frozen=True)
class Target:
    """A parser, valid inputs for it, and the exceptions with which it may refuse bytes."""

    name: str
    function: Callable[[bytes], object]
    seeds: Sequence[bytes]
    refusals: tuple[type[Exception], ...]


@dataclass
class Findings:
    """The findings of one target."""

    calls: int = 0
    refused: int = 0
    slowest_s: float = 0.0  # of CPU time for each 64 KiB
    failures: list[str] = field(default_factory=list)


def fuzz(target: Target, seed: int, calls: int | None = None, until: float = 0.0) -> Findings:
    """Call the target so many times, or until a time of the monotonic clock."""
    rng = random.Random(f"{target.name} {seed}")
    findings = Findings()
    for data in mutations(target.seeds, rng):
        if findings.calls == calls or (calls is None and time.monotonic() >= until):
            return findings
        call(target, data, findings)
        if len(findings.failures) >= 10:
            return findings
    return findings


def call(target: Target, data: bytes, findings: Findings) -> None:
    findings.calls += 1
    steps = max(len(data) / STEP_BYTES, 1)
    spent_s = float("inf")
    for _ in range(ROUNDS):
        start = time.thread_time()
        try:
            target.function(data)
        except target.refusals:
            findings.refused += 1
        except Exception as exc:  # noqa: BLE001 - any other error is what fuzzing looks for
            findings.failures.append(f"{type(exc).__name__}: {exc}: {data[:200]!r}")
        spent_s = min(spent_s, time.thread_time() - start)
        if spent_s <= steps * MAX_STEP_S:
            break
    else:
        findings.failures.append(
            f"{spent_s:.3f} s of CPU for {len(data)} bytes: {data[:200]!r} … {data[-40:]!r}"
        )
    findings.slowest_s = max(findings.slowest_s, spent_s / steps)


def mutations(seeds: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    """Yield the seeds, then mutations of them and of each other, for ever."""
    yield from seeds
    while True:
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2, 4, 16))):
            rng.choice(MUTATORS)(data, rng, seeds)
        yield bytes(data[:MAX_INPUT_BYTES])


def flip(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def overwrite(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> None:
    token = rng.choice(TOKENS)
    place = rng.randrange(len(data) + 1)
    data[place : place + len(token)] = token


def insert(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> None:
    place = rng.randrange(len(data) + 1)
    data[place:place] = rng.choice(TOKENS)


def repeat(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> None:
    """Repeat a token or a piece many times: what is not linear shows here."""
    start = rng.randrange(len(data) + 1)
    piece = rng.choice((rng.choice(TOKENS), bytes(data[start : start + rng.randint(1, 16)])))
    count = rng.choice((10, 1000, MAX_INPUT_BYTES // 4)) // max(len(piece), 1)
    data[start:start] = piece * count


def delete(data: bytearray, rng: random.Random, _: Sequence[bytes]) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.choice((1, 4, 64, 4096))]


def splice(data: bytearray, rng: random.Random, seeds: Sequence[bytes]) -> None:
    """Go on with the end of another input."""
    other = rng.choice(seeds)
    data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other) + 1) :]


MUTATORS = (flip, flip, overwrite, insert, insert, repeat, delete, splice)
