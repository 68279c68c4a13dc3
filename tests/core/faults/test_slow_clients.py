"""Clients that are slow on purpose: the real slowhttptest, a thousand connections, against each deadline."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.fake_triton import port_of
from tests.support.fleet import write_echo
from tests.support.load import (
    ECHO_V1,
    ECHO_V2,
    LOG_WARNINGS,
    OpenLoop,
    Pool,
    median_ms,
    p99_ms,
    statuses_of,
)
from tests.support.measurements import assert_number, compares_numbers
from tests.support.missing import find_program
from tests.support.servers import Triton, gateway

pytestmark = pytest.mark.soak

LOOK_EVERY_S = 0.5  # more often, and looking would slow down who asks beside it
DEADLINE_S = 6
PER_S = (
    200  # new slow connections: all are there before the first must go. More at once is a flood.
)
# To notice it, to linger while the client reads why, and for the machine to get round to it.
GRACE_S = 3
SLOW_HOST = "0100007F"  # 127.0.0.1, as the system's table has it
GOOD_HOST = "127.0.0.2"
GOOD_PER_S = 100
QUIET_S = 6
IDLE_S = 2  # less than the gateway keeps a connection
STAY_S = 240  # how long the slow clients would stay
GONE_S = 120  # the server is to close all of them long before
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
class Server:
    """A gateway whose deadlines for clients are a few seconds."""

    port: int

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
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
        with gateway(triton.options.url, **short, **many, **LOG_WARNINGS) as (client, _):
            port = port_of(client)
            yield Server(port)


GOOD = ECHO_V1, ECHO_V2


def held(port: int) -> set[int]:
    """The slow clients' ends of the connections that a process holds on this port (proc_net_tcp(5))."""
    found, local = set(), f":{port:04X} {SLOW_HOST}:"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        if local in line[:36]:  # before what is queued
            remote, state, inode = itemgetter(2, 3, 9)(line.split())
            if state != "0A" and inode != "0":  # LISTEN, and what only the system still has
                found.add(int(remote[-4:], 16))
    return found


@dataclass
class Watch:
    """Records the lifetime of each slow client's connection, by the client's port."""

    port: int
    seen: dict[int, tuple[float, float]] = field(default_factory=dict)
    most: int = 0

    def look(self) -> int:
        there = held(self.port)
        now = time.monotonic()
        for number in there:
            self.seen[number] = self.seen.get(number, (now, now))[0], now
        self.most = max(self.most, len(there))
        return len(there)

    @property
    def oldest_s(self) -> float:
        return max(last - first for first, last in self.seen.values())


@contextmanager
def humble() -> Iterator[None]:
    """Lower the priority of this process, so that its sampling does not distort the measurement."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    try:
        yield
    finally:
        with suppress(PermissionError):  # only root may
            os.setpriority(os.PRIO_PROCESS, 0, before)


@contextmanager
def slow(url: str, count: int, per_s: float, *how: str) -> Iterator[subprocess.Popen[bytes]]:
    """Attackers are elsewhere, as a rule: here they get what the server leaves of the few cores."""
    tool = find_program("slowhttptest")
    command = ["nice", "-n", "19", tool, "-c", str(count), "-r", f"{per_s:.0f}", "-u", url]
    with subprocess.Popen(
        [*command, "-l", f"{STAY_S:g}", "-p", "30", "-v", "0", *how],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


class Attack(NamedTuple):
    path: str
    connections: int
    options: tuple[str, ...]  # of slowhttptest


V1, V2 = "/v1/models/echo/infer", "/v2/models/echo/infer"
BODY = "-B", "-i", "1", "-x", "16", "-f", "application/json"
LARGE_BODY = *BODY, "-s", "100000"
READ = "-X", "-n", "1", "-z", "8", "-w", "256", "-y", "512"
ATTACKS = {
    "headers": [Attack(V1, 1000, ("-H", "-i", "1", "-x", "16"))],
    "bodies": [Attack(V1, 500, BODY), Attack(V2, 500, BODY)],
    "large bodies": [Attack(V1, 500, LARGE_BODY), Attack(V2, 500, LARGE_BODY)],
    # The system takes the small answers whole, and the gateway waits for the next request. The large ones
    # are few: the system keeps megabytes of each, and Triton is busy for long with each.
    "readers": [
        Attack("/docs", 995, READ),
        Attack("/v2/models/large/config", 5, READ),
    ],
}
# What the system takes of a large answer counts as taken, and it takes megabytes, a few at a time.
SEEN = 800  # of the thousand: some come and go between two looks
DEADLINES = {"headers": 1, "bodies": 1, "large bodies": 1, "readers": 2}


# Others share the machine, and a hundredth of the requests is a dozen: the best of a few rounds is ours.
ROUNDS = 3


@pytest.mark.fault("slow headers, slow bodies, slow readers, 1,000 silent connections")
@pytest.mark.parametrize("attack", ATTACKS)
def test_slow_clients_are_disconnected_at_their_deadline_and_others_are_served(
    server: Server, attack: str
) -> None:
    """Takes 20 s: six to see what it is like without, five until all have come, and their deadlines."""
    rounds = [send_slowly(server, attack)]
    while compares_numbers() and len(rounds) < ROUNDS and min(rounds).p99_grows > 2:
        rounds.append(send_slowly(server, attack))
    p99_grows, median_grows, oldest_s, at_a_time = min(rounds)
    limit_s = DEADLINES[attack] * DEADLINE_S + GRACE_S
    assert_number("the oldest", oldest_s, "s", at_most=limit_s)
    assert_number("at a time", at_a_time, at_least=300)
    assert_number("others' median with them", median_grows, "times that without", at_most=2)
    assert_number("others' p99 with them", p99_grows, "times that without", at_most=2)


class Round(NamedTuple):
    """How much the latencies of other requests grow, and the samples of the connections."""

    p99_grows: float
    median_grows: float
    oldest_s: float
    at_a_time: int


def send_slowly(server: Server, attack: str) -> Round:
    watch = Watch(server.port)
    good = Pool(server.port, IDLE_S, GOOD_HOST)
    with ExitStack() as stack:
        others = stack.enter_context(OpenLoop(good, GOOD, GOOD_PER_S, STAY_S))
        time.sleep(QUIET_S)  # what it is like without
        stack.enter_context(humble())
        began = time.monotonic()
        for path, count, options in ATTACKS[attack]:
            per_s = max(PER_S * count / 1000, 2)
            stack.enter_context(slow(server.url(path), count, per_s, *options))
        while (left := watch.look()) > 0 or len(watch.seen) < SEEN:
            assert time.monotonic() - began < GONE_S, f"{left} of {len(watch.seen)} are still there"
            time.sleep(LOOK_EVERY_S)
        samples = others.stop()
    without = [each for each in samples if began - QUIET_S + 1 < each.at < began]
    during = [each for each in samples if each.at > began]
    assert set(statuses_of(during)) == {200}
    p99_grows = p99_ms(during) / p99_ms(without)
    return Round(p99_grows, median_ms(during) / median_ms(without), watch.oldest_s, watch.most)
