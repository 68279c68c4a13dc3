"""Batches: many rows as one job, before a real Triton."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from gateway.client import AsyncClient, InferResult
from gateway.embedded.supervisor import EmbeddedTriton
from gateway.messages import parse_time
from tests.capabilities.jobs.support import wait_for
from tests.support.documents import DOCS
from tests.support.gateway_forks import run_gateway
from tests.support.measurements import assert_number, forget_peaks, peak_bytes
from tests.support.metrics import held_memory, metric
from tests.support.servers import GatewayProcess, gateway
from tests.support.wait import wait_until

BATCH = "/v1/models/vector_FP32/jobs"
CANCELLABLE = "/v1/models/cancellable/jobs"
NDJSON = {"Content-Type": "application/x-ndjson"}
FORM = {"Content-Type": "multipart/form-data; boundary=a"}
MIB = 1 << 20
FILE = b'Content-Disposition: form-data; name="file"; filename="a.json"\r\n\r\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def process(zoo_triton: EmbeddedTriton, folder: Path) -> Iterator[GatewayProcess]:
    process = GatewayProcess(
        {
            "GATEWAY_TRITON_URLS": zoo_triton.options.url,
            "GATEWAY_JOBS": f"sqlite://{folder}",
            "GATEWAY_CONNECT_TIMEOUT_S": "10",
            "GATEWAY_MAX_BATCH_ROWS": "1000",
            "GATEWAY_MAX_BATCH_BYTES": str(20 * MIB),
            "GATEWAY_MAX_RUNNING_JOBS": "4",
            "GATEWAY_JOB_LEASE_S": "1",
        }
    )
    process.start()
    for model in ("vector_FP32", "single_BYTES", "cancellable", "twins"):
        path = f"{process.url}/v2/repository/models/{model}/load"
        assert httpx.post(path, timeout=60).is_success
    yield process
    process.kill()


@pytest.fixture
def client(process: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=process.url, timeout=60) as client:
        yield client


def lines_of(rows: Iterable[Any]) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows)


def submit(client: httpx.Client, rows: Iterable[Any], path: str = BATCH) -> str:
    answer = client.post(path, content=lines_of(rows), headers=NDJSON)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def read_rows(client: httpx.Client, job: str, after: int = 0) -> list[dict[str, Any]]:
    result = client.get(f"/v1/jobs/{job}/result", params={"after": after})
    assert (result.status_code, result.headers["Content-Type"]) == (200, "application/x-ndjson")
    return [json.loads(line) for line in result.text.splitlines()]


def test_rows_come_in_their_order_each_with_its_result_or_error(client: httpx.Client) -> None:
    body = b"\n".join(
        [
            b'{"custom_id": "first", "inputs": [[1.5, 2.5]]}',
            b"{",
            b"",
            b'{"inputs": "text", "custom_id": "third"}',
            b'{"inputs": [[4]], "custom_id": 4}',
            b'{"inputs": [[5]]}',
            b'{"custom_id": "deep", "inputs": %b1%b}\n' % (b"[" * 300, b"]" * 300),
        ]
    )
    answer = client.post(BATCH, content=body, headers={**NDJSON, "Idempotency-Key": "rows"})
    job = answer.json()["id"]
    assert (answer.status_code, answer.headers["Location"]) == (202, f"/v1/jobs/{job}")
    document = wait_for(client, job)
    assert (document["state"], document["status"]) == ("done", 200)
    progress = document["progress"]
    assert {name: progress[name] for name in ("total", "done", "failed")} == {
        "total": 6,
        "done": 2,
        "failed": 4,
    }
    assert progress["rows_per_second"] > 0
    rows = read_rows(client, job)
    assert [row["row"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.get("custom_id") for row in rows] == ["first", None, "third", None, None, "deep"]
    assert [row["status"] for row in rows] == [200, 400, 422, 400, 200, 400]
    assert rows[0]["response"]["outputs"] == {"Y": [[1.5, 2.5]]}
    direct = client.post("/v1/models/vector_FP32/infer", json={"inputs": "text"}).json()
    assert rows[2]["error"] == {"code": direct["code"], "message": direct["error"]}
    assert read_rows(client, job, after=3) == rows[3:]
    again = client.post(BATCH, content=body, headers={**NDJSON, "Idempotency-Key": "rows"})
    assert again.json()["id"] == job
    other = client.post(BATCH, content=b"{}", headers={**NDJSON, "Idempotency-Key": "rows"})
    assert other.status_code == 422


def test_line_of_a_result_is_a_line_for_every_reader(client: httpx.Client) -> None:
    texts = [f"a{separator}b" for separator in "\v\f\x1c\x1d\x1e\x85\u2028\u2029"]
    rows: list[Any] = [{"custom_id": text, "inputs": text} for text in texts]
    rows.append({"custom_id": "\u2028", "inputs": {"\u2029": 1}})
    job = submit(client, rows, "/v1/models/single_BYTES/jobs")
    wait_for(client, job)
    *done, failed = read_rows(client, job)
    assert [row["response"]["outputs"] for row in done] == [{"Y": text} for text in texts]
    assert [row["custom_id"] for row in done] == texts
    assert (failed["custom_id"], failed["status"]) == ("\u2028", 422)
    assert failed["error"]["code"] == "DOES_NOT_FIT_MODEL"


def test_files_of_a_form_are_rows(client: httpx.Client) -> None:
    text = json.dumps({"inputs": [[1]]}).encode()
    array = io.BytesIO()
    np.save(array, np.array([[2, 3]], np.float32))
    large = io.BytesIO()
    np.save(large, np.arange(1 << 19, dtype=np.float32)[None])  # larger than a piece of the body
    files = [
        ("file", ("vör.json", text, "application/json")),
        ("file", ("b.npy", array.getvalue(), "application/octet-stream")),
        ("file", ("wrong.json", b"{\n}\n", "application/json")),
        ("file", ("large.npy", large.getvalue(), "application/x-npy")),
        ("file", ("last.json", text, "application/json")),
    ]
    job = client.post(BATCH, files=files).json()["id"]
    assert wait_for(client, job)["progress"]["done"] == 4
    rows = read_rows(client, job)
    assert [row["custom_id"] for row in rows] == [name for _, (name, _, _) in files]
    values = [row.get("response", {}).get("outputs", {}).get("Y") for row in rows]
    assert values[:3] == [[[1]], [[2, 3]], None]
    assert len(values[3][0]) == 1 << 19
    assert values[4] == [[1]]


@pytest.mark.parametrize(
    ("path", "content", "headers", "status"),
    [
        (BATCH, b"\n \n", NDJSON, 400),
        (BATCH, b"\n" * 2001, NDJSON, 413),
        (BATCH, b"{}", {"Content-Type": "application/json"}, 415),
        (BATCH, b"PK", {"Content-Type": "application/zip"}, 415),
        (BATCH, b"1\n" * 1001, NDJSON, 413),
        pytest.param(BATCH, b"1" * (1 << 20) + b"1", NDJSON, 413, id="a long row"),
        (BATCH, b"--a\r\n", FORM, 400),
        (BATCH, b"--a\r\n\r\nfile\r\n--a--", FORM, 400),
        (f"{BATCH}?after=1", b"{}", NDJSON, 400),
        (BATCH, b"{}", {**NDJSON, "Accept": "text/event-stream"}, 400),
        ("/v1/models/nothing/jobs", b"{}", NDJSON, 404),
    ],
)
def test_batch_that_cannot_run_is_refused(
    client: httpx.Client, path: str, content: bytes, headers: dict[str, str], status: int
) -> None:
    before = client.get("/v1/jobs").json()
    answer = client.post(path, content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert client.get("/v1/jobs").json() == before


@pytest.mark.parametrize(("headers", "start"), [(NDJSON, b""), (FORM, b"--a\r\n" + FILE)])
def test_part_of_a_row_that_has_arrived_is_charged_to_the_memory_budget(
    client: httpx.Client, headers: dict[str, str], start: bytes
) -> None:
    size_bytes = 512 << 10
    has_ended = threading.Event()

    def send() -> Iterator[bytes]:
        yield start + b"1" * size_bytes
        has_ended.wait()

    with ThreadPoolExecutor() as pool:
        sending = pool.submit(
            httpx.post, f"{client.base_url}{BATCH}", content=send(), headers=headers
        )
        try:
            wait_until(lambda: held_memory(client)["body"] >= size_bytes - 1000)
        finally:
            has_ended.set()
        assert sending.result().status_code in (202, 400)
    wait_until(lambda: held_memory(client)["body"] == 0)


def test_result_streams_while_a_killed_gateway_continues_the_batch(
    client: httpx.Client, process: GatewayProcess
) -> None:
    rows = [{"custom_id": str(number), "inputs": [0]} for number in range(8)]
    slow = {"custom_id": "8", "inputs": [4]}
    rest = [{"custom_id": str(number), "inputs": [0]} for number in range(9, 16)]
    job = submit(client, [*rows, slow, *rest], CANCELLABLE)
    first = []
    with client.stream("GET", f"/v1/jobs/{job}/result") as result:
        for line in result.iter_lines():
            first.append(json.loads(line))
            if (
                len(first) == 4
            ):  # at most four run at the same time: the slow row does not run before
                break
    progress = client.get(f"/v1/jobs/{job}").json()["progress"]
    assert progress["total"] == 16
    assert 4 <= progress["done"] < 16
    process.kill()
    process.start()
    assert first + read_rows(client, job, after=len(first)) == read_rows(client, job)
    document = wait_for(client, job)
    assert (document["state"], document["starts"]) == ("done", 2)
    assert document["progress"]["done"] == 16
    assert [row["custom_id"] for row in read_rows(client, job)] == list(map(str, range(16)))


def test_cancelled_batch_keeps_the_rows_that_have_run(client: httpx.Client) -> None:
    # The first rows fail without Triton, which could run a long one before them.
    rows = [{"inputs": "text"}] * 2 + [{"inputs": [3600]}] * 8
    job = submit(client, rows, CANCELLABLE)
    wait_until(lambda: client.get(f"/v1/jobs/{job}").json()["progress"]["failed"] == 2)
    # Four rows run, beside the request for the metrics.
    wait_until(lambda: metric(client, 'gateway_requests_in_flight{route="/v1"}') == 5)
    assert client.delete(f"/v1/jobs/{job}").json()["state"] == "cancelled"
    assert [row["row"] for row in read_rows(client, job)] == [1, 2]
    assert client.delete(f"/v1/jobs/{job}").is_success


@pytest.mark.long
def test_client_reads_on_after_a_killed_gateway(
    client: httpx.Client, process: GatewayProcess
) -> None:
    rows = [(str(number), {"X": [pause_s]}) for number, pause_s in enumerate((0, 0, 3, 0))]

    async def run() -> list[str]:
        names = []
        async with AsyncClient(process.url, arrays=False) as gateway:
            job = await gateway.submit_batch("cancellable", rows)
            async for name, outcome in gateway.batch_results(job):
                assert isinstance(outcome, InferResult)
                names.append(name)
                if len(names) == 1:
                    await asyncio.to_thread(process.kill)
                    await asyncio.to_thread(process.start)
        return names

    assert asyncio.run(run()) == ["0", "1", "2", "3"]


def test_job_without_its_body_fails(client: httpx.Client, folder: Path) -> None:
    # No other job starts before these have ended.
    slow = [submit(client, [{"inputs": [3600]}], CANCELLABLE) for _ in range(4)]
    request = client.post(
        "/v1/models/vector_FP32/infer", json={"inputs": [1]}, headers={"Prefer": "respond-async"}
    )
    lost = [request.json()["id"], submit(client, [{"inputs": [1]}])]
    for job in lost:
        (folder / f"files/{job}.body").unlink()
    for job in slow:
        client.delete(f"/v1/jobs/{job}")
    for job in lost:
        document = wait_for(client, job)
        assert (document["state"], document["starts"]) == ("failed", 3)
        assert document["error"]["code"] == "JOB_FILE_LOST"
    result = client.get(f"/v1/jobs/{lost[0]}/result")
    assert (result.status_code, result.json()["code"]) == (500, "JOB_FILE_LOST")


def test_job_whose_body_cannot_be_read_waits_and_leaves_its_place(
    client: httpx.Client, folder: Path
) -> None:
    # No other job starts before these have ended.
    slow = [submit(client, [{"inputs": [3600]}], CANCELLABLE) for _ in range(4)]
    request = client.post(
        "/v1/models/vector_FP32/infer", json={"inputs": [1]}, headers={"Prefer": "respond-async"}
    )
    job = request.json()["id"]
    body = folder / f"files/{job}.body"
    body.unlink()
    body.mkdir()
    for each in slow:
        client.delete(f"/v1/jobs/{each}")
    wait_until(lambda: get_starts(client, job) == ("queued", 1))
    body.rmdir()
    client.delete(f"/v1/jobs/{job}")


def get_starts(client: httpx.Client, job: str) -> tuple[str, int]:
    document = client.get(f"/v1/jobs/{job}").json()
    return document["state"], document["starts"]


def test_batch_leaves_an_instance_to_others_that_use_its_model(client: httpx.Client) -> None:
    def use_model() -> bool:
        headers = {"X-Request-Timeout": "50"}
        row = {"inputs": [0]}
        return client.post("/v1/models/twins/infer", json=row, headers=headers).is_success

    path = "/v1/models/twins/jobs"
    wait_for(client, submit(client, [{"inputs": [0]}], path))  # from now on, others are noticed
    assert use_model()
    # The model has two instances, and each row would take one for an hour.
    job = submit(client, [{"inputs": [0]}, *[{"inputs": [3600]}] * 3], path)

    def has_begun() -> bool:
        assert use_model()
        return bool(client.get(f"/v1/jobs/{job}").json()["progress"]["done"])

    wait_until(has_begun)
    assert use_model()
    assert client.delete(f"/v1/jobs/{job}").json()["state"] == "cancelled"


@pytest.mark.soak
def test_batch_is_as_fast_as_clients_that_wait(zoo_triton: EmbeddedTriton, tmp_path: Path) -> None:
    row = tmp_path / "row.json"
    row.write_text('{"inputs": [[1.5, 2.5]]}')
    options = ("--concurrency", "16", "--seconds", "10", "--json")
    jobs = f"sqlite://{tmp_path}/jobs"
    with gateway(zoo_triton.options.url, jobs=jobs) as (client, command):
        assert client.post("/v2/repository/models/vector_FP32/load").is_success
        environment = {**os.environ, "TRITON_GATEWAY_URL": str(client.base_url)}
        run = run_gateway("bench", "vector_FP32", row, *options, environment=environment)
        (level,) = json.loads(run.stdout)
        forget_peaks(command.pid)
        memory_before = peak_bytes(command.pid)
        job = submit(client, [{"inputs": [[number, 2]]} for number in range(10_000)])
        document = wait_for(client, job)
        memory = peak_bytes(command.pid) - memory_before
        started, ended = (parse_time(document[name]) for name in ("started", "ended"))
        assert started is not None
        assert ended is not None
        speed = 10_000 / (ended - started).total_seconds()
        assert_number("rows of a batch", speed, "/s", at_least=0.8 * level["per_second"])
        assert_number("memory of a batch", memory / (1 << 20), "MiB", at_most=30)
        rows = read_rows(client, job)
        assert [row["response"]["outputs"]["Y"][0][0] for row in rows] == list(range(10_000))


def test_recipe_of_the_document_submits_rows(demo: httpx.Client, tmp_path: Path) -> None:
    text = (DOCS / "use/jobs.md").read_text().partition("## Batches")[2]
    recipe = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)[0]
    address = str(demo.base_url).removeprefix("http://").rstrip("/")
    script = recipe.replace("localhost:8080", address)
    run = subprocess.run(
        ["sh", "-ec", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert [row["status"] for row in rows] == [200] * len(rows) != []
