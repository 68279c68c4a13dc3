"""What interactive users notice of a batch that runs beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import httpx
import orjson
import pytest

from tests.support.keys import BOTH, INFER, bearer, entry, written
from tests.support.load import LOG_WARNINGS, OpenLoop, Pool, Sample, p99_ms, post, statuses_of
from tests.support.measurements import assert_number
from tests.support.model_zoo.zoo import AS_WRITTEN, MODELS, write_repository
from tests.support.servers import gateway_before, triton_on_free_ports
from tests.support.wait import wait_until

SLEEPING = next(model for model in MODELS if model.name == "sleeping")
# Each has one instance, without a dynamic batcher, and the last one two.
OWN, OTHER = replace(SLEEPING, name="own"), replace(SLEEPING, name="other")
TWO = replace(SLEEPING, name="two", extra="instance_group { count: 2 kind: KIND_CPU }")
USERS_PER_S = 10
SECONDS = 30


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("models")
    write_repository(folder, AS_WRITTEN, (OWN, OTHER, TWO))
    entries = [entry(INFER, "infer", priority="interactive"), entry(BOTH, "infer")]
    settings = {
        "keys_file": str(written(tmp_path_factory.mktemp("keys") / "keys.yaml", entries)),
        "jobs": f"sqlite://{tmp_path_factory.mktemp('jobs')}",
        **LOG_WARNINGS,
    }
    with (
        triton_on_free_ports(folder) as triton,
        gateway_before(triton.options.url, **settings) as client,
    ):
        client.headers.update(bearer(BOTH))
        yield client


def send_users(client: httpx.Client, model: str, body: bytes) -> Sequence[Sample]:
    port = client.base_url.port
    assert port is not None
    path = f"/v1/models/{model}/infer"
    wire = post(path, body, "application/json", f"Authorization: Bearer {INFER}")
    with OpenLoop(Pool(port), [wire], USERS_PER_S, SECONDS) as loop:
        samples = loop.samples()
    assert statuses_of(samples).keys() == {200}
    return samples


@pytest.mark.soak
# Beside users one row runs at a time. The first request waits for all that Triton has: nothing overtakes them
# there.
@pytest.mark.parametrize(
    ("batch", "users", "seconds", "limit"),
    [("other", "own", 0.02, 1.2), ("own", "own", 0.02, 2.5), ("two", "two", 0.05, 1.2)],
)
def test_users_beside_a_batch(
    client: httpx.Client, batch: str, users: str, seconds: float, limit: float
) -> None:
    body = orjson.dumps({"inputs": [seconds]})
    send_users(client, users, body)  # the connections, and what is read once
    alone_ms = p99_ms(send_users(client, users, body))
    headers = {"Content-Type": "application/x-ndjson"}
    rows = (body + b"\n") * 20_000
    job = client.post(f"/v1/models/{batch}/jobs", content=rows, headers=headers).json()["id"]
    wait_until(lambda: client.get(f"/v1/jobs/{job}").json()["progress"]["done"])
    first = {"Content-Type": "application/json", "Authorization": f"Bearer {INFER}"}
    path = f"/v1/models/{users}/infer"
    assert client.post(path, content=body, headers=first).is_success
    beside_ms = p99_ms(send_users(client, users, body))
    assert client.delete(f"/v1/jobs/{job}").json()["state"] == "cancelled"
    print(f"users of {users} beside a batch on {batch}: {alone_ms:.1f} → {beside_ms:.1f} ms")
    assert_number("p99 beside a batch, of p99 alone", beside_ms / alone_ms, at_most=limit)
