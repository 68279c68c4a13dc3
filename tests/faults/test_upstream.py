"""What answers suffer on their way: real Tritons, each behind a proxy that spoils, and the real gateway."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import pytest

from tests.support.fault_proxy import WELL, End, Fault, Proxy, always
from tests.support.fleet import Fleet, hammer, write_echo
from tests.support.servers import Triton, gateway
from tests.support.wait import wait_until

INFER = b"/v2/models/echo/infer"
PLAIN = {"Accept-Encoding": "identity"}
CONNECT_S = 0.5  # the gateway's default
TOLERANCE_S = 0.4  # of a machine with other things to do


@dataclass
class Behind:
    """Two Tritons, each behind a proxy, and the addresses at which the gateway finds them."""

    tritons: list[Triton]
    proxies: list[Proxy]

    @property
    def urls(self) -> list[str]:
        """Only HTTP goes through the proxies."""
        options = [triton.options for triton in self.tritons]
        return [
            f"http://127.0.0.1:{proxy.port}?grpc={of.grpc_port}&metrics={of.metrics_port}"
            for proxy, of in zip(self.proxies, options, strict=True)
        ]


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    with ExitStack() as stack:
        tritons = []
        for number in range(2):
            folder = tmp_path_factory.mktemp(f"models{number}")
            write_echo(folder, "echo", dims=-1)
            tritons.append(stack.enter_context(Triton(folder, "echo")))
        for triton in tritons:
            triton.wait()
        ports = [triton.options.http_port for triton in tritons]
        proxies = [stack.enter_context(Proxy(port)) for port in ports]
        yield Behind(tritons, proxies)
        for triton in tritons:
            triton.kill()  # which is quicker than its end


@contextmanager
def before(behind: Behind, count: int) -> Iterator[Fleet]:
    with gateway(*behind.urls[:count]) as (client, command):
        wait_until(lambda: client.get("/readyz").text.count('"ready"') == count + 1)
        yield Fleet(behind.tritons[:count], client, command)


@pytest.fixture(scope="module")
def one(behind: Behind) -> Iterator[Fleet]:
    """A gateway before the first of them alone."""
    with before(behind, 1) as fleet:
        yield fleet


@pytest.fixture
def two(behind: Behind) -> Iterator[Fleet]:
    """A gateway before both, that has learned nothing yet."""
    with before(behind, 2) as fleet:
        yield fleet


def v2(values: list[float]) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "datatype": "FP32", "shape": [len(values)], "data": values}]}


# Answers that are none.

LENGTH = rb"\r\ncontent-length: (\d+)"  # and not the inference header's


def edited(pattern: bytes, by: bytes | Callable[[re.Match[bytes]], bytes]) -> Fault:
    return Fault(edit=lambda answer: re.sub(pattern, by, answer, count=1, flags=re.I))


def of_length(change: int) -> Fault:
    """Whose Content-Length is wrong by so many bytes; then it is closed."""
    fault = edited(LENGTH, lambda found: b"\r\nContent-Length: %d" % (int(found[1]) + change))
    return Fault(edit=fault.edit, idle_s=0.02)


def cut(end: End, keep: slice = slice(-5)) -> Fault:
    return Fault(edit=lambda answer: answer[keep], idle_s=0.02, end=end)


def head_only(answer: bytes) -> bytes:
    return answer[: answer.index(b"\r\n\r\n") + 4]


BAD = "502"
CUT = "cut off"  # what flows through has begun when it fails: nobody can take it for whole
AS_SAID = "as long as it said"
# What is spoilt, how, and how it ends for a client of /v2; for one of /v1 each of them is 502.
SPOILT = {
    "garbage": (Fault(edit=lambda _: b"\x16\x03\x01 no HTTP at all\r\n\r\n"), BAD),
    "HTML and no head": (Fault(edit=lambda _: b"<html>\r\n\r\n</html>"), BAD),
    "a status that is none": (edited(rb"HTTP/1.1 200", b"HTTP/1.1 999999"), BAD),
    "a version that is none": (edited(rb"HTTP/1.1", b"HTTP/9.9"), BAD),
    "nothing, closed": (Fault(ends_after=0), BAD),
    "nothing, half closed": (Fault(ends_after=0, end=End.HALF), BAD),
    "nothing, reset": (Fault(ends_after=0, end=End.RESET), BAD),
    "a head cut, closed": (Fault(ends_after=40), BAD),
    "a head cut, half closed": (Fault(ends_after=40, end=End.HALF), BAD),
    "a head cut, reset": (Fault(ends_after=40, end=End.RESET), BAD),
    "a head and no body": (Fault(edit=head_only, idle_s=0.02), BAD),
    "a body cut, closed": (cut(End.CLOSED), CUT),
    "a body cut, half closed": (cut(End.HALF), CUT),
    "a body cut, reset": (cut(End.RESET), CUT),
    "a length too large": (of_length(+5), CUT),
    "a length too small": (of_length(-5), AS_SAID),
    "a length that is none": (edited(LENGTH, b"\r\nContent-Length: many"), BAD),
    "two lengths": (edited(LENGTH, rb"\g<0>\r\nContent-Length: 3"), BAD),
    "a length and chunks": (
        edited(LENGTH, rb"\g<0>\r\nTransfer-Encoding: chunked"), BAD,
    ),
}  # fmt: skip
DOORS = {
    "/v1": ("/v1/models/echo/infer", {"inputs": {"X": [1, 2]}}),
    "/v2": ("/v2/models/echo/infer", v2([1, 2])),
}


def outcome(fleet: Fleet, door: str, length: int) -> str:
    path, body = DOORS[door]
    try:
        answer = fleet.client.post(path, json=body, headers={**PLAIN, "X-Request-Timeout": "5"})
    except httpx.RemoteProtocolError:
        return CUT
    if answer.status_code == 200:
        return AS_SAID if len(answer.content) == length - 5 else answer.text
    told = answer.json()
    assert list(told) == ["error", "code", "request_id"]
    assert (told["code"], told["request_id"]) == ("BAD_UPSTREAM", answer.headers["x-request-id"])
    return str(answer.status_code)


@pytest.mark.parametrize("door", DOORS)
def test_a_spoilt_answer_is_none_and_its_connection_is_not_used_again(
    behind: Behind, one: Fleet, door: str
) -> None:
    proxy, (path, body) = behind.proxies[0], DOORS[door]
    whole = one.client.post(path, json=body, headers=PLAIN)
    seen: Counter[str] = Counter()
    for name, (fault, of_v2) in SPOILT.items():
        asked = one.served()
        with proxy.having(always(fault, INFER)):
            began = time.monotonic()
            told = outcome(one, door, len(whole.content))
            assert time.monotonic() - began < 1
        assert told == (BAD if door == "/v1" else of_v2), name
        seen[told] += 1
        for _ in range(3):
            after = one.client.post(path, json=body, headers=PLAIN)
            assert after.status_code == 200, name
            assert after.content[-20:] == whole.content[-20:]
        assert proxy.reused_after(fault) == 0, name
        times = sum(one.served().values()) - sum(asked.values())
        assert times <= 4, f"{name}: one request and three ran {times} times"
    print(
        f"{door}: of {len(SPOILT)} ways to spoil an answer {dict(seen)}; 0 connections used again"
    )


@pytest.mark.parametrize(
    "fault",
    [Fault(piece_bytes=1), Fault(piece_bytes=7), Fault(piece_bytes=1000, bytes_per_s=50_000)],
    ids=["byte by byte", "in sevens", "slowly"],
)
def test_an_answer_in_pieces_is_right_byte_for_byte(
    behind: Behind, one: Fleet, fault: Fault
) -> None:
    values = [float(number) for number in range(1500)]
    direct = httpx.post(
        f"http://{behind.tritons[0].address}{INFER.decode()}", json=v2(values), headers=PLAIN
    )
    with behind.proxies[0].having(fault):
        began = time.monotonic()
        passed = one.client.post(INFER.decode(), json=v2(values), headers=PLAIN)
        took_s = time.monotonic() - began
        made = one.client.post("/v1/models/echo/infer", json={"inputs": {"X": values}})
    print(f"{len(passed.content)} bytes, all of them right, in {took_s:.2f} s")
    assert (passed.status_code, passed.content) == (200, direct.content)
    assert made.json()["outputs"]["Y"] == values


# Connections.


def test_a_connection_that_closes_as_it_is_reused_runs_nothing_twice(
    behind: Behind, one: Fleet
) -> None:
    """It is closed when it was idle for 3 ms, and used again after 2 to 4."""
    proxy, seen, passed = behind.proxies[0], Counter[int](), Counter[bytes]()
    hasty = Fault(idle_s=0.003)

    def script(request: bytes) -> Fault:
        if found := re.search(rb"race-\d+", request):
            passed[found[0]] += 1
            return hasty
        return WELL

    served = sum(one.served().values())
    with proxy.having(script):
        for number in range(300):
            headers = {"X-Request-ID": f"race-{number}"}
            seen[one.infer(headers=headers).status_code] += 1
            time.sleep(0.002 + 0.002 * random.random())
    ran = sum(one.served().values()) - served
    print(f"{dict(seen)}; {proxy.reused_after(hasty)} connections served twice or more, ", end="")
    print("no request did")
    assert set(seen) <= {200, 502}
    assert seen[200] <= ran <= 300
    assert max(passed.values()) == 1
    assert seen[200] > 150
    assert proxy.reused_after(hasty)


@dataclass
class Rush:
    """Requests that each carry their number, in an answer of a length of its own."""

    count: int = 3000
    at_a_time: int = 48
    seen: Counter[str] = field(default_factory=Counter)
    passed: Counter[bytes] = field(default_factory=Counter)
    chance: random.Random = field(default_factory=lambda: random.Random(17))

    def script(self, request: bytes) -> Fault:
        """Most answers come in pieces; some are cut, or followed by one that nobody asked for."""
        if (found := re.search(rb"x-request-id: (n\d+)", request)) is None:
            return WELL
        self.passed[found[1]] += 1
        fate, pieces = self.chance.random(), self.chance.choice([1, 3, 50, 65536])
        if fate < 0.03:
            end = self.chance.choice(list(End))
            return Fault(ends_after=self.chance.randrange(1, 300), end=end, piece_bytes=pieces)
        if fate < 0.06:
            return Fault(edit=lambda answer: answer + answer.replace(b"Y", b"Z"))
        return Fault(piece_bytes=pieces)

    async def ask(self, session: aiohttp.ClientSession, number: int) -> str:
        """Whose answer came to the request with this number."""
        values = [float(number)] * (1 + number % 40)
        headers = {"X-Request-ID": f"n{number}"}
        try:
            async with session.post(INFER.decode(), json=v2(values), headers=headers) as answer:
                if answer.status != 200:
                    assert (await answer.json())["request_id"] == f"n{number}"
                    return str(answer.status)
                document = await answer.json()
        except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError):
            return CUT
        (output,) = document["outputs"]
        own = (output["name"], output["data"]) == ("Y", values)
        return "own" if own and answer.headers["x-request-id"] == f"n{number}" else "another's"

    async def run(self, base: str) -> None:
        numbers = iter(range(self.count))

        async def client(session: aiohttp.ClientSession) -> None:
            for number in numbers:
                self.seen[await self.ask(session, number)] += 1

        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(base, connector=connector) as session:
            await asyncio.gather(*(client(session) for _ in range(self.at_a_time)))


def test_no_answer_goes_to_whom_it_does_not_belong(behind: Behind, one: Fleet) -> None:
    rush, proxy = Rush(), behind.proxies[0]
    with proxy.having(rush.script):
        asyncio.run(rush.run(str(one.client.base_url)))
    opened = sum(any(fault is not WELL for fault in line.faults) for line in proxy.lines)
    print(f"{rush.count} requests over {opened} connections: {dict(rush.seen)}, 0 mixed up")
    assert rush.seen["another's"] == 0
    assert set(rush.seen) <= {"own", "502", CUT}
    assert rush.seen["own"] > 0.9 * rush.count
    assert rush.seen["502"] + rush.seen[CUT] > 0
    assert max(rush.passed.values()) == 1


# Replicas.


def test_a_replica_that_is_500_ms_slower_gets_a_quarter_of_its_share(
    behind: Behind, two: Fleet
) -> None:
    slow = behind.tritons[0].address
    base, seen = hammer(two, 1, per_second=100)
    usual = p99(seen)
    with behind.proxies[0].having(always(Fault(delay_s=0.5), INFER)):
        hammer(two, 1, per_second=100)
        before = two.served()
        statuses, seen = hammer(two, 4, per_second=100)
        after = two.served()
    served = {address: after[address] - before[address] for address in after}
    share = served[slow] / sum(served.values())
    print(f"the slow one gets {share:.1%} where fair is 50 %; p99 {p99(seen) * 1000:.0f} ms,")
    print(f"{usual * 1000:.0f} ms without a slow one")
    assert set(base | statuses) == {200}
    assert share < 0.5 / 4


def p99(seen: list[tuple[float, int, float]]) -> float:
    took = sorted(took for _, _, took in seen)
    return took[int(len(took) * 0.99)]


WAYS: dict[str, tuple[Callable[[Proxy], Any], int]] = {
    "refuses": (Proxy.refusing, 0),
    "swallows": (Proxy.swallowing, 0),
    # What was written before the reset may have run: it is not sent again, and five such end it.
    "hangs up": (Proxy.hanging_up, 5),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_replica_that_cannot_be_reached_costs_half_a_second_and_then_nothing(
    behind: Behind, two: Fleet, way: str
) -> None:
    does, most_failures = WAYS[way]
    hammer(two, 0.5, per_second=100)
    with does(behind.proxies[0]):
        statuses, first = hammer(two, 2.5, per_second=60)
        later, then = hammer(two, 1, per_second=60)
    slowest, after = (max(took for _, _, took in seen) for seen in (first, then))
    print(f"it {way}: {dict(statuses)}, the slowest {slowest * 1000:.0f} ms; ", end="")
    print(f"later {dict(later)}, the slowest {after * 1000:.0f} ms")
    assert set(statuses) <= {200, 502}
    assert statuses[502] <= most_failures
    assert set(later) == {200}
    assert slowest < CONNECT_S + TOLERANCE_S
    assert after < TOLERANCE_S
    back = wait_until(lambda: two.client.get("/readyz").text.count('"ready"') == 3)
    print(f"it is asked again {back:.1f} s after it can be reached")


def test_a_replica_that_accepts_and_never_answers_costs_whom_it_has_their_deadline(
    behind: Behind, two: Fleet
) -> None:
    deadline_s = 1.0
    headers = {"X-Request-Timeout": str(deadline_s)}

    def ask(_: int) -> tuple[int, float]:
        answer = two.infer(headers=headers)
        return answer.status_code, answer.elapsed.total_seconds()

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(24)))
        with behind.proxies[0].having(Fault(delay_s=math.inf)):
            first = list(pool.map(ask, range(12)))
            left_s = wait_until(lambda: two.client.get("/readyz").text.count('"ready"') == 2)
            then = [ask(number) for number in range(20)]
    late = [took for status, took in first if status == 504]
    well = [took for status, took in first if status == 200]
    print(
        f"{len(late)} of 12 waited {min(late):.2f} to {max(late):.2f} s, the others at most ",
        end="",
    )
    print(f"{max(well):.2f} s; {left_s:.1f} s later 0 of 20")
    assert len(late + well) == 12
    assert all(deadline_s - 0.1 < took < deadline_s + TOLERANCE_S for took in late)
    assert max(well) < TOLERANCE_S
    assert {status for status, _ in then} == {200}
    assert max(took for _, took in then) < TOLERANCE_S
