"""Callbacks of jobs, the commands `jobs`, and the jobs of the Python client, before a real Triton."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from standardwebhooks.webhooks import Webhook

from gateway.capabilities.jobs.callbacks import MAX_ATTEMPTS_PER_HOST
from gateway.client import AsyncClient, Client, GatewayError, InferResult
from gateway.embedded.supervisor import EmbeddedTriton
from gateway.webhooks import generate_secret
from tests.capabilities.jobs.receiver import Received, Receiver, answer, receiving_in_thread
from tests.support.gateway_forks import fork_gateway, run_gateway
from tests.support.keys import ADMIN, BOTH, INFER, METRICS, bearer, entry, written
from tests.support.model_zoo.zoo import Zoo
from tests.support.servers import GatewayProcess
from tests.support.terminal import call_in_terminal
from tests.support.wait import wait_until

VECTOR = "/v1/models/vector_FP32/infer"
DOCUMENT = {"inputs": [[1.5, 2.5]]}
OWN_SECRET = generate_secret()


@dataclass(frozen=True)
class Service:
    process: GatewayProcess
    client: httpx.Client
    receiver: Receiver

    def submit(self, key: str = INFER, url: str = "", **headers: str) -> httpx.Response:
        headers = {"Prefer": "respond-async", "X-Callback-URL": url or self.receiver.url, **headers}
        return self.client.post(VECTOR, json=DOCUMENT, headers={**bearer(key), **headers})

    def list_received(self, job: str) -> list[Received]:
        return [each for each in self.receiver.received if each.headers["webhook-id"] == job]

    def wait_for_callback(self, key: str, job: str) -> dict[str, Any]:
        """Return the callback in the job's document, when no attempt is to come."""
        found: dict[str, Any] = {}

        def is_over() -> bool:
            found.clear()
            found.update(self.client.get(f"/v1/jobs/{job}", headers=bearer(key)).json()["callback"])
            return found["state"] in ("delivered", "failed")

        wait_until(is_over)
        return found

    def run(self, *arguments: str | Path, key: str = INFER, given: str = "") -> list[str]:
        """Run a command, and return the lines of its output."""
        environment = {
            **os.environ,
            "TRITON_GATEWAY_URL": self.process.url,
            "TRITON_GATEWAY_KEY": key,
        }
        done = run_gateway(*arguments, environment=environment, given=given)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@pytest.fixture(scope="module")
