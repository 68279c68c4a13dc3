"""What one caller can cost the others: each attack of the table alone, and all of them together."""

from __future__ import annotations

import asyncio
import os
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.attacks.table import ATTACKS, KEPT, MODELS, ON_DEMAND, Attack, Attacker, Site, with_key
from tests.support import keys
from tests.support.fake_triton import port_of
from tests.support.guards import child_of
from tests.support.load import (
    ECHO_V2,
    LOG_WARNINGS,
    SPAWN,
    OpenLoop,
    Pool,
    get,
    p99_ms,
    statuses_of,
)
from tests.support.measurements import (
    assert_number,
    compares_numbers,
    forget_peaks,
    memory_bytes,
    peak_bytes,
    process_tree,
)
from tests.support.metrics import held_memory, metric
from tests.support.model_zoo.zoo import Names, identity, write_repository
from tests.support.servers import Command, free_ports, gateway, triton_on_free_ports
from tests.support.wait import TIMEOUT_S, wait_until

pytestmark = pytest.mark.long

MIB = 1 << 20
NICENESS = 10
BUDGET_BYTES = 256 * MIB
PER_S = 100
MEASURE_S = 3.0
# Usually it is 1 to 3 ms.
MIN_LIMIT_MS = 10
# The same work takes that many times as much CPU time on a busy machine, whose cores share caches and clock.
BUSY_MACHINE = 3
SIGNALS = identity("signals", "FP32", (50_000_000,))
# All attacks together.
TOGETHER_S = float(os.environ.get("ATTACK_SECONDS", "600"))
ATTACKERS = 8
CALLER_PER_S = 30
# Besides the outcomes of an attack, while others are under way. The server of gRPC itself answers CANCELLED,
# before the gateway sees the call, while thousands of calls that were reset wait for their handlers.
REFUSALS = {
    *("408", "429", "503", "504"),
    *("RESOURCE_EXHAUSTED", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"),
}
# Between probes, which cost CPU time themselves.
PROBE_S = 0.1


@dataclass(frozen=True)
class Target:
    site: Site
    client: httpx.Client
    command: Command
    triton: EmbeddedTriton

    @property
    def pid(self) -> int:
        return self.command.pid

    @property
    def port(self) -> int:
        return self.site.port

    @property
    def triton_port(self) -> int:
        port = urlsplit(self.triton.options.url).port
        assert port is not None
        return port

    def cpu_s(self) -> float:
        """The CPU time of the gateway and its processes, those that have ended included.

        The time in the kernel depends on the file system.
        """
        times = [psutil.Process(pid).cpu_times() for pid in process_tree(self.pid)]
        return sum(each.user + each.children_user for each in times)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("attacked")
    repository = folder / "models"
    write_repository(repository, Names(), (*MODELS, SIGNALS, KEPT, *ON_DEMAND))
    files = {name: folder / f"{name}.yaml" for name in ("keys", "models")}
    keys.written(files["keys"], keys.ENTRIES)
    files["models"].write_text("models: []")
    (grpc_port,) = free_ports(1)
    loaded = [model.name for model in (*MODELS, SIGNALS)]
    settings = {
        **LOG_WARNINGS,
        "max_bytes_in_flight": str(BUDGET_BYTES),
        "connect_timeout_s": "10",
        "poll_interval_s": "0.2",
        "grpc_port": str(grpc_port),
        "dialects": "torchserve",
        "keys_file": str(files["keys"]),
        "models_file": str(files["models"]),
        "repository": f"file://{repository}",
        "model_uploads": "artifacts",
        "jobs": f"sqlite://{folder}/jobs",
        "on_demand_models": "asked*,kept",
        "max_loaded_models": str(len(loaded) + 4),
    }
    with (
        triton_on_free_ports(repository, *loaded) as triton,
        gateway(triton.options.url, **settings) as (client, command),
    ):
        client.headers["x-api-key"] = keys.BOTH
        site = Site(port_of(client), f"127.0.0.1:{grpc_port}", files)
        target = Target(site, client, command, triton)
        wait_until(lambda: serves_others(client))
        if compares_numbers():
            measure(target)  # the first inferences are slow
        yield target


def serves_others(client: httpx.Client) -> bool:
    """Return whether a model that is always loaded is served, and one that is loaded on demand."""
    answers = [
        client.post(f"/v1/models/{model}/infer", json={"inputs": {"X": [1, 2]}})
        for model in ("echo", "kept")
    ]
    values = [answer.json().get("outputs") for answer in answers]
    return values == [{"Y": [1, 2]}] * 2


@dataclass
class Probes:
    """Requests of another caller, from a thread: the longest times, and the refusals."""

    client: httpx.Client
    livez_s: float = 0.0
    infer_s: float = 0.0
    refusals: list[str] = field(default_factory=list)

    def run(self, stop: threading.Event) -> None:
        with httpx.Client(base_url=self.client.base_url, headers=self.client.headers) as client:
            while not stop.wait(PROBE_S):
                livez = client.get("/livez", timeout=TIMEOUT_S)
                self.livez_s = max(self.livez_s, livez.elapsed.total_seconds())
                answers = [livez]
                for model in ("echo", "kept"):
                    body = {"inputs": {"X": [1, 2]}}
                    answer = client.post(f"/v1/models/{model}/infer", json=body, timeout=TIMEOUT_S)
                    self.infer_s = max(self.infer_s, answer.elapsed.total_seconds())
                    answers.append(answer)
                self.refusals += [each.text for each in answers if each.status_code != 200]


@contextmanager
def probing(client: httpx.Client) -> Iterator[Probes]:
    probes = Probes(client)
    stop = threading.Event()
    thread = threading.Thread(target=probes.run, args=(stop,))
    thread.start()
    try:
        yield probes
    finally:
        stop.set()
        thread.join()


def answer_names(pipe: Pipe, site: Site) -> None:
    """Send the attack of each name that arrives, and return its outcomes."""

    async def send(attack: Attack) -> list[str]:
        with Pool(site.port) as pool:
            attacker = Attacker(site, pool)
            return [await request.send(attacker) for request in attack.requests]

    os.nice(NICENESS)
    while name := pipe.recv():
        pipe.send(asyncio.run(send(ATTACKS[name])))


class AttackerProcess:
    """Sends attacks from another process, which does not delay what is measured here."""

    def __init__(self, site: Site) -> None:
        self._pipe, theirs = SPAWN.Pipe()
        self._process = SPAWN.Process(target=answer_names, args=(theirs, site))
        self._process.start()
        theirs.close()  # so that the end of the process is an end of the pipe
        self.send("unfinished shapes")  # its imports cost more than an attack

    def send(self, name: str) -> list[str]:
        """Return the outcomes of an attack. Raises `EOFError` if it ends the process."""
        self._pipe.send(name)
        assert self._pipe.poll(2 * TIMEOUT_S)
        outcomes: list[str] = self._pipe.recv()
        return outcomes

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture(scope="module")
def send_attack(target: Target) -> Iterator[Callable[[str], list[str]]]:
    attackers = [AttackerProcess(target.site)]

    def send(name: str) -> list[str]:
        try:
            return attackers[-1].send(name)
        except EOFError:  # the others are sent from a new process
            attackers.append(AttackerProcess(target.site))
            raise

    try:
        yield send
    finally:
        for attacker in attackers:
            attacker.kill()


@pytest.mark.fault("requests that once blocked the whole process: unfinished shapes, archives that")
@pytest.mark.fault(
    "images, NumPy files, archives and forms that contradict themselves, or are small"
)
@pytest.mark.fault("an uploaded config of a million instances")
@pytest.mark.fault("a small archive of 10,000 files or folders")
@pytest.mark.fault("thousands of gRPC calls that are reset at once, pings without end")
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_costs_little_and_other_callers_are_served(
    target: Target, send_attack: Callable[[str], list[str]], name: str
) -> None:
    attack = ATTACKS[name]
    # What the attack before this one has sent may still be under way.
    wait_until(lambda: metric(target.client, 'gateway_requests_in_flight{route="grpc"}') == 0)
    forget_peaks(target.pid)
    memory = memory_bytes(target.pid)
    cpu_s = target.cpu_s()
    with probing(target.client) as probes:
        outcomes = send_attack(name)
    used_s = target.cpu_s() - cpu_s
    used_mib = (peak_bytes(target.pid) - memory) / MIB
    assert set(outcomes) <= attack.outcomes, outcomes
    assert not probes.refusals
    print(f"{used_mib:.0f} MiB")
    assert_number("CPU time", used_s, "s", at_most=attack.cpu_s)
    assert used_s <= BUSY_MACHINE * attack.cpu_s
    assert used_mib <= attack.memory_mib
    assert_number("the slowest /livez", probes.livez_s * 1000, "ms", at_most=attack.livez_ms)
    assert_number("the slowest inference", probes.infer_s * 1000, "ms", at_most=attack.infer_ms)
    assert serves_others(target.client)


class Latencies(NamedTuple):
    """99th percentiles in milliseconds: of `/livez`, and of another model, also without the gateway."""

    livez: float
    infer: float
    direct: float


def measure(target: Target, seconds: float = MEASURE_S, per_s: float = PER_S) -> Latencies:
    count = int(per_s * seconds)
    health = [get("/livez")]
    inference = [with_key(ECHO_V2, keys.BOTH)]
    with (
        OpenLoop(Pool(target.port), health, per_s, seconds) as livez,
        OpenLoop(Pool(target.port), inference, per_s, seconds) as infer,
        OpenLoop(Pool(target.triton_port), inference, per_s, seconds) as direct,
    ):
        seen = livez.samples(), infer.samples(), direct.samples()
    for samples in seen:
        assert set(statuses_of(samples)) == {200}
        assert len(samples) > count // 2
    # The processes that send them do not start at once, and starting one takes CPU time from the others.
    began_at = max(samples[0].at for samples in seen)
    measured = ([each for each in samples if each.at >= began_at] for samples in seen)
    return Latencies(*map(p99_ms, measured))


@contextmanager
def attacking(site: Site, names: Sequence[str], connections: int) -> Iterator[Counter[str]]:
    """Send these attacks in random order from a process of low priority; the outcomes, at the end."""
    outcomes: Counter[str] = Counter()
    stop = SPAWN.Event()
    results, pipe = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=attack_until, args=(pipe, stop, site, names, connections))
    process.start()
    try:
        assert results.poll(5 * TIMEOUT_S)
        results.recv()  # its imports cost more than the attack
        yield outcomes
        stop.set()
        assert results.poll(5 * TIMEOUT_S)
        outcomes.update(results.recv())
    finally:
        process.kill()
        process.join()


