"""The gateway is short of memory, workers, state and places: real gateways before a real Triton."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvloop
from PIL import Image

from tests.support.errors import assert_error
from tests.support.fake_triton import port_of
from tests.support.fleet import BODY, repository
from tests.support.gateway_forks import run_gateway
from tests.support.images import encoded
from tests.support.load import Pool, infer_v1, infer_v2, post
from tests.support.measurements import assert_number, memory_bytes
from tests.support.model_zoo.zoo import Names, image, write_repository
from tests.support.servers import Command, Triton, free_ports, gateway, gateway_before, workers
from tests.support.wait import TIMEOUT_S, wait_until, wait_until_async

MIB = 1 << 20
HELD = (-1000.0, 0.0)  # an input that `echo` keeps for as long as there is the file "hold"
LONG_S = 300.0  # the most that a client may ask for


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    folder = repository(tmp_path_factory.mktemp("models"))
    write_repository(folder, Names(), [image("picture", (6, 4, 3), layout="FORMAT_NHWC")])
    with Triton(folder, "echo", "other", "picture") as running:
        running.wait()
        yield running


@contextmanager
def hold(triton: Triton) -> Iterator[None]:
    """Inside, `echo` does not answer what is `HELD`."""
    file = triton.repository / "echo" / "hold"
    file.touch()
    try:
        yield
    finally:
        file.unlink()


@pytest.mark.long
@pytest.mark.fault("32 images of 25 megapixels at once")
def test_32_images_of_25_megapixels_do_not_block_the_event_loop(triton: Triton) -> None:
    ramp = np.linspace(0, 255, 5000, dtype=np.uint8)
    body = encoded(Image.fromarray(np.broadcast_to(ramp, (5000, 5000))), compress_level=1)
    headers = {"Content-Type": "image/png", "X-Request-Timeout": f"{LONG_S:g}"}
    with gateway(triton.options.url, connect_timeout_s="10") as (client, command):

        def send(_: int) -> int:
            url = "/v1/models/picture/infer"
            return client.post(url, content=body, headers=headers, timeout=LONG_S).status_code

        assert client.post("/v1/models/echo/infer", json=BODY).status_code == 200
        before, waits_s, most = memory_bytes(command.pid), list[float](), 0
        with ThreadPoolExecutor(32) as pool, httpx.Client(base_url=client.base_url) as prober:
            calls = [pool.submit(send, number) for number in range(32)]
            while not all(call.done() for call in calls):
                alive = prober.get("/livez", timeout=TIMEOUT_S)
                assert alive.status_code == 200
                waits_s.append(alive.elapsed.total_seconds())
                most = max(most, memory_bytes(command.pid))
                time.sleep(0.005)
            statuses = Counter(call.result() for call in calls)
    assert statuses == {200: 32}
    p99_s = sorted(waits_s)[int(len(waits_s) * 0.99)]
    # 100 megapixels at a time, as RGB and as decoded.
    grown_mib = (most - before) / MIB
    assert grown_mib < 1000, f"{grown_mib:.0f} MiB more memory"
    assert_number("p99 of /livez", p99_s * 1000, "ms", at_most=100)


@pytest.mark.long
@pytest.mark.fault("a worker process is killed")
def test_requests_of_a_killed_worker_are_no_longer_counted_as_in_flight(triton: Triton) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    environment = {
        "GATEWAY_TRITON_URLS": triton.options.url,
        "GATEWAY_CONNECT_TIMEOUT_S": "10",
        "GATEWAY_REQUEST_TIMEOUT_S": f"{LONG_S:g}",
    }

    def ask(_: int) -> int:
        body = {"inputs": {"X": HELD}}
        try:
            return httpx.post(f"{url}/v1/models/echo/infer", json=body, timeout=LONG_S).status_code
        except httpx.HTTPError:
            return 0

    arguments = ("serve", "--port", str(port), "--workers", "2")
    with (
        Command(*arguments, environment=environment) as command,
        hold(triton),
        ThreadPoolExecutor(3) as pool,
    ):
        command.wait_for("serving")
        calls = list(map(pool.submit, [ask] * 3, range(3)))
        wait_until(lambda: in_flight(url) >= 4)  # with this page
        victims = workers(command)
        for victim in victims:
            victim.kill()
        assert [call.result() for call in calls] == [0] * 3
        wait_until(lambda: not any(victim.is_running() for victim in victims))
        wait_until(lambda: serves(url))
        wait_until(lambda: in_flight(url) <= 2)  # this page, and perhaps the last one


def gauge(url: str, name: str) -> float:
    """Return the sum of a metric's samples."""
    page = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text
    return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.M)))


def in_flight(url: str) -> float:
    """Return the number of requests in progress, by the gateway's metrics."""
    return gauge(url, "gateway_requests_in_flight")


