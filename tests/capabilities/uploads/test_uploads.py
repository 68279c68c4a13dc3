"""Uploads of models to a folder that two real Tritons read."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway.capabilities.uploads.model_files.store import STORE_THREADS
from gateway.client import AsyncClient, Client, GatewayError
from tests.capabilities.uploads.support.uploads import (
    FIRST,
    HIDDEN,
    MIB,
    SECOND,
    FolderPlace,
    adding,
    folder_place,
    listed_states,
    padded,
)
from tests.support.errors import assert_error
from tests.support.fleet import write_echo
from tests.support.gateway_forks import run_gateway
from tests.support.keys import ADMIN, bearer, entry, written
from tests.support.servers import Command
from tests.support.wait import wait_until


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FolderPlace]:
    with folder_place(tmp_path_factory.mktemp("uploads")) as place:
        yield place


def digest_header(content: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"


@pytest.mark.long
def test_labels_of_a_removed_model_are_deleted(place: FolderPlace) -> None:
    client, labels = place.client, "/v1/models/labelled/labels"
    for _ in range(2):
        assert client.put("/v1/models/labelled", content=FIRST).status_code == 201
        assert client.get(labels).json()["labels"] == []
        assert client.put(f"{labels}/stable", json={"version": "1"}).status_code == 200
        assert client.delete("/v1/models/labelled").status_code == 200


@pytest.mark.fault("a gateway is killed while it removes a model")
def test_removal_that_was_killed_before_its_end_can_be_repeated(place: FolderPlace) -> None:
    """It has deleted the files, and what was desired is left."""
    path = "/v1/models/ended"
    assert place.client.put(path, content=FIRST).status_code == 201
    unloaded = place.client.post("/v2/repository/models/ended/unload")
    assert unloaded.status_code == 200
    shutil.rmtree(place.repository / "ended")
    assert place.client.delete(path).status_code == 200
    assert place.client.delete(path).status_code == 404


# With one instance more than a config may have.
CONFIG_OF_MANY = (
    b'--b\r\nContent-Disposition: form-data; name="config"\r\n\r\ninstance_group { count: 65 }\r\n'
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--b--\r\n'
)
REFUSALS: dict[str, tuple[str, dict[str, str], bytes, int, str, str]] = {
    "a name with a space": ("a%20b", {}, FIRST, 400, "MALFORMED_REQUEST", "the name of an"),
    "a hidden name": (".a", {}, FIRST, 400, "MALFORMED_REQUEST", "the name of an"),
    "a name above": ("..%2fa", {}, FIRST, 404, "NOT_FOUND", "path not found"),
    "version 0": ("bad/versions/0", {}, FIRST, 400, "MALFORMED_REQUEST", "a number from 1"),
    "version x": ("bad/versions/x", {}, FIRST, 404, "MODEL_NOT_FOUND", "not found"),
    "nothing": ("bad", {}, b"", 422, "INVALID_MODEL_FILE", "the file is empty; send a model file"),
    "a page": ("bad", {}, b"<html>", 422, "INVALID_MODEL_FILE", "not a model of a known kind"),
    "a named page": (
        "bad?filename=a.onnx", {}, b"<html>", 422, "INVALID_MODEL_FILE", "'a.onnx' is not a .onnx file",
    ),
    "code": ("bad?filename=model.py", {}, b"import os", 422, "INVALID_MODEL_FILE", "data only"),
    "another digest": (
        "bad", {"Repr-Digest": digest_header(SECOND)}, FIRST, 400, "DIGEST_MISMATCH", "SHA-256",
    ),
    "half a digest": (
        "bad", {"Repr-Digest": "sha-256=:AAAA:"}, FIRST, 400, "MALFORMED_REQUEST", "Repr-Digest",
    ),
    "compressed": ("bad", {"Content-Encoding": "gzip"}, FIRST, 415, "UNSUPPORTED_BODY", "unchanged"),
    "too large": ("bad", {}, b"x" * (4 * MIB + 1), 413, "TOO_LARGE", "exceeds the limit of"),
    "an evil form": (
        "bad",
        {"Content-Type": "multipart/form-data; boundary=b"},
        b'--b\r\nContent-Disposition: form-data; name="path"\r\n\r\n..\r\n--b--\r\n',
        400, "MALFORMED_REQUEST", "the fields of an upload are",
    ),
    "many instances": (
        "bad", {"Content-Type": "multipart/form-data; boundary=b"}, CONFIG_OF_MANY % FIRST,
        422, "INVALID_MODEL_FILE", "65 instances; the limit is 64",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def limited(place: FolderPlace) -> Iterator[httpx.Client]:
    """A gateway with small limits, of which one key has one model only."""
    keys = [entry(ADMIN, "admin"), entry("tgw_some-secret", "admin", models=["some-*"])]
    file = written(place.repository.parent / "keys.yaml", keys)
    limits = {
        "max_model_bytes": str(4 * MIB),
        "max_repository_bytes": str(16 * MIB),
        "body_stall_s": "60",  # uploads of a busy test wait for one another
    }
    with place.another_gateway(keys_file=str(file), **limits) as (client, _):
        client.headers.update(bearer(ADMIN))
        yield client


@pytest.mark.parametrize("case", REFUSALS)
def test_invalid_upload_is_refused_and_nothing_is_written(
    limited: httpx.Client, place: FolderPlace, case: str
) -> None:
    path, headers, content, status, code, words = REFUSALS[case]
    chunked = len(content) > MIB
    body = iter([content[:MIB], content[MIB:]]) if chunked else content
    refused = limited.put(f"/v1/models/{path}", headers=headers, content=body)
    assert_error(refused, status, code, words)
    assert not (place.repository / "bad").exists()
    assert place.hidden() == []


@pytest.mark.fault(
    "many uploads at a time, whose lengths are unknown; archives of thousands of files"
)
def test_at_most_sixteen_uploads_are_received_at_a_time(
    limited: httpx.Client, place: FolderPlace
) -> None:
    with ExitStack() as stack:
        for _ in range(16):
            connection = begin_upload(limited, "many", 400_000, Authorization=f"Bearer {ADMIN}")
            stack.enter_context(connection)
        wait_until(lambda: len(place.hidden()) == 16)
        refused = limited.put("/v1/models/many", content=FIRST)
        assert_error(refused, 429, "OVERLOADED", "16 uploads are in progress")
    wait_until(lambda: not place.hidden())
    stored = limited.put("/v1/models/some-other?load=false", content=FIRST)
    assert stored.status_code == 201
    assert limited.delete("/v1/models/some-other").status_code == 200


def test_version_has_the_number_of_its_path_and_the_next_one_keeps_the_config(
    limited: httpx.Client,
) -> None:
    content = b"".join(padded(3 * MIB))
    form = {"model": ("any.onnx", content), "config": ("config.pbtxt", b'name: "kept"')}
    uploads: dict[str, Any] = {"5": {"files": form}, "6": {"content": FIRST}}
    for path, version in (("kept/versions/5", "5"), ("kept", "6")):
        stored = limited.put(f"/v1/models/{path}?load=false", **uploads[version])
        assert stored.json()["version"] == version
        config = limited.get("/v1/models/kept/files/config.pbtxt").text
        assert config == 'backend: "onnxruntime"\nname: "kept"'
    assert limited.get("/v1/models/kept/files/5/model.onnx").content == content
    assert limited.delete("/v1/models/kept").status_code == 200


def test_uploads_and_files_require_the_rights_of_the_key(
    limited: httpx.Client, place: FolderPlace
) -> None:
    some = bearer("tgw_some-secret")
    put = limited.put("/v1/models/some-a?load=false", headers=some, content=FIRST)
    assert put.status_code == 201, put.text
    assert limited.put("/v1/models/shown?load=false", content=FIRST).status_code == 201
    other = limited.put("/v1/models/other", headers=some, content=FIRST)
    assert_error(other, 404, "MODEL_NOT_FOUND", "'other' is not found")
    assert_error(
        limited.get("/v1/models/shown/files", headers=some), 404, "MODEL_NOT_FOUND", "not found"
    )
    for path in ("some-a/files/../../keys.yaml", "some-a/files/%2e%2e%2f%2e%2e%2fkeys.yaml"):
        outside = limited.get(f"/v1/models/{path}", headers=some)
        assert outside.status_code == 404
    assert limited.delete("/v1/models/some-a", headers=some).status_code == 200
    with place.another_gateway(model_uploads="off", state="memory:") as (client, _):
        refused = client.put("/v1/models/bad", content=FIRST)
        assert_error(refused, 403, "FORBIDDEN", "GATEWAY_MODEL_UPLOADS")
        assert client.get("/v1/models/shown/files").status_code == 200


@pytest.mark.long
def test_code_is_accepted_if_the_setting_allows_it(place: FolderPlace, tmp_path: Path) -> None:
    write_echo(tmp_path, "code")
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as packed:
        packed.add(tmp_path / "code", "code")
    refused = place.client.put("/v1/models/code", content=file.getvalue())
    assert refused.json()["code"] == "INVALID_MODEL_FILE"
    settings = {"model_uploads": "code", "state": "memory:", "log_level": "info"}
    with place.another_gateway(**settings) as (client, command):
        command.wait_for("gateways that share a repository must share their state")
        assert client.put("/v1/models/code", content=file.getvalue()).status_code == 201
        assert place.infer("code", client) == [1, 2]
        listed = client.get("/v1/models/code/files").json()["files"]
        assert [each["path"] for each in listed] == ["1/model.py", "config.pbtxt"]
        assert client.delete("/v1/models/code").status_code == 200


def run_command(place: FolderPlace, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return run_gateway(*words, "--url", str(place.client.base_url))


def test_commands_push_pull_and_remove_models(place: FolderPlace, tmp_path: Path) -> None:
    file, config = tmp_path / "pushed.onnx", tmp_path / "any.json"
    file.write_bytes(FIRST)
    config.write_text('{"name": "pushed"}')
    ran = run_command(place, "push", file, "--no-load")
    digest = hashlib.sha256(FIRST).hexdigest()
    stored = f"pushed version 1: {len(FIRST)} bytes, sha256 {digest}\n"
    assert ran.stdout == f"{stored}not loaded; load it with: triton-gateway load pushed\n"
    assert ran.stderr == ""
    ran = run_command(place, "push", file, "--config", config, "--no-load", "--json")
    assert '"version": "2"' in ran.stdout, ran.stderr
    ran = run_command(place, "push", file, "--name", "loaded")
    advice = "ready; for a request to paste: triton-gateway curl loaded"
    assert ran.stdout.splitlines()[1:] == [advice], ran.stderr
    ran = run_command(place, "pull", "pushed", "--version", "2", "--output", tmp_path / "pulled")
    assert len(ran.stdout.splitlines()) == 2, ran.stderr
    pulled = tmp_path / "pulled" / "pushed"
    assert (pulled / "2" / "model.onnx").read_bytes() == FIRST
    assert 'name: "pushed"' in (pulled / "config.pbtxt").read_text()
    ran = run_command(place, "push", pulled, "--name", "again", "--no-load")
    assert ran.returncode == 1
    assert "that of model 'pushed'" in ran.stderr
    (pulled / "config.pbtxt").unlink()
    (pulled / "2" / "100% of #1?.txt").write_text("a")
    assert run_command(place, "push", pulled, "--name", "again", "--no-load").returncode == 0
    assert place.versions("again") == ["1"]
    assert run_command(place, "pull", "again", "--output", tmp_path / "back").returncode == 0
    assert (tmp_path / "back" / "again" / "1" / "100% of #1?.txt").read_text() == "a"
    assert (
        run_command(place, "rm", "pushed/1", "again").stdout == "removed pushed/1\nremoved again\n"
    )
    assert place.versions("pushed") == ["2"]
    assert not (place.repository / "again").exists()
    missing = run_command(place, "rm", "again")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "triton-gateway models lists the models" in missing.stderr
    absent = run_command(place, "push", tmp_path / "absent.onnx")
    assert absent.returncode == 1
    assert "no such file or directory" in absent.stderr.lower()


class DamagedFile(io.BytesIO):
    """A file whose last byte is another one when it is read again."""

    def seek(self, position: int, whence: int = 0) -> int:
        self.getbuffer()[-1] ^= 1
        return super().seek(position, whence)


async def test_python_client_pushes_files_and_folders(place: FolderPlace, tmp_path: Path) -> None:
    file, labels = tmp_path / "of_python.onnx", tmp_path / "labels.txt"
    file.write_bytes(FIRST)
    labels.write_text("zero\none\n")
    url = str(place.client.base_url)
    with Client(url) as client:
        stored = client.push(file, load=False)
        assert (stored["model"], stored["version"]) == ("of_python", "1")
        with file.open("rb") as opened:
            assert client.push(opened, name="of_python", version=7, load=False)["version"] == "7"
        with pytest.raises(GatewayError, match="No such file"):
            client.push("nothing.onnx")
        with pytest.raises(GatewayError) as caught:
            client.push(DamagedFile(FIRST), name="of_python", load=False)
        assert caught.value.code == "DIGEST_MISMATCH"
        with pytest.raises(ValueError, match="has no name for a model"):
            client.push("/")
    async with AsyncClient(url) as client:
        assert (await client.push(file, load=False))["version"] == "8"
        with pytest.raises(GatewayError) as caught:
            await client.push(file, labels=labels, name="labelled", config=file, load=False)
        assert caught.value.code == "INVALID_MODEL_FILE"
        await client.delete("of_python", 7)
        assert place.versions("of_python") == ["1", "8"]
        await client.delete("of_python")
    assert not (place.repository / "of_python").exists()


@pytest.mark.long
def test_transfers_show_their_progress_in_a_terminal(place: FolderPlace, tmp_path: Path) -> None:
    file = tmp_path / "shown.onnx"
    file.write_bytes(FIRST)
    for words in (("push", str(file), "--no-load"), ("pull", "shown", "--output", str(tmp_path))):
        url = str(place.client.base_url)
        with Command(*words, "--url", url, on_terminal=True) as command:
            assert command.end() == 0
        assert re.search(r"\d/\d+ bytes", command.output), command.output


def begin_upload(
    client: httpx.Client, model: str, size: int = 4 * MIB, **headers: str
) -> socket.socket:
    """Send one half of an upload."""
    url = client.base_url
    connection = socket.create_connection((url.host, url.port or 80))
    head = (
        f"PUT /v1/models/{model} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n"
        + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    )
    connection.sendall(head.encode() + b"\r\n\x08\x0a" + b"x" * (size // 2))
    return connection


@pytest.mark.fault("a gateway is killed while it uploads a model, and another one uploads the same")
def test_upload_after_that_of_a_killed_gateway_gets_the_next_version(place: FolderPlace) -> None:
    """The version that nobody acknowledged stays, and nothing is removed that was."""
    with place.another_gateway() as (client, command):
        assert client.put("/v1/models/cut", content=FIRST).status_code == 201
        for triton in place.tritons:
            triton.signal(signal.SIGSTOP)
        try:
            with ThreadPoolExecutor() as pool:
                put = pool.submit(client.put, "/v1/models/cut", content=SECOND)
                wait_until(lambda: place.versions("cut") == ["1", "2"])
                os.kill(command.pid, signal.SIGKILL)
                command.end()
                assert isinstance(put.exception(), httpx.TransportError)
        finally:
            for triton in place.tritons:
                triton.signal(signal.SIGCONT)
    answers: list[httpx.Response] = []

    def has_answered() -> bool:
        """Return whether the leases of the killed gateway have ended."""
        answers.append(place.client.put("/v1/models/cut", content=adding(3)))
        return answers[-1].status_code != 409

    wait_until(has_answered)
    assert answers[-1].status_code == 201, answers[-1].text
    newest = answers[-1].json()["version"]
    assert int(newest) > 2
    assert {"1", "2", newest} <= set(place.versions("cut"))
    assert place.infer("cut") == [4, 5]


def test_upload_is_refused_while_the_state_gives_no_lease(
    place: FolderPlace, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    path = "/v1/models/alone?load=false"
    with place.another_gateway(state=f"file://{state}/state.db") as (client, _):
        state.rename(tmp_path / "away")
        refused = client.put(path, content=FIRST)
        assert_error(refused, 503, "STATE_UNAVAILABLE", "the desired state cannot be written")
        assert not (place.repository / "alone").exists()
        (tmp_path / "away").rename(state)
        wait_until(lambda: client.put(path, content=FIRST).status_code == 201)
        assert place.versions("alone") == ["1"]


@pytest.mark.fault("a small archive of 10,000 files or folders")
def test_work_on_archives_ends_when_their_clients_leave(place: FolderPlace) -> None:
    """They are as many as the threads of the store, and contain 2 GiB that is ignored."""
    entry = tarfile.TarInfo("__MACOSX/zeros")
    entry.size = 2 << 30
    archive = gzip.compress(entry.tobuf()) + gzip.compress(bytes(64 * MIB), 1) * 32
    with place.another_gateway(state="memory:") as (client, command), ExitStack() as stack:
        process = psutil.Process(command.pid)

        def count_received() -> int:
            sizes = [path.stat().st_size for path in place.repository.glob(f"{HIDDEN}*")]
            return sizes.count(len(archive))

        for number in range(STORE_THREADS):
            address = (client.base_url.host, client.base_url.port or 80)
            connection = stack.enter_context(socket.create_connection(address))
            path = f"/v1/models/left-{number}"
            head = (
                f"PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(archive)}\r\n\r\n"
            )
            connection.sendall(head.encode() + archive)
        wait_until(lambda: count_received() == STORE_THREADS)
        used_s = process.cpu_times().user
        wait_until(lambda: process.cpu_times().user > used_s + 0.2)
        stack.close()
        wait_until(
            lambda: (
                len(re.findall("upload of model left-.*failed", command.output)) == STORE_THREADS
            )
        )
        assert "INVALID_MODEL_FILE" not in command.output  # at the end of an archive without files
    assert place.hidden() == []


def test_upload_to_a_full_disk_changes_nothing(place: FolderPlace, tmp_path: Path) -> None:
    settings = {"repository": f"file://{tmp_path}", "state": "memory:"}
    with place.another_gateway(**settings) as (client, command):
        # Every user can set this limit, and not mount a small disk.
        psutil.Process(command.pid).rlimit(psutil.RLIMIT_FSIZE, (MIB, MIB))
        path = "/v1/models/mine?load=false"
        assert client.put(path, content=FIRST).status_code == 201
        refused = client.put(path, content=b"".join(padded(2 * MIB)))
        assert_error(refused, 507, "REPOSITORY_FULL", "file too large")
        assert list(tmp_path.glob(f"{HIDDEN}*")) == []
        files = client.get("/v1/models/mine/files").json()["files"]
        assert [file["path"] for file in files] == ["1/model.onnx", "config.pbtxt"]
        assert client.put(path, content=SECOND).json()["version"] == "2"


@pytest.mark.long
def test_model_is_served_again_after_a_restart_of_all_processes(place: FolderPlace) -> None:
    """The last test: it ends the servers that the others use."""
    assert place.client.put("/v1/models/lasting", content=FIRST).status_code == 201
    place.tritons[1].kill()
    put = place.client.put("/v1/models/lasting", content=SECOND)  # loaded where there is a Triton
    assert (put.status_code, put.json()["code"]) == (502, "PARTLY_DONE")
    assert place.infer("lasting") == [3, 4]
    place.tritons[1].start()
    os.kill(place.command.pid, signal.SIGKILL)
    place.command.end()
    place.tritons[0].kill()
    place.tritons[0].start()
    for triton in place.tritons:
        triton.wait()
    with place.another_gateway() as (client, _):
        wait_until(lambda: listed_states(client, "lasting") == ["READY", "READY"])
        assert place.infer("lasting", client) == [3, 4]
