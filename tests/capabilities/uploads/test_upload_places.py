"""What uploads to a folder and to a bucket promise alike, before two real Tritons that read it."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from gateway.capabilities.uploads.model_files.store import hash_pieces
from tests.capabilities.uploads.support.uploads import (
    FIRST,
    MIB,
    SECOND,
    UNKNOWN_OPERATOR,
    Place,
    adding,
    bucket_place,
    folder_place,
    listed_states,
    padded,
    zipped_versions,
)
from tests.support.errors import assert_error
from tests.support.fleet import BODY, V2_BODY, Load
from tests.support.wait import wait_until

SAMPLE_S = 0.02


@pytest.fixture(scope="module", params=["folder", pytest.param("bucket", marks=pytest.mark.long)])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("uploads")
    with folder_place(folder) if request.param == "folder" else bucket_place(folder) as place:
        yield place
        assert place.hidden() == []


def test_each_upload_is_the_next_version_which_is_served_listed_and_removed(
    place: Place, tmp_path: Path
) -> None:
    """Under load: no inference fails while the version changes."""
    client = place.client
    for number, content in enumerate((FIRST, SECOND), 1):
        file = tmp_path / "whatever"  # no suffix says what it is
        file.write_bytes(content)
        with ExitStack() as stack:
            load = None
            if number > 1:
                load = stack.enter_context(Load(str(client.base_url), model="mine"))
                load.wait_for_more()
            url = f"{client.base_url}/v1/models/mine"
            ran = subprocess.run(["curl", "-sS", "-T", file, url], capture_output=True, text=True)
            if load is not None:
                load.wait_for_more()
                assert set(load.statuses) == {200}
        digest = hashlib.sha256(content).hexdigest()
        assert httpx.Response(200, text=ran.stdout).json() == {
            "model": "mine",
            "version": str(number),
            "ready": True,
            "infer": "/v1/models/mine/infer",
            "sha256": digest,
            "bytes": len(content),
        }, ran
        assert place.infer("mine") == [1 + number, 2 + number]
        audited = place.command.wait_for(f"version={number} sha256={digest}")
        assert "PUT /v1/models/mine: succeeded" in audited
        versions = list(range(1, number + 1))
        assert f"'versions of model mine', 'from': {versions[:-1]}, 'to': {versions}" in audited
    assert listed_states(client, "mine") == ["READY", "READY"]
    files = client.get("/v1/models/mine/files").json()["files"]
    assert [file["path"] for file in files] == ["1/model.onnx", "2/model.onnx", "config.pbtxt"]
    listed = client.get("/v1/models/mine/versions/2/files").json()["files"]
    assert (
        listed == [{"path": "2/model.onnx", "bytes": len(SECOND), "sha256": digest}] == files[1:2]
    )
    download = client.get("/v1/models/mine/files/1/model.onnx")
    first_digest = base64.b64encode(hashlib.sha256(FIRST).digest()).decode()
    assert (download.content, download.headers["repr-digest"]) == (
        FIRST,
        f"sha-256=:{first_digest}:",
    )
    absent = client.get("/v1/models/mine/files/3/model.onnx")
    assert_error(absent, 404, "NOT_FOUND", "no such file")
    deleted = client.delete("/v1/models/mine/versions/2")
    assert deleted.json() == {"model": "mine", "version": "2"}
    assert place.infer("mine") == [2, 3]
    only = client.delete("/v1/models/mine/versions/1")
    assert_error(only, 409, "CONFLICT", "the only one of model 'mine'")
    assert client.delete("/v1/models/mine").json() == {"model": "mine"}
    assert place.files("mine") == {}
    assert all(model["name"] != "mine" for model in client.get("/v1/models").json()["models"])
    for method, path, body in (
        ("DELETE", "/v1/models/mine", None),
        ("POST", "/v1/models/mine/infer", BODY),
        ("POST", "/v2/models/mine/infer", V2_BODY),
    ):
        unknown = client.request(method, path, json=body)
        assert_error(unknown, 404, "MODEL_NOT_FOUND", "'mine' is not found")


@pytest.mark.long
def test_version_that_cannot_be_loaded_leaves_nothing_behind(place: Place) -> None:
    put = place.client.put("/v1/models/steady", content=FIRST)
    assert (put.status_code, put.headers["location"]) == (201, "/v1/models/steady/versions/1")
    before = {"1/model.onnx": FIRST, "config.pbtxt": b'backend: "onnxruntime"\n'}
    config = b'backend: "onnxruntime" max_batch_size: 0'
    form = {"model": ("any.onnx", UNKNOWN_OPERATOR), "config": ("config.pbtxt", config)}
    for path in ("steady", "steady/versions/1"):
        refused = place.client.put(f"/v1/models/{path}", files=form)
        assert (refused.status_code, refused.json()["code"]) == (422, "LOAD_FAILED")
        assert "Odd" in refused.json()["error"]
        assert place.infer("steady") == [2, 3]
        assert place.files("steady") == before
    for content in (UNKNOWN_OPERATOR, FIRST[:-1]):
        refused = place.client.put("/v1/models/fresh", content=content)
        assert (refused.status_code, refused.json()["code"]) == (422, "LOAD_FAILED")
        assert place.files("fresh") == {}
    assert place.client.delete("/v1/models/steady").status_code == 200


@pytest.mark.long
def test_all_versions_of_an_archive_are_served_or_none(place: Place) -> None:
    client = place.client

    def answers() -> list[list[float]]:
        numbers = sorted({path[0] for path in place.files("both")} - {"c"})
        return [place.infer(f"both/versions/{number}") for number in numbers]

    put = client.put("/v1/models/both", content=zipped_versions({2: FIRST, 5: SECOND}))
    assert put.status_code == 201, put.text
    assert (put.json()["version"], put.json()["versions"]) == ("5", ["2", "5"])
    assert put.headers["location"] == "/v1/models/both/versions/5"
    assert answers() == [[2, 3], [3, 4]]
    bad = zipped_versions({2: SECOND, 5: UNKNOWN_OPERATOR, 6: SECOND})
    refused = client.put("/v1/models/both", content=bad)
    assert (refused.status_code, refused.json()["code"]) == (422, "LOAD_FAILED")
    assert answers() == [[2, 3], [3, 4]]
    put = client.put("/v1/models/both", content=zipped_versions({5: adding(7), 6: SECOND}))
    assert put.status_code == 201, put.text
    assert answers() == [[2, 3], [8, 9], [3, 4]]
    several = zipped_versions({1: FIRST, 2: FIRST})
    numbered = client.put("/v1/models/both/versions/1", content=several)
    assert_error(numbered, 422, "INVALID_MODEL_FILE", "keep their numbers")
    assert client.delete("/v1/models/both").status_code == 200


def test_uploads_of_one_model_through_two_gateways_get_consecutive_versions(place: Place) -> None:
    with place.another_gateway() as (other, _):

        def upload(number: int) -> httpx.Response:
            client = (place.client, other)[number % 2]
            return client.put("/v1/models/turns?load=false", content=adding(number))

        with ThreadPoolExecutor(4) as pool:
            answers = [answer.json() for answer in pool.map(upload, range(6))]
    digests = {
        f"{answer['version']}/model.onnx": answer["sha256"]
        for answer in sorted(answers, key=lambda answer: int(answer["version"]))
    }
    assert list(digests) == [f"{number}/model.onnx" for number in range(1, 7)]
    files = place.files("turns")
    assert {path: hashlib.sha256(files[path]).hexdigest() for path in digests} == digests
    assert place.client.get("/v2/models/turns/ready").status_code != 200
    assert place.client.delete("/v1/models/turns").status_code == 200


def test_upload_beyond_the_quota_is_refused(place: Place) -> None:
    limits = {"max_repository_bytes": str(2 * MIB), "body_stall_s": "60"}
    with place.another_gateway(**limits) as (client, _):
        assert client.put("/v1/models/quota?load=false", content=FIRST).status_code == 201
        content = b"".join(padded(3 * MIB))
        for body in (content, iter([content])):  # with Content-Length, and without
            refused = client.put("/v1/models/quota?load=false", content=body)
            assert_error(refused, 507, "REPOSITORY_FULL", "whose limit is 2097152 bytes")
        assert list(place.files("quota")) == ["1/model.onnx", "config.pbtxt"]
        assert client.delete("/v1/models/quota").status_code == 200


@pytest.mark.parametrize(
    "size",
    [128 * MIB, pytest.param(1024 * MIB, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])],
)
def test_large_upload_takes_little_memory(place: Place, size: int) -> None:
    process = psutil.Process(place.command.pid)
    path = "/v1/models/large"
    assert place.client.put(f"{path}?load=false", content=FIRST).status_code == 201
    before = process.memory_info().rss
    peak = before

    def upload() -> httpx.Response:
        return place.client.put(f"{path}?load=false", content=padded(size), timeout=None)

    with ThreadPoolExecutor() as pool:
        put = pool.submit(upload)
        while wait([put], SAMPLE_S).not_done:
            peak = max(peak, process.memory_info().rss)
    assert put.result().status_code == 201, put.result().text
    assert peak - before < 16 * MIB
    digest = hash_pieces(padded(size))
    listed = place.client.get(f"{path}/versions/2/files").json()["files"]
    assert [file["sha256"] for file in listed] == [digest]
    with place.client.stream("GET", f"{path}/files/2/model.onnx") as download:
        assert hash_pieces(download.iter_raw()) == digest
    assert place.client.delete(path).status_code == 200
    wait_until(lambda: place.hidden() == [])
