"""A fleet of real tritonservers whose models are loaded on demand, and what its indexes said meanwhile."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support.fleet import BODY, QUICK, Fleet, url_of, write_echo
from tests.support.metrics import metric
from tests.support.servers import Triton, gateway
from tests.support.wait import TIMEOUT_S, wait_until

if TYPE_CHECKING:
    from typing_extensions import Self

HELD = ("READY", "LOADING", "UNLOADING")


def model_names(count: int) -> list[str]:
    return [f"model{number:02}" for number in range(count)]


@contextmanager
def tritons_with(folder: Path, count: int, models: Sequence[str]) -> Iterator[list[Triton]]:
    """Tritons without any model loaded, each with a repository of its own."""
    with ExitStack() as stack:
        tritons = []
        for number in range(count):
            repository = folder / str(number)
            for model in models:
                write_echo(repository, model)
            tritons.append(stack.enter_context(Triton(repository)))
        for triton in tritons:
            triton.wait()
        yield tritons


@contextmanager
def on_demand_fleet(tritons: list[Triton], patterns: str = "*", **settings: str) -> Iterator[Fleet]:
    """A gateway that loads what matches the patterns, on Tritons with nothing loaded."""
    for triton in tritons:
        clear(triton)
    with on_demand_gateway(tritons, patterns, **settings) as fleet:
        yield fleet


@contextmanager
def on_demand_gateway(
    tritons: list[Triton], patterns: str = "*", **settings: str
) -> Iterator[Fleet]:
    """The same, with what the Tritons have."""
    options = {"poll_interval_s": QUICK["poll_interval_s"], "connect_timeout_s": "10", **settings}
    with gateway(*map(url_of, tritons), on_demand_models=patterns, **options) as (client, command):
        yield Fleet(tritons, client, command)


def read_index(triton: Triton) -> dict[str, str]:
    """The state of each model by what the Triton says."""
    url = f"http://{triton.address}/v2/repository/index"
    index = httpx.post(url, timeout=TIMEOUT_S).json()
    return {entry["name"]: entry.get("state", "never") for entry in index}


def list_held(triton: Triton) -> set[str]:
    return {name for name, state in read_index(triton).items() if state in HELD}


def clear(triton: Triton) -> None:
    """Unload everything, an ensemble before its steps."""
    base = f"http://{triton.address}/v2/repository/models"
    for name in sorted(list_held(triton)):
        options = {"parameters": {"unload_dependents": True}}
        httpx.post(f"{base}/{name}/unload", json=options, timeout=TIMEOUT_S)
    wait_until(lambda: not list_held(triton))


def loads(fleet: Fleet, outcome: str = "done") -> int:
    labels = {'action="load"', 'by="on_demand"', f'outcome="{outcome}"'}
    # Their order depends on the number of worker processes.
    samples = r"^gateway_model_actions_total\{(.*)\} (\S+)"
    page = fleet.client.get("/metrics").text
    return sum(
        int(float(value))
        for found, value in re.findall(samples, page, re.M)
        if labels <= set(found.split(","))
    )


def evictions(fleet: Fleet, reason: str = "room") -> int:
    return int(metric(fleet.client, f'gateway_on_demand_evictions_total{{reason="{reason}"}}'))


@dataclass
class IndexWatch:
    """Samples of the indexes while a test runs: the most models that each Triton held at a time."""

    tritons: list[Triton]
    most: dict[str, int] = field(default_factory=dict)
    copies: Counter[str] = field(default_factory=Counter)
    samples: int = 0

    def __enter__(self) -> Self:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            copies: Counter[str] = Counter()
            for triton in self.tritons:
                try:
                    held = list_held(triton)
                except httpx.HTTPError:  # the test has ended it
                    continue
                self.most[triton.address] = max(self.most.get(triton.address, 0), len(held))
                copies.update(held)
            self.copies |= copies
            self.samples += 1


@contextmanager
def used_continuously(
    fleet: Fleet,
    model: str,
    body: object = BODY,
    clients: int = 1,
    headers: Mapping[str, str] | None = None,
) -> Iterator[list[int]]:
    """The statuses of requests that clients send one after another until the block ends."""
    statuses: list[int] = []
    stop = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=fleet.client.base_url, timeout=TIMEOUT_S) as client:
            while not stop.wait(0.05):
                response = client.post(f"/v1/models/{model}/infer", json=body, headers=headers)
                statuses.append(response.status_code)

    with ThreadPoolExecutor(clients) as pool:
        sending = [pool.submit(send) for _ in range(clients)]
        try:
            yield statuses
        finally:
            stop.set()
            for each in sending:
                each.result()


@contextmanager
def flooded(fleet: Fleet, models: Sequence[str], headers: Mapping[str, str]) -> Iterator[list[str]]:
    """The models that answered: one of them is asked for every 50 ms, in turn, until the block ends."""
    answered: list[str] = []
    stop = threading.Event()

    def send(model: str) -> None:
        if fleet.infer(model, headers={**headers, "X-Request-Timeout": "1"}).status_code == 200:
            answered.append(model)

    def send_all(pool: ThreadPoolExecutor) -> None:
        for model in cycle(models):
            if stop.wait(0.05):
                return
            pool.submit(send, model)

    with ThreadPoolExecutor(100) as pool, ThreadPoolExecutor(1) as sender:
        sending = sender.submit(send_all, pool)
        try:
            yield answered
        finally:
            stop.set()
            sending.result()


# `make test` has the short one.
TRACE_SECONDS = [5.0, pytest.param(60.0, marks=pytest.mark.soak)]


@dataclass
class Trace:
    """Requests for models by Zipf's law, from several clients, in the order in which they began."""

    models: Sequence[str]
    seed: int = 1
    began: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(
        self, urls: Sequence[str], seconds: float, clients: int = 6, pause_s: float = 0.02
    ) -> None:
        ends = time.monotonic() + seconds
        threads = [
            threading.Thread(target=self._send, args=(urls[each % len(urls)], each, ends, pause_s))
            for each in range(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _send(self, url: str, number: int, ends: float, pause_s: float) -> None:
        draw = random.Random(self.seed * 1000 + number)
        weights = [1 / (rank + 1) for rank in range(len(self.models))]
        with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
            while time.monotonic() < ends:
                (model,) = draw.choices(self.models, weights)
                with self._lock:
                    self.began.append(model)
                began = time.monotonic()
                response = client.post(f"/v1/models/{model}/infer", json={"inputs": {"X": [1, 2]}})
                self.took_s.append(time.monotonic() - began)
                if response.status_code != 200:
                    self.failures.append(response.text)
                time.sleep(draw.expovariate(1 / pause_s))

    @property
    def p99_s(self) -> float:
        return sorted(self.took_s)[int(0.99 * len(self.took_s))]


def count_lru_loads(trace: Sequence[str], slots: int) -> int:
    """The loads of one cache with all slots, for the same trace."""
    held: OrderedDict[str, None] = OrderedDict()
    count = 0
    for model in trace:
        if model not in held:
            count += 1
            if len(held) == slots:
                held.popitem(last=False)
        held[model] = None
        held.move_to_end(model)
    return count
