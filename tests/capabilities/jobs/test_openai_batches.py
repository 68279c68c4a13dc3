"""Files and batches of OpenAI's API, with its client, before a real Triton."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import httpx
import orjson
import pytest

from gateway.capabilities.jobs.batches.openai import (
    ERRORS,
    OUTPUT,
    BatchFile,
    delete_result,
    describe_batch,
    list_job_files,
    stream_lines,
)
from gateway.capabilities.jobs.capability import create_store
from gateway.capabilities.jobs.errors import JobsFull
from gateway.capabilities.jobs.job import JobKind
from gateway.capabilities.jobs.service import Jobs
from gateway.capabilities.jobs.settings import JobSettings
from gateway.capabilities.jobs.storage.store import JobLimits
from gateway.embedded.supervisor import EmbeddedTriton
from tests.capabilities.jobs.support import CANCELLABLE, submit, wait_for, wait_for_state
from tests.capabilities.jobs.unit.test_job import NOW, QUEUED
from tests.capabilities.openai.support.lazy import LazyModule
from tests.support.documents import DOCS
from tests.support.gateway_forks import run_gateway
from tests.support.keys import ADMIN, BOTH, ENTRIES, INFER, TEXTS, bearer, entry, written
from tests.support.servers import gateway_before

if TYPE_CHECKING:
    import openai
else:
    openai = LazyModule("openai")

BATCH: dict[str, Any] = {"endpoint": "/v1/embeddings", "completion_window": "24h"}
FULL = "tgw_full-secret"
MAX_JOBS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def gateway(
    zoo_triton: EmbeddedTriton, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a gateway that runs one job at a time."""
    entries = [*ENTRIES, entry(FULL, "infer")]
    settings = {
        "jobs": f"sqlite://{folder}",
        "keys_file": str(written(tmp_path_factory.mktemp("keys") / "keys.yaml", entries)),
        "connect_timeout_s": "10",
        "max_running_jobs": "1",
        "max_batch_rows": "20",
        "max_jobs_per_caller": str(MAX_JOBS),
    }
    with gateway_before(zoo_triton.options.url, **settings) as client:
        for model in ("vectors", "cancellable"):
            path = f"/v2/repository/models/{model}/load"
            assert client.post(path, headers=bearer(ADMIN)).is_success
        yield str(client.base_url)


@pytest.fixture(scope="module")
def connect(gateway: str) -> Callable[[str], openai.OpenAI]:
    return lambda key: openai.OpenAI(base_url=f"{gateway}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(connect: Callable[[str], openai.OpenAI]) -> Iterator[openai.OpenAI]:
    client = connect(INFER)
    yield client
    for file in client.files.list():
        client.files.delete(file.id)


@pytest.fixture
def jobs(gateway: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway, headers=bearer(INFER), timeout=60) as client:
        yield client


def request_of(custom_id: Any, value: Any, **changes: Any) -> dict[str, Any]:
    body = {"model": "vectors", "input": value}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}
    return {**line, **changes}


def lines_of(requests: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in requests)


def upload(client: openai.OpenAI, *requests: Any) -> openai.types.FileObject:
    return client.files.create(file=("in.jsonl", lines_of(requests)), purpose="batch")


def run_batch(client: openai.OpenAI, jobs: httpx.Client, *requests: Any) -> openai.types.Batch:
    batch = client.batches.create(input_file_id=upload(client, *requests).id, **BATCH)
    wait_for(jobs, batch.id)
    return client.batches.retrieve(batch.id)


def read_lines(client: openai.OpenAI, file: str | None) -> list[dict[str, Any]]:
    assert file is not None
    content = client.files.content(file).content
    assert len(content) == client.files.retrieve(file).bytes
    return [json.loads(line) for line in content.splitlines()]