def attack_until(
    pipe: Pipe, stop: Event, site: Site, names: Sequence[str], connections: int
) -> None:
    """Record each outcome, and with the name of its attack if it is none of those in the table."""
    os.nice(NICENESS)
    pipe.send("ready")
    outcomes: Counter[str] = Counter()

    async def send(attacker: Attacker, random_: random.Random) -> None:
        while not stop.is_set():
            name = random_.choice(names)
            for request in ATTACKS[name].requests:
                try:
                    outcome = await request.send(attacker)
                except (OSError, asyncio.IncompleteReadError):
                    outcome = "closed"
                is_known = outcome in REFUSALS | ATTACKS[name].outcomes
                outcomes[outcome if is_known else f"{outcome} for {name}"] += 1

    async def run() -> None:
        with Pool(site.port) as pool:
            attacker = Attacker(site, pool)
            await asyncio.gather(
                *(send(attacker, random.Random(number)) for number in range(connections))
            )

    asyncio.run(run())
    pipe.send(outcomes)


def find_contention(before: Latencies, during: Latencies) -> float:
    return max(during.direct / before.direct, 1)


@pytest.mark.fault("all attacks together")
@pytest.mark.soak
@pytest.mark.timeout(TOGETHER_S + 10 * TIMEOUT_S)
def test_all_attacks_together_leave_a_caller_served(target: Target) -> None:
    """ATTACK_SECONDS says for how long."""
    before = measure(target, TOGETHER_S / 10, CALLER_PER_S)
    idle = memory_bytes(target.pid)
    peak = [0]
    triton_pid = child_of(target.triton.reaper_pid)
    stop = threading.Event()

    def watch_memory() -> None:
        while not stop.wait(1):
            peak.append(memory_bytes(target.pid))

    watch = threading.Thread(target=watch_memory)
    watch.start()
    try:
        with attacking(target.site, list(ATTACKS), ATTACKERS) as outcomes:
            during = measure(target, TOGETHER_S, CALLER_PER_S)
    finally:
        stop.set()
        watch.join()
    print(f"outcomes of {sum(outcomes.values())} requests: {dict(outcomes.most_common())}")
    print(f"before {before}, during {during}, idle {idle / MIB:.0f} MiB")
    print(f"at most {max(peak) / MIB:.0f} MiB")
    known = REFUSALS.union(*(attack.outcomes for attack in ATTACKS.values()))
    # Beside all others, a body can arrive so slowly that its connection is closed.
    closed = sum(count for outcome, count in outcomes.items() if outcome.startswith("closed for"))
    assert closed <= 0.01 * outcomes.total()
    assert {each for each in outcomes if not each.startswith("closed for")} <= known, outcomes
    assert serves_others(target.client)
    assert target.command.process.poll() is None
    assert child_of(target.triton.reaper_pid) == triton_pid
    assert "Traceback" not in target.command.output
    contention = find_contention(before, during)
    most_ms = max(2 * before.infer * contention, MIN_LIMIT_MS)
    assert_number(
        "p99 of /livez", during.livez, "ms", at_most=max(2 * before.livez * contention, 100)
    )
    assert_number("p99 of another model", during.infer, "ms", at_most=most_ms)
    most_mib = (idle + BUDGET_BYTES) / MIB + 250
    assert_number("memory", max(peak) / MIB, "MiB", at_most=most_mib)


