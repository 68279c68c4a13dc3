"""Faults and hostile requests that no other file tests, on real Tritons and real gateways."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from gateway.triton.embedded import EmbeddedTriton
from tests.support.fleet import BODY, ECHO, hammer, repository
from tests.support.fleet import Fleet as Served
from tests.support.images import encoded
from tests.support.model_zoo.zoo import MODELS, Names, write_repository
from tests.support.servers import (
    Command,
    Triton,
    free_ports,
    gateway,
    triton_on_free_ports,
    workers,
)
from tests.support.wait import wait_until

MIB = 1 << 20
JSON = {"Content-Type": "application/json"}
ZOO = ("nhwc", "sleeping", "pair", "single_BYTES", "batched_FP32")
CROWDED = "\ndynamic_batching { default_queue_policy { max_queue_size: 2 } }\n"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedTriton]:
    """Some models of the zoo; `sleeping` has room for two who wait."""
    folder = tmp_path_factory.mktemp("models")
    write_repository(folder, Names(), [model for model in MODELS if model.name in ZOO])
    with (folder / "sleeping" / "config.pbtxt").open("a") as config:
        config.write(CROWDED)
    with triton_on_free_ports(folder) as running:
        yield running


@pytest.fixture(scope="module")
def served(triton: EmbeddedTriton) -> Iterator[tuple[httpx.Client, Command]]:
    with gateway(triton.options.url) as pair:
        yield pair


@pytest.fixture
def client(served: tuple[httpx.Client, Command]) -> httpx.Client:
    return served[0]


def assert_told(answer: httpx.Response, status: int, code: str) -> None:
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


# Triton.


def test_the_only_triton_killed_under_load_is_said_at_once_and_is_back_at_once(
    tmp_path: Path,
) -> None:
    with Triton(repository(tmp_path), "echo") as triton:
        triton.wait()
        with (
            gateway(triton.options.url, log_level="error") as (client, command),
            ThreadPoolExecutor(1) as pool,
        ):
            alone = Served([triton], client, command)
            wait_until(lambda: alone.infer().is_success)
            load = pool.submit(hammer, alone, 4)
            time.sleep(1)
            triton.kill()
            killed = time.monotonic()
            wait_until(lambda: client.get("/readyz").status_code == 503)
            assert client.get("/livez").status_code == 200
            refused = alone.infer()
            assert_told(refused, 503, "NO_REPLICA")
            assert refused.headers["retry-after"] == "1"
            statuses, seen = load.result()
            after = sorted(took for at, _, took in seen if at > killed + 0.1)
            triton.start()
            triton.wait()
            back_s = wait_until(lambda: alone.infer().status_code == 200)
        triton.kill()  # which is quicker than its end
    print(
        f"{dict(statuses)}; half of the refusals within {after[len(after) // 2] * 1000:.1f} ms, ",
        end="",
    )
    print(
        f"99 % within {after[int(len(after) * 0.99)] * 1000:.0f} ms; serving {back_s:.2f} s after Triton"
    )
    assert set(statuses) <= {200, 502, 503}
    assert statuses[502] <= 16  # one per client: those that were under way
    assert after[len(after) // 2] < 0.01
    assert after[int(len(after) * 0.99)] < 0.1  # of 16 threads on a busy machine


def test_a_full_queue_of_a_model_is_429_and_costs_no_other_model_anything(
    client: httpx.Client,
) -> None:
    def ask(_: int) -> httpx.Response:
        return client.post("/v1/models/sleeping/infer", json={"inputs": 0.5})

    with ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(ask, number) for number in range(20)]
        slowest = 0.0
        while not all(call.done() for call in waiting):
            other = client.post("/v1/models/single_BYTES/infer", json={"inputs": "a"})
            assert other.status_code == 200
            slowest = max(slowest, other.elapsed.total_seconds())
    answers = [call.result() for call in waiting]
    statuses = Counter(answer.status_code for answer in answers)
    print(f"{dict(statuses)}; the slowest of another model {slowest * 1000:.0f} ms")
    assert set(statuses) == {200, 429}
    for answer in answers:
        if answer.status_code == 429:
            assert_told(answer, 429, "OVERLOADED")
            assert int(answer.headers["retry-after"]) >= 1
    assert slowest < 0.4


def test_a_model_unloaded_behind_our_back_is_503_at_once_and_other_models_are_served(
    client: httpx.Client, triton: EmbeddedTriton
) -> None:
    def pair() -> httpx.Response:
        return client.post("/v1/models/pair/infer", json={"inputs": {"A": [1, 2], "B": [3, 4]}})

    def ready() -> bool:
        (found,) = (m for m in client.get("/v1/models").json()["models"] if m["name"] == "pair")
        return bool(found["ready"])

    assert pair().status_code == 200
    direct = f"{triton.options.url.partition('?')[0]}/v2/repository/models/pair"
    httpx.post(f"{direct}/unload").raise_for_status()
    began = time.monotonic()
    wait_until(lambda: pair().status_code != 200)
    assert_told(pair(), 503, "MODEL_NOT_READY")
    wait_until(lambda: not ready())
    print(f"noticed after {(time.monotonic() - began) * 1000:.0f} ms")
    other = client.post("/v1/models/single_BYTES/infer", json={"inputs": "a"})
    assert other.status_code == 200
    httpx.post(f"{direct}/load").raise_for_status()
    wait_until(lambda: pair().status_code == 200)


def spoil_config(folder: Path) -> None:
    (folder / "config.pbtxt").write_text('backend: "python"\ninput [ { name: "X" nonsense')


def spoil_backend(folder: Path) -> None:
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace('"python"', '"nowhere"'))


def take_away(folder: Path) -> None:
    """The whole version: of one without its model.py Triton's Python backend would wait for ever."""
    shutil.rmtree(folder / "1")


