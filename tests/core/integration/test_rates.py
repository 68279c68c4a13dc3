"""Requests per second of a key: in one process, over several gateways, and while Redis is away."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.embedded.supervisor import EmbeddedTriton
from gateway.errors import StateUnavailable
from gateway.metrics import Metrics
from gateway.rate_limit import (
    MAX_REQUESTS_PER_WINDOW,
    MAX_WINDOW_S,
    RateLimiter,
    RateLimitExceeded,
    create_rate_window,
)
from tests.support.keys import INFER, METRICS, TEXTS, bearer, entry, written
from tests.support.redis_server import RedisServer
from tests.support.servers import Command, gateway

FREE, BURST = "tgw_free-secret", "tgw_burst-secret"
# Keys that may send one request in an hour, each for a test of its own.
ONCE = {name: f"tgw_{name}-secret" for name in ("forwarded", "large", "words")}
# Those of a fleet may send eleven in ten seconds; each is used for one burst of requests.
AMOUNT, WINDOW_S = 11, 10
FLEET = [f"tgw_fleet{number}-secret" for number in range(20)]
READY = "/v2/models/ensemble/ready"
FIELDS = {"error", "code", "request_id"}


@pytest.mark.parametrize(
    ("per_second", "amount", "seconds"),
    [
        (1, 1, 1), (50, 50, 1), (2.5, 5, 2), (1 / 3, 1, 3), (0.1, 1, 10), (1e308, MAX_REQUESTS_PER_WINDOW, 1),
        (5e-324, 1, MAX_WINDOW_S), (33.3, 333, 10),
    ],
)  # fmt: skip
def test_a_rate_is_whole_requests_in_whole_seconds(
    per_second: float, amount: int, seconds: int
) -> None:
    window = create_rate_window(per_second)
    assert (window.amount, window.get_expiry()) == (amount, seconds)


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_every_rate_that_a_keys_file_can_have_is_one(per_second: float) -> None:
    window = create_rate_window(per_second)
    assert 1 <= window.amount <= 10 * MAX_REQUESTS_PER_WINDOW
    assert 1 <= window.get_expiry() <= MAX_WINDOW_S


def count_admitted(rates: RateLimiter, name: str, per_second: float, times: int) -> int:
    async def scenario() -> int:
        count = 0
        for _ in range(times):
            try:
                await rates.count_request(name, per_second)
                count += 1
            except RateLimitExceeded:
                pass
        return count

    return asyncio.run(scenario())


def most_in(took_s: float, amount: int, window_s: float = 1) -> int:
    """How many requests may be admitted in so many seconds."""
    return amount * (int(took_s / window_s) + 1)


def test_no_second_has_more_requests_than_the_rate_and_keys_do_not_share_it() -> None:
    rates = RateLimiter(Metrics())
    for pause_s in (0, 1.01):
        time.sleep(pause_s)
        began = time.monotonic()
        count = count_admitted(rates, "a", 20, 50)
        assert 20 <= count <= most_in(time.monotonic() - began, 20)
        assert count_admitted(rates, "b", 5, 5) == 5


def test_who_is_refused_is_told_when_to_come_back() -> None:
    rates = RateLimiter(Metrics())
    assert count_admitted(rates, "slow", 0.2, 1) == 1
    with pytest.raises(RateLimitExceeded) as refused:
        asyncio.run(rates.count_request("slow", 0.2))
    assert refused.value.headers == {"Retry-After": "5"}
    assert refused.value.detail == ("key 'slow' may send 1 request in 5 seconds; try again in 5 s")


class Away:
    """Windows that cannot be asked."""

    asked = 0

    async def wait_s(self, window: object, name: str) -> float:
        self.asked += 1
        raise StateUnavailable("used", "no response from Redis")


def test_while_others_cannot_be_asked_it_counts_alone_and_does_not_ask_each_time() -> None:
    away = Away()
    assert count_admitted(RateLimiter(Metrics(), away), "a", 0.01, 30) == 1
    assert away.asked < 30


# The gateway.


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    return written(
        path,
        [
            entry(INFER, "infer", requests_per_second=1),
            entry(BURST, "infer", requests_per_second=5),
            *(entry(key, "infer", requests_per_second=1 / 3600) for key in ONCE.values()),
            *(entry(key, "infer", requests_per_second=AMOUNT / WINDOW_S) for key in FLEET),
            entry(TEXTS, "infer", models=["text_*"], requests_per_second=1000),
            entry(METRICS, "metrics", requests_per_second=1),
            entry(FREE, "infer"),
        ],
    )


@pytest.fixture(scope="module")
def counted(demo_triton: EmbeddedTriton, keys: Path) -> Iterator[httpx.Client]:
    with gateway(demo_triton.options.url, keys_file=str(keys)) as (client, _):
        yield client


def statuses(client: httpx.Client, key: str, times: int, path: str = READY) -> Counter[int]:
    return Counter(client.get(path, headers=bearer(key)).status_code for _ in range(times))


def shed(client: httpx.Client) -> float:
    page = client.get("/metrics", headers=bearer(METRICS)).text
    name = 'gateway_requests_shed_total{reason="rate"} '
    return float(page.partition(name)[2].split("\n")[0])


def test_a_key_that_asks_too_often_is_429_and_others_are_served(counted: httpx.Client) -> None:
    before, began = shed(counted), time.monotonic()
    found = statuses(counted, BURST, 20)
    assert 5 <= found[200] <= most_in(time.monotonic() - began, 5)
    assert shed(counted) - before == found[429] == 20 - found[200]
    assert statuses(counted, FREE, 20) == {200: 20}
    time.sleep(1.01)
    assert statuses(counted, BURST, 1) == {200: 1}


def test_a_refusal_says_what_the_key_may_do_and_when_to_come_back(counted: httpx.Client) -> None:
    assert statuses(counted, ONCE["words"], 1) == {200: 1}
    refused = counted.get("/v1/models", headers=bearer(ONCE["words"]))
    assert refused.status_code == 429
    assert 3000 < int(refused.headers["retry-after"]) <= 3600
    assert refused.headers["x-request-id"]
    assert set(refused.json()) == FIELDS
    assert refused.json()["code"] == "OVERLOADED"
    assert "'words' may send 1 request in 3600 seconds" in refused.json()["error"]


@pytest.mark.fault("`X-Forwarded-For` against the rate limits")
def test_whom_a_proxy_says_it_asks_for_changes_nothing(counted: httpx.Client) -> None:
    key = bearer(ONCE["forwarded"])
    found = Counter(
        counted.get(READY, headers={**key, "X-Forwarded-For": f"10.0.0.{n}"}).status_code
        for n in range(20)
    )
    assert found == {200: 1, 429: 19}


@pytest.mark.parametrize("path", ["/livez", "/v2/health/live", "/v2/health/ready"])
def test_health_is_not_counted(counted: httpx.Client, path: str) -> None:
    assert statuses(counted, INFER, 20, path) == {200: 20}


def test_metrics_are_not_counted(counted: httpx.Client) -> None:
    assert statuses(counted, METRICS, 5, "/metrics") == {200: 5}


def test_a_body_that_is_refused_does_not_cost_the_connection_its_next_answer(
    counted: httpx.Client,
) -> None:
    assert statuses(counted, ONCE["large"], 1) == {200: 1}
    path, key = "/v1/models/ensemble/infer", bearer(ONCE["large"])
    assert counted.post(path, headers=key, content=b"x" * 100_000).status_code == 429
    assert statuses(counted, FREE, 1) == {200: 1}


COUNTING = "used to count requests"


@dataclass
class Gateways:
    """Two before the same Redis, and what each says of it in its log."""

    pairs: list[tuple[httpx.Client, Command]]
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def ask(self, key: str, times: int) -> tuple[list[Counter[int]], float]:
        """Each in its turn: the statuses of each, and the seconds that it took."""
        began, found = time.monotonic(), [Counter[int]() for _ in self.pairs]
        for _ in range(times):
            name = f"counted-{next(self._numbers)}."
            headers = {**bearer(key), "X-Request-ID": name}
            for (client, _), counter in zip(self.pairs, found, strict=True):
                counter[client.get(READY, headers=headers).status_code] += 1
        took_s = time.monotonic() - began
        for _, command in self.pairs:
            command.wait_for(name)  # and so all that it wrote before
        return found, took_s

    def outages(self, number: int) -> int:
        return sum(f"cannot be {COUNTING}" in line for line in self.pairs[number][1].lines)

    def counts_alone(self, number: int) -> bool:
        """For all that its log says."""
        told = [line for line in self.pairs[number][1].lines if COUNTING in line]
        return bool(told) and f"can be {COUNTING} again" not in told[-1]

    def ask_together(self, keys: Iterator[str], times: int) -> tuple[list[Counter[int]], float]:
        """The same while all ask Redis: it must answer in a quarter of a second, which a busy machine
        does not always do."""
        numbers = range(len(self.pairs))
        while True:
            while any(map(self.counts_alone, numbers)):
                self.ask(TEXTS, 1)
                time.sleep(0.05)
            before = [*map(self.outages, numbers)]
            found = self.ask(next(keys), times)
            if [*map(self.outages, numbers)] == before:
                return found


@pytest.mark.fault("Redis goes away and comes back")
def test_two_gateways_with_one_redis_count_together_and_alone_while_it_is_away(
    demo_triton: EmbeddedTriton, keys: Path, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as redis:
        settings = {"keys_file": str(keys), "state": redis.url(), "log_level": "info"}
        url, unused = demo_triton.options.url, iter(FLEET)
        with gateway(url, **settings) as one, gateway(url, **settings) as other:
            gateways = Gateways([one, other])
            found, took_s = gateways.ask_together(unused, 15)
            print(f"together {found}")
            assert AMOUNT <= sum(each[200] for each in found) <= most_in(took_s, AMOUNT, WINDOW_S)

            redis.stop()
            before = [gateways.outages(number) for number in range(2)]
            found, took_s = gateways.ask(next(unused), 15)
            print(f"alone {found}")
            for number, each in enumerate(found):
                assert AMOUNT <= each[200] <= most_in(took_s, AMOUNT, WINDOW_S)
                assert each[200] + each[429] == 15
                # Told when it begins, and not each time.
                assert 0 < gateways.outages(number) - before[number] < 5
                assert gateways.counts_alone(number)

            redis.start()
            found, took_s = gateways.ask_together(unused, 15)
            assert AMOUNT <= sum(each[200] for each in found) <= most_in(took_s, AMOUNT, WINDOW_S)