def shed_for_memory(client: httpx.Client) -> float:
    page = client.get("/metrics").text
    (found,) = re.findall(r'^gateway_requests_shed_total\{reason="memory"\} (\S+)', page, re.M)
    return float(found)


@pytest.mark.fault("large uploads that never end")
def test_uploads_that_fill_the_memory_block_no_small_request(
    target: Target, tmp_path: Path
) -> None:
    """Large bodies that never end hold memory, until the budget refuses the next one."""
    head = (
        b"POST /v1/models/texts/infer HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
        b"Content-Length: 60000000\r\nX-Api-Key: " + keys.INFER.encode() + b"\r\n\r\n"
    )

    async def upload(count: int) -> tuple[int, bytes]:
        connections = [
            await asyncio.open_connection("127.0.0.1", target.port) for _ in range(count)
        ]
        try:
            for _, writer in connections:
                writer.write(head + bytes(20 * MIB))
            refused = [reader.readline() for reader, _ in connections]
            done, rest = await asyncio.wait(
                [asyncio.ensure_future(line) for line in refused],
                timeout=TIMEOUT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            small = await asyncio.to_thread(
                target.client.post, "/v1/models/echo/infer", json={"inputs": [1, 2]}
            )
            for task in rest:
                task.cancel()
            return small.status_code, done.pop().result()
        finally:
            for _, writer in connections:
                writer.transport.abort()

    before = shed_for_memory(target.client)
    small, first = asyncio.run(upload(8))
    assert first.startswith(b"HTTP/1.1 429 ")
    assert small == 200
    assert shed_for_memory(target.client) > before
    wait_until(lambda: set(held_memory(target.client).values()) == {0})


@pytest.mark.fault("the description of a model whose inputs have millions of values")
def test_description_of_large_tensors_takes_little_memory(target: Target) -> None:
    """Its examples had all values of an input: of 50 million, they took 15 s and 600 MiB."""
    path = "/v1/models/signals"
    wait_until(lambda: target.client.get(path).status_code == 200)
    forget_peaks(target.pid)
    before = peak_bytes(target.pid)
    description = target.client.get(path).json()
    assert f"* {description['inputs'][0]['shape'][0]}" in description["python"]
    assert len(str(description)) < 4000
    document = target.client.get(f"{path}/openapi.json")
    (operation,) = (item["post"] for item in document.json()["paths"].values())
    assert operation["requestBody"]["content"]["application/json"].keys() == {"schema"}
    assert peak_bytes(target.pid) - before < 16 * MIB
