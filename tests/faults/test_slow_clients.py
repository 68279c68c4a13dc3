"""Clients that are slow on purpose: the real slowhttptest, a thousand connections, against each deadline."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import psutil
import pytest

from tests.faults.test_load import (
    ECHO,
    QUIET,
    Asked,
    Pool,
    by_v2,
    median_ms,
    offer,
    p99_ms,
    port_of,
)
from tests.servers import Triton, gateway
from tests.test_exposition import program
from tests.test_fleet import write_echo

LOOK_EVERY_S = 0.2  # more often, and looking would slow down who asks beside it
DEADLINE_S = 4
# To notice it, to linger while the client reads why, and for the machine to get round to it.
GRACE_S = 3
IDLE_S = 2  # less than the gateway keeps a connection
LARGE_BYTES = 5 << 20
# Never run, and described in so many bytes: more than the system keeps of an answer for a client.
LARGE = """
platform: "ensemble"
input [ {{ name: "X" data_type: TYPE_FP32 dims: [ 2 ] }} ]
output [ {{ name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }} ]
ensemble_scheduling {{ step [ {{
  model_name: "echo" model_version: -1
  input_map {{ key: "X" value: "X" }} output_map {{ key: "Y" value: "Y" }}
}} ] }}
parameters {{ key: "large" value {{ string_value: "{large}" }} }}
"""


@dataclass(frozen=True)
class House:
    """A gateway that waits for nobody for longer than four seconds."""

    port: int
    process: psutil.Process
    quiet: Sequence[Asked]  # what is asked when nobody is slow

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("models")
    write_echo(folder, "echo", instances=2)
    (folder / "large" / "1").mkdir(parents=True)
    (folder / "large" / "config.pbtxt").write_text(LARGE.format(large="x" * LARGE_BYTES))
    short = {
        f"{name}": str(DEADLINE_S)
        for name in ("header_timeout_s", "body_stall_s", "write_timeout_s", "keep_alive_s")
    }
    with Triton(folder, "*") as triton:
        triton.wait()
        many = {"max_connections_per_client": "0"}
        with gateway(triton.options.url, **short, **many, **QUIET) as (client, command):
            port = port_of(client)
            offer(Pool(port, IDLE_S), GOOD, 50, 1)
            quiet = offer(Pool(port, IDLE_S), GOOD, 50, 3)
            yield House(port, psutil.Process(command.pid), quiet)


GOOD = ECHO, by_v2("echo", 1, 2)


def held(port: int) -> set[int]:
    """The clients' ends of the connections that a process holds on this port (proc_net_tcp(5))."""
    found, local = set(), f":{port:04X} "
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        if local in line[:24]:  # before the far end begins
            remote, state, inode = itemgetter(2, 3, 9)(line.split())
            if state != "0A" and inode != "0":  # LISTEN, and what only the system still has
                found.add(int(remote[-4:], 16))
    return found


@dataclass
class Watch:
    """From when to when each slow client's connection was there, by the client's port."""

    port: int
    seen: dict[int, tuple[float, float]] = field(default_factory=dict)
    most: int = 0
    most_memory: int = 0

    def look(self, process: psutil.Process, others: Pool) -> int:
        there = held(self.port) - others.own_ports
        now = time.monotonic()
        for number in there:
            self.seen[number] = self.seen.get(number, (now, now))[0], now
        self.most = max(self.most, len(there))
        self.most_memory = max(self.most_memory, process.memory_info().rss)
        return len(there)

    @property
    def oldest_s(self) -> float:
        return max(last - first for first, last in self.seen.values())


@contextmanager
def slow(url: str, count: int, *how: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [program("slowhttptest", "slowhttptest"), "-c", str(count), "-r", "500", "-u", url]
    with subprocess.Popen(
        [*command, "-l", "60", "-p", "30", "-v", "0", *how],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


V1, V2 = "/v1/models/echo/infer", "/v2/models/echo/infer"
BODY = "-B", "-i", "1", "-x", "16", "-s", "100000", "-f", "application/json"
READ = "-X", "-n", "1", "-z", "8", "-w", "256", "-y", "512"
ATTACKS = {
    "headers": [(V1, 1000, "-H", "-i", "1", "-x", "16")],
    "bodies": [(V1, 500, *BODY), (V2, 500, *BODY)],
    # The system takes the small answers whole, and the gateway waits for the next request. The large ones
    # are few: the system keeps megabytes of each, and Triton is busy for long with each.
    "readers": [
        ("/docs", 995, *READ),
        ("/v2/models/large/config", 5, *READ, "-r", "2"),
    ],
}
# What the system takes of a large answer counts as taken, and it takes megabytes, a few at a time.
SEEN = 800  # of the thousand: some come and go between two looks
DEADLINES = {"headers": 1, "bodies": 1, "readers": 2}


@pytest.mark.long
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_thousand_slow_clients_are_gone_at_their_deadline_and_nobody_else_notices(
    house: House, attack: str
) -> None:
    pool, watch, ended = Pool(house.port, IDLE_S), Watch(house.port), threading.Event()
    memory = house.process.memory_info().rss
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(ended.set)
        good = threads.submit(offer, pool, GOOD, 50, 60, ended)
        began = time.monotonic()
        for path, count, *how in ATTACKS[attack]:
            stack.enter_context(slow(house.url(path), count, *how))
        while (left := watch.look(house.process, pool)) > 0 or len(watch.seen) < SEEN:
            assert time.monotonic() - began < 40, f"{left} of {len(watch.seen)} are still there"
            time.sleep(LOOK_EVERY_S)
        took_s = time.monotonic() - began
        ended.set()
        asked = [each for each in good.result() if each.at > began]
    print(
        f"slow {attack}: {len(watch.seen)} connections, {watch.most} at a time, "
        f"the oldest was {watch.oldest_s:.1f} s old, "
        f"all gone after {took_s:.1f} s; {len(asked)} others' "
        f"median {median_ms(house.quiet):.1f} and p99 {p99_ms(house.quiet):.1f} ms without, "
        f"{median_ms(asked):.1f} and {p99_ms(asked):.1f} ms with them; "
        f"memory {memory >> 20} → at most {watch.most_memory >> 20} MiB"
    )
    assert watch.most > 300
    assert watch.oldest_s < DEADLINES[attack] * DEADLINE_S + GRACE_S
    assert {each.status for each in asked} == {200}
    # Wanted are twice; the thousand clients themselves run on the same few cores.
    assert median_ms(asked) < 2 * median_ms(house.quiet) + 25
    assert p99_ms(asked) < 2 * p99_ms(house.quiet) + 1000