def test_openais_client_runs_a_batch_of_embeddings(
    client: openai.OpenAI, jobs: httpx.Client
) -> None:
    requests = [request_of("one", "ab"), request_of("ünt", ["a", "abc"], id=7)]
    file = upload(client, *requests)
    assert (file.filename, file.purpose, file.object) == ("in.jsonl", "batch", "file")
    assert read_lines(client, file.id) == requests
    created = client.batches.create(input_file_id=file.id, metadata={"for": "tests"}, **BATCH)
    assert created.status in ("validating", "in_progress", "completed")
    client.files.delete(file.id)
    wait_for(jobs, created.id)
    batch = client.batches.retrieve(created.id)
    assert (batch.status, batch.model, batch.error_file_id) == ("completed", "vectors", None)
    assert batch.metadata == {"for": "tests"}
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 2, "failed": 0}
    assert batch.in_progress_at is not None
    assert batch.completed_at is not None
    assert batch.created_at <= batch.in_progress_at <= batch.completed_at < (batch.expires_at or 0)
    lines = read_lines(client, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == ["one", "ünt"]
    assert len({line["id"] for line in lines}) == 2
    for line, request in zip(lines, requests, strict=True):
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        direct = jobs.post("/v1/embeddings", json=request["body"])
        assert line["response"]["body"] == direct.json()


def test_requests_that_failed_are_in_a_file_of_their_own(
    client: openai.OpenAI, jobs: httpx.Client
) -> None:
    values = ["a", [], ["b", "c"], []]
    batch = run_batch(client, jobs, *(request_of(str(n), each) for n, each in enumerate(values)))
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 2)
    outputs = read_lines(client, batch.output_file_id)
    assert [line["custom_id"] for line in outputs] == ["0", "2"]
    errors = read_lines(client, batch.error_file_id)
    assert [line["custom_id"] for line in errors] == ["1", "3"]
    direct = jobs.post("/v1/embeddings", json={"model": "vectors", "input": []})
    assert errors[0]["response"]["status_code"] == direct.status_code == 400
    assert errors[0]["response"]["body"] == direct.json()
    for deleted, kept in ((batch.output_file_id, batch.error_file_id), (batch.error_file_id, None)):
        assert client.files.delete(deleted or "").deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(deleted or "")
        batch = client.batches.retrieve(batch.id)
        assert (batch.output_file_id, batch.error_file_id) == (None, kept)
    assert jobs.get(f"/v1/jobs/{batch.id}/result").status_code == 409


def test_batch_whose_requests_all_failed_has_no_output(
    client: openai.OpenAI, jobs: httpx.Client
) -> None:
    batch = run_batch(client, jobs, request_of("a", []))
    assert (batch.status, batch.output_file_id) == ("completed", None)
    client.files.delete(batch.error_file_id or "")
    batch = client.batches.retrieve(batch.id)
    assert (batch.output_file_id, batch.error_file_id) == (None, None)


def test_cancelled_batch_does_not_run(client: openai.OpenAI, jobs: httpx.Client) -> None:
    hour = submit(jobs, CANCELLABLE, json={"inputs": [3600]}).json()["id"]
    wait_for_state(jobs, hour, "running")
    batch = client.batches.create(input_file_id=upload(client, request_of("a", "a")).id, **BATCH)
    assert batch.status == "validating"
    batch = client.batches.cancel(batch.id)
    assert (batch.status, batch.output_file_id) == ("cancelled", None)
    assert batch.cancelled_at is not None
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert jobs.delete(f"/v1/jobs/{hour}").is_success


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "request 2"),
        (b"1", "request 2"),
        (b"[" * 300, "request 2"),
        (b'{"custom_id": "a", "body": {"model": "vectors"}}', "request 2"),
        (lines_of([request_of("a", "b", url="/v1/rerank")]), "request 2"),
        (lines_of([request_of("a", "b", method="GET")]), "request 2"),
        (lines_of([request_of(1, "b")]), "request 2"),
        (lines_of([request_of("a", "b", body={"model": 1})]), "request 2"),
        (lines_of([request_of("a", "b", body={"model": "m" * 257})]), "of the form"),
        (lines_of([request_of("a", "b", body={"model": "other"})]), "another model"),
        (lines_of([request_of("a", "a" * (1 << 20))]), "exceeds"),
        (lines_of([request_of("a", "a")] * 20), "20 rows"),
    ],
    ids=range(12),
)
def test_file_with_an_invalid_line_is_refused(
    client: openai.OpenAI, line: bytes, words: str
) -> None:
    lines = lines_of([request_of("first", "a")]) + b"\n" + line
    with pytest.raises(openai.APIStatusError, match=words) as refused:
        client.files.create(file=("in.jsonl", lines), purpose="batch")
    assert refused.value.status_code == (413 if words in ("exceeds", "20 rows") else 400)
    assert refused.value.type == "invalid_request_error"
    assert not client.files.list().data


