"""Uploads of models to an S3 bucket that two real Tritons read."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.capabilities.uploads.support.s3_server import CREDENTIALS, S3Server
from tests.capabilities.uploads.support.uploads import (
    FIRST,
    MIB,
    PREFIX,
    SECOND,
    BucketPlace,
    bucket_place,
    pack_zip,
    padded,
    triton_of,
)
from tests.support.errors import assert_error
from tests.support.servers import gateway
from tests.support.wait import TIMEOUT_S, wait_until

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketPlace]:
    with bucket_place(tmp_path_factory.mktemp("uploads")) as place:
        yield place


def test_file_of_another_program_is_listed_with_its_checksum(place: BucketPlace) -> None:
    httpx.put(f"{place.server.url}/{PREFIX}/foreign/1/model.onnx", content=FIRST)
    digest = hashlib.sha256(FIRST).hexdigest()
    expected = [{"path": "1/model.onnx", "bytes": len(FIRST), "sha256": digest}]
    assert place.client.get("/v1/models/foreign/files").json()["files"] == expected
    assert place.client.get("/v1/models/foreign/files/1/model.onnx").content == FIRST
    assert place.client.put("/v1/models/foreign", content=SECOND).json()["version"] == "2"
    assert place.infer("foreign") == [3, 4]
    assert place.client.delete("/v1/models/foreign").status_code == 200


def test_replaced_version_has_the_files_of_the_upload_whatever_their_names(
    place: BucketPlace,
) -> None:
    for name in ("weights.bin", "odd ä~#%20.bin"):
        content = pack_zip({"1/model.onnx": FIRST, f"1/{name}": name})
        put = place.client.put("/v1/models/several/versions/1?load=false", content=content)
        assert put.status_code == 201, put.text
        listed = place.client.get("/v1/models/several/versions/1/files").json()["files"]
        assert [file["path"] for file in listed] == ["1/model.onnx", f"1/{name}"]
    assert place.client.delete("/v1/models/several").status_code == 200
    assert place.files("several") == {}


def test_missing_bucket_is_reported(place: BucketPlace) -> None:
    missing = place.settings["repository"].replace("/models/", "/nothing/")
    with place.another_gateway(state="memory:", repository=missing) as (client, command):
        refused = client.put("/v1/models/mine", content=FIRST)
        assert_error(refused, 503, "REPOSITORY_UNAVAILABLE", "S3 refused the request: NoSuchBucket")
        assert "models cannot be uploaded to the bucket nothing" in command.output


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
