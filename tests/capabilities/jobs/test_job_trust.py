"""Who can have what run as a job: callers, and somebody who may write to the Redis of the jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from gateway.access.keys_editor import add_key, expire_key, remove_key, rotate_key
from gateway.callers import Role
from gateway.capabilities.jobs.service import MAX_WAITERS_PER_CALLER
from gateway.embedded.supervisor import EmbeddedTriton
from gateway.messages import parse_time
from tests.capabilities.identity.support.issuer import AUDIENCE, Issuer, serving_issuer
from tests.capabilities.jobs.stores import RedisNeighbour
from tests.capabilities.jobs.support import (
    CANCELLABLE,
    JOBS_SECRET,
    VECTOR,
    submit,
    wait_for,
    wait_for_state,
)
from tests.support.keys import ADMIN, BOTH, ENTRIES, INFER, bearer, entry, written
from tests.support.metrics import metric
from tests.support.redis_server import RedisServer
from tests.support.servers import gateway_before
from tests.support.wait import wait_until

BODY = b'{"inputs": [[1.5, 2.5]]}'
OTHER_BODY = b'{"inputs": [[9.5, 9.5]]}'
CALLBACK = "http://127.0.0.1:9/"
JSON_BODY = {"Content-Type": "application/json"}
FAST = "tgw_fast-secret"
NOT_TRUSTED = ("failed", "JOB_NOT_TRUSTED")
NOT_FOUND = ("", "JOB_NOT_FOUND")
OTHER_ID = "0f" * 16
UNLOAD = "/v2/repository/models/vector_FP32/unload"


@dataclass(frozen=True)
class Site:
    """A gateway with its jobs in Redis, and the keys of that Redis."""

    client: httpx.Client  # a key for inference
    admin: httpx.Client
    triton: httpx.Client
    neighbour: RedisNeighbour

    def read_fields(self, job: str) -> dict[str, Any]:
        return {**self.neighbour.read(job)}

    def write_fields(self, job: str, fields: Mapping[str, Any]) -> None:
        self.neighbour.write(job, orjson.dumps(fields), token=str(fields["token"]))

    def queue(self, job: str, owner: str, body: bytes) -> None:
        """Let a gateway find a job and its body, whatever has become of it."""
        self.neighbour.client.set(f"{self.neighbour.prefix}file:{job}.body", body)
        self.neighbour.list_job(f"queue:{owner}", job, 0)
        self.neighbour.list_job("turns", owner, 0)

    def find_outcome(self, job: str) -> tuple[str, str]:
        """Return the state and the error code of a job when it has ended or cannot be read."""
        document: dict[str, Any] = {}

        def has_ended() -> bool:
            document.clear()
            document.update(self.admin.get(f"/v1/jobs/{job}").json())
            return document.get("state") not in ("queued", "running")

        wait_until(has_ended)
        error = document.get("error", {})
        return document.get("state", ""), document.get("code", "") or error.get("code", "")


@pytest.fixture(scope="module")
def site(zoo_triton: EmbeddedTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    written(keys, [*ENTRIES, entry(FAST, "infer", requests_per_second=5)])
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(tmp_path_factory.mktemp("redis")))
        settings = {
            "jobs": redis.url(),
            "jobs_secret": JOBS_SECRET,
            "keys_file": str(keys),
            "on_demand_models": "plain_vector_FP32",
            "callback_urls": "http://127.0.0.1:9/",
            "connect_timeout_s": "10",
        }
        admin = stack.enter_context(gateway_before(zoo_triton.options.url, **settings))
        admin.headers.update(bearer(ADMIN))
        assert admin.post("/v2/repository/models/vector_FP32/load").is_success
        client = stack.enter_context(
            httpx.Client(base_url=admin.base_url, headers=bearer(INFER), timeout=60)
        )
        triton = stack.enter_context(
            httpx.Client(base_url=zoo_triton.options.url.partition("?")[0])
        )
        yield Site(client, admin, triton, RedisNeighbour(redis, url=settings["jobs"]))


# What somebody changes in a job that a caller has sent, before it is queued again: what becomes of it.
ATTEMPTS: Mapping[str, tuple[Mapping[str, Any], tuple[str, str]]] = {
    "the same job again": ({}, ("done", "")),
    "another model": (
        {"path": "/v1/models/classes/infer", "model": "classes"},
        NOT_TRUSTED,
    ),
    "an administrator as its caller": (
        {"owner": "key:admin", "caller": "admin", "caller_id": "admin"},
        NOT_TRUSTED,
    ),
    "the name of an administrator": ({"caller_id": "admin"}, NOT_TRUSTED),
    "another header": ({"headers": [["accept", "application/x-npy"]]}, NOT_TRUSTED),
    "another query": ({"query": "classification=1"}, NOT_TRUSTED),
    "a callback": (
        {"callback_url": CALLBACK, "callback_host": "127.0.0.1:9"},
        NOT_TRUSTED,
    ),
    "a batch": ({"kind": "batch"}, NOT_TRUSTED),
    "another time": ({"created_at": 1.0}, NOT_TRUSTED),
    "no signature": ({"signature": ""}, NOT_TRUSTED),
    "another signature": ({"signature": "0" * 64}, NOT_TRUSTED),
    "a copy": ({"id": OTHER_ID}, NOT_TRUSTED),
    "a path of Triton": ({"path": UNLOAD}, NOT_FOUND),
    "a path that leads elsewhere": ({"path": f"/v1/models/../..{UNLOAD}"}, NOT_FOUND),
    "the log": ({"path": "/v2/logging"}, NOT_FOUND),
    "the file of a result": ({"result_file": "/proc/self/environ"}, NOT_FOUND),
    "a credential": ({"headers": [["authorization", f"Bearer {ADMIN}"]]}, NOT_FOUND),
    "a job of a job": ({"headers": [["prefer", "respond-async"]]}, NOT_FOUND),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_job_that_somebody_else_has_changed_does_not_run(site: Site, attempt: str) -> None:
    changes, expected = ATTEMPTS[attempt]
    job = submit(site.client, content=BODY, headers=JSON_BODY).json()
    assert wait_for(site.client, job["id"])["state"] == "done"
    changed = {**site.read_fields(job["id"]), "state": "queued", "ended_at": 0, **changes}
    site.write_fields(changed["id"], changed)
    site.queue(changed["id"], changed["owner"], BODY)
    assert site.find_outcome(changed["id"]) == expected
    assert site.triton.get("/v2/models/vector_FP32/ready").status_code == 200
    assert submit(site.client).status_code == 202


def test_changed_body_does_not_run(site: Site) -> None:
    before = metric(site.admin, 'gateway_jobs_refused_total{reason="not_trusted"}')
    rows = {"Content-Type": "application/x-ndjson"}
    batch = site.client.post("/v1/models/vector_FP32/jobs", content=BODY, headers=rows).json()
    jobs = [submit(site.client, content=BODY, headers=JSON_BODY).json()["id"], batch["id"]]
    for job in jobs:
        wait_for(site.client, job)
        site.write_fields(job, {**site.read_fields(job), "state": "queued", "ended_at": 0})
        line_feed = b"\n" if job == batch["id"] else b""
        site.queue(job, site.read_fields(job)["owner"], OTHER_BODY + line_feed)
        assert site.find_outcome(job) == NOT_TRUSTED
    after = metric(site.admin, 'gateway_jobs_refused_total{reason="not_trusted"}')
    assert after == before + len(jobs)


def test_result_does_not_belong_to_whom_somebody_else_says(site: Site) -> None:
    job = submit(site.client).json()["id"]
    wait_for(site.client, job)
    site.write_fields(job, {**site.read_fields(job), "owner": "key:both"})
    stolen = site.client.get(f"/v1/jobs/{job}/result", headers=bearer(BOTH))
    assert (stolen.status_code, stolen.json()["code"]) == (403, "JOB_NOT_TRUSTED")
    assert site.client.get(f"/v1/jobs/{job}/result").status_code == 404


def test_callback_that_no_caller_has_asked_for_is_not_sent(site: Site) -> None:
    asked = submit(site.client, headers={"X-Callback-URL": CALLBACK}).json()["id"]
    job = submit(site.client).json()["id"]
    fields = {**site.read_fields(wait_for(site.client, job)["id"]), "callback_due_at": 1.0}
    site.write_fields(job, {**fields, "callback_url": CALLBACK, "callback_host": "127.0.0.1:9"})
    index = "callbacks:127.0.0.1:9"
    site.neighbour.list_job(index, job, 1)
    # The one that was asked for has failed once, and the other one is due no more.
    wait_until(lambda: site.client.get(f"/v1/jobs/{asked}").json()["callback"]["attempts"] == 1)
    wait_until(lambda: site.neighbour.client.zscore(site.neighbour.prefix + index, job) is None)
    assert site.client.get(f"/v1/jobs/{job}").json()["callback"]["attempts"] == 0


def test_idempotency_key_finds_no_job_of_somebody_else(site: Site) -> None:
    headers = {"Idempotency-Key": "mine"}
    job = submit(site.client, headers=headers).json()["id"]
    wait_for(site.client, job)
    site.write_fields(job, {**site.read_fields(job), "model": "classes"})
    again = submit(site.client, headers=headers)
    assert (again.status_code, again.json()["code"]) == (403, "JOB_NOT_TRUSTED")


@pytest.mark.parametrize(
    "headers",
    [{"Accept": "application/x-npy"}, {"X-Request-Timeout": "7"}, {"Content-Encoding": "identity"}],
)
def test_idempotency_key_is_that_of_a_request_with_its_headers(
    site: Site, headers: Mapping[str, str]
) -> None:
    key = {"Idempotency-Key": f"with {headers}"}
    assert submit(site.client, headers=key).status_code == 202
    other = submit(site.client, headers={**key, **headers})
    assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")


def test_inferences_of_a_job_count_at_the_rate_though_its_model_was_not_loaded(site: Site) -> None:
    rows = {"instances": [[1]] * 50}
    headers = bearer(FAST)
    accepted = submit(
        site.client, "/v1/models/plain_vector_FP32:predict", json=rows, headers=headers
    )
    assert wait_for(site.admin, accepted.json()["id"])["state"] == "done"
    refused = site.client.post(VECTOR, json={"inputs": [[1]]}, headers=headers)
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) > 5


async def test_requests_that_wait_for_jobs_are_limited_for_each_caller(site: Site) -> None:
    assert site.admin.post("/v2/repository/models/cancellable/load").is_success
    job = submit(site.client, CANCELLABLE, json={"inputs": [3600]}).json()["id"]
    wait_for_state(site.client, job, "running")
    limits = httpx.Limits(max_connections=None)
    base_url = site.client.base_url
    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=60) as client:

        async def wait() -> int:
            response = await client.get(f"/v1/jobs/{job}?wait=60", headers=bearer(INFER))
            return response.status_code

        waiters = [asyncio.create_task(wait()) for _ in range(MAX_WAITERS_PER_CALLER + 3)]
        refused, waiting = await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        while len(refused) < 3:
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            refused |= ended
        assert [each.result() for each in refused] == [429] * 3
        others = bearer(BOTH)
        assert (await client.get("/v1/jobs", headers=others)).status_code == 200
        await client.delete(f"/v1/jobs/{job}", headers=bearer(ADMIN))
        assert {await each for each in waiting} == {200}
        assert await wait() == 200


@pytest.fixture
def start(zoo_triton: EmbeddedTriton, tmp_path: Path) -> Iterator[Callable[..., httpx.Client]]:
    """Starts a gateway with its jobs in a folder, which runs one at a time."""
    with ExitStack() as stack:

        def start(**settings: str) -> httpx.Client:
            common = {"jobs": f"sqlite://{tmp_path}/jobs", "connect_timeout_s": "10"}
            client = stack.enter_context(
                gateway_before(zoo_triton.options.url, **{**common, **settings})
            )
            for model in ("vector_FP32", "cancellable"):
                path = f"/v2/repository/models/{model}/load"
                assert client.post(path, headers=bearer(ADMIN)).is_success
            return client

        yield start


def test_rotated_key_keeps_its_jobs_and_an_expired_one_or_a_namesake_has_none(
    start: Callable[..., httpx.Client], tmp_path: Path
) -> None:
    keys = written(tmp_path / "keys.yaml", [entry(ADMIN, "admin")])
    roles = [Role.infer]
    first = add_key(keys, "shop", roles, ["*"])
    client = start(keys_file=str(keys), max_running_jobs="1")
    blocking = submit(client, CANCELLABLE, json={"inputs": [3600]}, headers=bearer(ADMIN)).json()
    wait_for_state_of(client, blocking["id"], "running", ADMIN)
    waiting = submit(client, headers=bearer(first)).json()["id"]
    trial = add_key(keys, "trial", roles, ["*"])
    wait_until(lambda: client.get("/v1/jobs", headers=bearer(trial)).is_success)
    expiring = submit(client, headers=bearer(trial)).json()["id"]

    in_the_past = parse_time("2020-01-01T00:00:00Z")
    assert in_the_past is not None
    expire_key(keys, "trial", in_the_past)
    second = rotate_key(keys, "shop", in_the_past, None)
    wait_until(lambda: client.get("/v1/jobs", headers=bearer(first)).status_code == 401)
    client.delete(f"/v1/jobs/{blocking['id']}", headers=bearer(ADMIN))
    client.headers.update(bearer(second))
    assert wait_for(client, waiting)["state"] == "done"
    assert client.get(f"/v1/jobs/{waiting}/result").status_code == 200

    ended = client.get(f"/v1/jobs/{expiring}?wait=20", headers=bearer(ADMIN)).json()
    assert ended["error"]["code"] == "JOB_NOT_TRUSTED"
    remove_key(keys, "shop")
    third = add_key(keys, "shop", roles, ["*"])
    wait_until(lambda: client.get("/v1/jobs", headers=bearer(third)).is_success)
    client.headers.update(bearer(third))
    assert client.get("/v1/jobs").json() == {"jobs": []}
    assert client.get(f"/v1/jobs/{waiting}/result").status_code == 404
    # An administrator erases the jobs of both keys by their name.
    erased = client.delete("/v1/jobs", params={"caller": "shop"}, headers=bearer(ADMIN))
    assert erased.json() == {"deleted": 1}


def wait_for_state_of(client: httpx.Client, job: str, state: str, key: str) -> None:
    path = f"/v1/jobs/{job}"
    wait_until(lambda: client.get(path, headers=bearer(key)).json()["state"] == state)


RULES = [
    {"claim": "team", "value": "vision", "roles": ["infer"], "models": ["vector_*"]},
    {"claim": "team", "value": "few", "roles": ["infer"], "requests_per_month": 1},
    {"claim": "team", "value": "ops", "roles": ["admin"]},
]


def test_jobs_of_tokens_belong_to_their_issuer_and_subject(
    start: Callable[..., httpx.Client], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_bytes(orjson.dumps({"keys": [entry(ADMIN, "admin")], "oidc": RULES}))
    with serving_issuer() as issuer:
        client = start(
            keys_file=str(keys),
            oidc_issuer=issuer.url,
            oidc_audience=AUDIENCE,
            max_running_jobs="1",
        )
        wait_until(lambda: issuer.count("/keys"))
        check_tokens(client, issuer, keys)


def check_tokens(client: httpx.Client, issuer: Issuer, keys: Path) -> None:
    def sign(subject: Any, team: str = "vision") -> dict[str, str]:
        return bearer(issuer.sign(sub=subject, team=team))

    job = submit(client, headers=sign("alice")).json()["id"]
    path = f"/v1/jobs/{job}/result"
    wait_until(lambda: client.get(path, headers=sign("alice")).status_code == 200)
    for headers, status in (
        (sign("alice", "ops"), 200),  # the same user by another rule
        (sign("bob"), 404),
        (sign("alice "), 404),
        (sign(1002), 422),
        (sign(["alice"]), 422),
        (sign(...), 422),
    ):
        assert client.get(path, headers=headers).status_code == status
        if status == 422:
            refused = submit(client, headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (422, "JOB_SUBJECT_REQUIRED")
            assert client.get("/v1/jobs", headers=headers).status_code == 422

    # The quota of a rule holds for the jobs of its tokens, and the removal of a rule ends them.
    client.headers.update(bearer(ADMIN))
    blocking = submit(client, CANCELLABLE, json={"inputs": [3600]}).json()["id"]
    wait_for_state(client, blocking, "running")
    few = [submit(client, headers=sign("carol", "few")).json()["id"] for _ in range(2)]
    waiting = submit(client, headers=sign("alice")).json()["id"]
    keys.write_bytes(orjson.dumps({"keys": [entry(ADMIN, "admin")], "oidc": RULES[1:]}))
    wait_until(lambda: client.get(path, headers=sign("alice")).status_code == 403)
    client.delete(f"/v1/jobs/{blocking}")
    assert wait_for(client, waiting)["error"]["code"] == "JOB_NOT_TRUSTED"

    def find_states() -> set[str]:
        documents = [client.get(f"/v1/jobs/{each}").json() for each in few]
        return {each["state"] for each in documents if each["starts"]}

    wait_until(lambda: find_states() == {"done", "queued"})