def raise_at_the_start(folder: Path) -> None:
    (folder / "1" / "model.py").write_text(ECHO)
    (folder / "trouble").write_text("damaged")


SPOILED = (spoil_config, spoil_backend, take_away, raise_at_the_start)


def test_a_load_that_fails_is_told_without_secrets_and_what_served_goes_on(tmp_path: Path) -> None:
    with Triton(repository(tmp_path), "echo") as triton:
        triton.wait()
        with gateway(triton.options.url) as (client, _):
            kept = {path: path.read_bytes() for path in (tmp_path / "echo").rglob("*.p*")}
            for spoil in SPOILED:
                spoil(tmp_path / "echo")
                refused = client.post("/v2/repository/models/echo/load")
                reason = refused.json()["error"]
                print(
                    f"{spoil.__name__}: {refused.status_code} {refused.json()['code']}: {reason[:90]}"
                )
                assert refused.status_code in (422, 502)
                assert not re.search(rf"{tmp_path}|/opt/secret|Traceback|\.cc|0x", refused.text)
                assert client.post("/v1/models/echo/infer", json=BODY).status_code == 200
                for path, content in kept.items():
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(content)
                (tmp_path / "echo" / "trouble").unlink(missing_ok=True)
            assert client.post("/v2/repository/models/echo/load").status_code == 200
        triton.kill()  # after a reload that failed a tritonserver does not end by itself


# The gateway itself.


def test_thirty_two_images_of_25_megapixels_do_not_hold_up_the_loop(
    served: tuple[httpx.Client, Command],
) -> None:
    client, command = served
    ramp = np.linspace(0, 255, 5000, dtype=np.uint8)
    body = encoded(Image.fromarray(np.broadcast_to(ramp, (5000, 5000))), compress_level=1)
    process, statuses = psutil.Process(command.pid), Counter[int]()
    before, waits, most = process.memory_info().rss, list[float](), 0

    def post(_: int) -> int:
        headers = {"Content-Type": "image/png"}
        return client.post("/v1/models/nhwc/infer", content=body, headers=headers).status_code

    with ThreadPoolExecutor(32) as pool, httpx.Client(base_url=client.base_url) as prober:
        calls = [pool.submit(post, number) for number in range(32)]
        while not all(call.done() for call in calls):
            waits.append(prober.get("/livez").elapsed.total_seconds())
            most = max(most, process.memory_info().rss)
            time.sleep(0.005)
        statuses.update(call.result() for call in calls)
    waits.sort()
    p99_s = waits[int(len(waits) * 0.99)]
    print(f"{dict(statuses)}; p99 of {len(waits)} x /livez {p99_s * 1000:.0f} ms, ", end="")
    print(f"at most {(most - before) / MIB:.0f} MiB more")
    assert statuses == {200: 32}
    assert p99_s < 0.1
    assert most - before < 1000 * MIB  # 100 megapixels at a time, as RGB and as decoded


