"""Keys that end: their times, quotas of a day and month, and requests in progress."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from pathlib import Path

import httpx
import pytest

from gateway.access.limits import add_to_counts, find_quotas
from gateway.callers import CallerLimits
from gateway.messages import format_utc_time
from tests.support.fake_triton import Fake, Wire, fake_triton, port_of
from tests.support.keys import bearer, entry, written
from tests.support.redis_server import RedisServer
from tests.support.servers import Command, gateway
from tests.support.wait import wait_until

INFER = "/v2/models/any/infer"
REST, REQUESTS = 10, 100
RACERS = [f"tgw_racer{number}-secret" for number in range(20)]
DAILY, MONTHLY, PAIR, PAST, FUTURE = (
    f"tgw_{name}-secret" for name in ("daily", "monthly", "pair", "past", "future")
)
FREE_KEY = "tgw_free-secret"
EXPIRED = "2026-01-31T12:00:00Z"
ENTRIES = [
    *(entry(key, "infer", requests_per_day=REST) for key in RACERS),
    entry(DAILY, "infer", requests_per_day=2),
    entry(MONTHLY, "infer", requests_per_day=2, requests_per_month=1),
    entry(PAIR, "infer", max_inflight=2),
    entry(PAST, "infer", not_before="2025-01-01T01:00:00+01:00", expires=EXPIRED),
    entry(FUTURE, "infer", not_before="2999-01-01T00:00:00Z"),
    entry(FREE_KEY, "infer"),
]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("keys") / "keys.yaml", ENTRIES)


@pytest.fixture(scope="module")
def triton() -> Iterator[Fake]:
    with fake_triton() as fake:
        yield fake


@pytest.fixture(scope="module")
def limited(triton: Fake, keys: Path) -> Iterator[httpx.Client]:
    with gateway(f"http://127.0.0.1:{triton.port}", keys_file=str(keys)) as (client, _):
        yield client


def infer(client: httpx.Client, key: str, path: str = INFER) -> httpx.Response:
    return client.post(path, headers=bearer(key), json={"inputs": []})


async def race(clients: Sequence[httpx.Client], key: str) -> Counter[int]:
    """Return the statuses of requests that are sent at the same time to gateways in turn."""
    limits = httpx.Limits(max_connections=REQUESTS)
    async with httpx.AsyncClient(headers=bearer(key), limits=limits, timeout=60) as racing:
        urls = [clients[number % len(clients)].base_url.join(INFER) for number in range(REQUESTS)]
        responses = await asyncio.gather(*(racing.post(url, json={"inputs": []}) for url in urls))
    return Counter(response.status_code for response in responses)


@pytest.mark.parametrize("state", ["memory", "file", "redis"])
def test_concurrent_requests_get_exactly_the_rest_of_a_quota(
    triton: Fake, keys: Path, tmp_path: Path, state: str
) -> None:
    with ExitStack() as stack:
        url = {"memory": "memory:", "file": f"file://{tmp_path}/state.db"}.get(state)
        if url is None:
            url = stack.enter_context(RedisServer(tmp_path)).url()
        started: list[tuple[httpx.Client, Command]] = [
            stack.enter_context(
                gateway(f"http://127.0.0.1:{triton.port}", keys_file=str(keys), state=url)
            )
            for _ in range(1 if state == "memory" else 2)
        ]
        clients = [client for client, _ in started]
        for key in RACERS:
            triton.clear()
            found = asyncio.run(race(clients, key))
            assert found.keys() == {200, 429}
            # Redis did not answer in time on a busy machine, so that each gateway counted alone.
            if not any("cannot be used to count" in command.output for _, command in started):
                break
        assert found == {200: REST, 429: REQUESTS - REST}
        assert triton.requests.qsize() == REST


def test_quota_counts_what_was_sent_and_says_when_it_begins_again(limited: httpx.Client) -> None:
    for _ in range(3):  # nothing was sent
        assert infer(limited, DAILY, "/v2/models/any/versions/x/infer").status_code == 404
        assert limited.get("/v1/models", headers=bearer(DAILY)).status_code == 200

    def is_served() -> bool:  # once the others have given their part back
        return infer(limited, DAILY).status_code == 200

    wait_until(is_served)
    wait_until(is_served)
    refused = infer(limited, DAILY)
    assert refused.status_code == 429
    assert refused.json()["code"] == "QUOTA_EXCEEDED"
    assert "caller 'daily' has used 2 of its 2 requests of this day" in refused.json()["error"]
    wait_s = int(refused.headers["retry-after"])
    assert 0 < wait_s <= 24 * 3600
    assert refused.headers["ratelimit"] == f'"day";r=0;t={wait_s}'
    assert refused.headers["ratelimit-policy"] == '"day";q=2;w=86400'
    assert infer(limited, FREE_KEY).status_code == 200


def test_quota_of_a_month_counts_beside_that_of_a_day(limited: httpx.Client) -> None:
    assert infer(limited, MONTHLY).status_code == 200
    refused = infer(limited, MONTHLY)
    assert refused.status_code == 429
    assert re.fullmatch(
        r'"month";q=1;w=(24192|25056|25920|26784)00', refused.headers["ratelimit-policy"]
    )


def test_quotas_begin_with_days_and_months_of_utc() -> None:
    at = datetime(2026, 12, 31, 23, 59, 59, tzinfo=timezone.utc)
    limits = CallerLimits(requests_per_day=5, requests_per_month=9)
    day, month = find_quotas(limits, at.timestamp())
    assert (day.period, month.period) == ("2026-12-31", "2026-12")
    assert day.ends == month.ends == at + timedelta(seconds=1)
    assert month.begins == datetime(2026, 12, 1, tzinfo=timezone.utc)


def test_quota_of_a_month_is_kept_while_another_key_of_the_name_has_one_of_a_day() -> None:
    counts = {"2026-10": 7, "2026-11": 8}
    assert add_to_counts(counts, {"2026-11-26": 9}, 1).used == (1,)
    assert add_to_counts(counts, {"2026-11": 9}, 1).used == (9,)
    assert add_to_counts(counts, {"2026-11-27": 9}, 1).used == (1,)
    assert counts == {"2026-11": 9, "2026-11-27": 1}
    assert not add_to_counts(counts, {"2026-11": 9}, 1).is_added


def test_quota_does_not_begin_again_when_the_clock_goes_back() -> None:
    counts = {"2026-11-27": 9}
    assert add_to_counts(counts, {"2026-11-26": 9}, 1).used == (1,)
    assert not add_to_counts(counts, {"2026-11-27": 9}, 1).is_added


def test_requests_in_progress_above_the_maximum_are_refused_at_once(
    limited: httpx.Client, triton: Fake
) -> None:
    triton.clear()
    fields = list(bearer(PAIR).items())
    with Wire(port_of(limited)) as one, Wire(port_of(limited)) as other:
        for wire in (one, other):
            wire.send("POST", "/v2/models/silent/infer", fields, b"{}")
            triton.requests.get(timeout=30)
        refused = infer(limited, PAIR)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "'pair' may have 2 requests in progress" in refused.json()["error"]
    wait_until(lambda: infer(limited, PAIR).status_code == 200)  # the others have left
    for _ in range(3):
        assert infer(limited, PAIR).status_code == 200


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        (PAST, f"key 'past' expired at {EXPIRED}"),
        (FUTURE, "key 'future' is valid from 2999-01-01T00:00:00Z on"),
    ],
)
def test_key_outside_of_its_time_is_refused_with_the_time(
    limited: httpx.Client, key: str, reason: str
) -> None:
    refused = infer(limited, key)
    assert refused.status_code == 401
    assert refused.json()["error"].startswith(reason)
    assert limited.get("/livez", headers=bearer(key)).status_code == 200


def test_key_expires_while_the_gateway_runs(triton: Fake, tmp_path: Path) -> None:
    path = written(tmp_path / "keys.yaml", [])
    soon = datetime.now(timezone.utc) + timedelta(seconds=2)
    written(path, [entry(FREE_KEY, "infer", expires=format_utc_time(soon))])
    with gateway(f"http://127.0.0.1:{triton.port}", keys_file=str(path)) as (client, _):
        wait_until(lambda: "expired at" in infer(client, FREE_KEY).text)
