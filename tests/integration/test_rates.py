"""Requests per second of a key: in one process, over several gateways, and while Redis is away."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import StateUnavailable
from gateway.metrics import Metrics
from gateway.rates import LONGEST_S, MOST, Rates, TooFast, window_of
from gateway.triton.embedded import EmbeddedTriton
from tests.support.keys import INFER, METRICS, TEXTS, bearer, entry, written
from tests.support.redis_server import redis_server
from tests.support.servers import Command, gateway

FREE = "tgw_free-secret"
READY = "/v2/models/ensemble/ready"
FIELDS = {"error", "code", "request_id"}


@pytest.mark.parametrize(
    ("per_second", "amount", "seconds"),
    [
        (1, 1, 1), (50, 50, 1), (2.5, 5, 2), (1 / 3, 1, 3), (0.1, 1, 10), (1e308, MOST, 1),
        (5e-324, 1, LONGEST_S), (33.3, 333, 10),
    ],
)  # fmt: skip
def test_a_rate_is_whole_requests_in_whole_seconds(
    per_second: float, amount: int, seconds: int
) -> None:
    window = window_of(per_second)
    assert (window.amount, window.get_expiry()) == (amount, seconds)


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_every_rate_that_a_keys_file_can_have_is_one(per_second: float) -> None:
    window = window_of(per_second)
    assert 1 <= window.amount <= 10 * MOST
    assert 1 <= window.get_expiry() <= LONGEST_S


def admitted(rates: Rates, name: str, per_second: float, times: int) -> int:
    async def scenario() -> int:
        count = 0
        for _ in range(times):
            try:
                await rates.count(name, per_second)
                count += 1
            except TooFast:
                pass
        return count

    return asyncio.run(scenario())


def test_no_second_has_more_requests_than_the_rate_and_keys_do_not_share_it() -> None:
    rates = Rates(Metrics())
    assert admitted(rates, "a", 20, 50) == 20
    assert admitted(rates, "b", 20, 5) == 5
    time.sleep(1.01)
    assert admitted(rates, "a", 20, 50) == 20


def test_who_is_refused_is_told_when_to_come_back() -> None:
    rates = Rates(Metrics())
    assert admitted(rates, "slow", 0.2, 1) == 1
    with pytest.raises(TooFast) as refused:
        asyncio.run(rates.count("slow", 0.2))
    assert refused.value.headers == {"Retry-After": "5"}
    assert refused.value.detail == (
        "the key 'slow' may send 1 request in 5 seconds; try again in 5 s"
    )


class Away:
    """Windows that cannot be asked."""

    asked = 0

    async def full_until(self, window: object, name: str) -> float:
        self.asked += 1
        raise StateUnavailable("used", "Redis does not answer")


def test_while_others_cannot_be_asked_it_counts_alone_and_does_not_ask_each_time() -> None:
    away = Away()
    assert admitted(Rates(Metrics(), away), "a", 10, 30) == 10
    assert away.asked == 1


# The gateway.


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    return written(
        path,
        [
            entry(INFER, "infer", requests_per_second=5),
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
    before = shed(counted)
    found = statuses(counted, INFER, 20)
    assert set(found) == {200, 429}
    assert 5 <= found[200] <= 10  # that took a second at the most
    refused = counted.get("/v1/models", headers=bearer(INFER))
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["x-request-id"]
    assert set(refused.json()) == FIELDS
    assert refused.json()["code"] == "OVERLOADED"
    assert "'infer' may send 5 requests a second" in refused.json()["error"]
    assert statuses(counted, FREE, 20) == {200: 20}
    assert shed(counted) - before == found[429] + 1
    time.sleep(1.01)
    assert statuses(counted, INFER, 1) == {200: 1}


def test_whom_a_proxy_says_it_asks_for_changes_nothing(counted: httpx.Client) -> None:
    time.sleep(1.01)
    found = Counter(
        counted.get(READY, headers={**bearer(INFER), "X-Forwarded-For": f"10.0.0.{n}"}).status_code
        for n in range(20)
    )
    assert found[429] >= 10


@pytest.mark.parametrize("path", ["/livez", "/v2/health/live", "/v2/health/ready"])
def test_health_is_not_counted(counted: httpx.Client, path: str) -> None:
    assert statuses(counted, INFER, 20, path) == {200: 20}


def test_metrics_are_not_counted(counted: httpx.Client) -> None:
    assert statuses(counted, METRICS, 5, "/metrics") == {200: 5}


def test_a_body_that_is_refused_does_not_cost_the_connection_its_next_answer(
    counted: httpx.Client,
) -> None:
    statuses(counted, INFER, 10)
    path = "/v1/models/ensemble/infer"
    assert counted.post(path, headers=bearer(INFER), content=b"x" * 100_000).status_code == 429
    assert statuses(counted, FREE, 1) == {200: 1}


def together(clients: list[httpx.Client], key: str, for_s: float) -> Counter[int]:
    found: Counter[int] = Counter()
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        for client in clients:
            found += statuses(client, key, 1)
        time.sleep(0.005)
    return found


def logs(commands: list[Command], words: str) -> int:
    return sum(words in command.output for command in commands)


def test_two_gateways_with_one_redis_count_together_and_alone_while_it_is_away(
    demo_triton: EmbeddedTriton, keys: Path, tmp_path: Path
) -> None:
    with redis_server(tmp_path) as redis:
        settings = {"keys_file": str(keys), "state": redis.url(), "log_level": "info"}
        url = demo_triton.options.url
        with gateway(url, **settings) as (one, first), gateway(url, **settings) as (other, second):
            clients, commands = [one, other], [first, second]
            found = together(clients, INFER, 4)
            print(f"together {found[200]} in 4 s at 5 a second")
            assert set(found) == {200, 429}
            assert 15 <= found[200] <= 26
            redis.stop()
            together(clients, INFER, 0.2)
            found = together(clients, INFER, 3)
            print(f"alone {found[200]} in 3 s at 5 a second each")
            assert set(found) == {200, 429}
            assert 20 <= found[200] <= 41
            assert logs(commands, "cannot be used to count requests: Redis cannot be reached") == 2
            redis.start()
            end = time.monotonic() + 10
            while logs(commands, "can be used to count requests again") < 2:
                assert time.monotonic() < end
                together(clients, INFER, 0.1)
            time.sleep(1)
            found = together(clients, INFER, 3)
            assert 10 <= found[200] <= 21
