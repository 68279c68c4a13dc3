"""Two gateways with Redis before three Tritons, while any of them is killed or paused: after each
disturbance every replica has what was asked for last, and stays so.

`TRITON_GATEWAY_FLEET_SEED` replays a run, and `TRITON_GATEWAY_FLEET_STEPS` makes it longer.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleet import QUICK, V2_BODY, write_echo
from tests.support.measurements import assert_number
from tests.support.redis_server import RedisServer
from tests.support.servers import GatewayProcess, Triton
from tests.support.wait import TIMEOUT_S, wait_until

SEED = os.environ.get("TRITON_GATEWAY_FLEET_SEED")
STEPS = os.environ.get("TRITON_GATEWAY_FLEET_STEPS")
MODELS = ("a", "b")
UNTOUCHED = "steady"
MOST_CHANGES = 2  # of a model on a replica that was not disturbed, in one step
QUIET_S = 15.0
STABLE_LOOKS = 10
ABSENT = frozenset[str]()


@dataclass
class Fleet:
    repository: Path
    redis: RedisServer
    tritons: list[Triton]
    gateways: list[GatewayProcess]
    # What was asked for last; the newest version is served of what is loaded.
    loaded: dict[str, bool] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)

    def expected(self, model: str) -> frozenset[str]:
        return frozenset({str(self.newest[model])}) if self.loaded[model] else ABSENT

    def write_version(self, model: str) -> None:
        folder = self.repository / model
        self.newest[model] += 1
        shutil.copytree(folder / "1", folder / f".{self.newest[model]}")
        (folder / f".{self.newest[model]}").rename(folder / str(self.newest[model]))

    def ask(self, gateway: GatewayProcess, model: str, load: bool) -> bool:
        """Load or unload; whether the answer says that it is done everywhere, or will be."""
        verb = "load" if load else "unload"
        with suppress(httpx.HTTPError, ValueError):
            url = f"{gateway.url}/v2/repository/models/{model}/{verb}"
            answer = httpx.post(url, timeout=TIMEOUT_S)
            return answer.status_code == 200 or answer.json()["code"] == "PARTLY_DONE"
        return False


def served(triton: Triton) -> dict[str, frozenset[str]] | None:
    """The versions of each model that a Triton itself calls ready; None while it does not answer."""
    try:
        answer = httpx.post(f"http://{triton.address}/v2/repository/index", timeout=5)
        entries: list[dict[str, str]] = answer.json()
    except (httpx.HTTPError, ValueError):
        return None
    found: dict[str, set[str]] = {model: set() for model in MODELS}
    for entry in entries:
        if entry.get("state") == "READY" and entry["name"] in found:
            found[entry["name"]].add(entry["version"])
    return {model: frozenset(versions) for model, versions in found.items()}


class Changes:
    """Counts how often what each replica serves changes."""

    def __init__(self, tritons: list[Triton]) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self._tritons = tritons
        self._last: dict[tuple[str, str], frozenset[str]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            for triton in self._tritons:
                for model, versions in (served(triton) or {}).items():
                    key = triton.address, model
                    if self._last.setdefault(key, versions) != versions:
                        self.counts[key] += 1
                        self._last[key] = versions

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


class SteadyClient:
    """Asks for a model that nobody touches, by one gateway and, if that fails, once by the other."""

    def __init__(self, gateways: list[GatewayProcess]) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._gateways = gateways
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        turn = 0
        while not self._stop.wait(0.02):
            turn += 1
            failures = []
            for gateway in (self._gateways[turn % 2], self._gateways[(turn + 1) % 2]):
                url = f"{gateway.url}/v2/models/{UNTOUCHED}/infer"
                try:
                    answer = httpx.post(url, json=V2_BODY, timeout=TIMEOUT_S)
                except httpx.HTTPError as exc:
                    failures.append(repr(exc))
                    continue
                if answer.status_code == 200:
                    self.answered += 1
                    break
                failures.append(answer.text)
            else:
                self.failed.append(" | ".join(failures))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def fleet(folder: Path) -> Iterator[Fleet]:
    repository = folder / "models"
    for model in (*MODELS, UNTOUCHED):
        write_echo(repository, model)
    (folder / "redis").mkdir()
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder / "redis", "--appendonly", "yes"))
        tritons = [stack.enter_context(Triton(repository, UNTOUCHED)) for _ in range(3)]
        for triton in tritons:
            triton.wait()
        environment = {f"GATEWAY_{name.upper()}": str(value) for name, value in QUICK.items()}
        environment |= {
            "GATEWAY_TRITON_URLS": ",".join(triton.options.url for triton in tritons),
            "GATEWAY_STATE": redis.url(),
            "GATEWAY_SHUTDOWN_S": "1",
        }
        gateways = [GatewayProcess(environment) for _ in range(2)]
        for gateway in gateways:
            gateway.start()
            stack.callback(gateway.stop)
        yield Fleet(
            repository,
            redis,
            tritons,
            gateways,
            dict.fromkeys(MODELS, False),
            dict.fromkeys(MODELS, 1),
        )


Disturbance = Callable[[Fleet, random.Random], str]


def restart_gateway(fleet: Fleet, chance: random.Random) -> str:
    gateway = chance.choice(fleet.gateways)
    gateway.kill()
    gateway.start()
    return f"gateway {fleet.gateways.index(gateway)} killed"


def pause_gateway(fleet: Fleet, chance: random.Random) -> str:
    gateway = chance.choice(fleet.gateways)
    gateway.signal(signal.SIGSTOP)
    time.sleep(chance.uniform(0.5, 6))  # the lease lapses after five seconds
    gateway.signal(signal.SIGCONT)
    return f"gateway {fleet.gateways.index(gateway)} paused"


def restart_triton(fleet: Fleet, chance: random.Random) -> str:
    triton = chance.choice(fleet.tritons)
    triton.kill()
    triton.start()
    triton.wait()
    return f"triton {fleet.tritons.index(triton)} killed"


def pause_triton(fleet: Fleet, chance: random.Random) -> str:
    triton = chance.choice(fleet.tritons)
    triton.signal(signal.SIGSTOP)
    time.sleep(chance.uniform(0.2, 3))
    triton.signal(signal.SIGCONT)
    return f"triton {fleet.tritons.index(triton)} paused"


def pause_redis(fleet: Fleet, chance: random.Random) -> str:
    fleet.redis.signal(signal.SIGSTOP)
    time.sleep(chance.uniform(0.2, 4))
    fleet.redis.signal(signal.SIGCONT)
    return "redis paused"


def restart_redis(fleet: Fleet, chance: random.Random) -> str:
    fleet.redis.stop()
    time.sleep(chance.uniform(0, 2))
    fleet.redis.start()
    return "redis restarted"


def leave_alone(fleet: Fleet, chance: random.Random) -> str:
    return "nothing disturbed"


DISTURBANCES: tuple[Disturbance, ...] = (
    leave_alone,
    restart_gateway,
    pause_gateway,
    restart_triton,
    pause_triton,
    pause_redis,
    restart_redis,
)


def truth(gateway: GatewayProcess) -> dict[str, Any]:
    """What a gateway says of each model."""
    with suppress(httpx.HTTPError, KeyError):
        listed = httpx.get(f"{gateway.url}/v1/models", timeout=TIMEOUT_S).json()["models"]
        return {model["name"]: model for model in listed}
    return {}


def is_settled(fleet: Fleet) -> bool:
    """Whether every replica serves what was asked for, and both gateways say so."""
    for triton in fleet.tritons:
        if served(triton) != {model: fleet.expected(model) for model in MODELS}:
            return False
    for gateway in fleet.gateways:
        models = truth(gateway)
        for model in MODELS:
            told = models.get(model, {})
            ready = {
                version["version"]
                for version in told.get("versions", ())
                if version["state"] == "READY"
            }
            if ready != fleet.expected(model) or told.get("behind"):
                return False
            if len(told.get("replicas", ())) < len(fleet.tritons):
                return False
    return True


def take_step(fleet: Fleet, chance: random.Random, number: int) -> float:
    """Change something while something is disturbed; the seconds until all is as was asked."""
    model, gateway = chance.choice(MODELS), chance.choice(fleet.gateways)
    load = chance.random() < 0.7
    if load and chance.random() < 0.5:
        fleet.write_version(model)
    disturb = chance.choice(DISTURBANCES)
    changes = Changes(fleet.tritons)
    try:
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(fleet.ask, gateway, model, load)
            time.sleep(chance.uniform(0, 0.5))
            what = disturb(fleet, chance)
            done = asking.result()
        while not done:  # the gateway was killed, or Redis was away
            done = fleet.ask(chance.choice(fleet.gateways), model, load)
            time.sleep(0 if done else 0.2)
        fleet.loaded[model] = load
        took_s = wait_until(lambda: is_settled(fleet))
        for _ in range(STABLE_LOOKS):
            time.sleep(0.1)
            assert is_settled(fleet), "it did not stay so"
    finally:
        changes.stop()
    verb = "load" if load else "unload"
    print(f"step {number}: {verb} {model} {fleet.newest[model]}, {what}: settled in {took_s:.1f} s")
    print(f"  changes: {dict(changes.counts)}")
    if "killed" not in what or "triton" not in what:
        assert max(changes.counts.values(), default=0) <= MOST_CHANGES, changes.counts
    return took_s


def run(folder: Path, seed: int, steps: int) -> None:
    print(f"TRITON_GATEWAY_FLEET_SEED={seed} TRITON_GATEWAY_FLEET_STEPS={steps}")
    chance = random.Random(seed)
    with fleet(folder) as found:
        client = SteadyClient(found.gateways)
        try:
            slowest_s = max(take_step(found, chance, number) for number in range(steps))
        finally:
            client.stop()
    print(f"{client.answered} inferences of the model that nobody touches")
    assert client.failed == []
    assert client.answered > steps
    assert_number(
        "the longest time until the fleet was as asked for", slowest_s, "s", at_most=QUIET_S
    )


@pytest.mark.long
@pytest.mark.fault("a gateway, Redis or a Triton is killed or paused while models are loaded and")
@pytest.mark.timeout(3600)
def test_a_fleet_of_two_gateways_comes_to_rest_whatever_happens(tmp_path: Path) -> None:
    """Takes long: a few random disturbances, and each time the fleet comes to rest."""
    run(tmp_path, int(SEED or 1), int(STEPS or 5))


@pytest.mark.fault("a gateway, Redis or a Triton is killed or paused while models are loaded and")
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_fleet_of_two_gateways_comes_to_rest_two_hundred_times(tmp_path: Path) -> None:
    """Takes half an hour."""
    run(tmp_path, int(SEED or random.randrange(10**6)), int(STEPS or 200))