@pytest.mark.parametrize(
    "form",
    [
        [("file", ("a", b"1"))],
        [("purpose", (None, b"fine-tune")), ("file", ("a", lines_of([request_of("a", "a")])))],
        [("purpose", (None, b"batch"))],
        [("purpose", (None, b"batch")), ("file", ("a", b" \n"))],
        [("purpose", (None, b"batch")), *[("file", ("a", lines_of([request_of("a", "a")])))] * 2],
    ],
)
def test_form_without_one_file_for_batches_is_refused(jobs: httpx.Client, form: Any) -> None:
    answer = jobs.post("/v1/files", files=form)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"endpoint": "/v1/chat/completions"}, 400),
        ({"completion_window": "1h"}, 400),
        ({"metadata": "text"}, 400),
        ({"metadata": dict.fromkeys(map(str, range(17)), "")}, 400),
        ({"metadata": {"n" * 65: ""}}, 400),
        ({"metadata": {"name": "v" * 513}}, 400),
        ({"metadata": {"name": 1}}, 400),
        ({"input_file_id": "file-nobodys"}, 404),
        ({"input_file_id": None}, 404),
    ],
)
def test_batch_that_cannot_be_made_is_refused(
    client: openai.OpenAI, jobs: httpx.Client, changes: Any, status: int
) -> None:
    file = upload(client, request_of("a", "a"))
    answer = jobs.post("/v1/batches", json={"input_file_id": file.id, **BATCH, **changes})
    assert (answer.status_code, set(answer.json()["error"])) == (
        status,
        {"message", "type", "param", "code"},
    )


def test_refused_metadata_leaves_no_body(
    folder: Path, client: openai.OpenAI, jobs: httpx.Client
) -> None:
    file = upload(client, request_of("a", "a"))
    before = {path.name for path in (folder / "files").iterdir()}
    nested = json.loads("[" * 260 + "]" * 260)  # more levels than can be written
    wanted = {"input_file_id": file.id, **BATCH, "metadata": {"name": nested}}
    assert jobs.post("/v1/batches", json=wanted).status_code == 400
    assert {path.name for path in (folder / "files").iterdir()} <= before


def test_batch_for_a_model_that_is_unknown_to_its_caller_is_refused(
    client: openai.OpenAI, connect: Callable[[str], openai.OpenAI]
) -> None:
    unknown = upload(client, request_of("a", "a", body={"model": "nobody"}))
    others = connect(TEXTS)
    hidden = upload(others, request_of("a", "a"))
    for each, file in ((client, unknown), (others, hidden)):
        with pytest.raises(openai.NotFoundError) as refused:
            each.batches.create(input_file_id=file.id, **BATCH)
        assert refused.value.code == "MODEL_NOT_FOUND"
    others.files.delete(hidden.id)


def test_files_and_batches_belong_to_their_caller(
    client: openai.OpenAI, jobs: httpx.Client, connect: Callable[[str], openai.OpenAI]
) -> None:
    batch = run_batch(client, jobs, request_of("a", "a"))
    other = connect(BOTH)
    calls: list[Callable[[], Any]] = [
        lambda: other.files.retrieve(batch.input_file_id),
        lambda: other.files.content(batch.input_file_id),
        lambda: other.files.content(batch.output_file_id or ""),
        lambda: other.files.delete(batch.output_file_id or ""),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(input_file_id=batch.input_file_id, **BATCH),
    ]
    for call in calls:
        with pytest.raises(openai.NotFoundError) as refused:
            call()
        assert refused.value.code == "JOB_NOT_FOUND"
        assert re.match(r".*(file 'file-|batch 'batch_)", str(refused.value))
    assert not other.files.list().data
    assert not other.batches.list().data
    assert connect(ADMIN).batches.retrieve(batch.id).id == batch.id


def test_command_says_how_to_read_an_uploaded_file(client: openai.OpenAI, gateway: str) -> None:
    file = upload(client, request_of("a", "a")).id
    target = ("--url", gateway, "--key", INFER)
    refused = run_gateway("infer", "vectors", "--job", file, *target)
    command = f"triton-gateway jobs result {file}"
    assert (refused.returncode, command in refused.stderr) == (2, True), refused.stderr
    assert run_gateway("jobs", "result", file, *target).stdout.encode() == lines_of(
        [request_of("a", "a")]
    )


def test_lists_have_pages_with_the_newest_first(client: openai.OpenAI) -> None:
    files = [upload(client, request_of("a", "a")).id for _ in range(3)]
    batches = [client.batches.create(input_file_id=files[0], **BATCH).id for _ in range(3)]
    pages = client.files.list(limit=2, purpose="batch", order="desc")
    assert [each.id for each in pages] == files[::-1]
    found = [each.id for each in client.batches.list(limit=2)]
    assert found[:3] == batches[::-1]
    assert len(set(found)) == len(found)