def service(
    zoo_triton: EmbeddedTriton, zoo_as_written: Zoo, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    zoo_as_written.load("vector_FP32", "single_BYTES", "cancellable")
    folder = tmp_path_factory.mktemp("callbacks")
    entries = [
        entry(INFER, "infer"),
        entry(ADMIN, "admin"),
        entry(BOTH, "infer", callback_secrets=[OWN_SECRET]),
        entry(METRICS, "metrics"),
    ]
    with receiving_in_thread() as receiver:
        environment = {
            "GATEWAY_TRITON_URLS": zoo_triton.options.url,
            "GATEWAY_KEYS_FILE": str(written(folder / "keys.yaml", entries)),
            "GATEWAY_JOBS": f"sqlite://{folder}",
            "GATEWAY_CALLBACK_URLS": f"{receiver.url},https://shop.example",
        }
        process = GatewayProcess(environment)
        process.start()
        try:
            with httpx.Client(base_url=process.url, timeout=60) as client:
                yield Service(process, client, receiver)
        finally:
            process.stop()


@pytest.mark.parametrize("key", [INFER, BOTH])
def test_receiver_is_called_once_when_the_job_has_ended(service: Service, key: str) -> None:
    accepted = service.submit(key, **{"X-Request-ID": f"the-{key[-9:-7]}"})
    assert accepted.status_code == 202, accepted.text
    job = accepted.json()["id"]
    assert service.wait_for_callback(key, job) == {"state": "delivered", "attempts": 1}
    (received,) = service.list_received(job)
    assert received.headers["x-request-id"] == accepted.headers["X-Request-ID"]
    shown = service.run("jobs", "secret", key=ADMIN)
    event = Webhook(OWN_SECRET if key == BOTH else shown[0]).verify(received.body, received.headers)
    document = service.client.get(f"/v1/jobs/{job}", headers=bearer(key)).json()
    del document["callback"]
    result = f"/v1/jobs/{job}/result"
    times = (event.pop("timestamp"), *(document[name] for name in ("created", "started", "ended")))
    assert all(re.fullmatch(r"[\d-]+T[\d:]+\.\d{3}Z", time) for time in times), times
    assert event == {"type": "job.done", "data": document, "result": result}
    assert service.client.get(result, headers=bearer(key)).status_code == 200


def test_other_urls_are_forbidden_and_no_job_is_kept(service: Service) -> None:
    count = len(service.client.get("/v1/jobs", headers=bearer(INFER)).json()["jobs"])
    for url in ("https://evil.example/", f"{service.receiver.url}2"):
        refused = service.submit(url=url)
        assert (refused.status_code, refused.json()["code"]) == (403, "CALLBACK_NOT_ALLOWED")
    assert service.submit(url="no URL").status_code == 400
    assert len(service.client.get("/v1/jobs", headers=bearer(INFER)).json()["jobs"]) == count


def test_gone_receiver_is_not_called_again(service: Service) -> None:
    service.receiver.responses = [answer(410)]
    job = service.submit(url=f"{service.receiver.url}?no-secret").json()["id"]
    callback = service.wait_for_callback(INFER, job)
    service.receiver.responses = [answer(204)]
    assert callback == {
        "state": "failed",
        "attempts": 1,
        "problem": "the receiver answered with status 410",
    }
    assert "no-secret" not in "".join(service.process.lines)
    page = service.client.get("/metrics", headers=bearer(METRICS)).text
    assert 'gateway_job_callback_attempts_total{result="failed"} 1.0' in page


def test_host_gets_a_few_callbacks_at_a_time(service: Service) -> None:
    service.receiver.is_held = True
    jobs = [service.submit().json()["id"] for _ in range(MAX_ATTEMPTS_PER_HOST + 2)]
    wait_until(lambda: service.receiver.in_progress == MAX_ATTEMPTS_PER_HOST)
    service.receiver.is_held = False
    for job in jobs:
        assert service.wait_for_callback(INFER, job) == {"state": "delivered", "attempts": 1}
    assert service.receiver.max_in_progress == MAX_ATTEMPTS_PER_HOST


def test_secret_is_shown_to_admins_only_and_stays(service: Service) -> None:
    refused = service.client.get("/v1/jobs/secret", headers=bearer(INFER))
    assert refused.status_code == 403
    shown = service.client.get("/v1/jobs/secret", headers=bearer(ADMIN))
    assert shown.headers["Cache-Control"] == "no-store"
    assert shown.json()["secrets"] == service.run("jobs", "secret", key=ADMIN)


@pytest.mark.long
def test_delivery_is_repeated_and_survives_a_restart(service: Service) -> None:
    service.receiver.responses = [answer(500), answer(204)]
    job = service.submit().json()["id"]
    wait_until(lambda: service.list_received(job))
    secret = service.run("jobs", "secret", key=ADMIN)
    service.process.kill()
    service.process.start()
    assert service.run("jobs", "secret", key=ADMIN) == secret
    callback = service.wait_for_callback(INFER, job)
    assert callback == {"state": "delivered", "attempts": 2}
    first, second = service.list_received(job)
    assert first.body == second.body
    for received in (first, second):
        Webhook(secret[0]).verify(received.body, received.headers)


def test_commands_submit_await_and_cancel_a_job(service: Service, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    (job,) = service.run(
        *("infer", "single_BYTES", tmp_path, "--async", "--no-wait"),
        *("--callback", service.receiver.url),
    )
    assert service.run("jobs", "wait", job)[1].split()[1:5] == ["done", "single_BYTES", "2", "of"]
    assert json.loads("".join(service.run("jobs", "get", job, "--json")))["state"] == "done"
    listed = json.loads("".join(service.run("jobs", "list", "--state", "done", "--json")))
    assert job in {each["id"] for each in listed}
    assert job not in "".join(service.run("jobs", "list", "--state", "failed"))
    rows = [json.loads(line) for line in service.run("jobs", "result", job)]
    assert [row["response"]["outputs"] for row in rows] == [{"Y": "a"}, {"Y": "b"}]
    wait_until(lambda: service.list_received(job))
    assert service.run("jobs", "cancel", job)[1].split()[1] == "done"
    done = run_gateway("jobs", "wait", job, "--url", service.process.url, "--key", INFER)
    assert (done.returncode, "does not exist" in done.stderr) == (1, True)


def test_result_in_a_terminal_has_no_control_sequences(service: Service) -> None:
    text = "a\x9b31m\u202eb"
    url = "/v1/models/single_BYTES/infer"
    headers = {**bearer(INFER), "Prefer": "respond-async"}
    job = service.client.post(url, json={"inputs": text}, headers=headers).json()["id"]
    service.run("jobs", "wait", job)
    arguments = ("jobs", "result", job, "--url", service.process.url, "--key", INFER)
    shown = call_in_terminal(*arguments)
    assert r"a\u009b31m\u202eb" in shown
    assert json.loads(shown)["outputs"] == {"Y": text}
    assert text in run_gateway(*arguments).stdout


def test_folder_runs_as_one_job_with_the_records_of_infer(service: Service, tmp_path: Path) -> None:
    (tmp_path / "0.txt").symlink_to(tmp_path / "nothing")  # cannot be read
    (tmp_path / 'a "b" \\ c.txt').write_text("text")
    (tmp_path / "b").write_bytes(b"\x93NUMPY no array")  # its type is found by its content
    (tmp_path / "c.json").write_text('{"inputs": [1]}')
    environment = {
        **os.environ,
        "TRITON_GATEWAY_URL": service.process.url,
        "TRITON_GATEWAY_KEY": INFER,
    }
    arguments = ("infer", "single_BYTES", tmp_path)
    direct = run_gateway(*arguments, environment=environment)
    jobs = service.client.get("/v1/jobs", headers=bearer(INFER)).json()["jobs"]
    batch = run_gateway(*arguments, "--async", environment=environment)
    assert (batch.returncode, batch.stdout) == (1, direct.stdout), batch.stderr
    assert len(direct.stdout.splitlines()) == 4
    newest, *others = service.client.get("/v1/jobs", headers=bearer(INFER)).json()["jobs"]
    assert (newest["progress"]["total"], others) == (3, jobs)
    output = tmp_path / "results.jsonl"
    goes_on = ("infer", "single_BYTES", "--job", newest["id"], "--output", output)
    assert run_gateway(*goes_on, environment=environment).returncode == 1
    records = output.read_text()
    assert records.splitlines() == direct.stdout.splitlines()[1:]
    # The first input succeeded, the second failed, and the record of the third is cut off.
    output.write_text(records[:-5])
    resumed = run_gateway(*goes_on, "--resume", environment=environment)
    assert (output.read_text(), "1 skipped" in resumed.stderr) == (records, True)


def test_one_input_is_a_request_that_runs_as_a_job(service: Service) -> None:
    infer = ("infer", "single_BYTES", "--text", "a", "--version", "1")
    (record,) = service.run(*infer, "--async")
    assert json.loads(record) == {"input": "text:1", "outputs": {"Y": "a"}}
    (job,) = service.run(*infer, "--async", "--no-wait")
    (record,) = service.run("infer", "single_BYTES", "--job", job)
    assert json.loads(record) == {"input": job, "outputs": {"Y": "a"}}
    with Client(service.process.url, key=INFER) as client:
        assert client.job_result(job).text == "a"
        with pytest.raises(GatewayError, match="of the kind request, whose result has no rows"):
            next(client.batch_results(job))


def test_interrupted_command_leaves_its_job_running(service: Service, tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    for name, value in (("a", '"fails"'), ("b", "[3600]")):
        (inputs / f"{name}.json").write_text(f'{{"inputs": {value}}}')
    output = tmp_path / "results.jsonl"
    environment = {**os.environ, "TRITON_GATEWAY_URL": service.process.url}
    arguments = ["infer", "cancellable", str(inputs), "--async", "--output", str(output)]
    with (tmp_path / "stderr").open("w+") as stderr:
        files = (os.open(os.devnull, os.O_RDONLY), stderr.fileno(), stderr.fileno())
        process = fork_gateway([*arguments, "--key", INFER], environment, tmp_path, files)
        with process.stdin:
            wait_until(lambda: output.exists() and b"a.json" in output.read_bytes())
            process.terminate()  # as Ctrl-C
            status = process.wait(60)
        stderr.seek(0)
        message = stderr.read()
    os.close(files[0])
    job = message.split()[1]
    assert status == 128 + signal.SIGTERM
    assert f"--job {job} --output {output} --resume" in message
    assert service.client.get(f"/v1/jobs/{job}", headers=bearer(INFER)).json()["state"] == "running"
    service.client.delete(f"/v1/jobs/{job}", headers=bearer(INFER))
    arguments = ["infer", "cancellable", "--job", job, "--key", INFER]
    done = run_gateway(*arguments, environment=environment)
    assert (done.returncode, f"job {job} is cancelled" in done.stderr) == (1, True), done.stderr
    awaited = run_gateway("jobs", "wait", job, "--key", INFER, environment=environment)
    assert (awaited.returncode, " cancelled " in awaited.stdout) == (1, True)
    assert output.read_text().startswith(done.stdout)


def test_command_verifies_a_callback(service: Service, tmp_path: Path) -> None:
    job = service.submit(BOTH).json()["id"]
    service.wait_for_callback(BOTH, job)
    (received,) = service.list_received(job)
    body = tmp_path / "body.json"
    body.write_bytes(received.body)
    names = ("webhook-id", "webhook-timestamp", "webhook-signature")
    headers = [part for name in names for part in ("-H", f"{name}: {received.headers[name]}")]
    verify: list[str | Path] = ["jobs", "verify", body, *headers]
    assert service.run(*verify, "--secret", OWN_SECRET) == ["the signature is right"]
    for secret, tolerance, status, words in (
        (generate_secret(), "300", 1, "no signature matches"),
        (OWN_SECRET, "0", 1, "its time differs from now"),
        ("whsec_x", "300", 2, "--secret is invalid"),
    ):
        done = run_gateway(*verify, "--secret", secret, "--tolerance", tolerance)
        assert (done.returncode, words in done.stderr) == (status, True), done.stderr


def test_python_client_submits_waits_and_fetches(service: Service) -> None:
    values = np.arange(4, dtype=np.float32).reshape(2, 2)
    with Client(service.process.url, key=INFER) as client:
        job = client.submit("vector_FP32", values, callback_url=service.receiver.url)
        ended = client.wait_job(job)
        assert (ended.id, ended.model, ended.kind) == (job.id, "vector_FP32", "request")
        assert (ended.state, ended.total, ended.done, ended.failed) == ("done", 1, 1, 0)
        (output,) = client.job_result(job.id).values()
        np.testing.assert_array_equal(output, values)
        wait_until(lambda: service.list_received(job.id))
        assert client.cancel_job(job).document["callback"]["state"] == "delivered"
        with pytest.raises(GatewayError) as caught:
            client.job_result(job)
        assert caught.value.code == "JOB_NOT_FOUND"


def test_python_client_submits_rows_and_reads_their_results(service: Service) -> None:
    values = np.arange(4, dtype=np.float32).reshape(2, 2)
    rows = [("array", values), ("by name", {"X": [[1.5]]}), ("wrong", "text")]
    with Client(service.process.url, key=INFER) as client:
        job = client.submit_batch("vector_FP32", rows, callback_url=service.receiver.url)
        outcomes = [
            (name, outcome.status if isinstance(outcome, GatewayError) else outcome["Y"].tolist())
            for name, outcome in client.batch_results(job)
        ]
        assert outcomes == [("array", values.tolist()), ("by name", [[1.5]]), ("wrong", 422)]
        wait_until(lambda: service.list_received(job.id))
        ended = client.wait_job(job)
        assert (ended.kind, ended.total, ended.done, ended.failed) == ("batch", 3, 2, 1)


async def test_asynchronous_client_submits_waits_and_fetches(service: Service) -> None:
    async def read_rows() -> AsyncIterator[tuple[str, str]]:
        yield "name", "a"

    async with AsyncClient(service.process.url, key=INFER) as client:
        job = await client.submit("single_BYTES", "text")
        assert (await client.job_result(job)).text == "text"
        assert (await client.cancel_job(job)).state == "done"
        batch = await client.submit_batch("single_BYTES", read_rows())
        ((name, outcome),) = [row async for row in client.batch_results(batch)]
        assert isinstance(outcome, InferResult)
        assert (name, outcome.text) == ("name", "a")
        blocked = await client.submit_batch("cancellable", [("a", "fails"), ("b", 3600.0)])
        results = client.batch_results(blocked)
        assert (await anext(results))[0] == "a"
        await client.cancel_job(blocked)
        with pytest.raises(GatewayError, match=f"job {blocked.id} is cancelled"):
            await anext(results)
