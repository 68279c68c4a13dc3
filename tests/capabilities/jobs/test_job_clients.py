"""Callbacks of jobs, the commands `jobs`, and the jobs of the Python client, before a real Triton."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from standardwebhooks.webhooks import Webhook

from gateway.capabilities.jobs.callbacks import MAX_RUNNING_ATTEMPTS_PER_HOST
from gateway.client import AsyncClient, Client, GatewayError
from gateway.embedded.supervisor import EmbeddedTriton
from gateway.http_client.webhooks import generate_secret
from tests.capabilities.jobs.receiver import Received, Receiver, answer, receiving_in_thread
from tests.support.gateway_forks import run_gateway
from tests.support.keys import ADMIN, BOTH, INFER, METRICS, bearer, entry, written
from tests.support.model_zoo.zoo import Zoo
from tests.support.servers import GatewayProcess
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
    zoo_as_written.load("vector_FP32", "single_BYTES")
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
            "GATEWAY_CALLBACK_HOSTS": f"127.0.0.1:{receiver.port},shop.example",
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
    assert event.pop("timestamp")
    assert event == {"type": "job.done", "data": document, "result": result}
    assert service.client.get(result, headers=bearer(key)).status_code == 200


def test_other_hosts_are_forbidden_and_no_job_is_kept(service: Service) -> None:
    count = len(service.client.get("/v1/jobs", headers=bearer(INFER)).json()["jobs"])
    for url in ("https://evil.example/", f"http://localhost:{service.receiver.port}/"):
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
    jobs = [service.submit().json()["id"] for _ in range(MAX_RUNNING_ATTEMPTS_PER_HOST + 2)]
    wait_until(lambda: service.receiver.in_progress == MAX_RUNNING_ATTEMPTS_PER_HOST)
    service.receiver.is_held = False
    for job in jobs:
        assert service.wait_for_callback(INFER, job) == {"state": "delivered", "attempts": 1}
    assert service.receiver.max_in_progress == MAX_RUNNING_ATTEMPTS_PER_HOST


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


def test_commands_submit_await_and_cancel_jobs(service: Service, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    lines = service.run(
        *("infer", "single_BYTES", tmp_path, "--async", "--callback", service.receiver.url)
    )
    names = [line.rpartition("/")[2] for line in lines]
    first, second = (line.partition(" ")[0] for line in lines)
    assert names == ["a.txt", "b.txt"]
    for job in (first, second):
        assert service.run("jobs", "wait", job)[1].split()[1:3] == ["done", "single_BYTES"]
    assert json.loads("".join(service.run("jobs", "get", first, "--json")))["state"] == "done"
    listed = json.loads("".join(service.run("jobs", "list", "--state", "done", "--json")))
    assert {first, second} <= {each["id"] for each in listed}
    assert json.loads("".join(service.run("jobs", "result", first)))["outputs"] == {"Y": "a"}
    wait_until(lambda: service.list_received(second))
    assert service.run("jobs", "cancel", second)[1].split()[1] == "done"
    done = run_gateway("jobs", "wait", second, "--url", service.process.url, "--key", INFER)
    assert (done.returncode, "does not exist" in done.stderr) == (1, True)


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
    for secret, status, words in (
        (generate_secret(), 1, "no signature matches"),
        ("whsec_x", 2, "--secret is invalid"),
    ):
        done = run_gateway(*verify, "--secret", secret)
        assert (done.returncode, words in done.stderr) == (status, True), done.stderr


def test_python_client_submits_waits_and_fetches(service: Service) -> None:
    values = np.arange(4, dtype=np.float32).reshape(2, 2)
    with Client(service.process.url, key=INFER) as client:
        job = client.submit("vector_FP32", values, callback_url=service.receiver.url)
        assert client.wait_job(job["id"])["state"] == "done"
        (output,) = client.job_result(job["id"]).values()
        np.testing.assert_array_equal(output, values)
        wait_until(lambda: service.list_received(job["id"]))
        client.cancel_job(job["id"])
        with pytest.raises(GatewayError) as caught:
            client.job_result(job["id"])
        assert caught.value.code == "JOB_NOT_FOUND"


def test_asynchronous_client_submits_waits_and_fetches(service: Service) -> None:
    async def run() -> None:
        async with AsyncClient(service.process.url, key=INFER) as client:
            job = await client.submit("single_BYTES", "text")
            assert (await client.job_result(job["id"])).text == "text"
            assert (await client.cancel_job(job["id"]))["state"] == "done"

    asyncio.run(run())