def test_files_count_as_jobs_of_their_caller(
    gateway: str, connect: Callable[[str], openai.OpenAI]
) -> None:
    full = connect(FULL)
    files = [upload(full, request_of("a", "a")).id for _ in range(MAX_JOBS)]
    with pytest.raises(openai.RateLimitError, match=f"{MAX_JOBS} files and jobs"):
        upload(full, request_of("a", "a"))
    full.files.delete(files[0])
    upload(full, request_of("a", "a"))
    path = f"{gateway}/v1/jobs?caller=full"
    erased = httpx.delete(path, headers=bearer(FULL), timeout=60)
    assert erased.json() == {"deleted": MAX_JOBS}
    assert not full.files.list().data


def test_states_of_a_job_are_statuses_of_a_batch(tmp_path: Path) -> None:
    settings = JobSettings(jobs=f"sqlite://{tmp_path}")
    jobs = Jobs(create_store(settings), settings, 10)
    details: dict[str, Any] = {"input_file_id": "file-a", "metadata": None, "deleted": []}
    queued = replace(QUEUED, kind=JobKind.openai_batch, details=details)
    running = queued.start(NOW)
    for job, status in (
        (queued, "validating"),
        (running, "in_progress"),
        (running.postpone(NOW), "in_progress"),
        (running.finish_batch(NOW), "completed"),
        (running.fail(NOW, JobsFull("no room")), "failed"),
        (running.cancel(NOW), "cancelled"),
        (queued.expire(NOW), "expired"),
    ):
        batch = describe_batch(jobs, job)
        assert batch["status"] == status
        assert batch.get(f"{status}_at") == (
            NOW if job.has_ended or status == "in_progress" else None
        )
        errors = batch["errors"] and [each["code"] for each in batch["errors"]["data"]]
        assert errors == (["JOBS_FULL"] if status == "failed" else None)


def test_results_of_a_batch_are_deleted_at_the_same_time(tmp_path: Path) -> None:
    async def run() -> None:
        store = create_store(JobSettings(jobs=f"sqlite://{tmp_path}"))
        await store.open()
        job = replace(QUEUED.start(NOW), kind=JobKind.openai_batch, details={"deleted": []})
        job = replace(job.finish_batch(NOW), result_file="r", result_bytes=2, failed_bytes=1)
        await store.files.append(job.result_file, b"12")
        await store.add(job, JobLimits(10, 10))
        seen = await store.find(job.id)
        assert seen is not None
        for file in list_job_files(seen):
            await delete_result(store, file)
        left = await store.find(job.id)
        assert left is not None
        assert not list_job_files(left)
        assert not await store.files.read(job.result_file, 0, 2)
        await store.close()

    asyncio.run(run())


def test_lines_that_are_read_in_pieces_are_whole(tmp_path: Path) -> None:
    random = Random(3)
    lines: dict[str, list[bytes]] = {OUTPUT: [], ERRORS: []}
    every = []
    for _ in range(40):
        part, status = random.choice([(OUTPUT, 200), (ERRORS, 422)])
        name, value = ("x" * random.choice([5, 10_000, 400_000]) for _ in range(2))
        body = {"status_code": 0, "value": value}
        response = {"status_code": status, "request_id": "a", "body": body}
        every.append(orjson.dumps({"custom_id": name, "response": response}) + b"\n")
        lines[part].append(every[-1])

    async def read(part: str) -> bytes:
        store = create_store(JobSettings(jobs=f"sqlite://{tmp_path / part}"))
        await store.open()
        await store.files.append("result", b"".join(every))
        job = replace(QUEUED, result_file="result", result_bytes=sum(map(len, every)))
        pieces = [piece async for piece in stream_lines(store.files, BatchFile(job, part, 0))]
        await store.close()
        return b"".join(pieces)

    for part, expected in lines.items():
        assert asyncio.run(read(part)) == b"".join(expected)


@pytest.mark.parametrize(
    ("language", "interpreter"),
    [
        ("sh", ["sh", "-ec"]),
        pytest.param("python", [sys.executable, "-c"], marks=pytest.mark.long),
    ],
)
def test_example_of_the_document_prints_the_responses(
    demo: httpx.Client, tmp_path: Path, language: str, interpreter: Sequence[str]
) -> None:
    text = (DOCS / "use/jobs.md").read_text().partition("## Batches of OpenAI")[2]
    address = str(demo.base_url).removeprefix("http://").rstrip("/")
    examples = dict(re.findall(r"```(\w+)\n(.*?)```", text.partition("\n## ")[0], re.DOTALL))
    (tmp_path / "requests.jsonl").write_text(examples["sh"].split("END'\n")[1].split("END\n")[0])
    program = examples[language].replace("localhost:8080", address)
    run = subprocess.run(
        [*interpreter, program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line]
    assert [line["response"]["status_code"] for line in lines] == [200, 200]