def serves(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz", timeout=TIMEOUT_S).status_code == 200
    return False


# Its state.


@pytest.mark.fault("the state file is damaged, cannot be written, or its disk is full")
def test_invalid_state_file_ends_the_start_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_text('{"core": {"loa')
    state = f"file://{tmp_path}/state.db"
    with Command("serve", "--port", "0", environment={"GATEWAY_STATE": state}) as command:
        assert command.end() == 1
    assert "state.db cannot be used (file is not a database)" in command.lines[-1]
    assert "Traceback" not in command.output


@pytest.mark.fault("the state file is damaged, cannot be written, or its disk is full")
def test_state_that_cannot_be_written_refuses_only_changes(triton: Triton, tmp_path: Path) -> None:
    folder, gone = tmp_path / "state", tmp_path / "gone"
    folder.mkdir()
    state = f"file://{folder}/state.db"
    with gateway_before(triton.options.url, state=state, connect_timeout_s="10") as client:
        assert client.post("/v2/repository/models/other/load").status_code == 200
        folder.rename(gone)
        folder.touch()
        for verb, model in (("load", "late"), ("unload", "other")):
            refused = client.post(f"/v2/repository/models/{model}/{verb}")
            assert_error(refused, 503, "STATE_UNAVAILABLE", "")
        for model in ("echo", "other"):
            assert client.post(f"/v1/models/{model}/infer", json=BODY).status_code == 200
        folder.unlink()
        gone.rename(folder)
        desired = json.loads(run_gateway("state", "export", "--state", state).stdout)["models"]
        wait_until(lambda: client.post("/v2/repository/models/late/load").status_code == 200)
    assert "other" in desired
    assert "late" not in desired


# A client that disconnects.

Wire = Callable[..., bytes]
APIS: dict[str, Wire] = {"/v1": infer_v1, "/v2": infer_v2}


@pytest.fixture(scope="module")
def narrow(triton: Triton) -> Iterator[httpx.Client]:
    """A gateway that takes one request at a time."""
    places = {"max_inflight": "1", "max_model_inflight": "1", "max_queue": "0"}
    patience = {"connect_timeout_s": "10", "request_timeout_s": f"{LONG_S:g}"}
    with gateway_before(triton.options.url, **places, **patience) as client:
        yield client


@pytest.mark.fault("a client disconnects")
@pytest.mark.parametrize("api", APIS)
def test_client_that_disconnects_frees_its_slot(
    triton: Triton, narrow: httpx.Client, api: str
) -> None:
    with hold(triton):
        took_s = uvloop.run(disconnect_three_times(port_of(narrow), APIS[api]))
    assert_number("free after", max(took_s) * 1000, "ms", at_most=200)


async def disconnect_three_times(port: int, infer: Wire) -> list[float]:
    """Return the seconds from a client's disconnection until another one's request is admitted."""
    took_s: list[float] = []
    with Pool(port) as pool:

        async def status() -> int:
            return (await pool.ask(infer_v2("other", 1, 2))).status

        async def take_place(client: Pool) -> None:
            while (await client.ask(infer("echo", *HELD))).status == 429:
                pass

        async def is_free() -> bool:
            return await status() == 200

        async def is_taken() -> bool:
            return await status() == 429

        for _ in range(3):
            await wait_until_async(is_free)
            with Pool(port) as client:
                held = asyncio.create_task(take_place(client))
                await wait_until_async(is_taken)
            took_s.append(await wait_until_async(is_free))
            held.cancel()
            await asyncio.gather(held, return_exceptions=True)
    return took_s


LARGE = json.dumps(BODY).encode() + b" " * (256 << 10)  # it is looked at before it is whole
HALVES = {
    "/v1": infer_v1("echo", 1, 2)[:-5],
    "/v2": infer_v2("echo", 1, 2)[:-5],
    "/v1, large": post("/v1/models/echo/infer", LARGE)[:-1000],
}


@pytest.mark.fault("a client disconnects")
@pytest.mark.parametrize("half", HALVES)
def test_client_that_is_still_sending_holds_no_slot(narrow: httpx.Client, half: str) -> None:
    statuses = uvloop.run(statuses_beside_halves(narrow, HALVES[half], count=5))
    assert statuses == [200] * 5


async def statuses_beside_halves(client: httpx.Client, half: bytes, count: int) -> list[int]:
    """Return the statuses of requests sent while other clients are in the middle of their bodies."""

    async def are_connected(number: int) -> bool:
        """Return whether there are so many connections, and the one of this request."""
        found = await asyncio.to_thread(gauge, str(client.base_url), "gateway_connections")
        return found == number + 1

    with Pool(port_of(client)) as pool, Pool(port_of(client)) as senders:
        await wait_until_async(lambda: are_connected(0))
        sending = [asyncio.create_task(senders.ask(half)) for _ in range(count)]
        try:
            await wait_until_async(lambda: are_connected(count))
            return [(await pool.ask(infer_v2("other", 1, 2))).status for _ in range(5)]
        finally:
            for each in sending:
                each.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
