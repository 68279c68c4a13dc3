"""Requests per second of a key: in one process, over several gateways, and while Redis is away."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis as client_of
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.limits import (
    MAX_REQUESTS_PER_WINDOW,
    MAX_WINDOW_S,
    RateLimiter,
    RateLimitExceeded,
    create_rate_window,
)
from gateway.embedded.supervisor import EmbeddedTriton
from gateway.repository.state.places import open_state_store
from gateway.repository.state.store import StateStore
from gateway.telemetry.metrics import Metrics
from tests.support.keys import INFER, METRICS, TEXTS, bearer, entry, written
from tests.support.model_zoo.zoo import Zoo
from tests.support.redis_server import RedisServer
from tests.support.servers import Command, gateway
from tests.support.wait import wait_until_async

FREE = "tgw_free-secret"
BURST = "tgw_burst-secret"
DAILY = "tgw_daily-secret"
# Keys that may send one request in an hour, each for one test.
ONCE = {name: f"tgw_{name}-secret" for name in ("forwarded", "large", "words")}
# Those of a fleet may send eleven in ten seconds; each is used for one burst of requests.
AMOUNT = 11
WINDOW_S = 10
FLEET = [f"tgw_fleet{number}-secret" for number in range(20)]
READY = "/v2/models/ensemble/ready"
FIELDS = {"error", "code", "request_id"}


def test_window_of_a_rate_is_whole_requests_in_whole_seconds() -> None:
    for per_second, amount, seconds in (
        (1, 1, 1),
        (50, 50, 1),
        (2.5, 5, 2),
        (1 / 3, 1, 3),
        (0.1, 1, 10),
        (1e308, MAX_REQUESTS_PER_WINDOW, 1),
        (5e-324, 1, MAX_WINDOW_S),
        (33.3, 333, 10),
    ):
        window = create_rate_window(per_second)
        assert (window.amount, window.length_s) == (amount, seconds)


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_window_of_any_rate_is_bounded(per_second: float) -> None:
    window = create_rate_window(per_second)
    assert 1 <= window.amount <= 10 * MAX_REQUESTS_PER_WINDOW
    assert 1 <= window.length_s <= MAX_WINDOW_S


def most_in(took_s: float, amount: int, window_s: float = 1) -> int:
    """Return the most requests that may be admitted in so many seconds."""
    return amount * (int(took_s / window_s) + 1)


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


def test_key_above_its_rate_is_429_and_others_are_served(counted: httpx.Client) -> None:
    before = shed(counted)
    began = time.monotonic()
    found = statuses(counted, BURST, 20)
    assert 5 <= found[200] <= most_in(time.monotonic() - began, 5)
    assert shed(counted) - before == found[429] == 20 - found[200]
    assert statuses(counted, FREE, 20) == {200: 20}
    time.sleep(1.01)
    assert statuses(counted, BURST, 1) == {200: 1}


def test_refusal_names_the_rate_and_when_to_try_again(counted: httpx.Client) -> None:
    assert statuses(counted, ONCE["words"], 1) == {200: 1}
    refused = counted.get("/v1/models", headers=bearer(ONCE["words"]))
    assert refused.status_code == 429
    assert 3000 < int(refused.headers["retry-after"]) <= 3600
    assert refused.headers["x-request-id"]
    assert set(refused.json()) == FIELDS
    assert refused.json()["code"] == "OVERLOADED"
    assert "'words' may send 1 request in 3600 seconds" in refused.json()["error"]


@pytest.mark.fault("`X-Forwarded-For` against the rate limits")
def test_forwarded_address_does_not_evade_the_rate(counted: httpx.Client) -> None:
    key = bearer(ONCE["forwarded"])
    found = Counter(
        counted.get(READY, headers={**key, "X-Forwarded-For": f"10.0.0.{n}"}).status_code
        for n in range(20)
    )
    assert found == {200: 1, 429: 19}


def test_health_and_metrics_are_not_counted(counted: httpx.Client) -> None:
    for path in ("/livez", "/v2/health/live", "/v2/health/ready"):
        assert statuses(counted, INFER, 20, path) == {200: 20}
    assert statuses(counted, METRICS, 5, "/metrics") == {200: 5}


def test_body_above_the_rate_leaves_the_connection_usable(
    counted: httpx.Client,
) -> None:
    assert statuses(counted, ONCE["large"], 1) == {200: 1}
    path = "/v1/models/ensemble/infer"
    key = bearer(ONCE["large"])
    assert counted.post(path, headers=key, content=b"x" * 100_000).status_code == 429
    assert statuses(counted, FREE, 1) == {200: 1}


COUNTING = "used to count requests"


@dataclass
class Gateways:
    """Two gateways with one Redis, and what each logs about it."""

    pairs: list[tuple[httpx.Client, Command]]
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def ask(self, key: str, times: int) -> tuple[list[Counter[int]], float]:
        """Send requests to each in turn; return the statuses of each, and the seconds that it took."""
        began = time.monotonic()
        found = [Counter[int]() for _ in self.pairs]
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
        """Return whether a gateway logged last that Redis is unavailable."""
        lines = [line for line in self.pairs[number][1].lines if COUNTING in line]
        return bool(lines) and f"can be {COUNTING} again" not in lines[-1]

    def ask_together(self, keys: Iterator[str], times: int) -> tuple[list[Counter[int]], float]:
        """Repeat `ask` until Redis served all of it: within a quarter of a second, which a busy machine
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
def test_two_gateways_share_rates_while_redis_is_there(
    demo_triton: EmbeddedTriton, keys: Path, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as redis:
        settings = {"keys_file": str(keys), "state": redis.url(), "log_level": "info"}
        url = demo_triton.options.url
        unused = iter(FLEET)
        with gateway(url, **settings) as one, gateway(url, **settings) as other:
            gateways = Gateways([one, other])
            found, took_s = gateways.ask_together(unused, 15)
            assert AMOUNT <= sum(each[200] for each in found) <= most_in(took_s, AMOUNT, WINDOW_S)

            redis.stop()
            before = [gateways.outages(number) for number in range(2)]
            found, took_s = gateways.ask(next(unused), 15)
            for number, each in enumerate(found):
                assert AMOUNT <= each[200] <= most_in(took_s, AMOUNT, WINDOW_S)
                assert each[200] + each[429] == 15
                # Logged when it begins, and not each time.
                assert 0 < gateways.outages(number) - before[number] < 5
                assert gateways.counts_alone(number)

            redis.start()
            found, took_s = gateways.ask_together(unused, 15)
            assert AMOUNT <= sum(each[200] for each in found) <= most_in(took_s, AMOUNT, WINDOW_S)


# The clocks of Redis and of the gateway. What is kept in Redis would count for an hour longer if its clock
# is set back.

HOUR_MS = 3_600_000
SHOP_PER_SECOND = 5


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


@asynccontextmanager
async def open_store(url: str) -> AsyncIterator[StateStore]:
    store = open_state_store(url)
    try:
        yield store
    finally:
        await store.close()


async def count_requests(rates: RateLimiter, times: int) -> list[str]:
    """Return for each request the Retry-After of its refusal, or nothing."""
    found = []
    for _ in range(times):
        try:
            await rates.count_request("shop", SHOP_PER_SECOND)
            found.append("")
        except RateLimitExceeded as exc:
            found.append(str((exc.headers or {})["Retry-After"]))
    return found


def shift_windows(client: Any, later_ms: int) -> int:
    keys = list(client.scan_iter("*rate*"))
    for key in keys:
        client.hincrby(key, "start", later_ms)
    return len(keys)


def set_back(client: Any) -> int:
    """Let every window begin an hour later, as it does when the server's clock is set back an hour."""
    return shift_windows(client, HOUR_MS)


@pytest.mark.fault("the clock is set back or forward by an hour, on the gateway or in Redis")
async def test_clock_set_back_in_redis_locks_no_key_out(redis: RedisServer) -> None:
    kept = open_state_store(redis.url())
    rates = RateLimiter(Metrics(), kept.rate_windows)
    with client_of.Redis(port=redis.port) as client:

        async def has_set_back() -> bool:
            assert "1" in await count_requests(rates, 12)
            return set_back(client) > 0  # none, if Redis did not answer in time on a busy machine

        await wait_until_async(has_set_back)
    assert "" in await count_requests(rates, 2)
    assert "1" in await count_requests(rates, 12)  # and it counts again
    await kept.close()


# Requests that are many inferences.


@dataclass
class CountedKey:
    """A key that may send eleven requests in ten seconds, and the clock of its windows."""

    redis: RedisServer
    rates: RateLimiter
    now: float = 1000.0

    def wait(self, seconds: float) -> None:
        self.now += seconds
        with client_of.Redis(port=self.redis.port) as client:
            shift_windows(client, -int(1000 * seconds))

    async def count(self, inferences: int = 1, *, opens_window: bool = False) -> bool:
        per_second = AMOUNT / WINDOW_S
        return await self.rates.count_request(
            "shop", per_second, inferences, opens_window=opens_window
        )

    async def refuse(self, words: str, inferences: int = 1, *, opens_window: bool = False) -> int:
        """Return the Retry-After of a request that is refused with these words."""
        with pytest.raises(RateLimitExceeded, match=words) as refused:
            await self.count(inferences, opens_window=opens_window)
        return int((refused.value.headers or {})["Retry-After"])


PLAIN = "'shop' may send 11 requests in 10 seconds; try"


@pytest.mark.fault("rows that are an inference each")
@pytest.mark.parametrize("is_shared", [False, True])
async def test_request_of_many_inferences_is_counted_as_many(
    redis: RedisServer, is_shared: bool
) -> None:
    kept = open_state_store(redis.url())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(kept.close)
        shared = kept.rate_windows if is_shared else None
        key = CountedKey(redis, RateLimiter(Metrics(), shared, lambda: key.now))

        # The first of a window is admitted whatever its size, and closes it for as long as they take.
        assert await key.count()
        assert not await key.count()
        await key.count(220, opens_window=True)
        assert 190 < await key.refuse("has sent requests that count as more") <= 201
        key.wait(150)
        assert 40 < await key.refuse("has sent requests that count as more") <= 51
        key.wait(70)
        assert await key.count()

        # Others are admitted if they fit.
        assert not await key.count()
        await key.count(10)
        assert await key.refuse(PLAIN) <= 11
        key.wait(25)
        assert await key.count()
        assert not await key.count()
        wait_s = await key.refuse("11 requests in 10 seconds, and this one counts as 12", 12)
        assert 5 < wait_s <= 16
        key.wait(wait_s)
        assert await key.count()
        await key.count(12, opens_window=True)

        # Only one of those that came to an empty window closes it.
        for _ in range(2):
            key.wait(50)
            assert await key.count()
        await key.count(100, opens_window=True)
        assert await key.refuse("counts as 100", 100, opens_window=True) > 50


@pytest.mark.fault("rows that are an inference each")
def test_rows_that_are_inferences_count_as_requests(
    zoo_triton: EmbeddedTriton, zoo_as_written: Zoo, tmp_path: Path
) -> None:
    zoo_as_written.load("plain_single_BYTES", "single_BYTES")
    rare = [f"tgw_rare{number}-secret" for number in range(2)]
    keys = [entry(key, "infer", requests_per_second=1 / 3600) for key in rare]
    keys += [
        entry(FREE, "infer"),
        entry(BURST, "infer", requests_per_second=AMOUNT / WINDOW_S),
        entry(DAILY, "infer", requests_per_day=9),
    ]
    settings = {
        "keys_file": str(written(tmp_path / "keys.yaml", keys)),
        "max_request_inferences": "5",
    }
    calls: list[tuple[str, int, Callable[[int], Any]]] = [
        ("/v1/models/plain_single_BYTES:predict", 5, lambda rows: {"instances": ["a"] * rows}),
        ("/v1/models/single_BYTES/infer", 40, lambda rows: {"inputs": ["a"] * rows}),
    ]
    with gateway(zoo_triton.options.url, **settings) as (client, _):

        def call(key: str, path: str, document: Any) -> httpx.Response:
            return client.post(path, headers=bearer(key), json=document)

        for key, (path, most, build) in zip(rare, calls, strict=True):
            assert call(FREE, path, build(most + 1)).status_code == 413
            admitted = call(key, path, build(most))
            assert admitted.status_code == 200, admitted.text
            refused = call(key, path, build(1))
            assert refused.status_code == 429, refused.text
            assert 4 * 3600 < int(refused.headers["retry-after"]) <= 5 * 3600
        path, most, build = calls[0]
        statuses = [call(BURST, path, build(most)).status_code for _ in range(2)]
        refused = call(BURST, path, build(most))
        assert [*statuses, refused.status_code] == [200, 200, 429]
        assert "and this one counts as 5" in refused.json()["error"]
        statuses = [call(DAILY, path, build(rows)).status_code for rows in (5, 5, 4, 1)]
        assert statuses == [200, 429, 200, 429]


@pytest.mark.long
@pytest.mark.fault("the clock is set back or forward by an hour, on the gateway or in Redis")
@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
async def test_clock_of_the_gateway_does_not_affect_rates_in_redis(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    # At the end of a window, a refusal may last for the rest of it and the next one.
    refusals = {"1", "2"}
    async with open_store(redis.url()) as kept:
        rates = RateLimiter(Metrics(), kept.rate_windows)
        found = set(await count_requests(rates, 12))
        assert "" in found
        assert found & refusals
        assert found <= {"", *refusals}
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        assert set(await count_requests(rates, 5)) <= {"", *refusals}
        await asyncio.sleep(2.1)
        assert (await count_requests(rates, 1)) == [""]