def test_what_a_killed_worker_was_doing_is_not_counted_for_ever(triton: EmbeddedTriton) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    environment = {"GATEWAY_TRITON_URLS": triton.options.url}

    def in_flight() -> float:
        page = httpx.get(f"{url}/metrics", timeout=30).text
        return sum(map(float, re.findall(r"^gateway_requests_in_flight\{.*\} (\S+)$", page, re.M)))

    def ask(_: int) -> int:
        try:
            asked = httpx.post(f"{url}/v1/models/sleeping/infer", json={"inputs": 4}, timeout=30)
            return asked.status_code
        except httpx.HTTPError:
            return 0

    arguments = ("serve", "--port", str(port), "--workers", "2")
    with Command(*arguments, environment=environment) as command, ThreadPoolExecutor(3) as pool:
        command.wait_for("serving")
        calls = list(map(pool.submit, [ask] * 3, range(3)))
        wait_until(lambda: in_flight() >= 3)
        victims = workers(command)
        for victim in victims:
            victim.kill()
        began = time.monotonic()
        assert [call.result() for call in calls] == [0] * 3
        wait_until(lambda: not any(victim.is_running() for victim in victims))
        wait_until(lambda: serves(url))
        wait_until(lambda: in_flight() <= 2)  # this page, and perhaps the last one
        print(f"served and counted rightly {time.monotonic() - began:.1f} s after both were killed")


def serves(url: str) -> bool:
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/readyz").status_code == 200
    return False


def test_a_state_that_cannot_be_read_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"core": {"loa')
    state = f"file://{tmp_path}/state.json"
    with Command("serve", "--port", "0", environment={"GATEWAY_STATE": state}) as command:
        assert command.end() == 1
    print(command.lines[-1].replace(str(tmp_path), ""))
    assert "is not the state of a gateway" in command.lines[-1]
    assert "Traceback" not in command.output


def test_a_state_that_cannot_be_written_refuses_changes_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    with Triton(repository(tmp_path / "models"), "echo") as triton:
        triton.wait()
        with gateway(triton.options.url, state=f"file://{folder}/state.json") as (client, _):
            assert client.post("/v2/repository/models/other/load").status_code == 200
            folder.rename(tmp_path / "gone")
            folder.touch()
            for verb, model in (("load", "late"), ("unload", "other")):
                refused = client.post(f"/v2/repository/models/{model}/{verb}")
                assert_told(refused, 503, "STATE_UNAVAILABLE")
            for model in ("echo", "other"):
                assert client.post(f"/v1/models/{model}/infer", json=BODY).status_code == 200
            folder.unlink()
            (tmp_path / "gone").rename(folder)
            wished = json.loads((folder / "state.json").read_bytes())
            wait_until(lambda: client.post("/v2/repository/models/late/load").status_code == 200)
        triton.kill()
    print("2 changes refused with 503, 2 models served meanwhile")
    assert "other" in json.dumps(wished)
    assert "late" not in json.dumps(wished)


# Bad input and attacks.

GOOD: dict[str, Any] = {"name": "X", "datatype": "FP32", "shape": [1, 1, 2], "data": [1, 2]}
TENSORS: dict[str, dict[str, Any]] = {
    "a negative dimension": {"inputs": [{**GOOD, "shape": [1, 1, -2]}]},
    "a dimension of 2⁶³": {"inputs": [{**GOOD, "shape": [1, 1, 2**63]}]},
    "a dimension that is none": {"inputs": [{**GOOD, "shape": [1, 1, "two"]}]},
    "no shape": {"inputs": [{"name": "X", "datatype": "FP32", "data": [1, 2]}]},
    "no dimensions": {"inputs": [{**GOOD, "shape": []}]},
    "a batch of 0": {"inputs": [{**GOOD, "shape": [0, 1, 2], "data": []}]},
    "a batch that is too large": {"inputs": [{**GOOD, "shape": [9, 1, 2], "data": [1] * 18}]},
    "too few values": {"inputs": [{**GOOD, "data": [1]}]},
    "too many values": {"inputs": [{**GOOD, "data": [1, 2, 3]}]},
    "ragged values": {"inputs": [{**GOOD, "data": [[1, 2], [3]]}]},
    "texts": {"inputs": [{**GOOD, "data": ["a", "b"]}]},
    "no values": {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1, 2]}]},
    "values that are none": {"inputs": [{**GOOD, "data": {"a": 1}}]},
    "another datatype": {"inputs": [{**GOOD, "datatype": "INT64"}]},
    "a datatype that is none": {"inputs": [{**GOOD, "datatype": "FP7"}]},
    "an unknown input": {"inputs": [{**GOOD, "name": "Z"}]},
    "an input twice": {"inputs": [GOOD, GOOD]},
    "no input": {"inputs": []},
    "inputs that are none": {"inputs": {"X": [1, 2]}},
    "an unknown output": {"inputs": [GOOD], "outputs": [{"name": "Z"}]},
    "a length of −1": {"inputs": [{**GOOD, "parameters": {"binary_data_size": -1}}]},
    "a length of 2⁶³": {"inputs": [{**GOOD, "parameters": {"binary_data_size": 2**63}}]},
    "a region of shared memory": {
        "inputs": [{**GOOD, "parameters": {"shared_memory_region": "a", "shared_memory_byte_size": 8}}]
    },
    "a sequence that is none": {"inputs": [GOOD], "parameters": {"sequence_id": []}},
}  # fmt: skip


