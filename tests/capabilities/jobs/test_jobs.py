"""Single requests as jobs, before a real Triton."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from gateway.embedded.supervisor import EmbeddedTriton
from tests.capabilities.jobs.support import (
    ASYNC,
    CANCELLABLE,
    JOBS_SECRET,
    VECTOR,
    submit,
    wait_for,
    wait_for_state,
)
from tests.support.documents import DOCS
from tests.support.keys import ADMIN, BOTH, ENTRIES, INFER, TEXTS, bearer, entry, written
from tests.support.metrics import metric
from tests.support.redis_server import RedisServer
from tests.support.servers import ROOT, gateway, gateway_before
from tests.support.wait import wait_until

MONTHLY = "tgw_monthly-secret"
FEW = "tgw_few-secret"
ONCE = "tgw_once-secret"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="module", params=["sqlite", pytest.param("redis", marks=pytest.mark.long)])
def create_jobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], str]:
    """Returns a value of GATEWAY_JOBS for a store of its own."""
    if request.param == "sqlite":
        return lambda: f"sqlite://{tmp_path_factory.mktemp('jobs')}"
    return cast(RedisServer, request.getfixturevalue("redis")).url


@pytest.fixture(scope="module")
def client(
    zoo_triton: EmbeddedTriton,
    create_jobs: Callable[[], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    entries = [
        *ENTRIES,
        entry(MONTHLY, "infer", requests_per_month=3),
        entry(FEW, "infer", max_inflight=2),
    ]
    settings = {
        "jobs": create_jobs(),
        "keys_file": str(written(tmp_path_factory.mktemp("keys") / "keys.yaml", entries)),
        "connect_timeout_s": "10",
    }
    if settings["jobs"].startswith("redis"):  # which itself has no room for a large body
        settings["jobs_folder"] = str(tmp_path_factory.mktemp("files"))
        settings["jobs_secret"] = JOBS_SECRET
    with gateway_before(zoo_triton.options.url, **settings) as client:
        load_models(client)
        yield client


def load_models(client: httpx.Client) -> None:
    client.headers.update(bearer(ADMIN))
    for model in ("vector_FP32", "classes", "cancellable", "failing", "vectors"):
        assert client.post(f"/v2/repository/models/{model}/load").is_success
    client.headers.update(bearer(INFER))


def test_result_of_a_job_is_the_response_of_the_request(client: httpx.Client) -> None:
    headers = {"X-Request-ID": "the-same"}
    direct = client.post(VECTOR, json={"inputs": [[1.5, 2.5]]}, headers=headers)
    accepted = submit(client, headers=headers)
    assert accepted.status_code == 202, accepted.text
    assert accepted.headers["Preference-Applied"] == "respond-async"
    job = accepted.json()["id"]
    assert accepted.headers["Location"] == f"/v1/jobs/{job}"
    document = wait_for(client, job)
    assert (document["state"], document["starts"], document["model"]) == ("done", 1, "vector_FP32")
    assert document["progress"] == {"total": 1, "done": 1, "failed": 0}
    assert "unknown query parameter 'next'" in client.get("/v1/jobs?next=1").text
    result = client.get(f"/v1/jobs/{job}/result")
    assert (result.status_code, result.content) == (direct.status_code, direct.content)
    assert result.headers["Content-Type"] == direct.headers["Content-Type"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models/classes/infer?classification=1", {"inputs": [0.1, 0.7, 0.2]}),
        ("/v1/models/vector_FP32/versions/1:predict", {"instances": [[1, 2]]}),
        ("/v1/embeddings", {"model": "vectors", "input": ["a", "b"]}),
        (VECTOR, {"inputs": [[0.125] * 300_000]}),  # its body and its result have several pieces
    ],
)
def test_every_inference_can_be_a_job(client: httpx.Client, path: str, body: Any) -> None:
    headers = {"X-Request-ID": "one"}
    job = submit(client, path, json=body, headers=headers).json()
    assert wait_for(client, job["id"])["state"] == "done"
    direct = client.post(path, json=body, headers=headers)
    assert client.get(f"/v1/jobs/{job['id']}/result").content == direct.content


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/v1/models/nothing/infer", "{}", {}, 404),
        (VECTOR, "{", {}, 400),
        (VECTOR, '{"inputs": "text"}', {}, 422),
        (VECTOR, '{"inputs": [1]}', bearer(TEXTS), 404),
        (VECTOR, '{"inputs": [1]}', {"Authorization": "Bearer unknown"}, 401),
        (VECTOR, '{"inputs": [1]}', {"Content-Encoding": "br"}, 415),
        (f"{VECTOR}?other=1", '{"inputs": [1]}', {}, 400),
        ("/v1/embeddings", '{"model": "vectors"}', {}, 400),
        # What is done without the model is done at once.
        (f"{VECTOR}?dry_run=true", '{"inputs": [1]}', {}, 200),
        ("/v1/models/vector_FP32:predict", '{"instances": []}', {}, 400),
    ],
)
def test_what_needs_no_model_is_answered_at_once(
    client: httpx.Client, path: str, body: str, headers: dict[str, str], status: int
) -> None:
    headers = {"Content-Type": "application/json", "X-Request-ID": "one", **headers}
    direct = client.post(path, content=body, headers=headers)
    answer = client.post(path, content=body, headers={**headers, **ASYNC})
    assert (answer.status_code, answer.content) == (direct.status_code, direct.content)
    assert answer.status_code == status
    # The response has no header twice, but for the date.
    assert sorted(answer.headers.multi_items())[1:] == sorted(direct.headers.multi_items())[1:]


@pytest.mark.parametrize(
    "headers", [{"Accept": "text/event-stream"}, {"X-Sequence-ID": "1", "X-Sequence": "start"}]
)
def test_streams_and_sequences_are_no_jobs(client: httpx.Client, headers: dict[str, str]) -> None:
    answer = submit(client, headers=headers)
    assert answer.status_code == 400
    assert "without Prefer: respond-async" in answer.json()["error"]


def test_failed_job_has_the_error_of_the_request(client: httpx.Client) -> None:
    job = submit(client, "/v1/models/failing/infer", json={"inputs": [1]}).json()["id"]
    document = wait_for(client, job)
    result = client.get(f"/v1/jobs/{job}/result")
    direct = client.post("/v1/models/failing/infer", json={"inputs": [1]})
    assert (document["state"], document["status"]) == ("failed", direct.status_code)
    assert result.status_code == direct.status_code
    assert document["error"] == {"code": "MODEL_FAULT", "message": direct.json()["error"]}
    assert client.delete(f"/v1/jobs/{job}").status_code == 200
    assert client.get(f"/v1/jobs/{job}").status_code == 404


def test_request_that_ends_within_its_wait_is_answered_directly(client: httpx.Client) -> None:
    before = client.get("/v1/jobs").json()
    answer = submit(client, headers={"Prefer": "respond-async, wait=30", "X-Request-ID": "one"})
    direct = client.post(VECTOR, json={"inputs": [[1.5, 2.5]]}, headers={"X-Request-ID": "one"})
    assert (answer.status_code, answer.content) == (200, direct.content)
    wait_until(lambda: client.get("/v1/jobs").json() == before)


def test_idempotency_key_makes_one_job_of_many_requests(client: httpx.Client) -> None:
    headers = {"Idempotency-Key": "the-key"}
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: submit(client, headers=headers), range(24)))
    assert {answer.status_code for answer in answers} == {202}
    jobs = {answer.json()["id"] for answer in answers}
    assert len(jobs) == 1
    assert wait_for(client, *jobs)["starts"] == 1
    assert submit(client, headers=headers).json()["id"] in jobs
    other = submit(client, json={"inputs": [[3.0]]}, headers=headers)
    assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")
    assert submit(client, headers={**headers, **bearer(BOTH)}).json()["id"] not in jobs


def test_caller_sees_its_own_jobs_and_an_admin_all(client: httpx.Client) -> None:
    job = submit(client).json()["id"]
    wait_for(client, job)
    path = f"/v1/jobs/{job}"
    for method, url in (("GET", path), ("GET", f"{path}/result"), ("DELETE", path)):
        assert client.request(method, url, headers=bearer(BOTH)).status_code == 404
    erased = client.delete("/v1/jobs", params={"caller": "infer"}, headers=bearer(BOTH))
    assert erased.status_code == 403
    for headers, sees in ((bearer(BOTH), False), (bearer(ADMIN), True), (bearer(INFER), True)):
        listed = client.get("/v1/jobs", params={"state": "done"}, headers=headers).json()["jobs"]
        assert (job in [each["id"] for each in listed]) is sees
    pages = client.get("/v1/jobs", params={"limit": 1}).json()["jobs"]
    rest = client.get("/v1/jobs", params={"after": pages[0]["id"]}).json()["jobs"]
    assert pages + rest == client.get("/v1/jobs").json()["jobs"]


def test_rows_beyond_a_quota_fail_at_once(client: httpx.Client) -> None:
    """They would wait for `GATEWAY_JOB_MAX_RUN_S` each, in a place that the jobs of others need."""
    headers = {**bearer(MONTHLY), "Content-Type": "application/x-ndjson"}
    rows = b'{"inputs": [[1, 2]]}\n' * 40
    path = "/v1/models/vector_FP32/jobs"
    job = client.post(path, content=rows, headers=headers).json()["id"]
    document = client.get(f"/v1/jobs/{job}?wait=20", headers=bearer(ADMIN)).json()
    assert document["state"] == "done"
    assert 1 <= document["progress"]["done"] <= 3
    result = client.get(f"/v1/jobs/{job}/result", headers=bearer(ADMIN)).text.splitlines()
    assert json.loads(result[-1])["error"]["code"] == "QUOTA_EXCEEDED"


def test_cancelled_job_ends_in_triton(client: httpx.Client, zoo_triton: EmbeddedTriton) -> None:
    ends = Path(zoo_triton.options.model_repositories[0]) / "cancellable/ends"
    started = ends.with_name("started")
    for each in (started, ends):
        each.unlink(missing_ok=True)
    job = submit(client, CANCELLABLE, json={"inputs": [3600]}).json()["id"]
    wait_for_state(client, job, "running")
    wait_until(started.exists)
    assert client.get(f"/v1/jobs/{job}/result").status_code == 409
    assert client.delete(f"/v1/jobs/{job}").json()["state"] == "cancelled"
    wait_until(ends.exists)
    assert "cancelled" in ends.read_text()


def test_batch_has_no_more_rows_in_progress_than_its_caller_may_have(client: httpx.Client) -> None:
    rejections = 'gateway_requests_shed_total{reason="inflight"}'
    with httpx.Client(base_url=client.base_url, headers=bearer(ADMIN), timeout=60) as admin:
        before = metric(admin, rejections)
        rows = b'{"inputs": [[1]]}\n' * 20
        headers = {"Content-Type": "application/x-ndjson", **bearer(FEW)}
        accepted = client.post("/v1/models/vector_FP32/jobs", content=rows, headers=headers)
        assert wait_for(admin, accepted.json()["id"])["progress"]["done"] == 20
        assert metric(admin, rejections) == before


def test_queue_its_limits_a_quota_and_a_revoked_key(
    zoo_triton: EmbeddedTriton, create_jobs: Callable[[], str], tmp_path: Path
) -> None:
    entries = [*ENTRIES, entry(ONCE, "infer", requests_per_month=1)]
    keys = written(tmp_path / "keys.yaml", entries)
    settings = {
        "jobs": create_jobs(),
        "jobs_secret": JOBS_SECRET,
        "keys_file": str(keys),
        "max_running_jobs": "1",
        "max_model_inflight": "1",
        "max_jobs_per_caller": "2",
        "max_jobs_bytes": "1000",
    }
    with gateway_before(zoo_triton.options.url, **settings) as client:
        load_models(client)
        blocking = submit(client, CANCELLABLE, json={"inputs": [3600]}).json()
        wait_for_state(client, blocking["id"], "running")
        # It is checked at once, although its model is busy.
        waiting = submit(client, CANCELLABLE, json={"inputs": [0]}).json()["id"]
        last = submit(client, headers=bearer(BOTH)).json()["id"]
        admin = bearer(ADMIN)
        positions = [
            client.get(f"/v1/jobs/{job}", headers=admin).json()["position"]
            for job in (waiting, last)
        ]
        assert positions == [0, 1]
        assert submit(client).status_code == 429
        large = submit(client, json={"inputs": [[0.125] * 500]}, headers=bearer(BOTH))
        assert (large.status_code, large.json()["code"]) == (507, "JOBS_FULL")
        once = [submit(client, headers=bearer(ONCE)).json()["id"] for _ in range(2)]
        if settings["jobs"].startswith("sqlite"):
            stored = Path(settings["jobs"].removeprefix("sqlite://")).rglob("*")
            assert not any(INFER.encode() in each.read_bytes() for each in stored if each.is_file())
        page = client.get("/metrics", headers=admin).text
        assert 'gateway_jobs{state="queued"}' in page
        written(keys, [each for each in entries if each["name"] != "infer"])
        wait_until(lambda: client.get("/v1/jobs").status_code == 401)
        assert client.delete(f"/v1/jobs/{blocking['id']}", headers=admin).is_success
        client.headers.update(admin)
        assert wait_for(client, last)["state"] == "done"
        assert wait_for(client, waiting)["error"]["code"] == "JOB_NOT_TRUSTED"
        assert client.get(f"/v1/jobs/{waiting}/result").status_code == 403
        assert metric(client, 'gateway_jobs_refused_total{reason="not_trusted"}') >= 1
        assert wait_for(client, once[0])["state"] == "done"
        # The quota is used up: the other job was started, and waits.
        wait_until(lambda: client.get(f"/v1/jobs/{once[1]}").json()["starts"])
        wait_for_state(client, once[1], "queued")
        for caller in ("infer", "once"):
            erased = client.delete("/v1/jobs", params={"caller": caller})
            assert erased.json() == {"deleted": 2}
        assert [each["id"] for each in client.get("/v1/jobs").json()["jobs"]] == [last]


def test_recipe_of_the_document_prints_the_result(demo: httpx.Client) -> None:
    text = (DOCS / "use/jobs.md").read_text()
    recipe = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)[0]
    address = str(demo.base_url).removeprefix("http://").rstrip("/")
    script = recipe.replace("localhost:8080", address)
    run = subprocess.run(
        ["sh", "-ec", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout)["outputs"]["result"]["predictions"][0]["label"] == "7"


def test_gateway_with_jobs_ends_without_a_thread_left(tmp_path: Path) -> None:
    with gateway("http://127.0.0.1:1", jobs=f"sqlite://{tmp_path}") as (client, command):
        assert client.get("/v1/jobs").json() == {"jobs": []}
        command.process.terminate()
        assert command.end() == 0
        assert "exiting without" not in command.output
