"""`make soak`: hostile requests at full speed beside good traffic, for an hour (MINUTES=60).

Prints a line a minute. Fails on a 500 of the gateway, on a good request that is not answered with 200,
and on memory that grows.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.attacks.corpus import Request, valid_requests
from tests.attacks.fuzzing import mutations
from tests.attacks.table import ATTACKS, MODELS, HttpRequest
from tests.support.fake_triton import port_of
from tests.support.load import LOG_WARNINGS, OpenLoop, Pool, infer_v2, p99_ms, post
from tests.support.model_zoo.zoo import Names, write_repository
from tests.support.servers import gateway, triton_on_free_ports

MIB = 1 << 20
CLIENTS = 8
GOOD_PER_S = 20
MINUTE_S = 60.0
SAMPLE_S = 1.0
# The caches and pools of the first minutes fill once.
WARM_UP_MINUTES = 2
MAX_GROWTH_BYTES = 64 * MIB
# Larger ones would hide a growth of the memory.
MAX_HOSTILE_BYTES = 4 * MIB


@dataclass
class Report:
    """The outcomes of the hostile requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    # By minute: while the least was under way, for what is being decoded may take 64 MiB each.
    least_memory: list[int] = field(default_factory=list)
    most_memory: int = 0

    def record(self, outcome: str, wire: bytes, body: bytes) -> None:
        self.statuses[outcome] += 1
        if outcome == "500" and b'"MODEL_FAULT"' not in body:
            self.faults.append(f"{body[:300]!r} for {wire[:300]!r}")

    @property
    def growth(self) -> int:
        settled = self.least_memory[WARM_UP_MINUTES:]
        return max(settled, default=0) - min(settled[:1], default=0)


def hostile_wires(rng: random.Random) -> Iterator[bytes]:
    """Yield the corpus, in random order and mutated, for ever."""
    hostile = [
        request.wire
        for attack in ATTACKS.values()
        for request in attack.requests
        if isinstance(request, HttpRequest)
    ]
    hostile = [wire for wire in hostile if len(wire) <= MAX_HOSTILE_BYTES]
    valid = valid_requests("images", "numbers", "texts")
    mutants = {request.body: mutations([request.body], rng) for request in valid}
    while True:
        if rng.random() < 0.02:
            yield rng.choice(hostile)
            continue
        request = rng.choice(valid)
        body = next(mutants[request.body])
        yield Request(request.path, request.content_type, body, request.headers).wire


async def send_hostile(port: int, report: Report, number: int, until: float) -> None:
    wires = hostile_wires(random.Random(number))
    with Pool(port) as pool:
        while time.monotonic() < until:
            wire = next(wires)
            try:
                answer = await pool.ask(wire)
            except (OSError, asyncio.IncompleteReadError):
                report.record("closed", wire, b"")
            else:
                report.record(str(answer.status), wire, answer.body)


def memory_of(pid: int) -> int:
    """Return the resident memory of a process and of those that it started."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(each.memory_info().rss for each in family)


async def attack(port: int, pid: int, report: Report, minutes: float) -> None:
    until = time.monotonic() + minutes * MINUTE_S
    tasks = [
        asyncio.create_task(send_hostile(port, report, number, until)) for number in range(CLIENTS)
    ]
    while not all(task.done() for task in tasks):
        minute_ends = time.monotonic() + MINUTE_S
        samples = [memory_of(pid)]
        while time.monotonic() < minute_ends and not all(task.done() for task in tasks):
            await asyncio.wait(tasks, timeout=SAMPLE_S)
            samples.append(memory_of(pid))
        report.least_memory.append(min(samples))
        report.most_memory = max(report.most_memory, *samples)
        print(
            f"{sum(report.statuses.values())} hostile requests {dict(report.statuses.most_common())}, "
            f"{min(samples) / MIB:.0f} to {max(samples) / MIB:.0f} MiB, {len(report.faults)} faults",
            flush=True,
        )
    await asyncio.gather(*tasks)


def main(minutes: float) -> int:
    report = Report()
    good = [infer_v2("echo", 1, 2), post("/v1/models/echo/infer", b'{"inputs": [1, 2]}')]
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder), Names(), MODELS)
        with (
            triton_on_free_ports(Path(folder)) as triton,
            gateway(triton.options.url, **LOG_WARNINGS) as (client, command),
        ):
            port = port_of(client)
            with OpenLoop(Pool(port), good, GOOD_PER_S, (minutes + 5) * MINUTE_S) as loop:
                asyncio.run(attack(port, command.pid, report, minutes))
                samples = loop.stop()
    failed = [sample for sample in samples if sample.status != 200]
    print(f"{len(samples)} good requests, {len(failed)} failed, p99 {p99_ms(samples):.0f} ms")
    for refused in failed[:20]:
        print(f"failed after {refused.took_s:.2f} s: {refused.status} {refused.refusal[:300]!r}")
    print(
        f"memory grew by {report.growth / MIB:.0f} MiB after the first minutes, and was at most "
        f"{report.most_memory / MIB:.0f} MiB"
    )
    for fault in report.faults[:20]:
        print(fault)
    return int(bool(report.faults or failed or report.growth > MAX_GROWTH_BYTES))


if __name__ == "__main__":
    sys.exit(main(float(os.environ.get("MINUTES", "60"))))