def test_tensors_that_cannot_be_are_the_callers_mistake_on_the_way_through(
    client: httpx.Client,
) -> None:
    """Triton itself says 500 to some of them, and takes some."""
    seen: Counter[int] = Counter()
    wrong = []
    url = "/v2/models/batched_FP32"
    for name, document in TENSORS.items():
        answer = client.post(f"{url}/infer", json=document)
        seen[answer.status_code] += 1
        if answer.status_code not in (200, 400, 404, 422):
            wrong.append((name, answer.status_code, answer.text))
    for version, status in (("abc", 400), ("99", 404), ("-1", 400)):
        answer = client.post(f"{url}/versions/{version}/infer", json={"inputs": [GOOD]})
        seen[answer.status_code] += 1
        if answer.status_code not in (status, 404):
            wrong.append((f"version {version}", answer.status_code, answer.text))
    print(f"{len(TENSORS) + 3} requests: {dict(seen)}")
    assert wrong == [], "\n".join(map(str, wrong))
    assert client.post(f"{url}/infer", json={"inputs": [GOOD]}).status_code == 200


def peak_bytes(pid: int) -> int:
    return int(re.findall(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) * 1024


def test_ten_gigabytes_in_ten_megabytes_are_413_and_never_in_memory(
    served: tuple[httpx.Client, Command],
) -> None:
    client, command = served
    bomb = gzip.compress(bytes(100_000_000), 9) * 100
    before = peak_bytes(command.pid)
    took = []
    for path in ("/v1/models/single_BYTES/infer", "/v2/models/single_BYTES/infer"):
        headers = {"Content-Type": "text/plain", "Content-Encoding": "gzip"}
        answer = client.post(path, content=bomb, headers=headers)
        assert_told(answer, 413, "TOO_LARGE")
        took.append(f"{answer.elapsed.total_seconds():.2f} s")
    grown = (peak_bytes(command.pid) - before) / MIB
    print(
        f"{len(bomb) / 1e6:.0f} MB that inflate to 10 GB: 413 after {', '.join(took)}, {grown:.0f} MiB"
    )
    assert grown < 200


def test_65_537_chunks_of_six_bytes_are_a_body(client: httpx.Client) -> None:
    """Each part of a body costs something: many small ones must not cost much."""
    count = 65_537
    head = b"POST /v1/models/single_BYTES/infer HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
    wire = head + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire += b"6\r\nsix by\r\n" * count + b"0\r\n\r\n"
    began = time.monotonic()
    with socket.create_connection((client.base_url.host, client.base_url.port or 80), 20) as sent:
        sent.sendall(wire)
        answer = b"".join(iter(lambda: sent.recv(MIB), b""))
    print(f"answered after {time.monotonic() - began:.2f} s")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"six by") == count


def test_json_with_100_000_keys_costs_little(client: httpx.Client) -> None:
    for document in (
        {"inputs": {f"k{number}": 1 for number in range(100_000)}},
        {"inputs": "a", **{f"k{number}": 1 for number in range(100_000)}},
    ):
        answer = client.post("/v1/models/single_BYTES/infer", json=document)
        print(f"{answer.status_code} after {answer.elapsed.total_seconds():.2f} s, ", end="")
        assert answer.status_code in (200, 400, 422)
        assert len(answer.content) < 10_000
        assert answer.elapsed.total_seconds() < 2
    print("and none is repeated in the answer")
