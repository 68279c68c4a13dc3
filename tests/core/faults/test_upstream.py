"""Faults between the gateway and Triton: a real Triton behind proxies that add faults, and the gateway."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import pytest

from tests.support.fault_proxy import NO_FAULT, End, Fault, Proxy, always
from tests.support.fleet import Fleet, write_echo
from tests.support.load import LOG_WARNINGS
from tests.support.servers import Triton, gateway
from tests.support.wait import TIMEOUT_S, wait_until

PATH = "/v2/models/echo/infer"
INFER = PATH.encode()
PLAIN = {"Accept-Encoding": "identity"}


@dataclass
class Behind:
    """A Triton behind two proxies: a gateway takes them for two replicas."""

    triton: Triton
    proxies: list[Proxy]

    @property
    def urls(self) -> list[str]:
        """Only HTTP goes through the proxies."""
        of = self.triton.options
        return [
            f"http://127.0.0.1:{proxy.port}?grpc={of.grpc_port}&metrics={of.metrics_port}"
            for proxy in self.proxies
        ]


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    folder = tmp_path_factory.mktemp("models")
    write_echo(folder, "echo", dims=-1)
    with Triton(folder, "echo") as triton:
        triton.wait()
        port = triton.options.http_port
        with Proxy(port) as first, Proxy(port) as second:
            yield Behind(triton, [first, second])


@contextmanager
def gateway_before(behind: Behind, count: int, **settings: str) -> Iterator[Fleet]:
    """A gateway before so many of the proxies, that has learned nothing yet."""
    given = {"connect_timeout_s": "10", **LOG_WARNINGS, **settings}
    with gateway(*behind.urls[:count], **given) as (client, command):
        fleet = Fleet([behind.triton], client, command)
        wait_until(lambda: ready(fleet) == count)
        yield fleet


def ready(fleet: Fleet) -> int:
    """Return the number of ready replicas in /readyz."""
    return list(fleet.client.get("/readyz").json()["replicas"].values()).count("ready")


@pytest.fixture(scope="module")
def one(behind: Behind) -> Iterator[Fleet]:
    with gateway_before(behind, 1) as fleet:
        yield fleet


def v2(values: list[float]) -> dict[str, Any]:
    return {"inputs": [{"name": "X", "datatype": "FP32", "shape": [len(values)], "data": values}]}


# Invalid responses.

LENGTH = rb"\r\ncontent-length: (\d+)"  # and not the inference header's


def edited(pattern: bytes, by: bytes | Callable[[re.Match[bytes]], bytes]) -> Fault:
    return Fault(edit=lambda answer: re.sub(pattern, by, answer, count=1, flags=re.I))


def of_length(change: int) -> Fault:
    """Add a number to the Content-Length, and close the connection after the response."""
    fault = edited(LENGTH, lambda found: b"\r\nContent-Length: %d" % (int(found[1]) + change))
    return Fault(edit=fault.edit, idle_s=0.02)


def cut(end: End, keep: slice = slice(-5)) -> Fault:
    return Fault(edit=lambda answer: answer[keep], idle_s=0.02, end=end)


def head_only(answer: bytes) -> bytes:
    return answer[: answer.index(b"\r\n\r\n") + 4]


BAD = "502"
CUT = "cut off"  # its head was relayed before the failure, so that the client must see an incomplete body
SHORT = "as short as its length"
# The fault of each response, and its outcome for a client of /v2; the outcome of each for /v1 is 502.
FAULTS = {
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
    "a length too small": (of_length(-5), SHORT),
    "a length that is none": (edited(LENGTH, b"\r\nContent-Length: many"), BAD),
    "two lengths": (edited(LENGTH, rb"\g<0>\r\nContent-Length: 3"), BAD),
    "a length and chunks": (
        edited(LENGTH, rb"\g<0>\r\nTransfer-Encoding: chunked"), BAD,
    ),
}  # fmt: skip
APIS = {
    "/v1": ("/v1/models/echo/infer", {"inputs": {"X": [1, 2]}}),
    "/v2": ("/v2/models/echo/infer", v2([1, 2])),
}


def outcome(fleet: Fleet, api: str, length: int) -> str:
    path, body = APIS[api]
    try:
        answer = fleet.client.post(path, json=body, headers=PLAIN)
    except httpx.RemoteProtocolError:
        return CUT
    if answer.status_code == 200:
        return SHORT if len(answer.content) == length - 5 else answer.text
    error = answer.json()
    assert list(error) == ["error", "code", "request_id"]
    assert (error["code"], error["request_id"]) == ("BAD_UPSTREAM", answer.headers["x-request-id"])
    return str(answer.status_code)


@pytest.mark.fault(
    "a response is garbage, truncated, of the wrong length, or followed by another one"
)
@pytest.mark.parametrize("api", APIS)
def test_invalid_response_is_502_or_truncated_and_its_connection_is_closed(
    behind: Behind, one: Fleet, api: str
) -> None:
    proxy = behind.proxies[0]
    path, body = APIS[api]
    whole = one.client.post(path, json=body, headers=PLAIN)
    for name, (fault, v2_outcome) in FAULTS.items():
        before = one.served()
        with proxy.having(always(fault, INFER)):
            found = outcome(one, api, len(whole.content))
        assert found == (BAD if api == "/v1" else v2_outcome), name
        for _ in range(3):
            after = one.client.post(path, json=body, headers=PLAIN)
            assert after.status_code == 200, name
            assert after.content[-20:] == whole.content[-20:]
        assert proxy.reused_after(fault) == 0, name
        times = sum(one.served().values()) - sum(before.values())
        assert times <= 4, f"{name}: one request and three ran {times} times"


@pytest.mark.fault("a response arrives byte by byte")
@pytest.mark.parametrize(
    "fault",
    [Fault(piece_bytes=1), Fault(piece_bytes=7), Fault(piece_bytes=1000, bytes_per_s=50_000)],
    ids=["byte by byte", "in sevens", "slowly"],
)
def test_response_that_arrives_in_pieces_is_the_same_byte_for_byte(
    behind: Behind, one: Fleet, fault: Fault
) -> None:
    values = [float(number) for number in range(1500)]
    direct = httpx.post(
        f"http://{behind.triton.address}{PATH}",
        json=v2(values),
        headers=PLAIN,
        timeout=TIMEOUT_S,
    )
    with behind.proxies[0].having(always(fault, INFER)):
        passed = one.client.post(PATH, json=v2(values), headers=PLAIN)
        made = one.client.post("/v1/models/echo/infer", json={"inputs": {"X": values}})
    assert (passed.status_code, passed.content) == (200, direct.content)
    assert made.json()["outputs"]["Y"] == values


# Connections.


@pytest.mark.long
@pytest.mark.fault("Triton closes an idle connection while it is being reused")
def test_request_on_a_connection_that_closes_is_not_run_twice(behind: Behind, one: Fleet) -> None:
    """The first close when they were idle for 3 ms, and may be used again after 2 to 4; the others close
    as they are used again."""
    proxy, seen, passed = behind.proxies[0], Counter[int](), Counter[bytes]()
    hasty = Fault(idle_s=0.003)
    sure = [Fault(refuses_reuse=True, end=end) for end in (End.CLOSED, End.RESET)]

    def script(request: bytes) -> Fault:
        if (found := re.search(rb"race-(\d+)", request)) is None:
            return NO_FAULT
        passed[found[0]] += 1
        number = int(found[1])
        return hasty if number < 200 else sure[number // 2 % 2]

    served = sum(one.served().values())
    with proxy.having(script):
        for number in range(300):
            headers = {"X-Request-ID": f"race-{number}"}
            seen[one.infer(headers=headers).status_code] += 1
            time.sleep(0.002 + 0.002 * random.random())
    ran = sum(one.served().values()) - served
    reused = {fault.end.value: proxy.reused_after(fault) for fault in sure}
    assert set(seen) == {200, 502}
    assert seen[200] <= ran <= 300
    assert max(passed.values()) == 1
    assert seen[200] >= 150  # the first request of a connection is served
    assert all(reused.values())


@dataclass
class Rush:
    """Requests that each carry their number, in an answer of a length of its own."""

    count: int = 1000
    at_a_time: int = 48
    seen: Counter[str] = field(default_factory=Counter)
    passed: Counter[bytes] = field(default_factory=Counter)
    chance: random.Random = field(default_factory=lambda: random.Random(17))

    def script(self, request: bytes) -> Fault:
        """Send most responses in pieces; truncate some, or add an unsolicited response."""
        if (found := re.search(rb"x-request-id: (n\d+)", request)) is None:
            return NO_FAULT
        self.passed[found[1]] += 1
        fate, pieces = self.chance.random(), self.chance.choice([1, 3, 50, 65536])
        if fate < 0.03:
            end = self.chance.choice(list(End))
            return Fault(ends_after=self.chance.randrange(1, 300), end=end, piece_bytes=pieces)
        if fate < 0.06:
            return Fault(edit=lambda answer: answer + answer.replace(b"Y", b"Z"))
        return Fault(piece_bytes=pieces)

    async def ask(self, session: aiohttp.ClientSession, number: int) -> str:
        """Return whose response the request with this number received."""
        values = [float(number)] * (1 + number % 40)
        headers = {"X-Request-ID": f"n{number}"}
        try:
            async with session.post(PATH, json=v2(values), headers=headers) as answer:
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


@pytest.mark.long
@pytest.mark.fault(
    "a response is garbage, truncated, of the wrong length, or followed by another one"
)
def test_response_reaches_only_its_own_request(behind: Behind, one: Fleet) -> None:
    rush, proxy = Rush(), behind.proxies[0]
    with proxy.having(rush.script):
        asyncio.run(rush.run(str(one.client.base_url)))
    assert rush.seen["another's"] == 0
    assert set(rush.seen) <= {"own", "502", CUT}
    assert rush.seen["own"] > 0.9 * rush.count
    assert rush.seen["502"] + rush.seen[CUT] > 0
    assert max(rush.passed.values()) == 1
