"""Uploads of models to an S3 bucket that two real Tritons read."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from gateway.capabilities.uploads.model_files.store import hash_pieces
from tests.capabilities.uploads.support.s3_server import CREDENTIALS, S3Server
from tests.capabilities.uploads.support.uploads import (
    FIRST,
    MIB,
    SECOND,
    UNKNOWN_OPERATOR,
    Place,
    adding,
    listed_states,
    padded,
    triton_of,
)
from tests.support.doctor import examine
from tests.support.errors import assert_error
from tests.support.servers import gateway
from tests.support.wait import TIMEOUT_S, wait_until

pytestmark = pytest.mark.long

PREFIX = "of/tests"
MARKER = ".triton-gateway-repository"
SAMPLE_S = 0.02


@dataclass
class BucketPlace(Place):
    """A repository below a prefix of a bucket."""

    server: S3Server
    scratch: Path

    def object_keys(self, folder: str = "") -> list[str]:
        return [key for key in self.server.keys(PREFIX) if key.startswith(folder)]

    def read(self, key: str) -> bytes:
        signed = {
            "Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request"
        }
        return httpx.get(f"{self.server.url}/{PREFIX}/{key}", headers=signed).content

    def hidden(self) -> list[str]:
        """The temporary objects and files."""
        objects = [key for key in self.object_keys(".") if key != MARKER]
        return objects + [path.name for path in self.scratch.glob("triton-gateway-*")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketPlace]:
    folder = tmp_path_factory.mktemp("uploads")
    scratch = folder / "scratch"
    scratch.mkdir()
    with ExitStack() as stack:
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in {**CREDENTIALS, "TMPDIR": str(scratch)}.items():
            environment.setenv(name, value)
        server = stack.enter_context(S3Server())
        repository = server.repository(PREFIX)
        settings = {
            "repository": repository,
            "model_uploads": "artifacts",
            "state": f"file://{folder}/state.db",
            "poll_interval_s": "2",  # For each index, a Triton asks the S3 server many things.
            "connect_timeout_s": "10",
        }
        tritons = [triton_of(repository) for _ in range(2)]
        urls = [triton.options.url for triton in tritons]
        # The gateway first: a Triton does not start with an empty prefix.
        client, command = stack.enter_context(gateway(*urls, **settings))
        for triton in tritons:
            stack.enter_context(triton)
            triton.wait()
        wait_until(lambda: client.get("/readyz").is_success)
        yield BucketPlace(tritons, client, command, settings, server, scratch)


def test_uploaded_versions_are_served_listed_and_removed(place: BucketPlace) -> None:
    for number, content in enumerate((FIRST, SECOND), 1):
        put = place.client.put("/v1/models/mine", content=content)
        assert put.status_code == 201, put.text
        assert put.json()["version"] == str(number)
        assert place.infer("mine") == [1 + number, 2 + number]
    assert listed_states(place.client, "mine") == ["READY", "READY"]
    assert place.object_keys() == [
        MARKER,
        "mine/1/model.onnx",
        "mine/2/model.onnx",
        "mine/config.pbtxt",
    ]
    listed = place.client.get("/v1/models/mine/versions/2/files").json()["files"]
    digest = hashlib.sha256(SECOND).hexdigest()
    assert listed == [{"path": "2/model.onnx", "bytes": len(SECOND), "sha256": digest}]
    assert place.client.get("/v1/models/mine/files/2/model.onnx").content == SECOND
    absent = place.client.get("/v1/models/mine/files/3/model.onnx")
    assert_error(absent, 404, "NOT_FOUND", "no such file")
    deleted = place.client.delete("/v1/models/mine/versions/2")
    assert deleted.json() == {"model": "mine", "version": "2"}
    assert place.infer("mine") == [2, 3]
    assert place.client.delete("/v1/models/mine").json() == {"model": "mine"}
    assert place.object_keys() == [MARKER]
    assert place.hidden() == []


def test_file_of_another_program_is_listed_with_its_checksum(place: BucketPlace) -> None:
    httpx.put(f"{place.server.url}/{PREFIX}/foreign/1/model.onnx", content=FIRST)
    digest = hashlib.sha256(FIRST).hexdigest()
    expected = [{"path": "1/model.onnx", "bytes": len(FIRST), "sha256": digest}]
    assert place.client.get("/v1/models/foreign/files").json()["files"] == expected
    assert place.client.get("/v1/models/foreign/files/1/model.onnx").content == FIRST
    assert place.client.put("/v1/models/foreign", content=SECOND).json()["version"] == "2"
    assert place.infer("foreign") == [3, 4]
    assert place.client.delete("/v1/models/foreign").status_code == 200


def test_version_that_cannot_be_loaded_leaves_nothing_behind(place: BucketPlace) -> None:
    assert place.client.put("/v1/models/steady", content=FIRST).status_code == 201
    before = place.object_keys()
    config = b'backend: "onnxruntime" max_batch_size: 0'
    form = {"model": ("any.onnx", UNKNOWN_OPERATOR), "config": ("config.pbtxt", config)}
    for path in ("steady", "steady/versions/1"):
        refused = place.client.put(f"/v1/models/{path}", files=form)
        assert refused.status_code == 422
        assert refused.json()["code"] == "LOAD_FAILED"
        assert "Odd" in refused.json()["error"]
        assert place.infer("steady") == [2, 3]
        assert place.object_keys() == before
        assert place.read("steady/config.pbtxt") == b'backend: "onnxruntime"\n'
        assert place.read("steady/1/model.onnx") == FIRST
    unknown = place.client.put("/v1/models/fresh", content=UNKNOWN_OPERATOR)
    assert unknown.json()["code"] == "LOAD_FAILED"
    assert place.object_keys() == before
    assert place.hidden() == []
    assert place.client.delete("/v1/models/steady").status_code == 200


def test_replaced_version_has_the_files_of_the_upload_alone(place: BucketPlace) -> None:
    def zipped(*names: str) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("1/model.onnx", FIRST)
            for name in names:
                archive.writestr(f"1/{name}", name)
        return file.getvalue()

    for names in (("weights.bin", "odd ä~#%20.bin"), ("other.bin",)):
        put = place.client.put("/v1/models/several/versions/1?load=false", content=zipped(*names))
        assert put.status_code == 201, put.text
        listed = place.client.get("/v1/models/several/versions/1/files").json()["files"]
        expected = sorted(("1/model.onnx", *(f"1/{name}" for name in names)))
        assert [file["path"] for file in listed] == expected
    assert place.client.delete("/v1/models/several").status_code == 200
    assert place.object_keys("several") == []


def test_uploads_through_two_gateways_get_consecutive_versions(place: BucketPlace) -> None:
    with place.another_gateway() as (other, _):

        def upload(number: int) -> httpx.Response:
            client = (place.client, other)[number % 2]
            return client.put("/v1/models/turns?load=false", content=adding(number))

        with ThreadPoolExecutor(4) as pool:
            versions = sorted(put.json()["version"] for put in pool.map(upload, range(4)))
        assert versions == ["1", "2", "3", "4"]
        found = {place.read(f"turns/{version}/model.onnx") for version in versions}
        assert found == {adding(number) for number in range(4)}
    assert place.client.delete("/v1/models/turns").status_code == 200
    assert place.hidden() == []


@pytest.mark.parametrize(
    "size",
    [128 * MIB, pytest.param(1024 * MIB, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])],
)
def test_large_upload_takes_little_memory(place: BucketPlace, size: int) -> None:
    process = psutil.Process(place.command.pid)
    assert place.client.put("/v1/models/large?load=false", content=FIRST).status_code == 201
    before = process.memory_info().rss
    peak = before

    def upload() -> httpx.Response:
        # The answer comes once the S3 server has all of it.
        path = "/v1/models/large?load=false"
        return place.client.put(path, content=padded(size), timeout=None)

    with ThreadPoolExecutor() as pool:
        put = pool.submit(upload)
        while wait([put], SAMPLE_S).not_done:
            peak = max(peak, process.memory_info().rss)
    assert put.result().status_code == 201, put.result().text
    assert peak - before < 16 * MIB
    listed = place.client.get("/v1/models/large/versions/2/files").json()["files"]
    digest = hash_pieces(padded(size))
    assert listed == [{"path": "2/model.onnx", "bytes": listed[0]["bytes"], "sha256": digest}]
    with place.client.stream("GET", "/v1/models/large/files/2/model.onnx") as download:
        assert hash_pieces(download.iter_raw()) == digest
    assert place.server.unfinished_uploads() == 0
    assert place.client.delete("/v1/models/large").status_code == 200


def test_upload_beyond_the_quota_is_refused(place: BucketPlace) -> None:
    with place.another_gateway(state="memory:", max_repository_bytes=str(2 * MIB)) as (client, _):
        path = "/v1/models/quota?load=false"
        assert client.put(path, content=FIRST).status_code == 201
        refused = client.put(path, content=padded(3 * MIB))  # without Content-Length
        assert_error(refused, 507, "REPOSITORY_FULL", "whose limit is 2097152 bytes")
        assert client.delete("/v1/models/quota").status_code == 200
    assert place.hidden() == []


def test_missing_bucket_is_reported(place: BucketPlace) -> None:
    missing = place.settings["repository"].replace("/models/", "/nothing/")
    with place.another_gateway(state="memory:", repository=missing) as (client, command):
        refused = client.put("/v1/models/mine", content=FIRST)
        assert_error(refused, 503, "REPOSITORY_UNAVAILABLE", "S3 refused the request: NoSuchBucket")
        assert "models cannot be uploaded to the bucket nothing" in command.output


def test_secret_of_the_bucket_is_read_from_a_file(
    place: BucketPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("y\n")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    given: dict[str, str | Path] = {"GATEWAY_REPOSITORY": place.server.repository(PREFIX)}
    given["GATEWAY_REPOSITORY_SECRET_ACCESS_KEY_FILE"] = tmp_path / "secret"
    assert examine(**given)[1]["repository"]["status"] == "ok"


def test_bucket_that_stops_during_an_upload_is_reported(place: BucketPlace) -> None:
    with S3Server() as server:
        repository = server.repository("gone")
        with place.another_gateway(state="memory:", repository=repository) as (client, _):
            assert client.put("/v1/models/gone?load=false", content=FIRST).status_code == 201
            with ThreadPoolExecutor() as pool:
                path = "/v1/models/gone?load=false"
                put = pool.submit(client.put, path, content=padded(128 * MIB))
                wait_until(server.unfinished_uploads)
                server.stop()
                refused = put.result()
            assert_error(refused, 503, "REPOSITORY_UNAVAILABLE", "S3 cannot be reached")
            assert place.hidden() == []


def test_gateway_that_is_stopped_during_an_upload_leaves_nothing_behind(
    place: BucketPlace, tmp_path: Path
) -> None:
    """Its client has gone as well, so that nobody waits for the upload."""
    large = tmp_path / "large.onnx"
    large.write_bytes(b"".join(padded(128 * MIB)))
    before = place.object_keys()
    with place.another_gateway(state="memory:") as (client, command):
        url = f"{client.base_url}/v1/models/stopped?load=false"
        sender = subprocess.Popen(["curl", "-sS", "-T", large, url])
        wait_until(place.server.unfinished_uploads)
        sender.kill()
        sender.wait()
        os.kill(command.pid, signal.SIGTERM)
        command.end()
    assert place.object_keys() == before
    assert place.hidden() == []
    assert place.server.unfinished_uploads() == 0


@pytest.mark.fault(
    "a replica's repository index takes longer than a probe, as with many models in a"
)
@pytest.mark.soak
def test_triton_with_many_models_in_a_bucket_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index takes seconds: Triton makes two requests for each model."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with S3Server() as server:
        httpx.put(f"{server.url}/{PREFIX}/model0/1/model.onnx", content=FIRST)
        for number in range(150):
            config = b'backend: "onnxruntime"'
            httpx.put(f"{server.url}/{PREFIX}/model{number}/config.pbtxt", content=config)
        triton = triton_of(server.repository(PREFIX))
        with triton, gateway(triton.options.url) as (client, _):
            triton.wait()
            url = f"http://{triton.address}/v2/repository/index"
            assert httpx.post(url, timeout=TIMEOUT_S).is_success
            wait_until(lambda: client.get("/v1/replicas").json()["replicas"][0]["state"] == "UP")
            loaded = client.post("/v2/repository/models/model0/load", timeout=TIMEOUT_S)
            assert loaded.status_code == 200, loaded.text
            answer = client.post("/v1/models/model0/infer", json={"inputs": [1, 2]})
            assert answer.json()["outputs"] == {"Y": [2, 3]}
